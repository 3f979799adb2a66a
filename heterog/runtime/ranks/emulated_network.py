"""The network of a testbed: a namespace for each host on one switch, by the commands ip and tc."""

import shutil
import signal
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from types import FrameType
from typing import TypeAlias

from heterog.cluster.topology import Cluster
from heterog.errors import HeterogError, HeterogWarning

Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None

SUBNET = IPv4Network("10.77.0.0/16")
INTERFACE = "eth0"
# Jumbo frames: headers take 0.7 % of the rate instead of 4.4 %, so large transfers reach it.
MTU = 9000
# Bytes that may pass at once after a pause. Few, because a message below it is not shaped at all;
# more at rates above 1 Gbit/s, because a timer that fires late must not lose bandwidth.
_LEAST_BURST_BYTES = 32 * 1024
_BURST_S = 0.25e-3
# Above the largest TCP windows: a full queue would drop packets, and a lost last packet costs a
# timeout of 200 ms, which no link of the model has.
_QUEUE_BYTES = 64 * 1024**2
# Shorter delays are not emulated: the machine itself has some.
_LEAST_NETEM_DELAY_S = 1e-3

_COMMAND_TIMEOUT_S = 30.0


class TestbedError(HeterogError):
    """A testbed that cannot be built or used here; says what is missing."""

    __test__ = False  # for pytest: a name, not a test


def tool_path(name: str) -> str | None:
    """Path of a command; sudo and cron leave /usr/sbin out of PATH, where iproute2 is."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin:/usr/bin:/bin")


def run_tool(name: str, *arguments: str) -> None:
    """Run a command to its end.

    Raises:
        TestbedError: it fails, or takes too long.
    """
    command = [tool_path(name) or name, *arguments]
    try:
        # To the end, even after Ctrl-C: an abandoned command could still create something after
        # everything has been removed.
        with deferred_signals():
            subprocess.run(
                command,
                check=True,
                capture_output=True,
                text=True,
                timeout=_COMMAND_TIMEOUT_S,
                process_group=0,
            )
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().replace("\n", "; ") or f"exit code {error.returncode}"
        raise TestbedError(f"'{' '.join(command)}' failed: {said}.") from error
    except subprocess.TimeoutExpired as error:
        raise TestbedError(
            f"'{' '.join(command)}' took more than {_COMMAND_TIMEOUT_S:g} s."
        ) from error


def ip(*arguments: str) -> None:
    """Run the command ip."""
    run_tool("ip", *arguments)


def host_address(host_index: int) -> IPv4Address:
    """Address of a host on the switch."""
    return SUBNET[host_index + 1]


def connect(
    namespace: str, switch: str, port: str, rate_bytes_per_s: float, delay_s: float
) -> None:
    """Joins a namespace to the switch by a veth pair, made in place, that is shaped both ways."""
    ip(
        *("link", "add", INTERFACE, "netns", namespace, "mtu", str(MTU), "type", "veth"),
        *("peer", "name", port, "netns", switch, "mtu", str(MTU)),
    )
    ip("-n", switch, "link", "set", port, "master", "switch")
    for side, interface in ((namespace, INTERFACE), (switch, port)):
        _shape(side, interface, rate_bytes_per_s, delay_s)
        if Path("/proc/sys/net/ipv6").exists():  # gloo takes the first address: let there be one
            ip("-n", side, "link", "set", interface, "addrgenmode", "none")
        ip("-n", side, "link", "set", interface, "up")


def _shape(namespace: str, interface: str, rate_bytes_per_s: float, delay_s: float) -> None:
    """Limits the rate at which data leaves an interface, after a delay if there is one."""
    parent = ["root"]
    if delay_s > 0:
        run_tool(
            *("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "handle", "1:"),
            *("netem", "delay", f"{round(delay_s * 1e6)}us", "limit", "100000"),
        )
        parent = ["parent", "1:1", "handle", "10:"]
    burst_bytes = max(_LEAST_BURST_BYTES, round(rate_bytes_per_s * _BURST_S))
    run_tool(
        *("tc", "-n", namespace, "qdisc", "add", "dev", interface, *parent, "tbf"),
        *("rate", f"{round(rate_bytes_per_s * 8)}bit", "burst", str(burst_bytes)),
        *("limit", str(max(_QUEUE_BYTES, 2 * burst_bytes))),
    )


def emulates_delay(cluster: Cluster, namespace: str) -> bool:
    """Whether ``netem`` can and must delay packets; warns if it must and cannot."""
    slowest = max(cluster.hosts, key=lambda host: host.nic_latency_s)
    if slowest.nic_latency_s <= _LEAST_NETEM_DELAY_S:
        return False
    try:
        delay = ("netem", "delay", "1ms")
        run_tool("tc", "-n", namespace, "qdisc", "add", "dev", "lo", "root", *delay)
    except TestbedError:
        warnings.warn(
            f"the NIC latency of host '{slowest.name}' ({slowest.nic_latency_s * 1e3:g} ms) is "
            "ignored: this kernel has no 'netem'.",
            HeterogWarning,
            stacklevel=4,
        )
        return False
    return True


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Lets the body finish before a SIGINT, SIGTERM or SIGHUP has its effect."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    previous: dict[signal.Signals, Handler] = {}
    try:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            handler = signal.getsignal(number)
            if handler not in (signal.SIG_IGN, None):
                previous[number] = handler
                signal.signal(number, lambda number, frame: received.append(number))
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])
