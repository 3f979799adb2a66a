"""Teams with an asynchronous server: real ranks against a slow loop in one process."""

import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from heterog.errors import HeterogError, StrategyError
from heterog.graph.capture import CapturedStep, capture_step
from heterog.graph.grouping import group_ops
from heterog.lowering import lower
from heterog.modes.asynchronous.ranks import AsynchronousTraining
from heterog.modes.asynchronous.value import AsynchronousServer, PushOrder
from heterog.runtime.checkpoint import load_checkpoint, save_checkpoint
from heterog.runtime.deploy import deploy
from heterog.runtime.measure.rehearsal import rehearse
from heterog.search.plan import load_plan
from heterog.strategy.strategy import Decision, Strategy, Sync
from tests.runtime.cases import batch_of, workload_of
from tests.runtime.interrupted import interrupted_after
from tests.runtime.ranks import Ranks
from tests.runtime.strategies import cluster, graph_of, plan_of, strategy_of
from tests.runtime.test_averaging import labels_of
from tests.thorough import one_in

STEPS = 5
SINGLES = ((0,), (1,), (2,))
SHARES = (5, 2, 1)
PAIR = ((0,), (1, 2))
UNLIKE = AsynchronousServer(staleness=2, devices=(0,), ticks=(2, 3, 7))


def served(
    name: str, server: AsynchronousServer, optimizer: str = "SGD", *, cut: str = ""
) -> Strategy:
    """Three teams of one device; or one device and two, as replicas or as a pipeline."""
    graph = graph_of(name, optimizer)
    count = group_ops(graph).num_groups
    decisions = [Decision(devices=(0, 1, 2), shares=SHARES, teams=SINGLES)] * count
    if cut == "replicas":
        pair = Decision(devices=(0, 1, 2), shares=(3, 4, 1), sync=Sync.RING, teams=PAIR)
        decisions = [pair] * count
    if cut == "pipeline":
        decisions = [
            Decision(devices=(0, other), shares=(3, 5), teams=((0,), (other,)))
            for other in (1 if group < count // 2 else 2 for group in range(count))
        ]
    return strategy_of(graph, decisions).with_mode(server)


def samples_of(strategy: Strategy) -> list[int]:
    first = strategy.decisions[0]
    share = dict(zip(first.devices, first.shares, strict=True))
    return [sum(share[device] for device in team) for team in first.teams]


def part_of(batch: tuple[Tensor, ...], begin: int, count: int, whole: int) -> tuple[Tensor, ...]:
    """Some samples of a batch, whose tensors may have several rows for each."""
    rows = [each.shape[0] // whole for each in batch]
    return tuple(
        each[begin * n : (begin + count) * n] for each, n in zip(batch, rows, strict=True)
    )


class Reference:
    """One process: one model for each team, one for the server; events one after another."""

    def __init__(self, name: str, optimizer: str, strategy: Strategy) -> None:
        server = strategy.mode(AsynchronousServer)
        assert server is not None
        self.name, self.server = name, server
        self.workload = workload_of(name, optimizer)
        self.samples = samples_of(strategy)
        self.weights = self.workload.make_model()
        self.teams = [self.workload.make_model() for _ in self.samples]
        self.stepper = self.workload.optimizer(
            self.weights.parameters(), **dict(self.workload.optimizer_options)
        )

    def train(self, first: int, num_steps: int) -> list[list[float]]:
        """Losses of each step by team."""
        losses = [[math.nan] * len(self.samples) for _ in range(num_steps)]
        for event in self.server.events_of(num_steps):
            model = self.teams[event.team]
            if not event.is_push:
                copy_weights(self.weights, model)
                continue
            loss = self.backward(model, event.team, batch_of(self.name, first + event.step))
            losses[event.step][event.team] = loss
            for value, own in zip(self.weights.parameters(), model.parameters(), strict=True):
                value.grad = None if own.grad is None else own.grad.clone()
            self.stepper.step()
        return losses

    def backward(self, model: nn.Module, team: int, batch: tuple[Tensor, ...]) -> float:
        """Gradients of the team's part of the loss; returns the mean over its samples."""
        whole, begin = sum(self.samples), sum(self.samples[:team])
        own = part_of(batch, begin, self.samples[team], whole)
        part = self.workload.step_loss(model, own) * labels_of(own) / labels_of(batch)
        model.zero_grad()
        torch.autograd.backward(part)
        return float(part.detach()) * whole / self.samples[team]


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    with torch.no_grad():
        for value, new in zip(target.parameters(), source.parameters(), strict=True):
            value.copy_(new)


def train_served(rank: int, name: str, optimizer: str, path: str) -> tuple[list[float], object]:
    step = deploy(workload_of(name, optimizer), load_plan(path))
    losses = [float(step(batch_of(name, number))) for number in range(STEPS)]
    step.settle()
    state = step.state_dict()
    step.close()
    return losses, state


@one_in(2)
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "optimizer", "server", "cut"),
    [
        ("mlp", "AdamW", UNLIKE, ""),
        ("residual", "SGD", replace(UNLIKE, staleness=1, ticks=(1, 4)), "replicas"),
        ("mlp", "SGD", replace(UNLIKE, devices=(0, 1, 2), ticks=(3, 2)), "pipeline"),
        ("gpt", "SGD", replace(UNLIKE, devices=(0, 2), ticks=(5, 5, 6)), ""),
    ],
)
def test_ranks_train_as_the_loop_does(
    ranks: Ranks,
    tmp_path: Path,
    name: str,
    optimizer: str,
    server: AsynchronousServer,
    cut: str,
) -> None:
    strategy = served(name, server, optimizer, cut=cut)
    path = tmp_path / "plan.json"
    plan_of(graph_of(name, optimizer), strategy).save(path)
    found = ranks.run(train_served, name, optimizer, str(path))
    reference = Reference(name, optimizer, strategy)
    losses = reference.train(0, STEPS)
    for team, devices in enumerate(SINGLES if not cut else PAIR):
        for device in devices:
            wanted = [each[team] for each in losses]
            assert found[device][0] == pytest.approx(wanted, rel=1e-5)
    for key, value in reference.weights.named_parameters():
        torch.testing.assert_close(found[0][1][key], value.detach(), rtol=1e-5, atol=1e-6)


RATES = (0.1, 0.1, 0.03, 0.02, 0.05)


def one_device(name: str) -> dict[str, Tensor]:
    """Synchronous training on whole batches with plain SGD."""
    workload = workload_of(name)
    model = workload.make_model()
    sgd = torch.optim.SGD(model.parameters())
    for number, rate in enumerate(RATES):
        sgd.param_groups[0]["lr"] = rate
        sgd.zero_grad()
        torch.autograd.backward(workload.step_loss(model, batch_of(name, number)))
        sgd.step()
    return {key: value.detach() for key, value in model.named_parameters()}


def in_lock_step(rank: int, path: str) -> object:
    """Without momentum, which the workload's SGD has; options of the optimizer may change.

    One team asks for its first weights when the others have made their gradients.
    """
    step = deploy(workload_of("gpt"), load_plan(path))
    time.sleep(0.2 if rank == 2 else 0.0)
    for number, rate in enumerate(RATES):
        step.optimizer.param_groups[0] |= {"lr": rate, "momentum": 0.0}
        step(batch_of("gpt", number))
    step.settle()
    return step.state_dict()


@pytest.mark.distributed
@pytest.mark.parametrize("order", list(PushOrder))
def test_a_staleness_of_0_with_plain_sgd_is_the_step_of_one_device(
    ranks: Ranks, tmp_path: Path, order: PushOrder
) -> None:
    """Sums do not mind an order: what comes first may be first."""
    strategy = served("gpt", replace(UNLIKE, staleness=0, devices=(0, 1), order=order))
    path = tmp_path / "plan.json"
    plan_of(graph_of("gpt"), strategy).save(path)
    state = ranks.run(in_lock_step, str(path))[0]
    for key, value in one_device("gpt").items():
        torch.testing.assert_close(state[key], value, rtol=1e-5, atol=1e-6)


def with_a_slow_team(rank: int, path: str) -> tuple[int, dict[str, Tensor]]:
    """The last rank begins when the first has done all that it may without it."""
    step = deploy(workload_of("mlp"), load_plan(path))
    ahead_of_last = Path(f"{path}.ahead")
    for number in range(8):
        while rank == 2 and not ahead_of_last.exists():
            time.sleep(0.01)
        step(batch_of("mlp", number))
        if rank == 0 and number == 2:
            ahead_of_last.touch()
    step.settle()
    found = {name: value.detach().clone() for name, value in step.model.named_parameters()}
    (training,) = step.modes
    assert isinstance(training, AsynchronousTraining)
    ahead = 0 if training.weights is None else training.weights.most_ahead
    step.close()
    return ahead, found


@pytest.mark.distributed
def test_by_arrival_teams_run_ahead_as_far_as_the_bound_lets_them(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Afterwards all ranks have the server's weights."""
    server = replace(UNLIKE, staleness=2, order=PushOrder.ARRIVAL)
    path = tmp_path / "plan.json"
    plan_of(graph_of("mlp"), served("mlp", server)).save(path)
    found = ranks.run(with_a_slow_team, str(path))
    assert found[0][0] == 2
    for _, weights in found[1:]:
        torch.testing.assert_close(weights, found[0][1], rtol=0.0, atol=0.0)
    start = dict(workload_of("mlp").make_model().named_parameters())
    assert any(not torch.equal(start[name], value) for name, value in found[0][1].items())


def interrupted(rank: int, path: str, folder: str) -> tuple[str, object, object]:
    """Two steps, a checkpoint, three steps; and the three once more from the checkpoint."""
    return interrupted_after(2, STEPS, path, path, folder)


@pytest.mark.distributed
def test_a_checkpoint_holds_the_weights_and_the_servers_state(
    ranks: Ranks, tmp_path: Path
) -> None:
    strategy = served("mlp", replace(UNLIKE, devices=(0, 1)), "AdamW")
    path = tmp_path / "plan.json"
    plan_of(graph_of("mlp", "AdamW"), strategy).save(path)
    found = ranks.run(interrupted, str(path), str(tmp_path / "saved"))
    assert all("call settle() on every rank" in refused for refused, _, _ in found)
    _, whole, again = found[0]
    torch.testing.assert_close(again, whole, rtol=0.0, atol=0.0)
    reference = Reference("mlp", "AdamW", strategy)
    reference.train(0, 2)
    reference.train(2, STEPS - 2)
    for key, value in reference.weights.named_parameters():
        torch.testing.assert_close(whole[key], value.detach(), rtol=1e-5, atol=1e-6)


def on_exactly(rank: int, path: str, exact: str, folder: str) -> object:
    """Two steps with a server, then one of an exact plan from their checkpoint."""
    workload = workload_of("mlp", "AdamW")
    first = deploy(workload, load_plan(path))
    for number in range(2):
        first(batch_of("mlp", number))
    first.settle()
    save_checkpoint(first, folder)
    first.close()
    again = deploy(workload, load_plan(exact))
    load_checkpoint(again, folder)
    again(batch_of("mlp", 2))
    return again.state_dict()


@pytest.mark.distributed
def test_an_exact_plan_resumes_from_the_servers_weights_and_state(
    ranks: Ranks, tmp_path: Path
) -> None:
    graph = graph_of("mlp", "AdamW")
    strategy = served("mlp", replace(UNLIKE, devices=(1, 2)), "AdamW")
    plan_of(graph, strategy).save(tmp_path / "served.json")
    whole = [Decision(devices=(0, 1, 2), shares=SHARES)] * group_ops(graph).num_groups
    plan_of(graph, strategy_of(graph, whole)).save(tmp_path / "exact.json")
    paths = str(tmp_path / "served.json"), str(tmp_path / "exact.json"), str(tmp_path / "saved")
    found = ranks.run(on_exactly, *paths)[0]
    reference = Reference("mlp", "AdamW", strategy)
    reference.train(0, 2)
    reference.stepper.zero_grad()
    loss = reference.workload.step_loss(reference.weights, batch_of("mlp", 2))
    torch.autograd.backward(loss)
    reference.stepper.step()
    for key, value in reference.weights.named_parameters():
        torch.testing.assert_close(found[key], value.detach(), rtol=1e-5, atol=1e-6)


def refusals(rank: int, path: str) -> list[str]:
    """What a plan with a server does not do, in words."""
    said = []
    workload, plan = workload_of("mlp"), load_plan(path)
    masters = replace(workload, master_dtype=torch.float64)
    for wanted, norm in ((workload, 1.0), (masters, None)):
        try:
            deploy(wanted, plan, max_grad_norm=norm)
        except StrategyError as error:
            said.append(str(error))
    step = deploy(workload, plan)
    smaller = tuple(each[:4] for each in batch_of("mlp", 0))
    try:
        step(smaller)
    except StrategyError as error:
        said.append(str(error))
    step.close()
    return said


@pytest.mark.distributed
def test_what_needs_all_ranks_in_one_step_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan_of(graph_of("mlp"), served("mlp", UNLIKE)).save(path)
    for clipped, masters, smaller in ranks.run(refusals, str(path)):
        assert "max_grad_norm is a norm over one gradient" in clipped
        assert "without master weights" in masters
        assert "every batch has the shapes that were planned" in smaller


def idle_rank(rank: int, path: str) -> tuple[list[float], object]:
    return train_served(rank, "mlp", "SGD", path)


@pytest.mark.distributed
def test_a_rank_of_no_team_has_no_loss(ranks: Ranks, tmp_path: Path) -> None:
    graph = graph_of("mlp")
    two = Decision(devices=(0, 2), shares=(5, 3), teams=((0,), (2,)))
    server = AsynchronousServer(staleness=1, devices=(2,), ticks=(1, 2))
    alone = [two] * group_ops(graph).num_groups
    strategy = strategy_of(graph, alone).with_mode(server)
    strategy.check(graph, cluster())
    path = tmp_path / "plan.json"
    plan_of(graph, strategy).save(path)
    found = ranks.run(idle_rank, str(path))
    assert all(math.isnan(loss) for loss in found[1][0])
    reference = Reference("mlp", "SGD", strategy)
    losses = reference.train(0, STEPS)
    assert found[2][0] == pytest.approx([each[1] for each in losses], rel=1e-5)
    for key, value in reference.weights.named_parameters():
        torch.testing.assert_close(found[0][1][key], value.detach(), rtol=1e-5, atol=1e-6)


def with_a_failing_server(rank: int, path: str) -> str:
    """Only the rank beside the server trains; nobody else waits for anything."""

    def fail(*_: object) -> None:
        raise ValueError("no step today")

    step = deploy(workload_of("mlp"), load_plan(path))
    if rank:
        return ""
    (training,) = step.modes
    assert isinstance(training, AsynchronousTraining)
    assert training.weights is not None
    training.weights.optimizer.register_step_pre_hook(fail)
    try:
        for number in range(STEPS):
            step(batch_of("mlp", number))
    except HeterogError as error:
        return str(error)
    return "no error"


@pytest.mark.distributed
def test_why_a_server_has_ended_is_told(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    server = replace(UNLIKE, staleness=4, order=PushOrder.ARRIVAL)
    plan_of(graph_of("mlp"), served("mlp", server)).save(path)
    said = ranks.run(with_a_failing_server, str(path))[0]
    assert said == "the server on rank 0 has ended: no step today"


@pytest.mark.parametrize(
    ("name", "cut"), [("gpt", ""), ("mlp", "pipeline"), ("normalised", "replicas")]
)
def test_what_runs_is_rehearsed(name: str, cut: str) -> None:
    """Of teams with masked labels too, which every rank counts by itself."""
    ticks = UNLIKE.ticks[: 2 if cut else 3]
    strategy = served(name, replace(UNLIKE, ticks=ticks), cut=cut)
    assert rehearsed(capture_step(workload_of(name)), strategy) == ""


def test_teams_that_meet_in_every_step_are_refused() -> None:
    """The square of a mean over the batch: each team needs the others' parts of it."""

    def squared_mean(output: Tensor, _: Tensor) -> Tensor:
        return output.mean() ** 2

    workload = replace(workload_of("mlp"), loss=squared_mean)
    captured = capture_step(workload)
    alone = Decision(devices=(0, 1, 2), shares=SHARES, teams=SINGLES)
    decisions = [alone] * group_ops(captured.graph).num_groups
    strategy = strategy_of(captured.graph, decisions).with_mode(UNLIKE)
    said = rehearsed(captured, strategy)
    assert "devices (0, 1, 2) of several teams exchange a value in every step" in said


def rehearsed(captured: CapturedStep, strategy: Strategy) -> str:
    program = lower(captured.graph, cluster(), strategy, num_steps=1)
    return rehearse(captured, strategy, program, range(program.num_tasks))
