"""A process that is really slow: noticed, decided about, and said."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from heterog.cluster.catalog import device_type
from heterog.cluster.hardware import Device, Host, Link
from heterog.cluster.topology import Cluster
from heterog.graph.capture import capture
from heterog.healing.costs import BusyClock
from heterog.healing.job import HealingJob
from heterog.healing.options import HealOptions
from heterog.lowering import lower
from heterog.lowering.program import FIRST_LINK_KIND
from heterog.runtime.ranks import testbed
from heterog.runtime.ranks.testbed import Testbed, is_supported
from heterog.runtime.request import RunRequest
from heterog.search.plan import load_plan
from heterog.zoo import load_workload
from tests.healing.test_job import is_cleared
from tests.search.asking import make_plan
from tests.thorough import THOROUGH

_REASON = is_supported()
QUOTA = 0.45
BATCH = 1536
MODEL = Path(__file__).parents[2] / "experiments" / "healing_model.py"


def two() -> Cluster:
    """Two hosts of one device each, whose ranks may use 45 % of a core."""
    kind = device_type("CPU")
    kind = replace(
        kind,
        peak_flops_per_s={dtype: QUOTA * 40e9 for dtype in kind.peak_flops_per_s},
        memory_bandwidth_bytes_per_s=QUOTA * kind.memory_bandwidth_bytes_per_s,
        launch_overhead_s=kind.launch_overhead_s / QUOTA,
    )
    inner = Link(kind="loopback", bandwidth_bytes_per_s=1e9)
    hosts = [
        Host(
            name=f"h{number}",
            nic_line_rate_bytes_per_s=1e9,
            nic_latency_s=50e-6,
            intra=inner,
            cpu_quota=QUOTA,
        )
        for number in range(2)
    ]
    devices = [
        Device(name=f"h{number}:0", type=kind, host_index=number, usable_memory_bytes=2**30)
        for number in range(2)
    ]
    return Cluster(name="quotas", hosts=tuple(hosts), devices=tuple(devices), efficiency=1.0)


def test_a_clock_counts_compute_tasks_without_their_waits(tmp_path: Path) -> None:
    shutil.copy(MODEL, tmp_path / "model.py")
    graph = capture(load_workload(f"{tmp_path}/model.py:workload", BATCH))
    plan = make_plan(graph, two(), methods=["cp_ar"], budget="1e")
    program = lower(plan.graph, plan.cluster, plan.strategy, num_steps=1)
    computes = program.kind < FIRST_LINK_KIND
    task, link = int(computes.argmax()), int((~computes).argmax())
    now_s = 0.0
    clock = BusyClock(program, lambda: now_s)

    def run(number: int, seconds: float, waits_s: float = 0.0) -> None:
        nonlocal now_s
        clock.begin_task(number)
        if waits_s:
            clock.waiting()(now_s, now_s + waits_s)
        now_s += seconds + waits_s
        clock.end_task(number)

    run(task, 1.0, waits_s=5.0)
    run(link, 2.0)
    assert clock.seconds == 1.0
    clock.begin_update([0])  # between tasks
    now_s += 0.5
    clock.end_update([0])
    clock.begin_task(task)
    clock.begin_update([0])  # within one
    now_s += 0.25
    clock.end_update([0])
    clock.end_task(task)
    assert clock.seconds == 1.75


class Said(Exception):
    """The job has decided."""


def throttle(bed: Testbed, rank: int, quota: float) -> None:
    """Give a rank another share of its core from now on, as a card that gets hot does."""
    testbed._cpu_controller().set_quota(bed._cgroup(rank), quota)


@THOROUGH  # takes half a minute, most of it waiting for a rank that is really slow
@pytest.mark.distributed
@pytest.mark.skipif(_REASON is not None, reason=str(_REASON))
def test_a_rank_whose_share_of_a_core_is_cut_is_noticed_and_decided_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks with 45 % of a core; one is cut to 12 %, and what is quicker is taken."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(MODEL, tmp_path / "model.py")
    graph = capture(load_workload(f"{tmp_path}/model.py:workload", BATCH))
    make_plan(graph, two(), methods=["cp_ar"], budget="1e").save(tmp_path / "plan.json")
    with Testbed(two(), has_network=False) as bed:
        lines, chosen = run_until_said(
            bed, lambda step: throttle(bed, 1, 0.12) if step == 4 else None
        )
    (line,) = lines
    said = re.fullmatch(
        r"h1:0 takes (\S+) times as long as planned: (rebalanced|left out) "
        r"\(steps (\S+) ms as it is, (\S+) ms rebalanced, (\S+) ms left out\)",
        line,
    )
    assert said is not None, line
    stay, rebalanced, left_out = map(float, said.groups()[2:])
    assert float(said[1]) >= 2.0
    assert min(rebalanced, left_out) < stay
    plan = load_plan(chosen)
    if said[2] == "left out":
        assert left_out <= rebalanced
        assert plan.cluster.num_devices == 1
    else:
        assert rebalanced <= left_out
        shares = plan.strategy.decisions[0].shares
        assert 0 < shares[1] < shares[0]


def run_until_said(bed: Testbed, at_step: Callable[[int], None]) -> tuple[list[str], Path]:
    """Train until the job changes its plan; returns what it said, and a copy of that plan."""
    lines: list[str] = []
    chosen = Path("chosen.json")

    def say(text: str) -> None:
        lines.append(text)
        if job.trained.moves:
            assert job._change is not None
            chosen.write_bytes(Path(job._change.choice.path).read_bytes())
            raise Said

    def progress(stage: str) -> None:
        words = stage.split()
        if words[0] == "step":
            at_step(int(words[1]))

    job = HealingJob(
        RunRequest(plan=Path("plan.json"), num_steps=10**6, sources=("model.py",)),
        options=HealOptions(
            search_budget="", back_after_s=0.0, first_budget="1s", slow_factor=2.0
        ),
        place=bed,
        progress=progress,
        say=say,
    )
    with pytest.raises(Said):
        job.run()
    assert is_cleared(job)
    return lines, chosen
