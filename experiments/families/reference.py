"""Plain PyTorch on one device: what every plan has to come out equal to."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from families.family import Batch, Family
from heterog.graph.capture import CapturedStep
from heterog.graph.op_graph import OpGraph, Phase
from heterog.graph.placement import Placement
from heterog.graph.sharding_rules import Special
from heterog.lowering import lower
from heterog.runtime.step.local_op import Extent, LocalOp
from heterog.runtime.step.placed import cut, join
from heterog.runtime.step.random_stream import RandomStream
from heterog.runtime.step.rank_program import RankProgram
from heterog.runtime.step.spans import Spans
from heterog.search.plan import Plan

STEPS = 5


class Trained(NamedTuple):
    """What came out of some steps.

    Attributes:
        losses: of the steps.
        weights: parameters and buffers at the end, by name.
    """

    losses: list[float]
    weights: dict[str, Tensor]


class Part(NamedTuple):
    """Samples that one device normalises together: first, number, and the device."""

    begin: int
    size: int
    device: int


def train_on_one_device(
    family: Family, captured: CapturedStep, plan: Plan, *, is_double: bool = False
) -> Trained:
    """The same steps without any of this project, but for what cannot be the same by itself.

    BatchNorm sees the local groups that the plan makes, with running statistics of their own on
    every device; random ops are given the numbers that the ranks draw.

    Args:
        family: of models.
        captured: its step.
        plan: that the ranks follow.
        is_double: in double precision, from the same weights.
    """
    program = lower(plan.graph, plan.cluster, plan.strategy, num_steps=1)
    part = RankProgram(captured.graph, plan.strategy, program, 0)
    workload = family.workload()
    model = workload.make_model()
    if is_double:
        model = model.double()
    trained: Any = [value for value in model.parameters() if value.requires_grad]
    if workload.parameter_groups is not None:
        trained = workload.parameter_groups(model)
    optimizer = workload.optimizer(trained, **dict(workload.optimizer_options))
    groups = local_groups(part)
    buffers = [{k: v.clone() for k, v in model.named_buffers()} for _ in range(3)]
    losses = []
    for step in range(STEPS):
        batch = family.batch(step)
        optimizer.zero_grad()
        draws = Draws(captured, part, step) if family.is_random else nullcontext()
        with draws:
            if not groups:
                loss = workload.step_loss(model, batch)
                torch.autograd.backward(loss)
                losses.append(float(loss.detach()))
            else:
                losses.append(_in_groups(family, model, batch, groups, buffers, captured.graph))
        optimizer.step()
    weights = {name: value.detach() for name, value in model.state_dict().items()}
    if groups:
        # Statistics come from the first device with samples, whichever that is for a module.
        own = buffers[groups[0].device]
        weights |= {name: value for name, value in own.items() if name in weights}
    return Trained(losses, weights)


def _in_groups(
    family: Family,
    model: nn.Module,
    batch: Batch,
    groups: Sequence[Part],
    buffers: Sequence[dict[str, Tensor]],
    graph: OpGraph,
) -> float:
    """Gradients of a mean loss whose samples are normalised group by group."""
    workload = family.workload()
    total = 0.0
    for begin, size, device in groups:

        def run(*args: Any, _device: int = device, **keywords: Any) -> Any:
            state = {**dict(model.named_parameters()), **buffers[_device]}
            return torch.func.functional_call(model, state, args, keywords)

        def own(value: Any, _begin: int = begin, _count: int = size) -> Any:
            whole = isinstance(value, Tensor) and value.dim() and len(value) == graph.batch_size
            return value[_begin : _begin + _count] if whole else value

        part: Batch = pytree.tree_map(own, batch)
        loss = workload.step_loss(run, part) * (size / graph.batch_size)
        torch.autograd.backward(loss)
        total += float(loss.detach())
    return total


def local_groups(part: RankProgram) -> list[Part]:
    """Samples that each BatchNorm takes its statistics over; empty where there is none.

    Raises:
        NotImplementedError: they are not the same for all of them, or devices have unlike parts
            of them in different layers, so that their running statistics saw unlike samples.
    """
    found: set[tuple[Part, ...]] = set()
    for index, op in enumerate(part.graph.ops):
        layout = part.spans_of_op(index)
        if "batch_norm" not in op.kind or op.phase != Phase.FORWARD or layout is None:
            continue
        if part.plan.specials[index] == Special.LOCAL_STATISTICS:
            found.add(tuple(_parts(part, layout)))
        elif op.args.get("training") is True:  # a rule splits its channels
            found.add((Part(0, part.graph.batch_size, layout.devices[0]),))
    # Who computes them does not matter, but for whose running statistics change.
    if len({_by_turn(parts) for parts in found}) > 1:
        raise NotImplementedError("layers with BatchNorm have unlike local groups")
    return list(min(found, default=()))


def _by_turn(parts: Sequence[Part]) -> tuple[Part, ...]:
    """The parts with devices numbered in the order in which they come."""
    turn: dict[int, int] = {}
    return tuple(each._replace(device=turn.setdefault(each.device, len(turn))) for each in parts)


def _parts(part: RankProgram, layout: Spans) -> Iterator[Part]:
    for micro in range(part.num_micro):
        for device in layout.devices:
            begin, count = layout.range(micro, device)
            if count:
                yield Part(begin + part.micro_begin[micro], count, device)


class Draws(TorchDispatchMode):
    """Gives the random ops of a step on one device what the ranks draw for their samples."""

    def __init__(self, captured: CapturedStep, part: RankProgram, step: int) -> None:
        super().__init__()
        self._part = part
        self._step = step
        self._graph = captured.graph
        self._nodes = captured.node_of_op
        random = (Special.OWN_RANDOM_STREAM, Special.SHARED_RANDOM_STREAM)
        self._left = [i for i, special in enumerate(part.plan.specials) if special in random]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace what a random op returns."""
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if not draws or "attention" in func._schema.name:  # which has no dropout here
            return func(*args, **(kwargs or {}))
        op = self._left.pop(0)
        drawn = self._draw(op, args[0])
        if func._schema.name.endswith("_"):
            return args[0].copy_(drawn[0])
        return drawn if len(drawn) > 1 else drawn[0]

    def _draw(self, op: int, like: Any) -> tuple[Tensor, ...]:
        """What all ranks draw for an op, put together."""
        part, special = self._part, self._part.plan.specials[op]
        local_op = LocalOp(self._graph, part.plan, op, self._nodes[op], torch.device("cpu"))
        inputs = [like] if local_op.call.inputs else []
        if special == Special.SHARED_RANDOM_STREAM:
            with RandomStream(0, torch.device("cpu")).drawing(self._step, op, 0, rank=None):
                return tuple(local_op(inputs, local_op.whole))
        layout = part.spans_of_op(op)
        assert layout is not None
        place: Placement = part.plan.needed[op][0]
        drawn = []
        for micro in range(part.num_micro):
            for device in layout.devices:
                begin, count = layout.range(micro, device)
                if not count:
                    continue
                first = begin + part.micro_begin[micro]
                whole = local_op.whole.units if layout.axis else local_op.whole.samples
                own = [cut(each, place, whole, first, count) for each in inputs]
                extent = Extent(layout.samples(micro, device)[1], count if layout.axis else 1)
                stream = RandomStream(0, torch.device("cpu"))
                with stream.drawing(self._step, op, micro, rank=device):
                    drawn.append(local_op(own, extent))
        return tuple(join(parts, place) for parts in zip(*drawn, strict=True))
