"""Runs a family: captures it, plans it, executes the plans on ranks, compares.

A family runs in a process of its own that has three ranks, so a family that hangs or dies does not
end the others. All processes are forks of this one, which has imported everything already.

The reference is plain PyTorch on one device: every plan must equal it.
"""

import itertools
import logging
import math
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple
from unittest import mock

import torch
from testbeds import results_of_ranks
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from families.family import BFLOAT16, Batch, Family
from families.strategies import NUM_RANKS, makers
from heterog.errors import HeterogError
from heterog.graph.capture import CapturedStep, capture_step
from heterog.graph.op_graph import OpGraph, Phase
from heterog.graph.placement import Placement
from heterog.graph.sharding_rules import Special
from heterog.lowering import lower
from heterog.runtime.deploy import deploy
from heterog.runtime.step.local_op import LocalOp, Share
from heterog.runtime.step.rank_program import RankProgram
from heterog.runtime.step.spans import Span, Spans, cut, nested
from heterog.runtime.step.special_ops import RandomStream
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
    """Train with plain PyTorch, except for two things that could not be equal otherwise.

    BatchNorm normalises the local groups of the plan, with running statistics of their own for
    every device; random ops get the numbers that the ranks draw.

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
    trained = [value for value in model.parameters() if value.requires_grad]
    optimizer = workload.optimizer(trained, **dict(workload.optimizer_options))
    groups = local_groups(part)
    buffers = [{k: v.clone() for k, v in model.named_buffers()} for _ in range(3)]
    losses = []
    for step in range(STEPS):
        batch = family.batch(step)
        optimizer.zero_grad()
        with Draws(captured, part, step) if family.is_random else nullcontext():
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
    """Compute gradients of a mean loss whose samples are normalised group by group."""
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
    """Samples of the statistics of each BatchNorm; empty without one.

    Raises:
        NotImplementedError: BatchNorms have different groups, or devices have different parts of
            the groups in different layers, so that running statistics saw different samples.
    """
    found: set[tuple[Part, ...]] = set()
    for index, op in enumerate(part.graph.ops):
        layout = part.spans_of_op[index]
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
    """Gives the random ops of a step on one device the numbers that the ranks draw."""

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
        drawn = self._draw(self._left.pop(0), args)
        if func._schema.name.endswith("_"):
            return args[0].copy_(drawn[0])
        returned = len(func._schema.returns)
        written = [
            each
            for each, known in zip(args, func._schema.arguments, strict=False)
            if known.alias_info is not None and known.alias_info.is_write
        ]
        for each, value in zip(written, drawn[returned:], strict=True):
            each.copy_(value)  # the op of the graph returns it
        return drawn[:returned] if returned > 1 else drawn[0]

    def _draw(self, op: int, args: Any) -> tuple[Tensor, ...]:
        """What all ranks draw for an op with these arguments, put together."""
        part = self._part
        local_op = LocalOp(self._graph, part.plan, op, self._nodes[op], torch.device("cpu"))
        given = [each for each in args if isinstance(each, Tensor)]
        inputs = given[: len(local_op.call.inputs)]
        layout, stream = part.spans_of_op[op], RandomStream(0, torch.device("cpu"))
        if layout is None or not any(local_op.draws_own):
            with stream.drawing(self._step, op, 0, rank=None):
                return tuple(local_op(inputs, local_op.whole))
        batch, axis = local_op.along_batch, local_op.along_axis
        shapes = [(each.shape, getattr(torch, each.dtype)) for each in local_op.call.outputs]
        drawn = tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in shapes)
        places = [torch.arange(each.numel()).reshape(each.shape) for each in drawn]
        for micro, device in itertools.product(range(part.num_micro), layout.devices):
            begin, samples = layout.samples(micro, device)
            units = layout.range(micro, device) if layout.axis else (0, 1)
            if not samples or not units[1]:
                continue
            local = partial(
                _cut_twice,
                whole=local_op.whole,
                samples=(begin + part.micro_begin[micro], samples),
                units=units,
            )
            own = list(map(local, inputs, batch.inputs, axis.inputs))
            rank = self._rank_of(local_op.draws_own[1], layout, micro, device)
            with stream.drawing(self._step, op, micro, rank=rank):
                made = local_op(own, Share(samples, units[1], units[0]))
            written = map(local, places, batch.outputs, axis.outputs)
            for whole, place, piece in zip(drawn, written, made, strict=True):
                whole.view(-1)[place.reshape(-1)] = piece.reshape(-1)
        return drawn

    def _rank_of(self, is_of_axis: bool, layout: Spans, micro: int, device: int) -> int | None:
        """The rank whose numbers a device draws, as the interpreter says."""
        if is_of_axis or not layout.axis:
            return device
        if layout.num_teams == 1 and self._part.num_micro == 1:
            return None
        return layout.speaker(micro, device)


def _cut_twice(
    tensor: Tensor, batch: Placement, axis: Placement, *, whole: Share, samples: Span, units: Span
) -> Tensor:
    """The part of a tensor that belongs to some samples, and to some units of an axis."""
    if batch.kind == "S":
        tensor = cut(tensor, batch, whole.samples, *samples)
        axis = nested(axis, batch, whole.samples, samples[1])
    return cut(tensor, axis, whole.units, *units) if axis.kind == "S" else tensor


_FORK = multiprocessing.get_context("fork")
_END_S = 20
"""Seconds within which ranks may end by themselves."""
_STEP_TIMEOUT_S = 60


class Row(NamedTuple):
    """What became of a family.

    Attributes:
        family: its name.
        strategies: error of each strategy that was executed, relative to how far weights moved.
        equal: whether at least three strategies were executed or refused and all executed ones
            were equal, or the family was refused with the expected words.
        tolerance: largest error that counts as equal.
        refused: what was refused and why: by strategy, or under ``capture``.
        failed: what went wrong otherwise, the same way.
    """

    family: str
    strategies: dict[str, float]
    equal: bool
    tolerance: float
    refused: dict[str, str]
    failed: dict[str, str]


def run_family(family: Family, limit_s: float, *, searches: bool = True) -> Row:
    """Run a family in a process of its own.

    Args:
        family: of models.
        limit_s: seconds that it may take from one answer to the next.
        searches: whether a plan is searched for, too.
    """
    here, there = _FORK.Pipe()
    process = _FORK.Process(target=_family_process, args=(family, there, searches))
    process.start()
    there.close()
    told: dict[str, Any] = {"strategies": {}, "refused": {}, "failed": {}, "noise": {}}
    try:
        while here.poll(limit_s):
            kind, key, value = here.recv()
            if kind == "done":
                break
            told[kind][key] = value
        else:
            told["failed"]["process"] = f"no answer within {limit_s:g} s"
    except EOFError:
        told["failed"]["process"] = "its process died"
    _end(process)
    worst = max(told["strategies"].values(), default=0.0)
    # One device in bf16 has rounded as well.
    tolerance = max(family.tolerance, 3 * max(told["noise"].values(), default=0.0))
    num_asked = len(told["strategies"]) + len(told["refused"])
    equal = num_asked >= 3 and bool(told["strategies"]) and worst <= tolerance
    equal = equal and not told["failed"]
    if family.refused:
        equal = family.refused in told["refused"].get("capture", "")
    return Row(family.name, told["strategies"], equal, tolerance, told["refused"], told["failed"])


def _end(process: BaseProcess) -> None:
    """End a family's process and its ranks, which are in its process group."""
    process.join(_END_S if process.exitcode is None else 0)
    with suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()


def _family_process(family: Family, pipe: Connection, searches: bool) -> None:
    os.setpgid(0, 0)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    try:
        _run(family, searches, lambda kind, key, value: pipe.send((kind, key, value)))
    except HeterogError as error:
        pipe.send(("refused", "capture", str(error)))
    except Exception:
        pipe.send(("failed", "capture", traceback.format_exc()))
    pipe.send(("done", "", ""))
    pipe.close()
    os._exit(0)


def _run(family: Family, searches: bool, tell: Callable[[str, str, Any], None]) -> None:
    captured = capture_step(family.workload())
    for name, make in makers(captured.graph, searches=searches):
        try:
            plan = make()
            wanted = train_on_one_device(family, captured, plan)
            if family.tolerance == BFLOAT16 and _is_in_bf16(captured.graph):
                exact = train_on_one_device(family, captured, plan, is_double=True)
                tell("noise", name, error_of(family, [exact], wanted))
            results = results_of_ranks(
                _train, NUM_RANKS, family, captured, plan, timeout_s=_STEP_TIMEOUT_S
            )
            tell("strategies", name, error_of(family, results, wanted))
        except HeterogError as error:
            tell("refused", name, str(error))
        except NotImplementedError:
            continue  # nothing to compare with
        except Exception:
            tell("failed", name, traceback.format_exc())


def _is_in_bf16(graph: OpGraph) -> bool:
    """Whether weights are in bf16; autocast keeps them, and cannot be asked for doubles."""
    return any(graph.tensors[parameter].dtype == "bfloat16" for parameter in graph.parameters)


def error_of(family: Family, results: list[Trained], wanted: Trained) -> float:
    """Largest error of a loss or of the weights of a tensor.

    The error of weights is relative to the largest of three: their largest movement, a thousandth
    of any weight's movement (gradients that are zero in theory are rounding errors in practice),
    and the rounding of the largest weight, which is larger in bf16. The error of a loss is
    relative to the loss.

    In bf16 norms of tensors are compared instead of their largest elements, which are extremes of
    thousands of roundings: on one device, another order of the sums in its linear layers moves an
    embedding of ``llama_bf16`` by 0.95 of its movement in five steps, but its norm by 0.36.
    """
    size = _length if family.tolerance == BFLOAT16 else _largest
    start = family.workload().make_model().state_dict()
    weights = results[0].weights
    assert set(weights) == set(wanted.weights), set(weights) ^ set(wanted.weights)
    moved = {
        name: size(value - start[name])
        for name, value in wanted.weights.items()
        if (value.is_floating_point() or value.is_complex()) and value.numel()
    }
    farthest = max(moved.values())
    assert farthest > 0, "nothing was trained"
    errors = [
        abs(loss - target) / max(abs(target), 1e-3)
        for result in results
        for loss, target in zip(result.losses, wanted.losses, strict=True)
    ]
    for name, weight in wanted.weights.items():
        if name not in moved:
            # BatchNorm counts steps; on one device every local group was a step of its own.
            same = name.endswith("num_batches_tracked") or torch.equal(weights[name], weight)
            assert same, f"{name} differs"
            continue
        rounding = torch.finfo(weight.dtype).eps * size(weight)
        scale = max(moved[name], 1e-3 * farthest, rounding)
        errors.append(size(weights[name] - weight) / scale)
    return math.inf if any(map(math.isnan, errors)) else max(errors)


def _largest(value: Tensor) -> float:
    return float(value.abs().max())


def _length(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value.double()))


def _train(_rank: int, family: Family, captured: CapturedStep, plan: Plan) -> Trained:
    # Every rank would capture the same; this process has done it before it became three.
    with mock.patch("heterog.runtime.deploy.capture_step", return_value=captured):
        step = deploy(family.workload(), plan)
    losses = [float(step(family.batch(number))) for number in range(STEPS)]
    weights = step.state_dict() or {}
    step.close()
    return Trained(losses, weights)
