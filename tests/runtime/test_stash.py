"""Pipelines with a stash of weights: real ranks against a slow loop in one process."""

import math
import weakref
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from heterog.errors import StrategyError
from heterog.graph.capture import capture_step
from heterog.graph.grouping import group_ops
from heterog.lowering import lower
from heterog.lowering.program import TaskKind
from heterog.modes.stash.method import StashedPipelines
from heterog.modes.stash.value import WeightStash, stages_of
from heterog.runtime.deploy import deploy
from heterog.runtime.measure.rehearsal import rehearsal_of, rehearse
from heterog.runtime.step.collectives import Communicator
from heterog.search.plan import load_plan
from heterog.strategy.division import split_evenly
from heterog.strategy.strategy import Decision, Strategy
from tests.runtime.cases import BATCH, batch_of, workload_of
from tests.runtime.interrupted import interrupted_after
from tests.runtime.ranks import Ranks
from tests.runtime.strategies import cluster, graph_of, plan_of, strategy_of
from tests.search.asking import make_plan
from tests.thorough import one_in

STEPS = 9
RATES = (0.1, 0.1, 0.03, 0.02, 0.05, 0.1, 0.01, 0.04, 0.02)
CHAIN = tuple(Decision(devices=(device,), shares=(8,)) for device in range(3))
REPLICAS = (CHAIN[1], Decision(devices=(0, 2), shares=(5, 3)))


def stashed(
    name: str,
    boundary_steps: int,
    stages: tuple[Decision, ...] = CHAIN,
    optimizer: str = "SGD",
    num_micro: int = 1,
) -> Strategy:
    """Consecutive groups in stages of about as many, and even micro-batches."""
    graph = graph_of(name, optimizer)
    count = group_ops(graph).num_groups
    decisions = [stages[group * len(stages) // count] for group in range(count)]
    stash = WeightStash(boundary_steps=boundary_steps)
    sizes, idle = split_evenly(BATCH, num_micro), (0,) * num_micro
    micro = (sizes, idle, idle) if num_micro > 1 else ()
    return strategy_of(graph, decisions, micro_batches=micro).with_mode(stash)


class Reference:
    """One process with the weights after every update, from which stages pick older ones."""

    def __init__(self, name: str, optimizer: str, strategy: Strategy) -> None:
        self.name, self.workload = name, workload_of(name, optimizer)
        graph, stages = graph_of(name, optimizer), stages_of(strategy)
        stash = strategy.mode(WeightStash)
        assert stash is not None
        group = group_ops(graph).group
        self.staleness: dict[str, int] = {}
        for op, parameter, _ in graph.updates:
            devices = strategy.decisions[int(group[op])].devices
            stage = next(n for n, own in enumerate(stages) if devices[0] in own)
            behind = stash.boundary_steps * (len(stages) - 1 - stage)
            staleness = math.ceil(behind / strategy.num_micro_batches)
            self.staleness[graph.tensors[parameter].name] = staleness
        self.model = self.workload.make_model()
        self.stepper = self.workload.optimizer(
            self.model.parameters(), **dict(self.workload.optimizer_options)
        )

    def train(self, first: int, num_steps: int, rates: tuple[float, ...] = ()) -> list[float]:
        """Losses of a stretch that begins with an empty pipeline."""
        named = dict(self.model.named_parameters())
        versions = [{key: value.detach().clone() for key, value in named.items()}]
        losses = []
        for number in range(num_steps):
            for key, value in named.items():
                value.data = versions[max(number - self.staleness[key], 0)][key].clone()
            loss = self.workload.step_loss(self.model, batch_of(self.name, first + number))
            self.stepper.zero_grad()
            torch.autograd.backward(loss)
            losses.append(float(loss.detach()))
            for key, value in named.items():
                value.data = versions[-1][key].clone()
            if rates:
                self.stepper.param_groups[0]["lr"] = rates[first + number]
            self.stepper.step()
            versions.append({key: value.detach().clone() for key, value in named.items()})
        return losses

    def check(self, state: object) -> None:
        """Compare all weights and buffers with those of the ranks."""
        assert isinstance(state, dict)
        is_double = next(self.model.parameters()).dtype == torch.float64
        rtol, atol = (1e-9, 1e-11) if is_double else (1e-5, 1e-6)
        for key, value in self.model.state_dict().items():
            torch.testing.assert_close(state[key], value.detach(), rtol=rtol, atol=atol)


def train_stashed(
    rank: int, name: str, optimizer: str, path: str, *, changes_rate: bool = False
) -> tuple[list[float], list[float], object]:
    step = deploy(workload_of(name, optimizer), load_plan(path))
    losses = []
    for number in range(STEPS):
        if changes_rate:
            step.optimizer.param_groups[0]["lr"] = RATES[number]
        losses.append(float(step(batch_of(name, number))))
    step.settle()
    late, state = step.take_late_losses(), step.state_dict()
    step.close()
    return losses, late, state


@one_in(2)
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "optimizer", "boundary_steps", "stages", "num_micro", "oldest"),
    [
        ("normalised", "SGD", 1, CHAIN, 1, 2),
        ("gpt", "AdamW", 2, CHAIN, 1, 4),
        ("mlp", "SGD", 3, CHAIN, 4, 2),
        ("residual", "SGD", 1, REPLICAS, 1, 1),
        ("gpt", "SGD", 1, REPLICAS, 3, 1),
    ],
)
def test_ranks_train_as_the_loop_with_old_weights_does(
    ranks: Ranks,
    tmp_path: Path,
    name: str,
    optimizer: str,
    boundary_steps: int,
    stages: tuple[Decision, ...],
    num_micro: int,
    oldest: int,
) -> None:
    strategy = stashed(name, boundary_steps, stages, optimizer, num_micro)
    strategy.check(graph_of(name, optimizer), cluster())
    path = tmp_path / "plan.json"
    plan_of(graph_of(name, optimizer), strategy).save(path)
    found = ranks.run(train_stashed, name, optimizer, str(path))
    reference = Reference(name, optimizer, strategy)
    losses = reference.train(0, STEPS)
    for early, late, _ in found:
        assert all(math.isnan(loss) for loss in early[:oldest])
        assert [*early[oldest:], *late] == pytest.approx(losses, rel=1e-5)
    reference.check(found[0][2])


def changed_rates(rank: int, path: str) -> tuple[list[float], list[float], object]:
    return train_stashed(rank, "mlp", "SGD", path, changes_rate=True)


@pytest.mark.distributed
def test_an_update_uses_the_options_of_its_own_call(ranks: Ranks, tmp_path: Path) -> None:
    strategy = stashed("mlp", 1)
    path = tmp_path / "plan.json"
    plan_of(graph_of("mlp"), strategy).save(path)
    found = ranks.run(changed_rates, str(path))
    reference = Reference("mlp", "SGD", strategy)
    reference.train(0, STEPS, RATES)
    reference.check(found[0][2])


def interrupted(rank: int, path: str, exact: str, folder: str) -> tuple[str, object, object]:
    """Four steps, a checkpoint and three more; and the three from the checkpoint, exactly."""
    return interrupted_after(4, 7, path, exact, folder)


@pytest.mark.distributed
def test_a_checkpoint_holds_weights_that_any_plan_goes_on_from(
    ranks: Ranks, tmp_path: Path
) -> None:
    strategy = stashed("mlp", 1, optimizer="AdamW", num_micro=2)
    paths = [str(tmp_path / name) for name in ("plan.json", "exact.json", "saved")]
    plan_of(graph_of("mlp", "AdamW"), strategy).save(Path(paths[0]))
    exact = replace(strategy, modes=())
    plan_of(graph_of("mlp", "AdamW"), exact).save(Path(paths[1]))
    refused, stashed_state, exact_state = ranks.run(interrupted, *paths)[0]
    assert "call settle() on every rank" in refused
    for follows, state in ((strategy, stashed_state), (None, exact_state)):
        reference = Reference("mlp", "AdamW", strategy)
        reference.train(0, 4)
        if follows is None:
            reference.staleness = dict.fromkeys(reference.staleness, 0)
        reference.train(4, 3)
        reference.check(state)


def batches_kept(rank: int, path: str) -> list[int]:
    """How many batches are still in memory after each of six calls, and in the end."""
    step = deploy(workload_of("mlp"), load_plan(path))
    batches: list[weakref.ref[torch.Tensor]] = []
    kept = []

    def count() -> None:
        kept.append(sum(each() is not None for each in batches))

    for number in range(6):
        batch = batch_of("mlp", number)
        batches.append(weakref.ref(batch[0]))
        step(batch)
        del batch
        count()
    step.settle()
    count()
    step.close()
    return kept


@pytest.mark.distributed
def test_a_rank_lets_go_of_batches_that_have_ended(ranks: Ranks, tmp_path: Path) -> None:
    """The last stage keeps the newest one, those before it one and two more."""
    path = tmp_path / "plan.json"
    plan_of(graph_of("mlp"), stashed("mlp", 1)).save(path)
    assert ranks.run(batches_kept, str(path)) == [
        [1, 2, 3, 3, 3, 3, 0],
        [1, 2, 2, 2, 2, 2, 0],
        [1, 1, 1, 1, 1, 1, 0],
    ]


def lanes(rank: int, path: str) -> list[tuple[bool, bool]]:
    """Of everything sent: whether it goes to a later stage, and whether it has its own group."""
    found = set()
    send = Communicator._start_send

    def recorded(
        self: Communicator, tensor: torch.Tensor, dst: int, group: object = None, tag: int = 0
    ) -> object:
        found.add((dst > self.rank, group is not None))
        return send(self, tensor, dst, group, tag)  # type: ignore[arg-type]

    with patch.object(Communicator, "_start_send", recorded):
        step = deploy(workload_of("mlp"), load_plan(path))
        for number in range(3):
            step(batch_of("mlp", number))
        step.settle()
        step.close()
    return sorted(found)


@pytest.mark.distributed
def test_gradients_go_back_over_connections_of_their_own(ranks: Ranks, tmp_path: Path) -> None:
    """So that they do not hold up the word that a rank is ready for inputs."""
    path = tmp_path / "plan.json"
    plan_of(graph_of("mlp"), stashed("mlp", 1)).save(path)
    inputs, gradients = (True, False), (False, True)
    assert ranks.run(lanes, str(path)) == [[inputs], [gradients, inputs], [gradients]]


def refusals(rank: int, path: str) -> list[str]:
    """What a plan with a stash does not do, in words."""
    said = []
    workload, plan = workload_of("mlp"), load_plan(path)
    try:
        deploy(workload, plan, max_grad_norm=1.0)
    except StrategyError as error:
        said.append(str(error))
    step = deploy(workload, plan)
    try:
        step(tuple(each[:4] for each in batch_of("mlp", 0)))
    except StrategyError as error:
        said.append(str(error))
    step.close()
    return said


@pytest.mark.distributed
def test_what_needs_all_stages_in_one_step_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan_of(graph_of("mlp"), stashed("mlp", 1)).save(path)
    for clipped, smaller in ranks.run(refusals, str(path)):
        assert "max_grad_norm is a norm over one gradient" in clipped
        assert "every batch has the shapes that were planned" in smaller


@pytest.mark.parametrize(
    ("name", "boundary_steps", "stages", "num_micro"),
    [
        ("gpt", 1, CHAIN, 1),
        ("gpt", 3, CHAIN, 4),
        ("residual", 2, REPLICAS, 2),
        ("normalised", 0, CHAIN, 1),
    ],
)
def test_what_runs_is_rehearsed(
    name: str, boundary_steps: int, stages: tuple[Decision, ...], num_micro: int
) -> None:
    assert rehearsed(name, stashed(name, boundary_steps, stages, num_micro=num_micro)) == ""


def test_a_planned_pipeline_is_rehearsed_and_chosen() -> None:
    """As the plan has it, with the sends that a rank would wait for in an exact plan."""
    captured = capture_step(workload_of("gpt"))
    plan = make_plan(
        captured.graph,
        cluster(),
        methods=("model_parallel",),
        budget="40e",
        rehearse=rehearsal_of(captured),
        asynchronous=StashedPipelines(WeightStash(boundary_steps=1), num_micro=2),
    )
    assert plan.rows[1].is_rehearsed
    assert plan.method == "stash"
    assert plan.strategy.num_micro_batches == 2


def test_values_that_flow_against_the_stages_are_refused() -> None:
    """The last group on the first stage's device: its input comes from a later stage."""
    strategy = stashed("mlp", 1)
    back = replace(strategy, decisions=(*strategy.decisions[:-1], CHAIN[0]))
    said = rehearsed("mlp", back)
    assert "exchange a value of the forward pass, which with a stash goes from a stage to" in said


def rehearsed(name: str, strategy: Strategy) -> str:
    captured = capture_step(workload_of(name))
    program = lower(captured.graph, cluster(), strategy, num_steps=1)
    return rehearse(captured, strategy, program, range(program.num_tasks))


def recorded(rank: int, path: str) -> object:
    step = deploy(workload_of("mlp"), load_plan(path))
    step(batch_of("mlp", 0))
    found = step.record(batch_of("mlp", 1))
    step.close()
    return found


@pytest.mark.distributed
def test_a_recorded_step_has_one_micro_batch_after_another_as_the_timeline(
    ranks: Ranks, tmp_path: Path
) -> None:
    strategy = stashed("mlp", 2, num_micro=2)
    path = tmp_path / "plan.json"
    plan_of(graph_of("mlp"), strategy).save(path)
    loss, start, finish = ranks.run(recorded, str(path))[0]
    program = lower(graph_of("mlp"), cluster(), strategy, num_steps=1)
    first = (program.kind == TaskKind.COMPUTE) & (program.device == 0)
    ends = finish[first & (program.micro == 0)].max()
    assert ends <= start[first & (program.micro == 1)].min()
    reference = Reference("mlp", "SGD", strategy)
    reference.train(0, 1)  # ends before
    assert float(loss) == pytest.approx(reference.train(1, 1)[0], rel=1e-5)
