"""Blocks with losses of their own: gradients, what crosses a boundary, and what is refused."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

import heterog
from heterog.errors import HeterogError
from heterog.graph.capture import capture
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph, Phase
from heterog.graph.workload import Workload
from heterog.local_losses import LocalBlocks
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.division import split_evenly
from heterog.strategy.strategy import Decision
from tests.simulator.builders import cluster_of, strategy_of

WIDTH, BLOCKS = 16, 4


def net(width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(BLOCKS))
    )


def blocks_of(model: nn.Module, width: int = WIDTH) -> LocalBlocks:
    names = [str(block) for block in range(BLOCKS - 1)]
    return heterog.local_blocks(
        model, names, head=lambda name: nn.Linear(width, width), loss=functional.mse_loss
    )


def batch(width: int = WIDTH, samples: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(samples, width, generator=generator),
        torch.randn(samples, width, generator=generator),
    )


def gradients(loss: Tensor, module: nn.Module) -> dict[str, Tensor]:
    named = dict(module.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: each for name, each in zip(named, found, strict=True) if each is not None}


def test_each_block_follows_its_own_loss_alone() -> None:
    model, (x, y) = net(), batch()
    blocks = blocks_of(model)
    made = gradients(blocks(x, y), blocks)
    for number in range(BLOCKS):
        inputs = x
        for before in range(number):
            inputs = model[before](inputs).detach()
        output = model[number](inputs)
        if number < BLOCKS - 1:
            output = blocks.heads[str(number)](output)
        own = gradients(functional.mse_loss(output, y), model[number])
        for name, gradient in own.items():
            torch.testing.assert_close(made[f"model.{number}.{name}"], gradient)


def test_without_boundaries_it_is_the_model() -> None:
    model, (x, y) = net(), batch()
    whole = heterog.local_blocks(model, [], head=nn.Identity, loss=functional.mse_loss)
    loss = functional.mse_loss(model(x), y)
    assert torch.equal(whole(x, y), loss)
    plain = gradients(loss, model)
    for name, gradient in gradients(whole(x, y), whole).items():
        assert torch.equal(gradient, plain[name.removeprefix("model.")])


def test_the_model_itself_stays_as_it_was() -> None:
    model, (x, y) = net(), batch()
    before = gradients(functional.mse_loss(model(x), y), model)
    blocks_of(model)(x, y)
    for name, gradient in gradients(functional.mse_loss(model(x), y), model).items():
        assert torch.equal(gradient, before[name])


def captured(make: Callable[[], nn.Module], width: int, samples: int) -> OpGraph:
    loss = None if isinstance(make(), LocalBlocks) else functional.mse_loss
    return capture(Workload(make, lambda: batch(width, samples), loss, torch.optim.SGD))


def block_of(module: str) -> int:
    parts = module.split(".")
    return int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else -1


def test_no_gradient_crosses_a_boundary() -> None:
    graph = captured(lambda: blocks_of(net()), WIDTH, 12)
    for op in graph.ops:
        if op.phase is not Phase.BACKWARD:
            continue
        for tensor in op.inputs:
            maker = int(graph.producer[tensor])
            if maker >= 0 and min(block_of(op.module), block_of(graph.ops[maker].module)) >= 0:
                assert block_of(graph.ops[maker].module) <= block_of(op.module)
        if block_of(op.module) >= 0:
            assert depends_on_blocks(graph, op.inputs) <= set(range(block_of(op.module) + 1))


def depends_on_blocks(graph: OpGraph, tensors: tuple[int, ...]) -> set[int]:
    waiting, seen, found = list(tensors), set[int](), set[int]()
    while waiting:
        maker = int(graph.producer[waiting.pop()])
        if maker < 0 or maker in seen:
            continue
        seen.add(maker)
        waiting += graph.ops[maker].inputs
        found |= {block_of(graph.ops[maker].module)} - {-1}
    return found


@pytest.mark.parametrize("num_micro", [1, 4])
def test_stages_take_what_the_closed_form_says(num_micro: int) -> None:
    """Stage k ends its m micro-batches when those before it have made one forward pass each."""
    width, samples = 2048, 16 * 1024
    cluster = cluster_of(*[(1e6, ["T4"])] * BLOCKS)
    graph = captured(lambda: blocks_of(net(width), width), width, samples)
    evaluator = Evaluator(graph, cluster)
    grouping = group_ops(graph)
    group = grouping.group
    of_group = {int(group[i]): stage_of(op.module) for i, op in enumerate(graph.ops) if op.module}
    stages = [of_group[number] for number in range(grouping.num_groups)]
    decisions = [Decision(devices=(each,), shares=(samples,)) for each in stages]
    counts = split_evenly(samples, num_micro)
    strategy = strategy_of(graph, cluster, decisions[0], micro_batches=(counts,) * BLOCKS)
    strategy = replace(strategy, decisions=tuple(decisions))
    took = evaluator.evaluate(strategy, Order.RANK).step_time_s

    each = evaluator.cost_model.op_seconds(graph, cluster.device_types[0], samples // num_micro)
    work, before_head = np.zeros(BLOCKS), np.zeros(BLOCKS)
    for index, op in enumerate(graph.ops):
        if op.phase is Phase.UPDATE or group[index] < 0:
            continue
        work[stages[group[index]]] += each[index]
        if op.phase is Phase.FORWARD and op.module.startswith("model."):
            before_head[stages[group[index]]] += each[index]
    before = np.concatenate([[0.0], np.cumsum(before_head)[:-1]])
    expected = float((before + num_micro * work).max())
    assert took == pytest.approx(expected, rel=0.05)


def stage_of(module: str) -> int:
    """Blocks with their heads; the sum of losses is of the last one."""
    block = block_of(module)
    return BLOCKS - 1 if block < 0 else block


def test_language_models_with_their_own_loss() -> None:
    config = GPT2Config(n_embd=16, n_layer=3, n_head=2, vocab_size=32, n_positions=8)
    config.use_cache = False
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    model.train(False)

    def token_loss(scores: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    blocks = heterog.local_blocks(
        model,
        ["transformer.h.0", "transformer.h.1"],
        head=lambda name: nn.Linear(16, 32),
        loss=token_loss,
        returns_loss=True,
    )
    tokens = torch.randint(0, 32, (4, 8))
    loss = blocks(input_ids=tokens, labels=tokens)
    made = gradients(loss, blocks)
    own = gradients(model(input_ids=tokens, labels=tokens).loss, model)
    last = "transformer.h.2.mlp.c_fc.weight"
    torch.testing.assert_close(made[f"model.{last}"], own[last])
    first = "transformer.h.0.mlp.c_fc.weight"
    assert not torch.allclose(made[f"model.{first}"], own[first])


class Skipping(nn.Module):
    """What the first layer makes reaches the last one in two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        made = self.first(x)
        return self.last(self.middle(made) + made)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("boundaries", "words"),
    [
        (["middle"], "passes beside boundary 'middle'"),
        (["center"], "'center' is no submodule"),
        (["middle", "first"], r"reached as \['first', 'middle'\]"),
        (["middle", "middle"], "twice"),
    ],
)
def test_what_cannot_be_cut_is_told(boundaries: list[str], words: str) -> None:
    x, y = batch()
    with pytest.raises(HeterogError, match=words):
        heterog.local_blocks(
            Skipping(), boundaries, head=lambda name: nn.Identity(), loss=functional.mse_loss
        )(x, y)


def test_blocks_learn_nearly_as_well_as_the_whole() -> None:
    """Blobs in a plane, three blocks."""
    generator = torch.Generator().manual_seed(3)
    centres = 3.0 * torch.randn(6, 2, generator=generator)
    labels = torch.arange(600) % 6
    points = centres[labels] + 0.5 * torch.randn(600, 2, generator=generator)
    reached = []
    for boundaries in ([], ["0", "1"]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Sequential(nn.Linear(2, 32), nn.ReLU()),
            nn.Sequential(nn.Linear(32, 32), nn.ReLU()),
            nn.Linear(32, 6),
        )
        trained = heterog.local_blocks(
            model, boundaries, head=lambda name: nn.Linear(32, 6), loss=functional.cross_entropy
        )
        stepper = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
        for _ in range(60):
            stepper.zero_grad()
            trained(points, labels).backward()
            stepper.step()
        reached.append(float((model(points).argmax(1) == labels).float().mean()))
    assert reached[1] >= 0.9 * reached[0] > 0.8
