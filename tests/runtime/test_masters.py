"""Master weights and sums of gradients in another dtype, against one device that has the same.

float32 models with masters and sums in float64: what ranks do differently is then rounding in the
last digits, as for any other step, while leaving the masters out would show.
"""

import os
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from heterog.errors import CaptureError
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph
from heterog.graph.workload import Workload
from heterog.lowering import lower
from heterog.lowering.program import TaskKind
from heterog.runtime.checkpoint import load_checkpoint, save_checkpoint
from heterog.runtime.deploy import DeployedStep, deploy
from heterog.search.plan import load_plan
from heterog.strategy.strategy import Decision, Strategy, Sync
from tests.runtime.any_strategy import any_strategy
from tests.runtime.cases import TinyGpt, batch_of, captured_once, mlp, token_loss
from tests.runtime.grids import grid_cluster
from tests.runtime.ranks import PARENT, Ranks
from tests.simulator.builders import plan_by_hand, strategy_of
from tests.thorough import one_in

SEED = int(os.environ.get("HETEROG_SEED", "0"))
CASES = int(os.environ.get("HETEROG_RANDOM_STRATEGIES", "1"))
STEPS = 4
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, float]]] = {
    "mlp": (torch.optim.Adam, {"lr": 0.01}),
    # Adam would make a step of the rounding of gradients that are zero, those of the keys' biases.
    "gpt": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Vectors between matrices in a group of their own: slices of ZeRO are cut at every one."""
    every = list(model.parameters())
    return [
        {"params": [p for p in every if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in every if p.dim() < 2], "lr": 0.02},
    ]


def workload_of(
    name: str, master: torch.dtype | None = torch.float64, reduce: torch.dtype | None = None
) -> Workload:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return mlp() if name == "mlp" else TinyGpt()

    loss = functional.mse_loss if name == "mlp" else token_loss
    optimizer, options = OPTIMIZERS[name]
    return Workload(
        seeded,
        batch_of(name, 0),
        loss,
        optimizer,
        options,
        name=name,
        master_dtype=master,
        reduce_dtype=reduce or master,
        parameter_groups=groups_of,
    )


def on_one_device(name: str, num_steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and the masters, by plain PyTorch."""
    workload = workload_of(name)
    model = workload.make_model()
    masters = {key: nn.Parameter(p.detach().double()) for key, p in model.named_parameters()}
    groups = [
        {"params": [p for p in masters.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in masters.values() if p.dim() < 2], "lr": 0.02},
    ]
    stepper = workload.optimizer(groups, **dict(workload.optimizer_options))
    losses = []
    for number in range(num_steps):
        model.zero_grad()
        loss = workload.step_loss(model, batch_of(name, number))
        torch.autograd.backward(loss)
        with torch.no_grad():
            for key, value in model.named_parameters():
                assert value.grad is not None
                masters[key].grad = value.grad.double()
            stepper.step()
            for key, value in model.named_parameters():
                value.copy_(masters[key])
        losses.append(float(loss.detach()))
    return losses, {key: value.detach() for key, value in masters.items()}


def deployed(name: str, path: str) -> DeployedStep:
    with captured_once(("masters", name)):
        return deploy(workload_of(name), load_plan(path))


def train_in_turn(
    rank: int, name: str, paths: list[str], folder: str
) -> tuple[list[float], dict[str, Tensor] | None]:
    """One step under each plan; what the next one goes on with is read from a checkpoint."""
    losses, weights = [], None
    for number, path in enumerate(paths):
        step = deployed(name, path)
        if number:
            load_checkpoint(step, folder)
        losses.append(float(step(batch_of(name, number))))
        save_checkpoint(step, folder)
        weights = step.state_dict()
        step.close()
    return losses, weights


@one_in(2)
@pytest.mark.distributed
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_trains_and_resumes_as_one_device_with_masters(
    four_ranks: Ranks, tmp_path: Path, name: str
) -> None:
    graph = PARENT.capture(("masters", name), workload_of, name)
    wanted, masters = on_one_device(name, STEPS)
    for seed in range(SEED, SEED + CASES):
        paths = []
        for number in range(STEPS):
            strategy = any_strategy(Random(f"{seed} {name} {number}"), graph, 4)
            paths.append(str(tmp_path / f"{seed}-{number}.json"))
            plan_by_hand(graph, grid_cluster(4), strategy).save(paths[-1])
        (losses, weights), *others = four_ranks.run(
            train_in_turn, name, paths, str(tmp_path / str(seed))
        )
        assert all(each == losses for each, _ in others)
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert weights is not None
        for key, master in masters.items():
            limit = 1e-4 * max(float(master.abs().max()), 1e-2)
            assert float((weights[key] - master).abs().max()) <= limit, key


class Scale(nn.Module):
    """A weight of 1 whose gradient is 1 for every batch of ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum(dim=1)


def summed(output: Tensor, target: Tensor) -> Tensor:
    del target
    return output.mean()


def scale(master: torch.dtype | None) -> Workload:
    ones = torch.ones(8, 4, dtype=torch.bfloat16)
    return Workload(
        Scale, (ones, torch.zeros(8)), summed, torch.optim.SGD, {"lr": 1e-3}, master_dtype=master
    )


def weight_after(rank: int, master: torch.dtype | None, path: str, num_steps: int) -> list[float]:
    workload = scale(master)
    with captured_once(("scale", master)):
        step = deploy(workload, load_plan(path))
    for _ in range(num_steps):
        step(workload.make_batch())
    weights = step.state_dict()
    step.close()
    return [] if weights is None else weights["weight"].tolist()


@one_in(2)
@pytest.mark.distributed
@pytest.mark.parametrize("sync", [Sync.RING, Sync.ZERO1, Sync.ZERO2, Sync.ZERO3])
def test_updates_too_small_for_bfloat16_add_up(
    four_ranks: Ranks, tmp_path: Path, sync: Sync
) -> None:
    """1 - 8/1000 is 0.992; numbers of bfloat16 below 1 are 1/256 apart, so 1 - 1/1000 is 1."""
    for master, expected in ((None, 1.0), (torch.float32, 0.9921875)):
        graph = capture(scale(master))
        decision = Decision(devices=(0, 1, 2, 3), shares=(4, 2, 1, 1), sync=sync)
        strategy = strategy_of(graph, grid_cluster(4), decision)
        plan_by_hand(graph, grid_cluster(4), strategy).save(tmp_path / "plan.json")
        first, *_ = four_ranks.run(weight_after, master, str(tmp_path / "plan.json"), 8)
        assert first == [expected] * 4


NARROW_STEPS = 2
"""Under each of two plans."""


def narrow(state: torch.dtype | None = torch.bfloat16) -> Workload:
    """A model in double precision: rounding of the state is all there is to see."""

    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).double()

    torch.manual_seed(1)
    batch = (torch.randn(8, 6).double(), torch.randn(8, 4).double())
    adam = {"lr": 1e-2}
    return Workload(seeded, batch, functional.mse_loss, torch.optim.Adam, adam, state_dtype=state)


def with_rounded_moments(state: torch.dtype) -> dict[str, Tensor]:
    """The weights by plain PyTorch, the moments rounded by hand after each step."""
    workload = narrow()
    model, batch = workload.make_model(), workload.make_batch()
    stepper = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(2 * NARROW_STEPS):
        stepper.zero_grad()
        torch.autograd.backward(workload.step_loss(model, batch))
        stepper.step()
        for moments in stepper.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                moments[key] = moments[key].to(state).double()
    return {key: value.detach() for key, value in model.named_parameters()}


def train_with_narrow_state(
    rank: int, paths: list[str], folder: str
) -> tuple[dict[str, Tensor] | None, set[str], int]:
    """Weights after steps under each plan, and dtypes and bytes of this rank's state."""
    weights, dtypes, size = None, set[str](), 0
    for number, path in enumerate(paths):
        with captured_once("narrow"):
            step = deploy(narrow(), load_plan(path))
        if number:
            load_checkpoint(step, folder)
        for _ in range(NARROW_STEPS):
            step(narrow().make_batch())
        save_checkpoint(step, folder)
        weights = step.state_dict()
        moments = [
            value
            for state in step.optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor) and value.dim()
        ]
        dtypes |= {str(value.dtype) for value in moments}
        size = sum(value.nbytes for value in moments)
        step.close()
    return weights, dtypes, size


@pytest.mark.distributed
def test_state_is_kept_in_fewer_digits(four_ranks: Ranks, tmp_path: Path) -> None:
    """As on one device, whole and then in slices, resumed from a checkpoint between."""
    graph = PARENT.capture("narrow", narrow)
    whole = capture(narrow(state=None))
    assert (whole.optimizer_state_ratio, graph.optimizer_state_ratio) == (2.0, 0.5)
    paths, kept = [], 0.0
    for sync in (Sync.RING, Sync.ZERO2):
        decision = Decision(devices=(0, 1, 2, 3), shares=(4, 2, 1, 1), sync=sync)
        strategies = [strategy_of(each, grid_cluster(4), decision) for each in (graph, whole)]
        paths.append(str(tmp_path / f"{sync.name}.json"))
        plan_by_hand(graph, grid_cluster(4), strategies[0]).save(paths[-1])
        narrower, wider = (
            lower(each, grid_cluster(4), strategy).resident_bytes[0]
            for each, strategy in zip((graph, whole), strategies, strict=True)
        )
        kept = (wider - narrower) / 3  # two bytes of eight
    found = four_ranks.run(train_with_narrow_state, paths, str(tmp_path / "saved"))
    wanted, unrounded = with_rounded_moments(torch.bfloat16), with_rounded_moments(torch.float64)
    for weights, dtypes, size in found:
        assert dtypes == {"torch.bfloat16"}
        assert size == pytest.approx(kept, abs=16)  # slices of whole elements
        for key, value in (weights or {}).items():
            assert float((value - wanted[key]).abs().max()) <= 1e-9, key
            assert float((value - unrounded[key]).abs().max()) > 1e-5, key


def test_state_with_more_digits_than_what_is_stepped_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"holds less; give master_dtype=torch.float32 as well"):
        capture(replace(scale(None), optimizer=torch.optim.Adam, state_dtype=torch.float32))
    both = replace(scale(torch.float32), optimizer=torch.optim.Adam, state_dtype=torch.bfloat16)
    graph = capture(both)
    assert graph.optimizer_state_ratio == 4.0  # 4 + 2 * 2 bytes, for 2 of the parameter
    assert {graph.stepped_dtype(each) for each in graph.parameters} == {"float32"}


class TwoDtypes(nn.Module):
    """Layers in bfloat16, the normalisation between them in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 16).bfloat16()
        self.norm = nn.LayerNorm(16)
        self.second = nn.Linear(16, 4).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x.bfloat16()).float())
        out: Tensor = self.second(hidden.bfloat16())
        return out.float()


def two_dtypes() -> Workload:
    return Workload(
        TwoDtypes, batch_of("mlp", 0), functional.mse_loss, torch.optim.Adam, {"lr": 1e-3}
    )


def losses_of_two_dtypes(rank: int, path: str) -> list[float]:
    with captured_once("two dtypes"):
        step = deploy(two_dtypes(), load_plan(path))
    losses = [float(step(batch_of("mlp", number))) for number in range(STEPS)]
    step.close()
    return losses


@pytest.mark.distributed
def test_parameters_of_two_dtypes_are_in_no_bucket_together(
    four_ranks: Ranks, tmp_path: Path
) -> None:
    graph, found = PARENT.capture("two dtypes", two_dtypes), {}
    for sync in (Sync.RING, Sync.ZERO1, Sync.ZERO2, Sync.ZERO3):
        decision = Decision(devices=(0, 1, 2, 3), shares=(4, 2, 1, 1), sync=sync)
        strategy = strategy_of(graph, grid_cluster(4), decision, bucket_bytes=1 << 20)
        program = lower(graph, grid_cluster(4), strategy)
        for bucket in set(program.bucket.tolist()):
            rows = [row for row, own in enumerate(program.bucket.tolist()) if own == bucket]
            assert len({graph.tensors[graph.updates[row][1]].dtype for row in rows}) == 1
        plan_by_hand(graph, grid_cluster(4), strategy).save(tmp_path / "plan.json")
        found[sync] = four_ranks.run(losses_of_two_dtypes, str(tmp_path / "plan.json"))[0]
    model = TwoDtypes()
    stepper = torch.optim.Adam(model.parameters(), lr=1e-3)
    wanted = []
    for number in range(STEPS):
        stepper.zero_grad()
        loss = two_dtypes().step_loss(model, batch_of("mlp", number))
        torch.autograd.backward(loss)
        stepper.step()
        wanted.append(float(loss.detach()))
    # Sums are rounded in other places, by half a step of bfloat16 each.
    assert all(losses == pytest.approx(wanted, rel=2.0**-7) for losses in found.values())


def bfloat16_gpt(master: torch.dtype | None, reduce: torch.dtype | None) -> OpGraph:
    def model() -> nn.Module:
        return TinyGpt().bfloat16()

    return capture(
        Workload(
            model,
            batch_of("gpt", 0),
            token_loss,
            torch.optim.Adam,
            master_dtype=master,
            reduce_dtype=reduce,
        )
    )


def moved(graph: OpGraph, strategy: Strategy) -> dict[TaskKind, float]:
    """Bytes of each kind of task."""
    program = lower(graph, grid_cluster(4), strategy)
    found: dict[TaskKind, float] = {}
    for kind, size in zip(program.kind.tolist(), program.num_bytes.tolist(), strict=True):
        found[TaskKind(kind)] = found.get(TaskKind(kind), 0.0) + size
    return found


def test_memory_and_traffic_follow() -> None:
    plain, full = bfloat16_gpt(None, None), bfloat16_gpt(torch.float32, torch.float32)
    # Adam's two moments; with masters of 4 bytes for parameters of 2, three times 2.
    assert (plain.optimizer_state_ratio, full.optimizer_state_ratio) == (2.0, 6.0)
    everyone = Decision(devices=(0, 1, 2, 3), shares=(2, 2, 2, 2), sync=Sync.ZERO1)
    by_kind = [
        moved(graph, strategy_of(graph, grid_cluster(4), everyone)) for graph in (plain, full)
    ]
    before, after = by_kind
    assert after[TaskKind.REDUCE_SCATTER] == 2.0 * before[TaskKind.REDUCE_SCATTER]
    assert after[TaskKind.GATHER_PARAMETERS] == before[TaskKind.GATHER_PARAMETERS]


def test_a_dtype_that_cannot_be_added_in_is_refused() -> None:
    for changes in (
        {"master_dtype": torch.int8},
        {"reduce_dtype": "float32"},
        {"state_dtype": torch.int64},
    ):
        with pytest.raises(CaptureError, match="give a floating point dtype"):
            Workload(nn.Linear(2, 2), (torch.ones(2, 2),), None, torch.optim.SGD, **changes)
