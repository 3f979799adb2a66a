"""Network namespaces on one switch, as machines; needs root and the command ip."""

import ctypes
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from heterog.runtime.ranks.emulated_network import ip

_CLONE_NEWNET = 0x40000000  # <linux/sched.h>


@contextmanager
def namespaces(
    count: int, prefix: str = "hb", subnet: str = "10.78.0"
) -> Iterator[list[tuple[str, str]]]:
    """Names and addresses of this machine's namespace, which has no name, and of new ones."""
    bridge = f"{prefix}0"
    servers = re.findall(r"^nameserver\s+([0-9.]+)$", Path("/etc/resolv.conf").read_text(), re.M)
    with ExitStack() as stack:
        ip("link", "add", bridge, "type", "bridge")
        stack.callback(ip, "link", "delete", bridge)
        ip("addr", "add", f"{subnet}.1/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        places = [("", f"{subnet}.1")]
        for number in range(count):
            name, address = f"{prefix}{number + 1}", f"{subnet}.{number + 2}"
            ip("netns", "add", name)
            stack.callback(ip, "netns", "delete", name)
            peer = ("peer", "name", "eth0", "netns", name)
            ip("link", "add", f"{name}-link", "type", "veth", *peer)
            stack.callback(ip, "link", "delete", f"{name}-link")  # with its peer, at once
            ip("link", "set", f"{name}-link", "master", bridge, "up")
            within = ("-n", name)
            ip(*within, "addr", "add", f"{address}/24", "dev", "eth0")
            ip(*within, "link", "set", "eth0", "up")
            ip(*within, "link", "set", "lo", "up")
            ip(*within, "route", "add", "default", "via", f"{subnet}.1")
            for server in servers:  # or who asks for a name would wait for an answer
                ip(*within, "route", "add", "unreachable", server)
            places.append((name, address))
        yield places


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Make this thread's new sockets and processes in a namespace; no name means its own."""
    if not namespace:
        yield
        return
    here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        enter(namespace)
        yield
    finally:
        _set_namespace(here)


def enter(namespace: str) -> None:
    """Put this thread into a namespace for good."""
    _set_namespace(os.open(f"/run/netns/{namespace}", os.O_RDONLY))


def _set_namespace(opened: int) -> None:
    """Change to a namespace that was opened, and close it."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        if libc.setns(opened, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(opened)


def set_link(namespace: str, state: str) -> None:
    """Cut the link of a namespace (``down``), or mend it (``up``)."""
    ip("link", "set", f"{namespace}-link", state)
