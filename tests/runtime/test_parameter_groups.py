"""Parameter groups on real ranks: every plan, one after the other, trains as one device does."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

from heterog.errors import StrategyError
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.graph.workload import Workload
from heterog.modes.asynchronous.value import AsynchronousServer
from heterog.modes.averaging.value import Averaging
from heterog.runtime.checkpoint import load_checkpoint, read_contents, save_checkpoint
from heterog.runtime.deploy import DeployedStep, deploy
from heterog.runtime.ranks.background import Trainer
from heterog.search.plan import load_plan
from heterog.strategy.strategy import Decision, Strategy, Sync
from tests.runtime.cases import BATCH, captured_once
from tests.runtime.ranks import PARENT, Ranks
from tests.runtime.strategies import ALL, SYNCS, ZERO, plan_of, strategy_of

STEPS = 2
"""Under each plan."""
MAX_NORM = 0.3
MOMENTUM: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
RATES = (lambda n: 0.5**n, lambda n: 1 / (1 + n), lambda n: 1.0, lambda n: 0.9**n)
"""Factor of each group's learning rate after n steps."""


class Tied(nn.Module):
    """A tied table, matrices between vectors, a layer that is frozen and one left out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 6)
        self.first = nn.Linear(6, 10)
        self.norm = nn.LayerNorm(10)
        self.left_out = nn.Linear(10, 10)
        self.frozen = nn.Linear(10, 10)
        self.frozen.requires_grad_(False)
        self.second = nn.Linear(10, 6)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(torch.tanh(self.first(self.embedding(tokens))))
        hidden = torch.tanh(self.frozen(torch.tanh(self.left_out(hidden))))
        out: Tensor = self.head(self.second(hidden)).transpose(1, 2)
        return out


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """As scripts have them: no decay of vectors, a rate of its own for the table."""
    named = {key: p for key, p in model.named_parameters() if not key.startswith("left_out")}
    table = named.pop("embedding.weight")
    return [
        {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0, "momentum": 0},
        {"params": (p for p in named.values() if p.dim() > 1)},
        {"params": [], "lr": 7.0},
        {"params": table, "lr": 0.02, "name": "table"},
    ]


def swapped(model: nn.Module) -> list[dict[str, Any]]:
    vectors, matrices, *others = groups_of(model)
    return [matrices, vectors, *others]


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens, labels = torch.randint(0, 13, (2, BATCH, 5), generator=generator)
    return tokens, labels


def workload_of(options: dict[str, Any]) -> Workload:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return Tied().double()

    return Workload(
        seeded,
        batch_of(0),
        functional.cross_entropy,
        torch.optim.SGD,
        options,
        parameter_groups=groups_of,
    )


def on_one_device(
    options: dict[str, Any], num_steps: int, max_norm: float | None
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights, by plain PyTorch."""
    model = workload_of(options).make_model()
    optimizer = torch.optim.SGD(groups_of(model), **options)
    scheduler = LambdaLR(optimizer, list(RATES))
    losses = []
    for number in range(num_steps):
        tokens, labels = batch_of(number)
        loss = functional.cross_entropy(model(tokens), labels)
        model.zero_grad()
        torch.autograd.backward(loss)
        if max_norm is not None:
            every = [p for group in optimizer.param_groups for p in group["params"]]
            assert float(nn.utils.clip_grad_norm_(every, max_norm)) > max_norm
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


def captured(options: dict[str, Any]) -> OpGraph:
    """A graph that ranks have captured, too."""
    key = "parameter groups", str(workload_of(options).optimizer_options)
    return PARENT.capture(key, workload_of, options)


def deployed(workload: Workload, path: str, max_norm: float | None) -> DeployedStep:
    with captured_once(("parameter groups", str(workload.optimizer_options))):
        return deploy(workload, load_plan(path), max_grad_norm=max_norm)


def train_in_turn(
    rank: int, options: dict[str, Any], paths: list[str], folder: str, max_norm: float | None
) -> tuple[list[float], Any, str]:
    """Steps under each plan, which goes on from the checkpoint of the one before."""
    warnings.simplefilter("ignore")  # that a scheduler's last_epoch is given
    losses, weights = [], None
    workload = workload_of(options)
    for number, path in enumerate(paths):
        step, done = deployed(workload, path, max_norm), number * STEPS
        if number:
            load_checkpoint(step, folder)
            rates = [group["lr"] for group in step.optimizer.param_groups]
            assert rates[:2] == [0.1 * RATES[0](done), 0.1 * RATES[1](done)]
            assert rates[2:] == [7.0, pytest.approx(0.02 * RATES[3](done))]
        scheduler = LambdaLR(step.optimizer, list(RATES), last_epoch=done - 1)
        assert step.optimizer.param_groups[2]["lr"] == 7.0
        for batch in range(done, done + STEPS):
            losses.append(float(step(batch_of(batch))))
            scheduler.step()
        step.settle()
        save_checkpoint(step, folder)
        weights = step.state_dict()
        step.close()
    other = replace(workload, parameter_groups=swapped)
    step, said = deployed(other, paths[0], max_norm), ""
    try:
        load_checkpoint(step, folder)
    except StrategyError as error:
        said = str(error)
    step.close()
    return losses, weights, said


def piped(graph: OpGraph) -> Strategy:
    """A stage on one device, then one on two, in micro-batches."""
    count = group_ops(graph).num_groups
    first, last = Decision(devices=(0,), shares=(BATCH,)), Decision(devices=(1, 2), shares=(5, 3))
    decisions = [first if group < count // 2 else last for group in range(count)]
    return strategy_of(graph, decisions, micro_batches=((6, 2), (0, 0), (0, 0)))


def exact_strategies(graph: OpGraph) -> list[Strategy]:
    count, rows = group_ops(graph).num_groups, len(graph.updates)
    every = {name: [decision] * count for name, decision in (SYNCS | ZERO).items()}
    return [
        strategy_of(graph, every["ring"], step_barrier=False),
        strategy_of(graph, every["zero3"], bucket_bytes=10**6),
        piped(graph),
        strategy_of(graph, every["zero1"], bucket_bytes=500),
        strategy_of(graph, every["server"], homes=tuple(row % 3 for row in range(rows))),
        strategy_of(graph, every["zero2, no slice"], bucket_bytes=10**6),
    ]


def saved_plans(folder: Path, graph: OpGraph, strategies: Sequence[Strategy]) -> list[str]:
    paths = [str(folder / f"{number}.json") for number in range(len(strategies))]
    for path, strategy in zip(paths, strategies, strict=True):
        plan_of(graph, strategy).save(path)
    return paths


def check(results: list[Any], options: dict[str, Any], max_norm: float | None) -> None:
    (losses, weights, _), *_ = results
    wanted, states = on_one_device(options, len(losses), max_norm)
    told = slice(2, 4) if max_norm is None else slice(0)  # with a server each team has its own
    del losses[told], wanted[told]
    assert losses == pytest.approx(wanted, rel=1e-9)
    assert set(weights) == set(states)
    for key, state in states.items():
        torch.testing.assert_close(weights[key], state, rtol=1e-9, atol=1e-9)


@pytest.mark.distributed
def test_every_plan_goes_on_as_one_device_with_the_same_groups(
    ranks: Ranks, tmp_path: Path
) -> None:
    graph = captured(MOMENTUM)
    paths = saved_plans(tmp_path, graph, exact_strategies(graph))
    folder = str(tmp_path / "saved")
    results = ranks.run(train_in_turn, MOMENTUM, paths, folder, MAX_NORM)
    check(results, MOMENTUM, MAX_NORM)
    states = read_contents(folder).states
    assert {states[name].group for name in states} == {0, 1, 3}
    assert states["first.bias"].options["weight_decay"] == 0
    assert states["embedding.weight"].options["name"] == "table"
    for _, _, said in results:
        assert "in parameter group 1, but here it is in group 0; resume with the same" in said


@pytest.mark.distributed
def test_averages_and_servers_step_every_group_at_its_rate(ranks: Ranks, tmp_path: Path) -> None:
    """Averages after every step, and plain SGD on a server at once, are the step of one device."""
    options = {"lr": 0.1}
    graph = captured(options)
    count = group_ops(graph).num_groups
    islands = Decision(devices=ALL, shares=(3, 4, 1), sync=Sync.RING, teams=((0,), (1, 2)))
    teams = Decision(devices=ALL, shares=(5, 2, 1), teams=((0,), (1,), (2,)))
    server = AsynchronousServer(staleness=0, devices=(0, 1), ticks=(2, 3, 7))
    averaged = strategy_of(graph, [islands] * count).with_mode(Averaging(every=1))
    served = strategy_of(graph, [teams] * count).with_mode(server)
    paths = saved_plans(tmp_path, graph, [averaged, served, averaged])
    check(ranks.run(train_in_turn, options, paths, str(tmp_path / "saved"), None), options, None)


def test_a_background_job_steps_its_groups() -> None:
    workload = workload_of(MOMENTUM)
    torch.manual_seed(0)
    trainer = Trainer(workload, torch.device("cpu"))
    model = workload.make_model()
    optimizer = torch.optim.SGD(groups_of(model), **MOMENTUM)
    for _ in range(3):
        tokens, labels = batch_of(0)
        loss = functional.cross_entropy(model(tokens), labels)
        model.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        assert trainer.step() == pytest.approx(float(loss.detach()), rel=1e-12)
