"""What the step writes and reads, conjugates, float8, bags, spectra, experts: rules and stages."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from heterog.graph.batch_plan import batch_plan, micro_batches_refused, reads_across_samples
from heterog.graph.capture import capture, capture_step
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.graph.workload import Workload
from heterog.lowering import lower
from heterog.runtime.deploy import deploy
from heterog.runtime.measure.rehearsal import rehearse
from heterog.search.plan import load_plan
from heterog.strategy.layer_shardings import layer_shardings
from heterog.strategy.strategy import Decision, Strategy, Sync, scope_fault
from tests.graph.test_grouped_rows import Experts, products_one_by_one
from tests.runtime.cases import BATCH, captured_once
from tests.runtime.ranks import PARENT, Ranks
from tests.runtime.strategies import ALL, SYNCS, plan_of, strategy_of
from tests.strategy.merging import merge_rules

STEPS = 3


class WithTarget(nn.Module):
    """A target network that follows the trained one, in the forward pass, and buffers replaced."""

    count: Tensor
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4))
        self.target = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4))
        self.target.requires_grad_(False)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        factor, self.count = 1 + self.count, self.count + 1
        last = self.net[2]
        assert isinstance(last, nn.Linear)
        self.average = 0.9 * self.average + 0.1 * factor * last.weight.detach().sum(1)
        with torch.no_grad():
            for own, other in zip(self.net.parameters(), self.target.parameters(), strict=True):
                other.lerp_(own, 0.1)
        out: Tensor = self.net(x) * factor + self.target(x).detach() - self.average
        return out


class Copied(nn.Module):
    """Targets that are deep copies, which follow by ``.data`` in the ways of many programs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4))
        self.targets = nn.ModuleList(copy.deepcopy(self.net) for _ in range(2))
        self.targets.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        first, second = (list(each.parameters()) for each in self.targets)
        for own, one, two in zip(self.net.parameters(), first, second, strict=True):
            one.data.mul_(0.9).add_(own.data, alpha=0.1)
            two.data.copy_(0.2 * own.data + 0.8 * two.data)
        out: Tensor = self.net(x) - 0.1 * sum(each(x) for each in self.targets)
        return out


class Conjugates(nn.Module):
    """Weights that are read as conjugates, and gradients that are made as such."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 12, dtype=torch.complex128)
        self.weight = nn.Parameter(torch.randn(12, 12, dtype=torch.complex128) / 4)
        self.scale = nn.Parameter(torch.randn(12, dtype=torch.complex128))
        self.last = nn.Linear(12, 4, dtype=torch.complex128)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(torch.complex(x, x.flip(1)).conj()) @ self.weight.mH
        hidden = hidden * self.scale.conj()
        mixed = torch.complex(torch.tanh(hidden.real), torch.tanh(hidden.conj().imag))
        out: Tensor = self.last(mixed).conj()
        return out.abs()


class Float8(nn.Module):
    """A frozen weight, activations and a trained weight in eight bits, and a table in int16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, 4)
        fixed = torch.randn(12, 12).to(torch.float8_e4m3fn)
        self.fixed = nn.Parameter(fixed, requires_grad=False)
        self.register_buffer("table", torch.arange(12, dtype=torch.int16))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        rounded = hidden.relu().to(torch.float8_e4m3fn).to(x.dtype)
        hidden = rounded @ self.fixed.to(x.dtype) + hidden * self.table
        weight = self.last.weight.to(torch.float8_e5m2).to(x.dtype)
        return nn.functional.linear(hidden, weight, self.last.bias) / 50


class Masked(nn.Module):
    """Trained weights of which the forward pass makes some zero, as masked convolutions do."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, 4)
        self.register_buffer("mask", torch.ones(12, 8).tril())

    def forward(self, x: Tensor) -> Tensor:
        self.first.weight.data *= self.mask
        out: Tensor = self.last(self.first(x).relu())
        return out


class Narrow(nn.Module):
    """Layers without features between others, as a small adaptive softmax has for rare words."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 12)
        self.none, self.back = nn.Linear(12, 0), nn.Linear(0, 4)
        self.last = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        out: Tensor = self.last(hidden) + self.back(self.none(hidden))
        return out


class Turned(nn.Module):
    """Weights that run through memory column by column, and channels last, and a buffer."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.linalg.qr(torch.randn(8, 8))[0])
        self.layer = nn.Conv2d(2, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.register_buffer("table", torch.randn(4, 8).t())

    def forward(self, x: Tensor) -> Tensor:
        turned = (x @ self.turn).view(-1, 2, 2, 2)
        bent = torch.linalg.slogdet(self.turn)[1]
        out: Tensor = self.layer(turned).flatten(1) + x @ self.table * bent
        return out + self.turn.t().flatten().view(2, 32).sum()


class Counted(nn.Module):
    """A counter that is read before it is stepped, and after."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu() * torch.cos(self.count)
        self.count += 1
        out: Tensor = self.last(hidden) * self.count
        return out


class Bags(nn.Module):
    """Sums, means and maxima of rows of tables, in bags of one size: several a sample, weighed."""

    def __init__(self) -> None:
        super().__init__()
        self.history = nn.EmbeddingBag(30, 6, mode="sum")
        self.words = nn.EmbeddingBag(20, 6, mode="mean", padding_idx=0)
        self.best = nn.EmbeddingBag(10, 6, mode="max")
        self.last = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        numbers = (10 * x.abs()).long()
        weighed = self.history(numbers % 30, per_sample_weights=x.tanh() * self.last.bias.sum())
        words = self.words(numbers.view(-1, 4) % 20).view(-1, 2, 6).tanh().sum(1)
        out: Tensor = self.last(weighed + words + self.best(numbers[:, :3] % 10))
        return out


class Spectra(nn.Module):
    """A layer in the frequencies, distances to trained points, small linear systems."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, 4)
        self.filter = nn.Parameter(torch.randn(7, 2) / 4)
        self.points = nn.Parameter(torch.randn(12, 12))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        spectrum = torch.fft.rfft(hidden) * torch.view_as_complex(self.filter) * (1 + 2j)
        near = torch.cdist(torch.fft.irfft(spectrum, n=12), self.points)
        systems = torch.diag_embed(near) + hidden[:, :, None] * near[:, None, :] / 9
        solved = torch.linalg.solve(systems + 9 * torch.eye(12), hidden)
        out: Tensor = self.last(torch.lerp(solved, hidden, near.sigmoid()))
        out = out / torch.linalg.norm(hidden, dim=1, keepdim=True)
        return out


class WithStatistics(nn.Module):
    """Running statistics that the step reads before and after it updates them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, 4)
        self.norm = nn.BatchNorm1d(12)

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = self.norm.running_mean, self.norm.running_var
        assert mean is not None
        assert variance is not None
        before = mean.clone()
        hidden = self.norm(self.first(x)).relu()
        out: Tensor = self.last(hidden * variance.sqrt() + mean - before)
        return out + (mean - self.first.bias).square().sum()


def loss_of(out: Tensor | tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    value, more = out if isinstance(out, tuple) else (out, 0.0)
    return nn.functional.mse_loss(value, target) + more


class Mixed(nn.Module):
    """What a step makes of the batch alone: samples mixed with others, their order, counts.

    Beside the output comes a part of the loss.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        blend = 0.7 * x + 0.3 * x.flip(0)
        scale = (x[:, 0] - x[:, 0].mean()) / x[:, 0].std()
        order = x[:, 1].argsort().argsort() / len(x)
        classes = x[:, :4].argmax(1)
        counts = torch.bincount(classes, minlength=4)
        log = self.last(self.first(blend).tanh()).log_softmax(1)
        known = nn.functional.nll_loss(log, classes, 1 / (counts + 1.0).to(x), reduction="sum")
        guessed = nn.functional.nll_loss(log, log.argmax(1), reduction="sum")
        return log * (scale + order)[:, None], (known + guessed) / len(x)


MODELS = {
    "mixed": Mixed,
    "counted": Counted,
    "statistics": WithStatistics,
    "turned": Turned,
    "target": WithTarget,
    "copied": Copied,
    "conjugates": Conjugates,
    "float8": Float8,
    "masked": Masked,
    "narrow": Narrow,
    "bags": Bags,
    "spectra": Spectra,
    "experts": Experts,
}


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, 8, generator=generator).double()
    return inputs, torch.rand(BATCH, 4, generator=generator).double()


def workload_of(name: str) -> Workload:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        model = MODELS[name]()
        if name == "float8":
            fixed = model.get_parameter("fixed").data
            model.double().get_parameter("fixed").data = fixed
        return model if name in ("conjugates", "float8") else model.double()

    return Workload(seeded, batch_of(0), loss_of, torch.optim.SGD, {"lr": 0.1}, name=name)


def strategies(graph: OpGraph) -> list[Strategy]:
    num_groups = group_ops(graph).num_groups
    ring = strategy_of(graph, [SYNCS["ring"]] * num_groups)
    stages = [
        Decision(devices=(2 - 2 * group // num_groups,), shares=(BATCH,))
        for group in range(num_groups)
    ]
    team = Decision(devices=ALL, shares=(4, 2, 2), sync=Sync.RING)
    places = [rules for places in layer_shardings(graph) for rules in places]
    ruled = replace(strategy_of(graph, [team] * num_groups), op_rules=merge_rules(*places))
    halves = () if micro_batches_refused(graph, 2) else ((BATCH // 2,) * 2, (0, 0), (0, 0))
    return [ring, strategy_of(graph, stages, micro_batches=halves), ruled]


def trained(rank: int, name: str, paths: list[str]) -> list[dict[str, Tensor] | None]:
    found = []
    with captured_once(("written", name)):
        for path in paths:
            step = deploy(workload_of(name), load_plan(path))
            for number in range(STEPS):
                step(batch_of(number))
            found.append(step.state_dict())
            step.close()
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("name", MODELS)
def test_they_train_as_on_one_device(ranks: Ranks, tmp_path: Path, name: str) -> None:
    graph = PARENT.capture(("written", name), workload_of, name)
    paths = []
    for number, strategy in enumerate(strategies(graph)):
        paths.append(str(tmp_path / f"{number}.json"))
        plan_of(graph, strategy).save(paths[-1])
    model = workload_of(name).make_model()
    stepper = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for number in range(STEPS):
        stepper.zero_grad()
        with products_one_by_one():
            torch.autograd.backward(workload_of(name).step_loss(model, batch_of(number)))
        stepper.step()
    for found in ranks.run(trained, name, paths)[0]:
        for key, value in model.state_dict().items():
            both = (each.to(torch.complex128) for each in (found[key], value))
            torch.testing.assert_close(*both, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["mixed", "bags", "spectra", "experts"])
def test_no_sample_is_gathered_and_plans_rehearse(name: str) -> None:
    captured = capture_step(workload_of(name))
    graph = captured.graph
    assert batch_plan(graph).unruled == ()
    assert list(reads_across_samples(graph)) == []
    for strategy in strategies(graph):
        plan = plan_of(graph, strategy)
        program = lower(graph, plan.cluster, strategy, num_steps=1)
        assert not rehearse(captured, strategy, program, plan.task_order)


def test_what_the_step_writes_to_stays_whole() -> None:
    """A slice of a gathered copy would be what the optimizer has, without the zeros."""
    graph = capture(workload_of("masked"))
    assert [graph.tensors[each].name for each in graph.written] == ["first.weight"]
    num_groups = group_ops(graph).num_groups
    for sync in (Sync.ZERO1, Sync.ZERO3):
        team = Decision(devices=ALL, shares=(4, 2, 2), sync=sync)
        sliced = strategy_of(graph, [team] * num_groups)
        assert "writes to 'first.weight', which has" in scope_fault(graph, sliced, graph.scope)
    assert not scope_fault(graph, strategies(graph)[0], graph.scope)
