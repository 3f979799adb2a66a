"""Network namespaces on one switch, which stand for machines; takes root and the command ip."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from heterog.runtime.ranks.emulated_network import ip

BRIDGE, SUBNET = "hb0", "10.78.0"
_CLONE_NEWNET = 0x40000000  # <linux/sched.h>


@contextmanager
def namespaces(count: int) -> Iterator[list[tuple[str, str]]]:
    """Names and addresses: of this machine, whose namespace has no name, and of new ones."""
    with ExitStack() as stack:
        ip("link", "add", BRIDGE, "type", "bridge")
        stack.callback(ip, "link", "delete", BRIDGE)
        ip("addr", "add", f"{SUBNET}.1/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        places = [("", f"{SUBNET}.1")]
        for number in range(count):
            name, address = f"hb{number + 1}", f"{SUBNET}.{number + 2}"
            ip("netns", "add", name)
            stack.callback(ip, "netns", "delete", name)
            peer = ("peer", "name", "eth0", "netns", name)
            ip("link", "add", f"{name}-link", "type", "veth", *peer)
            ip("link", "set", f"{name}-link", "master", BRIDGE, "up")
            within = ("-n", name)
            ip(*within, "addr", "add", f"{address}/24", "dev", "eth0")
            ip(*within, "link", "set", "eth0", "up")
            ip(*within, "link", "set", "lo", "up")
            ip(*within, "route", "add", "default", "via", f"{SUBNET}.1")
            places.append((name, address))
        yield places


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Sockets and processes that this thread makes are in a namespace; no name is where it is."""
    if not namespace:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(path: str) -> int:
        return os.open(path, os.O_RDONLY)

    here, there = enter("/proc/thread-self/ns/net"), enter(f"/run/netns/{namespace}")
    try:
        if libc.setns(there, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        yield
    finally:
        libc.setns(here, _CLONE_NEWNET)
        os.close(here)
        os.close(there)


def set_link(namespace: str, state: str) -> None:
    """Cut the link of a namespace (``down``), or mend it (``up``)."""
    ip("link", "set", f"{namespace}-link", state)
