"""Dropout and noise on several ranks: their distribution, and runs that repeat."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from heterog.errors import StrategyError
from heterog.graph.axis_plan import axis_plan
from heterog.graph.capture import capture, capture_step
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.graph.workload import Workload
from heterog.runtime.deploy import deploy
from heterog.runtime.step.local_op import LocalOp
from heterog.runtime.step.special_ops import RandomStream
from heterog.search.plan import load_plan
from heterog.strategy.strategy import Decision
from tests.runtime.cases import (
    BATCH,
    TinyGpt,
    batch_of,
    captured_once,
    reference,
    token_loss,
)
from tests.runtime.ranks import PARENT, Ranks
from tests.runtime.strategies import ALL, plan_of, strategy_of
from tests.thorough import THOROUGH, one_in

WIDTH = 400
SHARES = Decision(devices=ALL, shares=(4, 3, 1))


class Masks(nn.Module):
    """The loss is the mean of masked ones: each gradient shows how often its column was kept."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(x * self.weight)
        return out


class Noise(nn.Module):
    """Adds the same noise to every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x + torch.randn(6))
        return out


class AttentionDropout(nn.Module):
    """Dropout on the weights of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


def sum_loss(output: Tensor, target: Tensor) -> Tensor:
    """Sample ``i`` counts ``target[i]`` times."""
    return (output * target).sum()


def masks(weights: Tensor) -> Workload:
    return Workload(Masks, (torch.ones(BATCH, WIDTH), weights), sum_loss, torch.optim.SGD,
                    {"lr": 1.0})  # fmt: skip


def noise() -> Workload:
    batch = (torch.zeros(BATCH, 6), torch.zeros(BATCH, 4))
    return Workload(Noise, batch, functional.mse_loss, torch.optim.SGD, {"lr": 0.1})


def attention() -> Workload:
    batch = (torch.ones(BATCH, 5, 8), torch.zeros(BATCH, 5, 8))
    return Workload(AttentionDropout, batch, functional.mse_loss, torch.optim.SGD, {"lr": 0.1})


def gpt(dropout: float = 0.3) -> Workload:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return TinyGpt(dropout)

    options = {"lr": 0.1, "momentum": 0.9}
    return Workload(seeded, batch_of("gpt", 0), token_loss, torch.optim.SGD, options)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "noise": noise,
    "attention": attention,
    "gpt": gpt,
}


def saved_plan(folder: Path, graph: OpGraph, decision: Decision = SHARES) -> str:
    strategy = strategy_of(graph, [decision] * group_ops(graph).num_groups)
    path = folder / "plan.json"
    plan_of(graph, strategy).save(path)
    return str(path)


def kept(rank: int, path: str, seed: int, steps: int) -> list[Tensor]:
    """The masks of the batch, sample by sample, read off the gradients of several steps.

    Sample ``i`` is weighted by ``2 ** i``: the sum tells which of them were kept.
    """
    weights = 2.0 ** torch.arange(BATCH).unsqueeze(1).expand(BATCH, WIDTH).contiguous()
    with captured_once("masks"):
        step = deploy(masks(weights), load_plan(path), seed=seed)
    found = []
    for _ in range(steps):
        weight = step.model.get_parameter("weight").detach()
        before = weight.clone()
        loss = step((torch.ones(BATCH, WIDTH), weights))
        assert torch.isfinite(loss)
        sums = ((before - weight) * 0.75).round().long()
        found.append(torch.stack([(sums >> sample) & 1 for sample in range(BATCH)]))
    return found


@pytest.mark.distributed
def test_masks_differ_by_sample_rank_and_step_and_repeat_with_the_seed(
    ranks: Ranks, tmp_path: Path
) -> None:
    path = saved_plan(tmp_path, capture(masks(torch.ones(BATCH, WIDTH))))
    first, second = ranks.run(kept, path, 7, 2)[0]
    again, _ = ranks.run(kept, path, 7, 2)[0]
    other, _ = ranks.run(kept, path, 8, 2)[0]
    assert torch.equal(first, again)
    samples = [*first, *second, *other]
    for number, mask in enumerate(samples):
        for earlier in samples[:number]:
            assert not torch.equal(mask, earlier)
    # 9600 draws: three standard deviations are 0.013.
    assert abs(torch.stack(samples).double().mean() - 0.75) < 0.02


@THOROUGH
@pytest.mark.distributed
def test_dropout_of_zero_is_no_dropout(ranks: Ranks, tmp_path: Path) -> None:
    graph = capture(gpt(0.0))
    assert not any("bernoulli" in op.kind for op in graph.ops)
    losses = ranks.run(losses_without_dropout, saved_plan(tmp_path, graph))
    assert losses[0] == pytest.approx(reference("gpt").losses, rel=1e-5)


def losses_without_dropout(rank: int, path: str) -> list[float]:
    with captured_once("gpt without dropout"):
        step = deploy(gpt(0.0), load_plan(path), seed=3)
    return [float(step(batch_of("gpt", number))) for number in range(3)]


def losses_of(rank: int, name: str, path: str, seed: int) -> list[float]:
    """Losses of two steps, and that the user's own generator is left alone."""
    workload = WORKLOADS[name]()
    state = torch.get_rng_state()
    with captured_once(("random", name)):
        step = deploy(workload, load_plan(path), seed=seed)
    torch.set_rng_state(state)
    batch = workload.make_batch()
    losses = [float(step(batch)) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), state)
    return losses


@one_in(3)
@pytest.mark.distributed
@pytest.mark.parametrize("name", WORKLOADS)
def test_random_models_train_and_repeat(ranks: Ranks, tmp_path: Path, name: str) -> None:
    path = saved_plan(tmp_path, PARENT.capture(("random", name), WORKLOADS[name]))
    one = ranks.run(losses_of, name, path, 1)
    assert torch.isfinite(torch.tensor(one)).all()
    assert ranks.run(losses_of, name, path, 1) == one
    assert ranks.run(losses_of, name, path, 2) != one


def gradient_of_noise(rank: int, path: str) -> Tensor:
    """Change of the linear map in one step from zero; every sample has the same input."""
    batch = (torch.zeros(BATCH, 6), torch.ones(BATCH, 4))
    with captured_once(("random", "noise")):
        step = deploy(noise(), load_plan(path), seed=5)
    weight = step.model.get_parameter("linear.weight")
    with torch.no_grad():
        for value in step.model.parameters():
            value.zero_()
    step(batch)
    return weight.detach().clone()


@pytest.mark.distributed
def test_noise_that_all_samples_share_is_the_same_on_every_rank(
    ranks: Ranks, tmp_path: Path
) -> None:
    """With equal samples the gradient is that of one sample, whoever has how many of them."""
    graph = PARENT.capture(("random", "noise"), noise)
    many = ranks.run(gradient_of_noise, saved_plan(tmp_path, graph))
    alone = Decision(devices=(0,), shares=(BATCH,))
    one = ranks.run(gradient_of_noise, saved_plan(tmp_path, graph, alone))[0]
    assert one.abs().max() > 0
    for found in many:
        torch.testing.assert_close(found, one)


def test_the_seed_of_an_op_depends_on_what_it_should() -> None:
    def draw(seed: int, rank: int, step: int, op: int, micro: int, shared: bool) -> float:
        stream = RandomStream(seed, torch.device("cpu"))
        with stream.drawing(step, op, micro, rank=None if shared else rank):
            return float(torch.rand(()))

    own = draw(0, 0, 0, 0, 0, False)
    changed = [(1, 0, 0, 0, 0), (0, 1, 0, 0, 0), (0, 0, 1, 0, 0), (0, 0, 0, 1, 0), (0, 0, 0, 0, 1)]
    assert own == draw(0, 0, 0, 0, 0, False)
    assert len({own, *(draw(*where, False) for where in changed)}) == 6
    assert draw(0, 0, 2, 3, 0, True) == draw(0, 1, 2, 3, 1, True) != draw(0, 0, 2, 3, 0, False)


class WholeNoise(nn.Module):
    """An op that draws and that no rule knows how to share out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out * torch.empty_like(out).random_()


def refuse(rank: int, path: str) -> str:
    batch = (torch.zeros(BATCH, 6), torch.zeros(BATCH, 4))
    workload = Workload(WholeNoise, batch, functional.mse_loss, torch.optim.SGD, {"lr": 0.1})
    try:
        deploy(workload, load_plan(path))
    except StrategyError as error:
        return str(error)
    return ""


@pytest.mark.distributed
def test_random_ops_without_a_rule_are_refused_by_name(ranks: Ranks, tmp_path: Path) -> None:
    batch = (torch.zeros(BATCH, 6), torch.zeros(BATCH, 4))
    workload = Workload(WholeNoise, batch, functional.mse_loss, torch.optim.SGD, {"lr": 0.1})
    text = ranks.run(refuse, saved_plan(tmp_path, capture(workload)))[0]
    assert "random" in text
    assert "Use torch.nn.Dropout instead" in text


def test_dropout_inside_fused_attention_is_refused() -> None:
    """A CPU computes such attention op by op; a GPU has a kernel for it."""
    captured = capture_step(gpt(0.0))
    (index, *_) = [i for i, op in enumerate(captured.graph.ops) if op.kind == "attention"]
    ops = list(captured.graph.ops)
    ops[index] = replace(ops[index], args={**ops[index].args, "dropout_p": 0.1})
    graph = replace(captured.graph, ops=tuple(ops))
    with pytest.raises(StrategyError, match=r"op 'attention' in module 'blocks.0' draws random"):
        LocalOp(graph, axis_plan(graph), index, captured.node_of_op[index], torch.device("cpu"))
