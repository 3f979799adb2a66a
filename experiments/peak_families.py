"""How far predicted peaks of memory are from those of ranks, over families of models.

    python experiments/peak_families.py --json
    python experiments/peak_families.py --only unet,lstm --ways eager,compiled
    python experiments/peak_families.py -o rows.jsonl      # goes on where it was stopped

Each family (``families/sized.py``) is run on one and on two ranks, eagerly and compiled, with one
and four micro-batches, with and without recomputation, and in sizes that are decades apart.
Kernels that inductor makes do nothing here: what they allocate is the same. *ratio* is the
predicted peak without ``MEMORY_MARGIN`` over the one measured, the least of the ranks.
"""

import multiprocessing
import os
import signal
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from families.sized import SIZED, Sized
from rows import finish, keep_row, option, progress, read_rows, script_parser
from testbeds import plan_of
from torch._inductor import config as inductor
from torch._inductor.async_compile import AsyncCompile

from heterog.cluster import Cluster
from heterog.cluster.spec import parse_cluster
from heterog.cluster.topology import Execution
from heterog.graph.capture import CapturedStep, capture_step
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.runtime.deploy import DeployedStep
from heterog.runtime.measure.op_profiler import peak_bytes
from heterog.search.plan import Plan
from heterog.simulator.evaluator import MEMORY_MARGIN, Evaluator
from heterog.strategy.strategy import REPLICATED, Decision, Strategy

_CLUSTER = """
schema_version: 1
name: peaks
hosts:
  - {name: a, devices: [{type: CPU, count: COUNT}], intra: pcie4}
"""
_MIB = 2**20
_LIMIT_S = 240.0


class Size(NamedTuple):
    """Samples of a batch, and a model's width."""

    batch: int
    width: int


MIDDLE = "middle"
SIZES = {
    MIDDLE: Size(32, 64),
    "few": Size(4, 32),
    "many": Size(256, 32),
    "wide": Size(4, 256),
}


class Way(NamedTuple):
    """How a family is run."""

    execution: Execution
    num_ranks: int = 1
    num_micro: int = 1
    recomputes: bool = False
    has_stages: bool = False


E, C = Execution.EAGER, Execution.COMPILED
WAYS = {
    "eager": Way(E),
    "compiled": Way(C),
    "eager_micro": Way(E, num_micro=4),
    "compiled_micro": Way(C, num_micro=4),
    "eager_recomputed": Way(E, recomputes=True),
    "compiled_recomputed": Way(C, recomputes=True),
    "eager_ddp": Way(E, num_ranks=2),
    "compiled_ddp": Way(C, num_ranks=2),
    "eager_stages": Way(E, num_ranks=2, num_micro=4, has_stages=True),
}
IN_ALL_SIZES = ("eager", "compiled")


def cluster_of(way: Way) -> Cluster:
    """One host with a device for each rank."""
    text = _CLUSTER.replace("COUNT", str(way.num_ranks))
    return replace(parse_cluster(text, Path("peaks.yaml")), execution=way.execution)


def strategy_of(graph: OpGraph, cluster: Cluster, way: Way) -> Strategy:
    """The strategy of a way."""
    groups, batch = group_ops(graph).num_groups, graph.batch_size
    devices = tuple(range(way.num_ranks))
    shares = (batch // way.num_ranks,) * way.num_ranks
    decisions = [Decision(devices=devices, shares=shares, recompute=way.recomputes)] * groups
    of_micro = (batch // way.num_micro // way.num_ranks,) * way.num_micro
    micro = (of_micro,) * way.num_ranks
    if way.has_stages:
        stages = [Decision(devices=(device,), shares=(batch,)) for device in devices]
        decisions = [stages[group * way.num_ranks // groups] for group in range(groups)]
        micro = ((batch // way.num_micro,) * way.num_micro,) * way.num_ranks
    return Strategy(
        graph=graph.fingerprint,
        cluster=cluster.fingerprint(),
        decisions=tuple(decisions),
        homes=(REPLICATED,) * len(graph.updates),
        micro_batches=micro if way.num_micro > 1 else (),
        bucket_bytes=25 * _MIB,
        first_bucket_bytes=_MIB,
    )


def peak_on(rank: int, way: Way, family: Sized, size: Size, planned: Any, path: str) -> int:
    """The peak of the second step on a rank."""
    captured, plan = planned
    workload = family.workload(*size)
    torch.set_num_threads(1)
    store = dist.FileStore(path, way.num_ranks)
    limit = timedelta(seconds=_LIMIT_S)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=way.num_ranks, timeout=limit
    )
    step = DeployedStep(workload, plan, captured=captured)
    step(workload.make_batch())
    found = peak_bytes(step, workload.make_batch())
    dist.barrier()
    return found


_FORK = multiprocessing.get_context("fork")


def on_forks(num_forks: int, call: Callable[[int], Any]) -> list[Any]:
    """What a call returns in each of some forks of this process.

    Raises:
        RuntimeError: one of them failed, or took too long.
    """
    ends, processes = [], []
    for number in range(num_forks):
        own, given = _FORK.Pipe(duplex=False)
        process = _FORK.Process(target=_answer, args=(call, number, given), daemon=True)
        process.start()
        given.close()
        ends.append(own)
        processes.append(process)
    try:
        found = []
        for end in ends:
            if not wait([end], _LIMIT_S):
                raise RuntimeError("it took too long")
            is_done, value = end.recv()
            if not is_done:
                raise RuntimeError(value)
            found.append(value)
        return found
    finally:
        for process in processes:
            process.join(2.0)
            if process.is_alive():
                process.kill()


def _answer(call: Callable[[int], Any], number: int, pipe: Connection) -> None:
    try:
        answer = True, call(number)
    except BaseException as error:
        answer = False, f"{type(error).__name__}: {error}".partition("\n")[0][:200]
    pipe.send(answer)
    pipe.close()
    with suppress(Exception):
        dist.destroy_process_group()
    os.kill(os.getpid(), signal.SIGKILL)  # threads of gloo may not end by themselves


def measured(family: Sized, size: Size, way: Way) -> Iterator[tuple[int, int]]:
    """(predicted without the margin, measured) bytes of each rank."""
    workload = family.workload(*size)
    captured: CapturedStep = capture_step(workload)
    cluster = cluster_of(way)
    evaluator = Evaluator(captured.graph, cluster)
    plan: Plan = plan_of(evaluator, strategy_of(captured.graph, cluster, way))
    with tempfile.TemporaryDirectory() as folder:
        path, planned = f"{folder}/store", (captured, plan)
        peaks = on_forks(
            way.num_ranks, lambda rank: peak_on(rank, way, family, size, planned, path)
        )
    for predicted, found in zip(plan.peak_memory_bytes, peaks, strict=True):
        yield round(predicted / (1.0 + MEMORY_MARGIN)), found


def row_of(name: str, size: str, way: str) -> dict[str, Any]:
    """A row: bytes of each rank, or why there are none."""
    row: dict[str, Any] = {"family": name, "size": size, "way": way}
    row["is_aside"] = SIZED[name].is_aside
    try:
        torch.manual_seed(0)
        pairs = list(measured(SIZED[name], SIZES[size], WAYS[way]))
    except Exception as error:
        return row | {"why": f"{type(error).__name__}: {error}".partition("\n")[0][:200]}
    return row | {"pairs": pairs, "ratio": min(p / m for p, m in pairs)}


def asked(only: list[str], sizes: list[str], ways: list[str]) -> Iterator[tuple[str, str, str]]:
    """Families, sizes and ways."""
    for way in ways:
        for size in sizes:
            for name in only if size == MIDDLE or way in IN_ALL_SIZES else ():
                yield name, size, way


def main() -> None:
    """Measure all families."""
    arguments = script_parser(
        __doc__,
        option("--only", default=",".join(SIZED)),
        option("--sizes", default=",".join(SIZES)),
        option("--ways", default=",".join(WAYS)),
        option("-o", "--output", type=Path, help="JSON lines, added to; none is made again"),
    ).parse_args()
    warnings.simplefilter("ignore")
    AsyncCompile.cpp_pybinding = lambda *_, **__: lambda *_: None
    inductor.force_disable_caches = True
    import_module("torch._inductor.compile_fx")  # before forks, which would all take seconds
    key = ("family", "size", "way")
    kept = {tuple(row[k] for k in key): row for row in read_rows(arguments.output)}
    rows = []
    lists = (arguments.only.split(","), arguments.sizes.split(","), arguments.ways.split(","))
    for each in asked(*lists):
        row = kept.get(each)
        if row is None:
            row = row_of(*each)
            keep_row(arguments.output, row)
        progress(row)
        rows.append(row)
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    within = sum(0.9 <= ratio <= 1.1 for ratio in ratios)
    document = {
        "num": len(ratios),
        "within_a_tenth": within,
        "below_0.9": sum(ratio < 0.9 for ratio in ratios),
        "median": statistics.median(ratios),
        "rows": rows,
    }
    finish(arguments, document)


if __name__ == "__main__":
    main()
