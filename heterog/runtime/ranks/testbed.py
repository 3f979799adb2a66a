"""A testbed: a small heterogeneous cluster of real processes on one Linux machine.

Each host of a cluster file becomes a network namespace, each of its devices a rank: a process that
may use ``cpu_quota`` of one core (cgroup) and whose traffic leaves and enters at the effective
rate of the host's NIC (``tc tbf`` on both ends of a veth pair). All hosts meet on a bridge in a
namespace of its own, so that nothing is added to the machine's own network.

    with Testbed(load_testbed("skew_both")) as testbed:
        for rank in range(testbed.num_ranks):
            environment = os.environ | testbed.environment(rank) | {"RANK": str(rank), ...}
            subprocess.Popen(testbed.command(rank, ["python", "train.py"]), env=environment)

All names contain the process id and the start time of the creator, so that the next testbed can
remove what a killed process has left behind.
"""

import atexit
import errno
import logging
import os
import re
import secrets
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

from heterog.cluster.spec import load_cluster, yaml_names
from heterog.cluster.topology import Cluster
from heterog.errors import HeterogWarning
from heterog.runtime.ranks.emulated_network import (
    INTERFACE,
    MTU,
    SUBNET,
    TestbedError,
    connect,
    deferred_signals,
    emulates_delay,
    host_address,
    ip,
    tool_path,
)
from heterog.runtime.ranks.forks import fields_of_process
from heterog.runtime.ranks.place import Place
from heterog.workers import Closed, signals_as_exit

_TESTBEDS = resources.files("heterog.runtime.ranks") / "testbeds"
_logger = logging.getLogger(__name__)

_NETNS_FOLDER = Path("/run/netns")

_QUOTA_PERIOD_US = 100_000
_LEAST_QUOTA = 0.01  # of a core; the kernel refuses less than 1 ms
_LARGEST_SHARES = 262_144  # cgroup v1; a process alone has 1,024
_LARGEST_WEIGHT = 10_000  # cgroup v2; a process alone has 100

_KILL_TIMEOUT_S = 10.0


def shipped_testbeds() -> tuple[str, ...]:
    """Names of the testbeds that are built in."""
    return yaml_names(_TESTBEDS)


def load_testbed(name_or_file: str) -> Cluster:
    """Reads a testbed by its name, or any cluster file by its path.

    Raises:
        UnknownNameError: Neither a built-in testbed nor a file.
        InputFileError: The file cannot be read or says something that makes no sense.

    >>> [host.cpu_quota for host in load_testbed("skew_compute").hosts]
    [0.8, 0.4, 0.3]
    """
    return load_cluster(name_or_file, "testbed", _TESTBEDS)


def is_supported() -> str | None:
    """Why no testbed can be built here, in words; None where one can."""
    if not sys.platform.startswith("linux"):
        return f"a testbed needs Linux (namespaces, cgroups); this is {sys.platform}."
    if os.geteuid() != 0:
        return (
            "a testbed needs root: run with sudo, or in a container started with --privileged "
            "where you are root."
        )
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("taskset", "util-linux")):
        if tool_path(tool) is None:
            return f"a testbed needs the command '{tool}': install the package {package}."
    missing = _missing_capabilities()
    if missing:
        return (
            f"a testbed needs {' and '.join(missing)}, which root lacks here: start the container "
            "with --privileged."
        )
    controller = _find_cpu_controller()
    if controller is None:
        return (
            "a testbed needs the cgroup controller 'cpu', which is not mounted: mount it (cgroup "
            "v1 or v2), or start the container with --privileged."
        )
    if not os.access(controller.root, os.W_OK):
        return (
            f"a testbed makes cgroups in {controller.root}, which is mounted read-only: start the "
            "container with --privileged."
        )
    return None


class Testbed(Closed, Place):
    """A cluster of throttled processes, there while the context is open.

    Transfers between ranks of one host go over its loopback, unshaped. Delays of the network are
    those of the machine, unless the file gives a NIC more than 1 ms and the kernel has ``netem``:
    then a packet waits half of the sender's and half of the receiver's latency.

    A host without ``cpu_quota`` leaves its ranks unthrottled. Each rank is pinned to one core, so
    that the largest load of a core is as small as possible.

    Args:
        cluster: Cluster to build.
        has_network: Build namespaces and links. Without them ranks meet on this machine's
            loopback, and only their CPU time is limited.

    Attributes:
        cluster: Cluster that is built.
        has_network: Whether it has namespaces and links of its own.
        num_ranks: One for each device of the cluster, in its order.
        name: What the names of all its namespaces and cgroups begin with; empty before it is open.
    """

    __test__ = False  # for pytest: a name, not a test

    def __init__(self, cluster: Cluster, *, has_network: bool = True) -> None:
        self.cluster = cluster
        self.has_network = has_network
        self.num_ranks = cluster.num_devices
        self.name = ""
        self._owner_pid = 0
        self._is_open = False
        self._signals = ExitStack()
        _check_hosts(cluster)
        # Systems other than Linux get here, and fail with a clear error when it is opened.
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
        quotas = [cluster.hosts[h].cpu_quota for h in cluster.host_of]
        self._core_of = _pin(quotas, cores)
        _warn_about_load(quotas, self._core_of)
        _warn_about_intra(cluster)

    def __enter__(self) -> "Testbed":
        """Builds namespaces, links and cgroups.

        Raises:
            TestbedError: It cannot be built here; everything half built is gone.
        """
        reason = is_supported()
        if reason is not None:
            raise TestbedError(reason)
        if self._is_open:
            raise TestbedError("this testbed is already open; make another one.")
        self._owner_pid = os.getpid()
        self.name = _new_name()
        atexit.register(self.close)
        try:
            self._signals.enter_context(signals_as_exit())
            _remove_leftovers()
            self._build()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise TestbedError(f"cannot build the testbed: {error}.") from error
            raise
        self._is_open = True
        return self

    def command(self, rank: int, argv: Sequence[str]) -> list[str]:
        """The command line that runs ``argv`` as this rank: in its namespace, cgroup and core.

        The process keeps its id through all of it, so signals sent to it reach ``argv``.

        Raises:
            TestbedError: There is no such rank, or the testbed is not open.
        """
        self._check_rank(rank)
        if not self._is_open:
            raise TestbedError("the testbed is not open; use it as 'with Testbed(cluster) as ...'")
        namespace = self._namespace(self.cluster.host_of[rank])
        enter = [tool_path("ip") or "ip", "netns", "exec", namespace] if self.has_network else []
        # The cgroup first: `ip netns exec` mounts a new /sys, which has no cgroups.
        return [
            *("/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"'),
            str(self._cgroup(rank) / "cgroup.procs"),
            *enter,
            *(tool_path("taskset") or "taskset", "-c", str(self._core_of[rank])),
            *argv,
        ]

    def processes(self, rank: int) -> list[int]:
        """Ids of all processes that this rank's command has started and that still run.

        Raises:
            TestbedError: There is no such rank.
        """
        self._check_rank(rank)
        return _processes(self._cgroup(rank))

    def environment(self, rank: int) -> dict[str, str]:
        """Environment of this rank beside RANK, WORLD_SIZE and MASTER_PORT.

        Raises:
            TestbedError: There is no such rank.
        """
        self._check_rank(rank)
        return {
            "GLOO_SOCKET_IFNAME": INTERFACE if self.has_network else "lo",
            "MASTER_ADDR": self.address(0),
            "OMP_NUM_THREADS": "1",
        }

    def address(self, rank: int) -> str:
        """IPv4 address of this rank; ranks of one host share it.

        Raises:
            TestbedError: There is no such rank.
        """
        self._check_rank(rank)
        if not self.has_network:
            return "127.0.0.1"
        return str(host_address(self.cluster.host_of[rank]))

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.num_ranks:
            raise TestbedError(
                f"testbed '{self.cluster.name}' has no rank {rank}; its ranks are 0 to "
                f"{self.num_ranks - 1}."
            )

    def _namespace(self, host_index: int) -> str:
        return f"{self.name}_h{host_index}"

    def _cgroup(self, rank: int) -> Path:
        return _cpu_controller().root / self.name / f"rank{rank}"

    def _build(self) -> None:
        if self.has_network:
            self._build_network()
        controller = _cpu_controller()
        controller.make_group(self.name)
        for rank in range(self.num_ranks):
            quota = self.cluster.hosts[self.cluster.host_of[rank]].cpu_quota
            controller.make_rank_group(self._cgroup(rank), quota)

    def _build_network(self) -> None:
        switch = f"{self.name}_switch"
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "switch", "mtu", str(MTU), "type", "bridge")
        ip("-n", switch, "link", "set", "switch", "up")
        with_delay = emulates_delay(self.cluster, switch)
        for index, host in enumerate(self.cluster.hosts):
            namespace = self._namespace(index)
            ip("netns", "add", namespace)
            ip("-n", namespace, "link", "set", "lo", "up")
            delay_s = host.nic_latency_s / 2 if with_delay else 0.0
            rate = self.cluster.nic_bandwidth_bytes_per_s[index]
            connect(namespace, switch, f"port{index}", rate, delay_s)
            address = f"{host_address(index)}/{SUBNET.prefixlen}"
            ip("-n", namespace, "address", "add", address, "dev", INTERFACE)

    def close(self) -> None:
        """Removes everything; does nothing in a forked child of the owner."""
        if os.getpid() != self._owner_pid:
            return
        self._is_open = False
        try:
            with deferred_signals():
                _remove(self.name)
                # Only now: after a signal before the removal, the end of the process removes it.
                atexit.unregister(self.close)
        finally:
            self._signals.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuController:
    """The place of the cgroups that limit CPU time, and the way to write them.

    Attributes:
        root: Mount point.
        version: Version of the cgroup interface.
    """

    root: Path
    version: Literal[1, 2]

    def make_group(self, name: str) -> None:
        """Makes a group that holds the groups of the ranks.

        It goes before everything else on the machine: a rank gets its share of a core whatever
        runs beside it.
        """
        (self.root / name).mkdir()
        if self.version == 2:
            for folder in (self.root, self.root / name):
                (folder / "cgroup.subtree_control").write_text("+cpu")
            (self.root / name / "cpu.weight").write_text(str(_LARGEST_WEIGHT))
        else:
            (self.root / name / "cpu.shares").write_text(str(_LARGEST_SHARES))

    def make_rank_group(self, folder: Path, quota: float | None) -> None:
        """Makes a group that may use the share ``quota`` of one core; None is not limited."""
        folder.mkdir()
        if quota is not None:
            self.set_quota(folder, quota)

    def set_quota(self, folder: Path, quota: float) -> None:
        """Lets a group use the share ``quota`` of one core."""
        quota_us = round(quota * _QUOTA_PERIOD_US)
        if self.version == 2:
            (folder / "cpu.max").write_text(f"{quota_us} {_QUOTA_PERIOD_US}")
        else:
            (folder / "cpu.cfs_period_us").write_text(str(_QUOTA_PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(quota_us))


def _find_cpu_controller(mounts: Path = Path("/proc/self/mounts")) -> CpuController | None:
    """The controller by the mount table; version 1 first, as only one version can have it."""
    lines = [line.split() for line in mounts.read_text().splitlines()]
    for _, folder, kind, options, *_ in lines:
        if kind == "cgroup" and "cpu" in options.split(","):
            return CpuController(root=Path(folder), version=1)
    for _, folder, kind, *_ in lines:
        controllers = Path(folder) / "cgroup.controllers"
        if kind == "cgroup2" and controllers.exists():
            if "cpu" in controllers.read_text().split():
                return CpuController(root=Path(folder), version=2)
    return None


def _cpu_controller() -> CpuController:
    controller = _find_cpu_controller()
    if controller is None:
        raise TestbedError("the cgroup controller 'cpu' is not mounted any more.")
    return controller


def _missing_capabilities() -> list[str]:
    """Capabilities that namespaces and links need and this process lacks."""
    status = Path("/proc/self/status").read_text()
    effective = int(status.split("CapEff:")[1].split()[0], base=16)
    needed = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}  # <linux/capability.h>
    return [name for name, bit in needed.items() if not effective >> bit & 1]


def _check_hosts(cluster: Cluster) -> None:
    if cluster.pairs:
        raise TestbedError(
            f"cluster '{cluster.name}' limits what goes between pairs of hosts; a testbed shapes "
            "NICs alone. Leave out pairs, or lower the rates of the NICs."
        )
    for host in cluster.hosts:
        if host.num_nics > 1:
            raise TestbedError(
                f"host '{host.name}' has {host.num_nics} NICs; hosts of a testbed have one, which "
                "their ranks share."
            )
        if host.cpu_quota is not None and host.cpu_quota < _LEAST_QUOTA:
            raise TestbedError(
                f"host '{host.name}' has a cpu_quota of {host.cpu_quota:g}; the kernel takes "
                f"{_LEAST_QUOTA:g} (1 ms in 100 ms) or more."
            )


def _pin(quotas: Sequence[float | None], cores: Sequence[int]) -> tuple[int, ...]:
    """The core of each rank: the largest quota first, to the core with the least load so far.

    Equal quotas go round robin. Of all simple rules this one (Graham 1969, LPT) best keeps ranks
    from taking CPU time that the quotas of other ranks promise.
    """
    load = dict.fromkeys(cores, 0.0)
    core_of = [cores[0]] * len(quotas)
    for rank in sorted(range(len(quotas)), key=lambda rank: -_demand(quotas[rank])):
        core_of[rank] = min(cores, key=lambda core: load[core])
        load[core_of[rank]] += _demand(quotas[rank])
    return tuple(core_of)


def _demand(quota: float | None) -> float:
    return 1.0 if quota is None else quota


def _warn_about_load(quotas: Sequence[float | None], core_of: Sequence[int]) -> None:
    for core in sorted(set(core_of)):
        shares = [q for q, c in zip(quotas, core_of, strict=True) if c == core and q is not None]
        if sum(shares) > 1 + 1e-9:
            terms = " + ".join(f"{100 * share:g}" for share in shares)
            warnings.warn(
                f"the ranks on core {core} may use {terms} = {100 * sum(shares):g} % of it: they "
                "slow each other down when all are busy. Lower the quotas or use a machine with "
                f"more cores than {len(set(core_of))}.",
                HeterogWarning,
                stacklevel=3,
            )
            return


def _warn_about_intra(cluster: Cluster) -> None:
    for host, devices in zip(cluster.hosts, cluster.host_devices, strict=True):
        if len(devices) > 1:
            warnings.warn(
                f"host '{host.name}' has {len(devices)} ranks: what they send "
                "to each other goes over loopback, not at the "
                f"{host.intra.bandwidth_bytes_per_s / 1e9:g} GB/s of its inner link.",
                HeterogWarning,
                stacklevel=3,
            )
            return


def _start_ticks(pid: int) -> int | None:
    """Start of a process, in clock ticks since boot; None if it is gone or a zombie."""
    try:
        fields = fields_of_process(pid)
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _new_name() -> str:
    return f"heterog_{os.getpid()}_{_start_ticks(os.getpid())}_{secrets.token_hex(3)}"


_NAME = re.compile(r"(heterog_(\d+)_(\d+)_[0-9a-f]+)(?:_.*)?")


def _remove_leftovers() -> None:
    """Removes the testbeds whose creator is gone."""
    found: set[str] = set()
    for folder in (_NETNS_FOLDER, _cpu_controller().root):
        for entry in folder.iterdir() if folder.exists() else ():
            match = _NAME.fullmatch(entry.name)
            if match and _start_ticks(int(match[2])) != int(match[3]):
                found.add(match[1])
    for name in sorted(found):
        _logger.info("removing testbed %s, whose process is gone", name)
        _remove(name)


def _remove(name: str) -> None:
    """Kills all processes of a testbed and removes its cgroups and namespaces.

    What cannot be removed is logged and skipped; the next testbed tries again.
    """
    try:
        _remove_cgroups(_cpu_controller().root / name)
    except (OSError, TestbedError) as error:
        _logger.warning("cannot remove the cgroups of testbed %s: %s", name, error)
    # Removing a namespace destroys its veths, and with them their other ends.
    for entry in sorted(_NETNS_FOLDER.glob(f"{name}_*")):
        try:
            ip("netns", "delete", entry.name)
        except TestbedError as error:
            if entry.exists():  # else another process removed it at the same time
                _logger.warning("cannot remove a network namespace: %s", error)


def _remove_cgroups(folder: Path) -> None:
    if not folder.exists():
        return
    deadline_s = time.monotonic() + _KILL_TIMEOUT_S
    for group in [*(path for path in folder.iterdir() if path.is_dir()), folder]:
        while group.exists():
            # Repeatedly, because a process may fork while its siblings are killed.
            _kill_all(group)
            try:
                group.rmdir()
            except FileNotFoundError:
                return
            except OSError as error:
                if error.errno != errno.EBUSY or time.monotonic() > deadline_s:
                    raise
                time.sleep(0.005)


def _processes(group: Path) -> list[int]:
    try:
        return [int(line) for line in (group / "cgroup.procs").read_text().split()]
    except OSError:  # removed at the same time; any other reason makes rmdir fail and say so
        return []


def _kill_all(group: Path) -> None:
    for pid in _processes(group):
        if pid > 1:  # 0 is a process of another pid namespace, and kill(0) is our own group
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
