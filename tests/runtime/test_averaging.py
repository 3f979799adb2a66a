"""Islands that train alone and average: real ranks against a slow loop in one process."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from heterog.errors import StrategyError
from heterog.graph.grouping import group_ops
from heterog.planners.plan import load_plan
from heterog.runtime.averaging import OuterState, outer_step
from heterog.runtime.checkpoint import load_checkpoint, save_checkpoint
from heterog.runtime.deploy import deploy
from heterog.strategy.averaging import AverageWeights, Averaging
from heterog.strategy.strategy import Decision, Strategy, Sync
from tests.runtime.cases import batch_of, workload_of
from tests.runtime.ranks import Ranks
from tests.runtime.strategies import graph_of, plan_of, strategy_of
from tests.thorough import one_in

ISLANDS = ((0,), (1, 2))
SAMPLES = (3, 5)
STEPS = 4
DILOCO = Averaging(every=2, weights=AverageWeights.EQUAL, outer_rate=0.7, outer_momentum=0.9)


def averaged(
    name: str,
    averaging: Averaging,
    *,
    optimizer: str = "SGD",
    piped: bool = False,
    idle: bool = False,
) -> Strategy:
    """Island 0 is one device; island 1 two, as replicas or a pipeline, or one of them alone."""
    graph = graph_of(name, optimizer)
    count = group_ops(graph).num_groups
    if idle:
        alone = [Decision(devices=(0, 2), shares=SAMPLES, teams=((0,), (2,)))] * count
        return replace(strategy_of(graph, alone), averaging=averaging)
    decisions = [Decision(devices=(0, 1, 2), shares=(3, 4, 1), sync=Sync.RING, teams=ISLANDS)]
    decisions *= count
    if piped:
        for group in range(count):
            other = 1 if group < count // 2 else 2
            decisions[group] = Decision(devices=(0, other), shares=SAMPLES, teams=((0,), (other,)))
    return replace(strategy_of(graph, decisions, bucket_bytes=300), averaging=averaging)


def train_averaged(rank: int, name: str, optimizer: str, path: str) -> tuple[list[float], object]:
    step = deploy(workload_of(name, optimizer), load_plan(path))
    losses = [float(step(batch_of(name, number))) for number in range(STEPS)]
    step.settle()
    return losses, step.state_dict()


def reference(
    name: str, optimizer: str, averaging: Averaging
) -> tuple[list[float], dict[str, Tensor]]:
    """One copy of the model for each island; averages are taken parameter by parameter."""
    workload = workload_of(name, optimizer)
    models = [workload.make_model() for _ in SAMPLES]
    steppers = [
        workload.optimizer(model.parameters(), **dict(workload.optimizer_options))
        for model in models
    ]
    batch_size = sum(SAMPLES)
    weights = [count / batch_size for count in SAMPLES]
    if averaging.weights == AverageWeights.EQUAL:
        weights = [0.5, 0.5]
    outer = [value.detach().clone() for value in models[0].parameters()]
    sgd = torch.optim.SGD(
        outer,
        lr=averaging.outer_rate,
        momentum=averaging.outer_momentum,
        nesterov=averaging.outer_momentum > 0,
    )
    losses = []
    sent: list[list[Tensor]] = []
    for number in range(STEPS):
        batch = batch_of(name, number)
        begin, total = 0, 0.0
        for model, stepper, count in zip(models, steppers, SAMPLES, strict=True):
            per_sample = [each.shape[0] // batch_size for each in batch]  # a token is a row
            own = tuple(
                each[begin * rows : (begin + count) * rows]
                for each, rows in zip(batch, per_sample, strict=True)
            )
            begin += count
            # A masked mean is over the labels of the whole batch, of which islands have parts
            # that are not those of their samples.
            part = labels_of(own) / labels_of(batch)
            loss = workload.step_loss(model, own) * part * batch_size / count
            stepper.zero_grad()
            torch.autograd.backward(loss)
            stepper.step()
            total += float(loss.detach()) * count / batch_size
        losses.append(total)
        is_last = number + 1 == STEPS
        if (number + 1) % averaging.every == 0:
            sent = [[value.detach().clone() for value in each.parameters()] for each in models]
        if sent and ((number + 1) % averaging.every == averaging.delay or is_last):
            move(models, sent, outer, sgd, weights)
            sent = []
        if is_last and averaging.delay:  # settled
            now = [[value.detach().clone() for value in each.parameters()] for each in models]
            move(models, now, outer, sgd, weights)
    return losses, models[0].state_dict()


def labels_of(batch: tuple[Tensor, ...]) -> int:
    """Labels that count; samples where there are no masks."""
    labels = batch[-1]
    return labels.shape[0] if labels.is_floating_point() else int((labels != -100).sum())


def move(
    models: list[nn.Module],
    sent: list[list[Tensor]],
    outer: list[Tensor],
    sgd: torch.optim.Optimizer,
    weights: list[float],
) -> None:
    """The outer optimizer steps; each island keeps what it has learned since it sent."""
    for anchor, copies in zip(outer, zip(*sent, strict=True), strict=True):
        mean = torch.stack([w * v for w, v in zip(weights, copies, strict=True)]).sum(0)
        anchor.grad = anchor - mean
    sgd.step()
    with torch.no_grad():
        for model, before in zip(models, sent, strict=True):
            for value, old, new in zip(model.parameters(), before, outer, strict=True):
                value.copy_(new + (value - old))


def compare(
    found: list[tuple[list[float], object]], wanted: tuple[list[float], dict[str, Tensor]]
) -> None:
    losses, weights = wanted
    for own, _ in found:
        assert own == pytest.approx(losses, rel=1e-5)
    state = found[0][1]
    assert isinstance(state, dict)
    for name, value in weights.items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


@one_in(2)
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "optimizer", "averaging", "cut"),
    [
        ("mlp", "SGD", Averaging(every=2), {"idle": True}),
        ("mlp", "AdamW", DILOCO, {"piped": True}),
        ("residual", "SGD", Averaging(every=4, weights=AverageWeights.EQUAL), {"piped": True}),
        ("gpt", "SGD", replace(DILOCO, every=3, delay=1), {}),
    ],
)
def test_ranks_train_as_the_loop_does(
    ranks: Ranks,
    tmp_path: Path,
    name: str,
    optimizer: str,
    averaging: Averaging,
    cut: dict[str, bool],
) -> None:
    strategy = averaged(name, averaging, optimizer=optimizer, **cut)
    path = tmp_path / "plan.json"
    plan_of(graph_of(name, optimizer), strategy).save(path)
    assert load_plan(path).strategy == strategy
    compare(
        ranks.run(train_averaged, name, optimizer, str(path)),
        reference(name, optimizer, averaging),
    )


def interrupted(rank: int, path: str, folder: str, cut: int) -> tuple[str, object, object]:
    """Four steps in one go, and four with a checkpoint after some that another step resumes."""
    workload = workload_of("mlp", "AdamW")
    whole = deploy(workload, load_plan(path))
    first = deploy(workload, load_plan(path))
    for number in range(STEPS):
        whole(batch_of("mlp", number))
    for number in range(cut):
        first(batch_of("mlp", number))
    refused = ""
    try:
        save_checkpoint(first, folder)
    except StrategyError as error:
        refused = str(error)
        first.settle()
        save_checkpoint(first, folder)
    again = deploy(workload, load_plan(path))
    load_checkpoint(again, folder)
    for number in range(cut, STEPS):
        again(batch_of("mlp", number))
    return refused, whole.state_dict(), again.state_dict()


@pytest.mark.distributed
def test_a_checkpoint_holds_every_island_and_the_outer_momentum(
    ranks: Ranks, tmp_path: Path
) -> None:
    """AdamW's moments differ between islands: the resumed run is the uninterrupted one."""
    path = tmp_path / "plan.json"
    strategy = averaged("mlp", DILOCO, optimizer="AdamW", piped=True)
    plan_of(graph_of("mlp", "AdamW"), strategy).save(path)
    for refused, whole, again in ranks.run(interrupted, str(path), str(tmp_path / "even"), 2):
        assert not refused
        if whole is not None:
            torch.testing.assert_close(again, whole, rtol=1e-6, atol=1e-7)
    texts = [each[0] for each in ranks.run(interrupted, str(path), str(tmp_path / "odd"), 1)]
    assert all("call settle() on every rank" in text for text in texts)


def test_the_outer_step_is_that_of_torch() -> None:
    anchor = torch.tensor([1.0, -2.0])
    wanted = [anchor.clone()]
    sgd = torch.optim.SGD(wanted, lr=0.7, momentum=0.9, nesterov=True)
    state = OuterState(anchor.clone(), torch.zeros(2))
    for average in (torch.tensor([0.5, -1.0]), torch.tensor([0.0, 0.5])):
        wanted[0].grad = wanted[0] - average
        sgd.step()
        torch.testing.assert_close(outer_step(state, average, DILOCO), wanted[0])


def clipped(rank: int, path: str) -> str:
    try:
        deploy(workload_of("mlp"), load_plan(path), max_grad_norm=1.0)
    except StrategyError as error:
        return str(error)
    return ""


@pytest.mark.distributed
def test_clipping_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan_of(graph_of("mlp"), averaged("mlp", Averaging(every=2))).save(path)
    assert all("islands or stages of this plan" in text for text in ranks.run(clipped, str(path)))
