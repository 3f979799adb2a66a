"""New parameters: schedulers, clipping, and steps that leave their updates to the next one."""

import gc
import math
import os
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from heterog.errors import StrategyError
from heterog.graph.grouping import group_ops
from heterog.lowering.program import TaskKind
from heterog.runtime.deploy import DeployedStep, deploy
from heterog.runtime.step import optimizer
from heterog.runtime.step.recorder import Recorder
from heterog.search.plan import load_plan
from heterog.strategy.strategy import Decision, Strategy
from tests.runtime.cases import (
    STEPS,
    Recipe,
    Trained,
    assert_same,
    batch_of,
    deployed,
    reference,
    train,
    workload_of,
)
from tests.runtime.ranks import Ranks
from tests.runtime.strategies import SYNCS, graph_of, homes_of, plan_of, strategy_of
from tests.search.asking import make_plan
from tests.simulator.builders import cluster_of
from tests.thorough import one_in


def strategy_by_name(name: str, case: str, *, step_barrier: bool) -> Strategy:
    graph = graph_of(name)
    groups = group_ops(graph).num_groups
    decisions = [SYNCS["ring" if case == "hybrid" else case]] * groups
    if case == "hybrid":
        decisions[groups // 2] = Decision(devices=(2,), shares=(8,))
    homes = None if case == "hybrid" else homes_of(graph, case)
    return strategy_of(graph, decisions, homes=homes, step_barrier=step_barrier)


def saved_plan(folder: Path, name: str, case: str, *, step_barrier: bool) -> str:
    path = folder / "plan.json"
    strategy = strategy_by_name(name, case, step_barrier=step_barrier)
    plan_of(graph_of(name), strategy).save(path)
    return str(path)


CASES = ["ring", "uneven slices", "server", "hybrid", "one device"]


@one_in(3)
@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("step_barrier", [True, False])
def test_an_update_uses_the_learning_rate_of_its_own_step(
    ranks: Ranks, tmp_path: Path, case: str, step_barrier: bool
) -> None:
    recipe = Recipe(decay=0.3)
    path = saved_plan(tmp_path, "gpt", case, step_barrier=step_barrier)
    assert_same(ranks.run(train, "gpt", recipe, path), reference("gpt", recipe))


@one_in(3)
@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("step_barrier", [True, False])
def test_clipping_is_that_of_one_device(
    ranks: Ranks, tmp_path: Path, case: str, step_barrier: bool
) -> None:
    recipe = Recipe(max_grad_norm=0.05, decay=0.5)
    plain, clipped = reference("gpt"), reference("gpt", recipe)
    some = next(iter(plain.gradients))
    assert not torch.allclose(plain.gradients[some][0], clipped.gradients[some][0])
    path = saved_plan(tmp_path, "gpt", case, step_barrier=step_barrier)
    assert_same(ranks.run(train, "gpt", recipe, path), clipped)


def train_in_parts(rank: int, name: str, recipe: Recipe, path: str) -> Trained:
    """As with large models: several calls, and large parameters in pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "STEPPED_BYTES_CPU", 1000)
        return train(rank, name, recipe, path)


@pytest.mark.distributed
@pytest.mark.parametrize("case", ["ring", "server", "uneven slices"])
def test_parameters_that_are_stepped_in_parts_are_those_of_one_device(
    ranks: Ranks, tmp_path: Path, case: str
) -> None:
    recipe = Recipe(max_grad_norm=0.05, decay=0.5)
    path = saved_plan(tmp_path, "gpt", case, step_barrier=True)
    assert_same(ranks.run(train_in_parts, "gpt", recipe, path), reference("gpt", recipe))


def test_parts_hold_all_rows_in_order_and_no_more_bytes_than_they_may() -> None:
    sizes = [10, 30, 50, 10, 10, 20, 1]
    parts = optimizer.in_parts(range(7), sizes, 40)
    assert parts == [[0, 1], [2], [3, 4, 5], [6]]
    assert optimizer.in_parts(range(7), sizes, 1000) == [list(range(7))]


def odd_batch(kind: str) -> tuple[Tensor, Tensor]:
    """A batch whose gradients overflow as they are summed up, or hold what is no number.

    Nothing in between: where huge terms of both signs meet, the order of a sum decides whether it
    is infinite or no number, and kernels of different CPUs have different orders.
    """
    x, y = batch_of("mlp", 0)
    if kind == "inf":
        return x * 1e15, y
    x = x.clone()
    x[0, 0] = math.nan
    return x, y


def clip_a_huge_gradient(
    rank: int, path: str, kind: str
) -> tuple[float, dict[str, Tensor] | None]:
    step = deployed("mlp", path, Recipe(max_grad_norm=1.0))
    step(odd_batch(kind))
    state = step.state_dict()
    assert step.grad_norm is not None
    return float(step.grad_norm), state


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["inf", "nan"])
def test_a_norm_that_is_not_finite_does_what_it_does_in_torch(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    workload = workload_of("mlp")
    model = workload.make_model()
    stepper = workload.optimizer(model.parameters(), **dict(workload.optimizer_options))
    torch.autograd.backward(workload.step_loss(model, odd_batch(kind)))
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    stepper.step()
    path = saved_plan(tmp_path, "mlp", "ring", step_barrier=True)
    (here, state), *_ = ranks.run(clip_a_huge_gradient, path, kind)
    assert state is not None
    assert str(here) == str(norm)
    assert not math.isfinite(norm)
    for key, wanted in model.state_dict().items():
        assert torch.equal(state[key].isnan(), wanted.isnan())


def refuse_norm(rank: int, path: str) -> str:
    try:
        deploy(workload_of("mlp"), load_plan(path), max_grad_norm=0.0)
    except StrategyError as error:
        return str(error)
    return ""


@pytest.mark.distributed
def test_a_norm_of_zero_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    path = saved_plan(tmp_path, "mlp", "ring", step_barrier=True)
    assert "max_grad_norm is 0.0; it must be above 0" in ranks.run(refuse_norm, path)[1]


def schedule_everywhere(rank: int, path: str) -> tuple[int, list[float]]:
    """Number of parameters that this rank steps, and the learning rates it sees."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = deployed("mlp", path)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(step.optimizer, 0.5)
        rates = []
        for number in range(STEPS):
            step(batch_of("mlp", number))
            scheduler.step()
            rates.append(float(step.optimizer.param_groups[0]["lr"]))
        step.flush()
    step.optimizer.load_state_dict(step.optimizer.state_dict())
    return len(step.optimizer.param_groups[0]["params"]), rates


@pytest.mark.distributed
@pytest.mark.parametrize("step_barrier", [True, False])
def test_every_rank_can_have_a_scheduler(ranks: Ranks, tmp_path: Path, step_barrier: bool) -> None:
    path = saved_plan(tmp_path, "mlp", "one device", step_barrier=step_barrier)
    results = ranks.run(schedule_everywhere, path)
    assert [number for number, _ in results] == [0, 6, 0]
    assert all(rates == pytest.approx([0.05, 0.025, 0.0125]) for _, rates in results)


class Heard(Recorder):
    """Tasks in the order in which they ran."""

    def __init__(self) -> None:
        self.tasks: list[int] = []
        self.updates = 0

    def begin_task(self, task: int) -> None:
        self.tasks.append(task)

    def end_task(self, task: int) -> None:
        assert self.tasks[-1] == task

    def begin_update(self, parameters: object) -> None:
        self.updates += 1


def listen(rank: int, path: str) -> tuple[int, int, int, bool]:
    """UPDATE tasks in the first call, in the second, in the flush; whether a property flushed."""
    step = deployed("gpt", path)
    executor = step._executor
    heard = executor.recorder = Heard()
    counts = []

    def updates() -> int:
        tasks, heard.tasks = heard.tasks, []
        return sum(bool(executor.program.kind[task] == TaskKind.UPDATE) for task in tasks)

    for number in range(2):
        step(batch_of("gpt", number))
        counts.append(updates())
    step.flush()
    counts.append(updates())
    step.flush()
    assert updates() == 0
    step(batch_of("gpt", 2))
    updates()
    flushed = bool(step.parameters) and updates() == counts[2]
    return counts[0], counts[1], counts[2], flushed


@pytest.mark.distributed
@pytest.mark.parametrize("case", ["ring", "server"])
def test_without_a_step_barrier_updates_come_in_the_next_step(
    ranks: Ranks, tmp_path: Path, case: str
) -> None:
    path = saved_plan(tmp_path, "gpt", case, step_barrier=False)
    for first, second, flushed, by_property in ranks.run(listen, path):
        assert first == 0
        assert second == flushed > 0
        assert by_property


def look_between(rank: int, path: str) -> tuple[dict[str, Tensor], list[float]]:
    """Weights after one step, read from the model, and the step counts of Adam at the end."""
    recipe = Recipe("AdamW")
    step = deployed("mlp", path, recipe)
    step(batch_of("mlp", 0))
    weights = {name: value.detach().clone() for name, value in step.model.named_parameters()}
    for number in range(1, STEPS):
        step(batch_of("mlp", number))
    step.flush()
    return weights, [float(state["step"]) for state in step.optimizer.state.values()]


@pytest.mark.distributed
def test_reading_the_model_finishes_the_step(ranks: Ranks, tmp_path: Path) -> None:
    graph = graph_of("mlp", "AdamW")
    strategy = strategy_of(
        graph, [SYNCS["server"]] * group_ops(graph).num_groups, step_barrier=False,
        homes=homes_of(graph, "server"),
    )  # fmt: skip
    path = tmp_path / "plan.json"
    plan_of(graph, strategy).save(path)
    workload = workload_of("mlp", "AdamW")
    model = workload.make_model()
    stepper = workload.optimizer(model.parameters(), **dict(workload.optimizer_options))
    torch.autograd.backward(workload.step_loss(model, batch_of("mlp", 0)))
    stepper.step()
    for weights, steps in ranks.run(look_between, str(path)):
        assert steps == [STEPS] * len(steps)
        for name, wanted in model.named_parameters():
            torch.testing.assert_close(weights[name], wanted.detach(), rtol=1e-5, atol=2e-5)


_kept: list[DeployedStep] = []


def flush_and_leave(rank: int, path: str) -> None:
    """Train, flush, and leave together; gloo aborts who leaves with communication under way."""
    step = deployed("gpt", path)
    for number in range(STEPS):
        step(batch_of("gpt", number))
    step.flush()
    _kept.append(step)
    torch.distributed.barrier()


@pytest.mark.distributed
def test_after_a_flush_the_process_group_may_be_destroyed(tmp_path: Path) -> None:
    pool = Ranks(2)
    graph = graph_of("gpt")
    pair = cluster_of((1.0, ["T4"]), (1.0, ["T4"]))
    plan = make_plan(graph, pair, methods=["ev_ar"], budget="1e", step_barrier=False)
    plan.save(tmp_path / "plan.json")
    try:
        pool.run(flush_and_leave, str(tmp_path / "plan.json"))
    finally:
        codes = pool.close()
    assert codes == [0, 0]


def threads_after_each_plan(rank: int, path: str) -> list[int]:
    """Of this process, with one plan after the other."""
    gc.collect()  # groups of earlier tests may be in cycles, whose threads would end in between
    found = []
    for _ in range(3):
        step = deployed("gpt", path)
        others = set(threading.enumerate())  # a capture leaves one of tqdm, which never ends
        step(batch_of("gpt", 0))
        step.close()
        with pytest.raises(StrategyError, match="closed; deploy its plan again"):
            step(batch_of("gpt", 0))
        for thread in set(threading.enumerate()) - others:
            thread.join(300)  # of sends; they end by themselves
        time.sleep(0.1)  # the system's thread ends a moment after Python's
        found.append(len(os.listdir("/proc/self/task")))
    return found


@pytest.mark.distributed
def test_a_closed_step_leaves_no_threads(ranks: Ranks, tmp_path: Path) -> None:
    """Groups of every step stayed: in a process with many plans their threads took both cores."""
    graph = graph_of("gpt")
    decisions = [SYNCS["ring"], Decision(devices=(0, 2), shares=(5, 3))]
    each = [decisions[number % 2] for number in range(group_ops(graph).num_groups)]
    plan_of(graph, strategy_of(graph, each, step_barrier=False)).save(tmp_path / "plan.json")
    for first, *others in ranks.run(threads_after_each_plan, str(tmp_path / "plan.json")):
        assert others == [first, first]
