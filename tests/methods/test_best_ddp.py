"""The best data parallelism is what trying everything finds, in a small part of a budget."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional

from heterog.agents.planners import default_methods
from heterog.cluster import Cluster
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph, UpdateScope
from heterog.graph.workload import Workload
from heterog.lowering import Choice
from heterog.lowering.channels import proportional_slices
from heterog.methods.data_parallel import (
    BUCKETS,
    BestDataParallel,
    class_sets,
    uniform_strategy,
)
from heterog.methods.planner import Budget, Problem
from heterog.search.allotment import (
    Allotment,
)
from heterog.search.judging import run_method
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.runs import Lowered
from heterog.simulator.space import balanced_homes
from heterog.strategy.division import split_evenly, split_in_proportion
from heterog.strategy.strategy import Decision, Sync, scope_fault
from tests.search.asking import run_methods
from tests.search.test_budget import clocked
from tests.thorough import one_in

CLUSTER = Cluster.load("paper_8gpu")


def model(width: int, batch_size: int) -> OpGraph:
    def layers() -> nn.Module:
        inner = [each for _ in range(4) for each in (nn.Linear(width, width), nn.ReLU())]
        return nn.Sequential(*inner, nn.Linear(width, 8))

    batch = (torch.zeros(batch_size, width), torch.zeros(batch_size, 8))
    return capture(Workload(layers, batch, functional.mse_loss, torch.optim.Adam))


def brute_force_s(evaluator: Evaluator) -> float:
    """The shortest step, by the engine, of everything that the definition names."""
    cluster, batch = evaluator.cluster, evaluator.graph.batch_size
    speeds, best = evaluator.speeds, float("inf")
    hosts = {kind: [] for kind in cluster.host_kind}  # type: dict[int, list[int]]
    for host, kind in enumerate(cluster.host_kind):
        hosts[kind] += cluster.host_devices[host]
    for taken in product((False, True), repeat=len(hosts)):
        some = [own for own, is_taken in zip(hosts.values(), taken, strict=True) if is_taken]
        devices = tuple(sorted(device for own in some for device in own))
        if not devices:
            continue
        of_speeds = split_in_proportion(batch, [speeds[device] for device in devices])
        one = (max(devices, key=lambda d: cluster.nic_bandwidth_bytes_per_s[cluster.host_of[d]]),)
        for shares, (others, first), sync in product(
            (of_speeds, split_evenly(batch, len(devices))),
            (*BUCKETS, (1 << 40, 0)),
            list(Sync)[:4],
        ):
            slices = proportional_slices(cluster, devices) if sync.takes_slices else ()
            decision = Decision(devices=devices, shares=shares, sync=sync, slices=slices)
            balanced = tuple(balanced_homes(evaluator.tables.parameter_bytes, devices).tolist())
            for homes in (one * len(balanced), balanced) if sync.is_served else (None,):
                strategy = uniform_strategy(
                    evaluator,
                    decision,
                    homes=homes,
                    bucket_bytes=others,
                    first_bucket_bytes=first,
                )
                found = [evaluator.evaluate(strategy, order) for order in Order]
                best = min([best, *(each.step_time_s for each in found if each.is_ok)])
    return best


@one_in(2)
@pytest.mark.parametrize("efficiency", [0.05, 0.7])
@pytest.mark.parametrize("width", [512, 2048])
def test_it_is_what_trying_everything_finds(width: int, efficiency: float) -> None:
    evaluator = Evaluator(model(width, 256), replace(CLUSTER, efficiency=efficiency))
    problem = Problem(evaluator=evaluator, budget=Budget(evaluations=1))
    found = BestDataParallel().plan(problem)
    first = found.candidates[0]
    assert first.strategy.num_micro_batches == 1
    seconds = evaluator.evaluate(first.strategy, first.orders[0]).step_time_s
    assert seconds == pytest.approx(brute_force_s(evaluator), rel=1e-9)
    tried = 7 * 2 * (3 * 5 + 2) * 3
    assert found.num_evaluations < tried / 2  # most is known to be behind


def test_as_few_micro_batches_as_it_takes_to_fit() -> None:
    graph = model(512, 1 << 16)
    ample = Evaluator(graph, CLUSTER)
    needed = max(run_method(BestDataParallel(), problem_of(ample)).peak_memory_bytes)
    devices = [replace(each, usable_memory_bytes=int(0.7 * needed)) for each in CLUSTER.devices]
    tight = Evaluator(graph, replace(CLUSTER, devices=tuple(devices)))
    row = run_method(BestDataParallel(), problem_of(tight))
    assert row.outcome == "ok"
    assert row.candidate is not None
    found = row.candidate.strategy
    count = found.num_micro_batches
    assert count > 1
    # With the same devices and shares, one less does not fit.
    sizes = (split_evenly(graph.batch_size, count - 1), *((0,) * (count - 1),) * 7)
    fewer = replace(found, micro_batches=sizes if count > 2 else ())
    assert not tight.evaluate(fewer, row.candidate.orders[0]).is_ok


def problem_of(evaluator: Evaluator) -> Problem:
    return Problem(evaluator=evaluator, budget=Budget(evaluations=1))


def test_classes_are_hosts_that_are_alike() -> None:
    assert class_sets(CLUSTER)[0] == tuple(range(8))
    assert set(class_sets(CLUSTER)) == {
        (0, 1, 2, 3, 4, 5, 6, 7), (0, 1, 2, 3, 4, 5), (0, 1, 6, 7), (2, 3, 4, 5, 6, 7),
        (0, 1), (2, 3, 4, 5), (6, 7),
    }  # fmt: skip


def test_it_takes_a_twentieth_of_a_budget_that_methods_share() -> None:
    evaluator, clock = clocked(0.05)
    budget = Budget(seconds=20.0)
    allotment = Allotment(budget, clock=clock)
    rows = run_methods(evaluator, ["best_ddp", "two_segment"], budget=budget, allotment=allotment)
    row = next(row for row in rows if row.method == "best_ddp")
    assert row.step_time_s is not None
    assert 0.0 < row.search_seconds <= 0.05 * 20.0 * 1.2


@pytest.mark.parametrize(
    "name", ["two_segment", "islands", "megatron_grid", "model_parallel", "agent"]
)
def test_searches_pass_over_what_the_optimizer_forbids(name: str) -> None:
    """What is cut among devices is neither simulated nor handed over."""
    evaluator = Evaluator(replace(model(64, 32), seen_scope=UpdateScope.MODEL), CLUSTER)
    simulated: list[Choice] = []
    lower = evaluator.lower

    def noted(choice: Choice) -> Lowered:
        simulated.append(choice)
        return lower(choice)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(evaluator, "lower", noted)
        problem = Problem(evaluator=evaluator, budget=Budget(evaluations=12))
        result = default_methods()[name].plan(problem)
    assert simulated
    assert not any(evaluator.feasibility.refused(choice) for choice in simulated)
    assert result.candidates
    for candidate in result.candidates:
        assert scope_fault(evaluator.graph, candidate.strategy, UpdateScope.MODEL) == ""
