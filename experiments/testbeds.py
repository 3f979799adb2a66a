"""Testbeds with calibrations of their own, and plans on their ranks, measured in turn."""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rows import Option, option
from torch.nn.parallel import DistributedDataParallel

import heterog
from heterog.cluster import Cluster
from heterog.cluster.topology import Execution
from heterog.errors import HeterogError
from heterog.graph.capture import capture_step
from heterog.methods.planner import Candidate
from heterog.pricing.calibration import calibrate
from heterog.pricing.op_fits import Measurements
from heterog.runtime.deploy import DeployedStep
from heterog.runtime.launch import run_commands
from heterog.runtime.measure.op_profiler import peak_bytes
from heterog.runtime.measure.profiler import profile_cluster
from heterog.runtime.rank import end_together, join
from heterog.runtime.ranks.testbed import Testbed, load_testbed
from heterog.runtime.ranks.watching import Limits
from heterog.search.plan import Plan, load_plan, plan_from_rows
from heterog.search.rows import MethodRow
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.strategy import Strategy
from heterog.zoo import load_workload

WARM_UP = 1

WORKLOADS = Path(__file__).with_name("testbed_workloads.py")
CALIBRATED_ON = ("mlp_small", "mlp_wide", "vgg_narrow", "vgg_wide", "text_small", "text_wide")


def workload_of(model: str, batch_size: int | None = None) -> heterog.Workload:
    """A workload of ``testbed_workloads.py``."""
    return load_workload(f"{WORKLOADS}:{model}", batch_size)


def plan_of(evaluator: Evaluator, strategy: Strategy) -> Plan:
    """A strategy as a plan, in the order of first come, first served."""
    found = evaluator.referee(strategy, Order.FIFO)
    row = MethodRow(
        method="given",
        stage="baseline",
        outcome=str(found.outcome),
        step_time_s=found.step_time_s,
        order="fifo",
        peak_memory_bytes=found.peak_memory_bytes,
        num_evaluations=1,
        search_seconds=0.0,
        candidate=Candidate(strategy=strategy, orders=(Order.FIFO,)),
    )
    return plan_from_rows(evaluator, [row])


def calibrated(testbed: str, folder: Path, execution: Execution = Execution.EAGER) -> Cluster:
    """The testbed's cluster with a calibration of its own; measured once per folder.

    Ops are not measured again on types of devices that were measured for another testbed with the
    same execution, nor are links if these ops are known.
    """
    cluster = replace(load_testbed(testbed), execution=execution)
    is_compiled = execution.compiles
    name = Path(testbed).stem + (".compiled" if is_compiled else "")
    path, kept = folder / f"{name}.calibration.json", folder / f"{name}.measurements.json"
    if not path.exists():
        others = [Measurements.load(each) for each in sorted(folder.glob("*.measurements.json"))]
        types = {of_type.name for of_type in cluster.device_types}
        alike = [part for part in others if part.compiled == is_compiled]
        ops = tuple(row for part in alike for row in part.ops if row.device_type in types)
        is_known = types <= {row.device_type for row in ops}
        linked = [
            replace(part, ops=(), compiled=is_compiled)
            for part in others
            if part.cluster and Cluster.from_dict(part.cluster).fingerprint == cluster.fingerprint
        ]
        if kept.exists():
            measured = Measurements.load(kept)
        elif is_known and linked:
            measured = linked[0]
        else:
            sources = [f"{WORKLOADS}:{name}" for name in CALIBRATED_ON]
            measured = profile_cluster(
                [] if is_known else sources, cluster, folder / f"{name}.journal"
            )
            measured.save(kept)
        if not measured.ops:
            measured = replace(measured, ops=ops, compiled=is_compiled)
        calibrate(measured, cluster, name=f"calibrated on {testbed}").save(path)
    return replace(cluster, calibration=str(path))


FOLDER = option("--folder", default="", help="keeps calibrations here, and uses old ones")


def testbed_options(testbeds: Iterable[str], models: Iterable[str]) -> tuple[Option, ...]:
    """Options of a script that measures models on testbeds."""
    own = option("--testbeds", default=",".join(testbeds))
    how = option("--execution", default="eager", help="eager or compiled, on both sides")
    return own, option("--models", default=",".join(models)), how, FOLDER


def testbeds_and_models(asked: argparse.Namespace) -> Iterator[tuple[Cluster, str]]:
    """Every testbed, calibrated and with the execution asked for, with every model."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(asked.folder or scratch)
        for testbed in asked.testbeds.split(","):
            cluster = calibrated(testbed, folder, Execution(asked.execution))
            for model in asked.models.split(","):
                yield cluster, model


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A measurement on all ranks of a testbed: a model's plans and DDP, in turn.

    Attributes:
        model: of ``testbed_workloads.py``.
        rounds: after one to warm up.
        batch_size: samples of a step; the workload's own if there is none.
        steps: of each contender in a round.
        peaks: plans whose largest memory is reported.
        shares: samples of each rank, for every DDP by its name.
        every: contenders that are slow, and in how many rounds they take part once.
        execution: how every DDP runs; plans say it themselves.
    """

    model: str
    rounds: int
    batch_size: int | None = None
    steps: int = 1
    peaks: Sequence[str] = ()
    shares: Mapping[str, Sequence[int]] = field(default_factory=dict)
    every: Mapping[str, int] = field(default_factory=dict)
    execution: str = Execution.EAGER


class Measured(NamedTuple):
    """Measurements of the ranks, by contender.

    Attributes:
        seconds: a step of each round, on rank 0.
        peaks: most bytes of each rank.
    """

    seconds: dict[str, list[float]]
    peaks: dict[str, list[int]]


def measured(cluster: Cluster, plans: Mapping[str, Plan], task: Task) -> Measured:
    """Run plans on the ranks of a testbed that corresponds to a cluster."""
    with tempfile.TemporaryDirectory() as name, Testbed(cluster) as bed:
        folder = Path(name)
        for key, plan in plans.items():
            plan.save(folder / f"{key}.json")
        (folder / _TASK).write_text(json.dumps(asdict(task)))
        run_commands(
            [str(Path(__file__).resolve()), name],
            cluster.num_devices,
            limits=Limits(timeout_s=1800),
            place=bed,
        )
        found = [
            json.loads(_result(folder, rank).read_text()) for rank in range(cluster.num_devices)
        ]
    return Measured(
        found[0]["seconds"], {key: [own["peaks"][key] for own in found] for key in task.peaks}
    )


_TASK = "task"


def _result(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.result"


def _on_rank(folder: Path) -> None:
    """Be a rank of ``measured``."""
    torch.set_num_threads(1)
    join(timeout_s=1800)
    task = Task(**json.loads((folder / _TASK).read_text()))
    workload = workload_of(task.model, task.batch_size)
    batch, captured = workload.make_batch(), capture_step(workload)
    deployed = {
        path.stem: DeployedStep(workload, load_plan(path), captured=captured)
        for path in sorted(folder.glob("*.json"))
    }
    contenders: dict[str, Callable[[], None]] = {
        name: partial(_window, step, batch, task.steps) for name, step in deployed.items()
    }
    contenders |= {name: _ddp_step(task, shares) for name, shares in task.shares.items()}
    seconds = seconds_in_turn(contenders, task.rounds, every=task.every)
    found = {
        "seconds": {name: [each / task.steps for each in own] for name, own in seconds.items()},
        "peaks": {name: peak_bytes(deployed[name], batch) for name in task.peaks},
    }
    _result(folder, dist.get_rank()).write_text(json.dumps(found))
    end_together()


def _window(step: DeployedStep, batch: Any, num_steps: int) -> None:
    for _ in range(num_steps):
        step(batch)
    if step.is_free_running:
        step.settle()


def _ddp_step(task: Task, shares: Sequence[int]) -> Callable[[], None]:
    """Training steps of the real DDP on this rank's part of the batch."""
    workload, rank = workload_of(task.model, task.batch_size), dist.get_rank()
    replica: Any = DistributedDataParallel(workload.make_model())
    optimizer = workload.optimizer(replica.parameters(), **dict(workload.optimizer_options))
    batch = workload.make_batch()
    assert isinstance(batch, tuple)
    if Execution(task.execution).compiles:
        # Several batch sizes in one process would make shapes dynamic, and kernels slower.
        replica = torch.compile(replica, dynamic=False)
    begin = sum(shares[:rank])
    local = tuple(each[begin : begin + shares[rank]] for each in batch)

    def run() -> None:
        for _ in range(task.steps):
            optimizer.zero_grad()
            torch.autograd.backward(workload.step_loss(replica, local))
            optimizer.step()

    return run


def seconds_in_turn(
    contenders: Mapping[str, Callable[[], Any]],
    num_rounds: int,
    *,
    every: Mapping[str, int] | None = None,
) -> dict[str, list[float]]:
    """Seconds of every contender in every round, between barriers; on every rank.

    Each round begins with another contender, because a contender's time depends on the one before.

    Args:
        contenders: what to call, by name; the same names in the same order on all ranks.
        num_rounds: after one to warm up.
        every: contenders that are slow, and in how many rounds they take part once.
    """
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(num_rounds + WARM_UP):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if number % (every or {}).get(name, 1):
                continue
            dist.barrier()
            begin = time.perf_counter()
            contenders[name]()
            dist.barrier()
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def results_of_ranks(
    function: Callable[..., Any], num_ranks: int, *arguments: Any, timeout_s: float = 300.0
) -> list[Any]:
    """Run a function on ranks that are forks of this process; what each of them returned.

    Args:
        function: Called with the rank and the arguments, in a process of one thread.
        num_ranks: Number of processes.
        arguments: Further arguments of the function.
        timeout_s: Seconds that a rank waits for another one.

    Raises:
        HeterogError: a rank raised it.
        RuntimeError: a rank failed otherwise.
    """
    with tempfile.TemporaryDirectory() as folder:
        how = {
            "init_method": f"file://{folder}/store",
            "world_size": num_ranks,
            "timeout": timedelta(seconds=timeout_s),
        }
        return results_of_forks(_join_and_run, num_ranks, how, function, arguments)


def _join_and_run(
    rank: int, how: dict[str, Any], function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", rank=rank, **how)
    return function(rank, *arguments)


def results_of_forks(function: Callable[..., Any], count: int, *arguments: Any) -> list[Any]:
    """Run a function in forks of this process; see ``results_of_ranks``.

    The forks may join a process group. One that fails takes its connections with it, so others
    that wait for it fail, too.
    """
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        files = [Path(name, str(number)) for number in range(count)]
        forks = [
            fork.Process(target=_answer, args=(file, function, number, *arguments))
            for number, file in enumerate(files)
        ]
        for process in forks:
            process.start()
        for process in forks:
            process.join()
        answers = [
            torch.load(file, weights_only=False)
            if file.exists()
            else RuntimeError(f"fork {number} ended with {forks[number].exitcode}")
            for number, file in enumerate(files)
        ]
    refusals = [answer for answer in answers if isinstance(answer, HeterogError)]
    if refusals:
        raise refusals[0]
    # The first that failed by itself says more than those that lost it.
    failures = [answer for answer in answers if isinstance(answer, RuntimeError)]
    if failures:
        raise min(failures, key=lambda each: "gloo" in str(each) or "Connection" in str(each))
    return answers


def _answer(file: Path, function: Callable[..., Any], *arguments: Any) -> None:
    torch.set_num_threads(1)
    answer: Any
    try:
        answer = function(*arguments)
        if dist.is_initialized():
            dist.barrier()  # a rank that ends takes its connections with it
    except HeterogError as error:
        answer = error
    except BaseException:
        answer = RuntimeError(traceback.format_exc())
    torch.save(answer, file)
    os._exit(0)


if __name__ == "__main__":
    _on_rank(Path(sys.argv[1]))
