"""The testbed: what it refuses, what it builds, and that nothing of it stays behind."""

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist

from heterog.cluster.catalog import device_type
from heterog.cluster.hardware import Device, Host, Link
from heterog.cluster.topology import Cluster
from heterog.errors import HeterogWarning, InputFileError, UnknownNameError
from heterog.runtime.ranks import emulated_network as network
from heterog.runtime.ranks import testbed as module
from heterog.runtime.ranks.emulated_network import TestbedError
from heterog.runtime.ranks.testbed import CpuController, Testbed, load_testbed
from tests.runtime.ranks import FORKS

# Only where a testbed is built; what it refuses and computes is tested everywhere.
_REASON = module.is_supported()
real = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

MBIT_BYTES = 125_000
WAIT_S = 200.0
MOST_TRIES = 10
"""Of what takes at least so long on any machine, and longer on a busy one."""


def cluster_of(
    *quotas: float | None,
    mbit_per_s: float = 1000,
    latency_s: float = 20e-6,
    ranks_per_host: int = 1,
) -> Cluster:
    link = Link(kind="loopback", bandwidth_bytes_per_s=10e9)
    hosts = tuple(
        Host(
            name=f"h{index}",
            nic_line_rate_bytes_per_s=mbit_per_s * MBIT_BYTES,
            nic_latency_s=latency_s,
            intra=link,
            cpu_quota=quota,
        )
        for index, quota in enumerate(quotas)
    )
    devices = tuple(
        Device(
            name=f"h{host}:{index}",
            type=device_type("CPU"),
            host_index=host,
            usable_memory_bytes=2**30,
        )
        for host in range(len(hosts))
        for index in range(ranks_per_host)
    )
    return Cluster(name="small", hosts=hosts, devices=devices, efficiency=1.0)


def namespaces_of(name: str) -> set[str]:
    return {path.name for path in Path("/run/netns").glob(f"{name}_*")}


def cgroups_of(name: str) -> set[str]:
    folder = module._cpu_controller().root / name
    return {path.name for path in folder.glob("rank*")} if folder.exists() else set()


def is_gone(name: str) -> bool:
    group = module._cpu_controller().root / name
    return name != "" and not namespaces_of(name) and not group.exists()


def wait_until_gone(pid: int) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while module._start_ticks(pid) is not None:
        assert time.monotonic() < deadline_s, f"process {pid} still runs"
        time.sleep(0.01)


def python(bed: Testbed, rank: int, code: str, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        bed.command(rank, [sys.executable, "-c", code, *arguments]),
        env=os.environ | bed.environment(rank),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def results(processes: Sequence["subprocess.Popen[str]"]) -> list[str]:
    """What each process printed; fails with what it complained about."""
    texts = []
    for process in processes:
        out, err = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, err
        texts.append(out.strip())
    return texts


class TestFiles:
    @pytest.mark.parametrize(
        ("name", "quotas", "mbit_per_s"),
        [
            ("skew_compute", (0.8, 0.4, 0.3), (1000, 1000, 1000)),
            ("skew_network", (0.5, 0.5, 0.5), (200, 100, 100)),
            ("skew_both", (0.8, 0.4, 0.3), (200, 100, 50)),
        ],
    )
    def test_shipped(
        self, name: str, quotas: tuple[float, ...], mbit_per_s: tuple[float, ...]
    ) -> None:
        cluster = load_testbed(name)
        assert cluster.name == name
        assert [device.name for device in cluster.devices] == ["a", "b", "c"]
        assert tuple(host.cpu_quota for host in cluster.hosts) == quotas
        rates = list(cluster.nic_bandwidth_bytes_per_s)
        assert rates == [rate * MBIT_BYTES for rate in mbit_per_s]

    def test_all_are_listed(self) -> None:
        assert module.shipped_testbeds() == (
            "skew_both", "skew_compute", "skew_hosts", "skew_network"
        )  # fmt: skip

    def test_hosts_of_several_ranks(self) -> None:
        """Six ranks on three hosts, which two cores have 150 % for."""
        cluster = load_testbed("skew_hosts")
        assert cluster.host_of == (0, 0, 1, 1, 2, 2)
        quotas = [cluster.hosts[host].cpu_quota or 1.0 for host in cluster.host_of]
        assert sum(quotas) == pytest.approx(1.5)
        rates = list(cluster.nic_bandwidth_bytes_per_s)
        assert rates == [200 * MBIT_BYTES, 100 * MBIT_BYTES, 50 * MBIT_BYTES]

    def test_path(self, tmp_path: Path) -> None:
        cluster = load_testbed("skew_both")
        cluster.save(tmp_path / "mine.yaml")
        assert load_testbed(str(tmp_path / "mine.yaml")).fingerprint == cluster.fingerprint

    def test_unknown_name(self) -> None:
        with pytest.raises(UnknownNameError, match=r"testbed 'skew_booth'; did you .*'skew_both'"):
            load_testbed("skew_booth")
        with pytest.raises(UnknownNameError, match="unknown testbed 'paper_8gpu'"):
            load_testbed("paper_8gpu")

    def test_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(InputFileError, match=r"mine\.yaml"):
            load_testbed(str(tmp_path / "mine.yaml"))


@linux_only
class TestRefusals:
    """Why a machine cannot; each reason is also what `with` raises."""

    @pytest.fixture(autouse=True)
    def capable(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """A machine that lacks nothing."""
        controller = CpuController(root=tmp_path, version=1)
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setattr(shutil, "which", lambda name, path=None: f"/usr/bin/{name}")
        monkeypatch.setattr(module, "_missing_capabilities", list)
        monkeypatch.setattr(module, "_find_cpu_controller", lambda: controller)

    @staticmethod
    def assert_refused(*parts: str) -> None:
        reason = module.is_supported()
        assert reason is not None
        assert all(part in reason for part in parts), reason
        with pytest.raises(TestbedError) as caught, Testbed(cluster_of(None)):
            pass
        assert str(caught.value) == reason

    def test_nothing_lacks(self) -> None:
        assert module.is_supported() is None

    def test_not_linux(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "platform", "darwin")
        self.assert_refused("needs Linux", "this is darwin")

    def test_not_root(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        self.assert_refused("a testbed needs root: run with sudo")

    @pytest.mark.parametrize(
        ("tool", "package"), [("ip", "iproute2"), ("tc", "iproute2"), ("taskset", "util-linux")]
    )
    def test_no_tool(self, monkeypatch: pytest.MonkeyPatch, tool: str, package: str) -> None:
        monkeypatch.setattr(shutil, "which", lambda n, path=None: None if n == tool else f"/{n}")
        self.assert_refused(f"needs the command '{tool}'", f"install the package {package}")

    def test_no_capability(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_missing_capabilities", lambda: ["CAP_SYS_ADMIN"])
        self.assert_refused("needs CAP_SYS_ADMIN, which root lacks", "--privileged")

    def test_no_controller(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_find_cpu_controller", lambda: None)
        self.assert_refused("cgroup controller 'cpu', which is not mounted")
        with pytest.raises(TestbedError, match="'cpu' is not mounted any more"):
            module._cpu_controller()

    def test_read_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        self.assert_refused("mounted read-only")

    def test_quota_too_small(self) -> None:
        with pytest.raises(TestbedError, match=r"'h0' has a cpu_quota of 0.005; .* takes 0.01"):
            Testbed(cluster_of(0.005))

    def test_unknown_rank(self) -> None:
        bed = Testbed(cluster_of(None))
        for use in (bed.environment, bed.address, lambda rank: bed.command(rank, ["true"])):
            with pytest.raises(TestbedError, match=r"has no rank 1; its ranks are 0 to 0"):
                use(1)
        with pytest.raises(TestbedError, match="has no rank -1"):
            bed.environment(-1)

    def test_not_open(self) -> None:
        with pytest.raises(TestbedError, match="not open; use it as 'with Testbed"):
            Testbed(cluster_of(None)).command(0, ["true"])


@linux_only
class TestTools:
    def test_failure_tells_command_and_reason(self) -> None:
        with pytest.raises(TestbedError, match=r"'/.*/ls /no/such' failed: .*No such file"):
            network.run_tool("ls", "/no/such")

    def test_silent_failure(self) -> None:
        with pytest.raises(TestbedError, match=r"false' failed: exit code 1"):
            network.run_tool("false")

    def test_timeout(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(network, "_COMMAND_TIMEOUT_S", 0.05)
        with pytest.raises(TestbedError, match=r"sleep 10' took more than 0.05 s"):
            network.run_tool("sleep", "10")


@linux_only
class TestWarnings:
    def test_overloaded_core(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 5})
        with pytest.warns(HeterogWarning, match=r"core 4 may use 60 \+ 50 = 110 % of it"):
            Testbed(cluster_of(0.6, 0.6, 0.5))

    def test_no_warning_where_quotas_fit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for name in module.shipped_testbeds():
                Testbed(load_testbed(name))
            Testbed(cluster_of(None, None, None))
        # Ranks of one host meet over loopback, which only one of the testbeds has.
        assert all("goes over loopback" in str(each.message) for each in told)

    def test_unshaped_intra(self) -> None:
        with pytest.warns(HeterogWarning, match=r"'h0' has 2 ranks.*not at the 10 GB/s"):
            Testbed(cluster_of(None, ranks_per_host=2))

    def test_latency_without_netem(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*arguments: str) -> NoReturn:
            raise TestbedError("unknown qdisc")

        monkeypatch.setattr(network, "run_tool", refuse)
        with pytest.warns(HeterogWarning, match=r"'h0' \(5 ms\) is ignored.*no 'netem'"):
            assert not network.emulates_delay(cluster_of(None, latency_s=5e-3), "ns")


class TestPinning:
    def test_equal_quotas_go_round_robin(self) -> None:
        assert module._pin([None] * 5, [2, 3]) == (2, 3, 2, 3, 2)

    def test_no_core_has_more_than_it_can_give(self) -> None:
        # Round robin would give 110 % to the first core.
        assert module._pin([0.8, 0.4, 0.3], [0, 1]) == (0, 1, 1)


class TestController:
    def test_version_1(self, tmp_path: Path) -> None:
        mounts = tmp_path / "mounts"
        mounts.write_text(
            "cgroup /sys/fs/cgroup/cpuset cgroup rw,cpuset 0 0\n"
            "cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\n"
        )
        found = module._find_cpu_controller(mounts)
        assert found == CpuController(root=Path("/sys/fs/cgroup/cpu,cpuacct"), version=1)
        here = CpuController(root=tmp_path, version=1)
        here.make_group("bed")
        here.make_rank_group(tmp_path / "bed" / "rank0", 0.3)
        assert (tmp_path / "bed/rank0/cpu.cfs_quota_us").read_text() == "30000"
        assert (tmp_path / "bed/rank0/cpu.cfs_period_us").read_text() == "100000"

    def test_version_2(self, tmp_path: Path) -> None:
        mounts = tmp_path / "mounts"
        mounts.write_text(f"cgroup2 {tmp_path} cgroup2 rw 0 0\n")
        assert module._find_cpu_controller(mounts) is None
        (tmp_path / "cgroup.controllers").write_text("cpuset memory")
        assert module._find_cpu_controller(mounts) is None
        (tmp_path / "cgroup.controllers").write_text("cpuset cpu memory")
        found = module._find_cpu_controller(mounts)
        assert found == CpuController(root=tmp_path, version=2)
        found.make_group("bed")
        found.make_rank_group(tmp_path / "bed" / "rank0", 0.3)
        found.make_rank_group(tmp_path / "bed" / "rank1", None)
        for folder in (tmp_path, tmp_path / "bed"):
            assert (folder / "cgroup.subtree_control").read_text() == "+cpu"
        assert (tmp_path / "bed/rank0/cpu.max").read_text() == "30000 100000"
        assert list((tmp_path / "bed/rank1").iterdir()) == []


@real
@pytest.mark.distributed
class TestLife:
    """What exists while a testbed is open, and that all of it is gone after."""

    def test_builds_and_removes(self) -> None:
        with Testbed(cluster_of(0.5, None)) as bed:
            name = bed.name
            assert f"_{os.getpid()}_" in name
            assert namespaces_of(name) == {f"{name}_h0", f"{name}_h1", f"{name}_switch"}
            assert cgroups_of(name) == {"rank0", "rank1"}
            links = subprocess.check_output(["ip", "-n", f"{name}_switch", "link"], text=True)
            assert "port0" in links
            assert "port1" in links
            for rank in range(2):
                shape = subprocess.check_output(
                    bed.command(rank, ["tc", "qdisc", "show", "dev", "eth0"]), text=True
                )
                assert "tbf" in shape
                assert "rate 1Gbit" in shape
        assert is_gone(name)

    def test_can_be_opened_again(self) -> None:
        bed = Testbed(cluster_of(None))
        with bed:
            first = bed.name
            with pytest.raises(TestbedError, match="already open"):
                bed.__enter__()
            assert namespaces_of(first)
        with bed:
            assert bed.name != first
        assert is_gone(bed.name)

    def test_two_do_not_collide(self) -> None:
        with Testbed(cluster_of(None)) as one, Testbed(cluster_of(None)) as other:
            assert namespaces_of(one.name)
            assert namespaces_of(other.name)

    def test_after_an_exception(self) -> None:
        with pytest.raises(ZeroDivisionError), Testbed(cluster_of(None)) as bed:
            raise ZeroDivisionError
        assert is_gone(bed.name)

    def test_half_built(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bed = Testbed(cluster_of(None, None))
        shape = network._shape

        def fail_at_the_second_host(namespace: str, *rest: object) -> None:
            if namespace.endswith("h1"):
                network.ip("link", "show", "nothing")
            shape(namespace, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(network, "_shape", fail_at_the_second_host)
        with pytest.raises(TestbedError, match=r"ip link show nothing' failed: .*does not exist"):
            bed.__enter__()
        assert is_gone(bed.name)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

    def test_system_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(controller: CpuController, name: str) -> NoReturn:
            raise PermissionError(13, "Permission denied")

        bed = Testbed(cluster_of(None))
        monkeypatch.setattr(CpuController, "make_group", refuse)
        with pytest.raises(TestbedError, match=r"cannot build the testbed: .*Permission denied"):
            bed.__enter__()
        assert is_gone(bed.name)

    def test_processes_are_killed(self) -> None:
        with Testbed(cluster_of(0.1)) as bed:
            code = "import os, time; os.fork() and print('up', flush=True); time.sleep(1000)"
            process = python(bed, 0, code)
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
        assert is_gone(bed.name)
        process.communicate()
        assert process.returncode == -signal.SIGKILL

    def test_forked_child_leaves_it_alone(self) -> None:
        with Testbed(cluster_of(None)) as bed:
            pid = os.fork()
            if pid == 0:
                try:
                    bed.__exit__(None, None, None)
                finally:
                    os._exit(0)
            os.waitpid(pid, 0)
            assert namespaces_of(bed.name)
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                try:
                    os.write(writer, b"up")  # signals that come before are lost in the fork
                    time.sleep(1000)
                finally:
                    os._exit(1)
            os.read(reader, 2)
            os.kill(pid, signal.SIGTERM)
            assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGTERM
            assert namespaces_of(bed.name)
        assert is_gone(bed.name)


_HOLDER = """
import subprocess, sys, time
from heterog.runtime.ranks.testbed import Testbed, load_testbed
with Testbed(load_testbed("skew_both")) as bed:
    process = subprocess.Popen(bed.command(0, ["sleep", "1000"]))
    print(bed.name, process.pid, flush=True)
    time.sleep(1000)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that has a testbed open, with a process in it."""

    process: "subprocess.Popen[str]"
    name: str
    rank_pid: int


@pytest.fixture
def holder(tmp_path: Path) -> Holder:
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDER],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert process.stdout is not None
    name, rank_pid = process.stdout.readline().split()
    return Holder(process=process, name=name, rank_pid=int(rank_pid))


@real
@pytest.mark.distributed
class TestSignals:
    @pytest.mark.parametrize(
        ("number", "exit_codes"),
        [
            (signal.SIGTERM, {128 + signal.SIGTERM}),
            (signal.SIGHUP, {128 + signal.SIGHUP}),
            (signal.SIGINT, {-signal.SIGINT, 128 + signal.SIGINT}),
        ],
    )
    def test_ends_with_clean_up(
        self, holder: Holder, number: signal.Signals, exit_codes: set[int]
    ) -> None:
        assert namespaces_of(holder.name)
        holder.process.send_signal(number)
        holder.process.communicate(timeout=WAIT_S)
        assert holder.process.returncode in exit_codes
        assert is_gone(holder.name)
        wait_until_gone(holder.rank_pid)

    def test_next_one_removes_what_sigkill_left(self, holder: Holder) -> None:
        with Testbed(cluster_of(None)):
            assert namespaces_of(holder.name)  # its process is alive
        holder.process.kill()
        wait_until_gone(holder.process.pid)  # a zombie: its parent has not looked yet
        assert namespaces_of(holder.name)
        with Testbed(cluster_of(None)):
            assert is_gone(holder.name)
        wait_until_gone(holder.rank_pid)
        holder.process.communicate()

    def test_handlers_are_restored(self) -> None:
        before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)]
        with Testbed(cluster_of(None)):
            assert signal.getsignal(signal.SIGTERM) != before[0]
        after = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)]
        assert after == before

    def test_signal_during_a_command_waits(self, tmp_path: Path) -> None:
        script = f"kill -INT {os.getpid()}; sleep 0.1; touch {tmp_path / 'done'}"
        with pytest.raises(KeyboardInterrupt):
            network.run_tool("sh", "-c", script)
        assert (tmp_path / "done").exists()

    def test_signal_during_clean_up_waits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        remove = module._remove_cgroups

        def remove_and_interrupt(folder: Path) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            remove(folder)

        bed = Testbed(cluster_of(None))
        monkeypatch.setattr(module, "_remove_cgroups", remove_and_interrupt)
        with pytest.raises(KeyboardInterrupt), bed:
            pass
        assert is_gone(bed.name)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


_BUSY = """
import time
wall, cpu = time.perf_counter(), time.process_time()
while time.process_time() - cpu < 0.5: pass
print((time.perf_counter() - wall) / (time.process_time() - cpu))
"""

_RECEIVE = """
import socket, sys
server = socket.create_server(("", 5000))
print("up", flush=True)
connection, peer = server.accept()
num_bytes = 0
while num_bytes < int(sys.argv[1]):
    num_bytes += len(connection.recv(2**20))
connection.sendall(b"all")
print(peer[0])
"""

_SEND = """
import socket, sys, time
data = bytes(int(sys.argv[2]))
with socket.create_connection((sys.argv[1], 5000)) as connection:
    start = time.perf_counter()
    connection.sendall(data)
    connection.recv(3)
    print(time.perf_counter() - start)
"""


def sum_over_ranks(namespace: str, variables: Mapping[str, str]) -> None:
    """What a rank does in a namespace, which it enters by itself: it was forked outside."""
    with Path("/run/netns", namespace).open() as file:
        assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0
    os.environ |= variables
    dist.init_process_group("gloo")
    value = torch.full((1000,), 10.0 ** dist.get_rank())
    dist.all_reduce(value)
    assert value.eq(111.0).all()
    dist.destroy_process_group()


@real
@pytest.mark.distributed
class TestShaping:
    def test_quota_slows_a_busy_loop(self) -> None:
        with Testbed(cluster_of(0.3)) as bed:
            for _ in range(MOST_TRIES):
                [slowdown] = results([python(bed, 0, _BUSY)])
                assert float(slowdown) > 2
                if float(slowdown) < 6:  # 1 / 0.3 = 3.3
                    return
        raise AssertionError(slowdown)

    def test_ranks_are_pinned(self) -> None:
        code = "import os; print(*os.sched_getaffinity(0))"
        with Testbed(cluster_of(None, None)) as bed:
            cores = results([python(bed, rank, code) for rank in range(2)])
        assert [int(core) for core in cores] == list(bed._core_of)

    def test_transfer_takes_what_the_link_needs(self) -> None:
        num_bytes = 4 * 2**20
        ideal_s = num_bytes / (100 * MBIT_BYTES)
        with Testbed(cluster_of(None, None, mbit_per_s=100)) as bed:
            for _ in range(MOST_TRIES):
                receiver = python(bed, 1, _RECEIVE, str(num_bytes))
                assert receiver.stdout is not None
                receiver.stdout.readline()
                sender = python(bed, 0, _SEND, bed.address(1), str(num_bytes))
                taken_s, peer = results([sender, receiver])
                assert peer == bed.address(0)
                assert float(taken_s) > 0.8 * ideal_s
                if float(taken_s) < 3 * ideal_s:
                    return
        raise AssertionError(taken_s)

    def test_ranks_of_one_host_share_its_address(self) -> None:
        with pytest.warns(HeterogWarning, match="2 ranks"):
            shared = Testbed(cluster_of(None, ranks_per_host=2))
        with shared as bed:
            assert bed.num_ranks == 2
            assert bed.address(0) == bed.address(1)
            assert cgroups_of(bed.name) == {"rank0", "rank1"}

    def test_all_reduce_of_three_gloo_ranks(self) -> None:
        with Testbed(cluster_of(None, None, None)) as bed:
            processes = []
            for rank in range(bed.num_ranks):
                variables = dict(bed.environment(rank))
                variables |= {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_PORT": "29500"}
                where = bed._namespace(bed.cluster.host_of[rank])
                processes.append(FORKS.Process(target=sum_over_ranks, args=(where, variables)))
                processes[-1].start()
            for process in processes:
                process.join(WAIT_S)
            assert [process.exitcode for process in processes] == [0, 0, 0]

    def test_machine_cannot_be_reached_from_inside(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server, Testbed(cluster_of(None)) as bed:
            port = server.getsockname()[1]
            code = f"import socket; print(socket.socket().connect_ex(('127.0.0.1', {port})) != 0)"
            assert results([python(bed, 0, code)]) == ["True"]
