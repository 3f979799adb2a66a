"""Checks that ranks train alike: their settings, batches and weights; resizes a step for a batch.

Ranks that train with other learning rates, options or batches run to the end without an error, and
their replicas drift apart. So facts about the workload and the step are compared in the first
steps and again now and then (``compare``). A comparison sends one number of eight bytes from each
rank; only if these differ do ranks exchange the facts themselves.

``Replicas`` and ``drift`` compare weights, by a few numbers about each tensor. Replicas begin with
equal parameters and make equal updates. If gradients are not averaged, or learning rates differ,
parameters differ by a part of the way that they have moved. Different GPUs may round an update
differently, which is far less: at most about one unit in the last place for each step, in either
direction. A rank sends the sum of a tensor's elements with random signs. The sums of two ranks
differ by about as much as their tensors do, as vectors, for any difference d:
E (u . d)^2 = |d|^2 for independent signs u.

``resize`` makes a plan's step for batches of other shapes: the last batch of an epoch, or other
sequence lengths.
"""

import hashlib
import itertools
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.utils import _pytree as pytree

from heterog.errors import HeterogError, StrategyError
from heterog.graph.capture import CapturedStep, capture_step
from heterog.graph.op_graph import OpGraph, same_ops
from heterog.graph.optimizer_probe import ParameterGroup
from heterog.graph.workload import Workload, named_leaves
from heterog.grouped import grouped
from heterog.lowering import lower_resized
from heterog.lowering.program import Program
from heterog.names import own_name
from heterog.runtime.accelerators import from_every_rank
from heterog.runtime.measure.rehearsal import rehearse
from heterog.runtime.step.collectives import gather_texts
from heterog.search.plan import Plan
from heterog.strategy.strategy import Strategy

MOST_ELEMENTS = 2**14
"""Elements of each tensor that are compared: updates change nearly all elements, and copies of
this many in double precision take only a fraction of a megabyte."""
EVERY = 64
"""Steps between comparisons, after those at steps 1, 2, 4, ... up to here."""
PART_OF_WAY = 1e-3
"""Least difference that counts, as a part of the way from the first step. Gradients that are not
averaged give about 1; a learning rate that is 1 % larger gives 0.01."""
ROUNDING = 1e-6
"""Least difference that counts, as a part of a tensor's norm, for a step: about sixteen times
the rounding of float32. It grows with the root of the number of steps. In 16 bits only a part
eps32 / eps16 of the elements is rounded to another neighbour, so their rounding counts
sqrt(eps16 / eps32) times as much."""

_EPS_32 = torch.finfo(torch.float32).eps
_NUM_FACTS = 3
_NOT_HELD = -1.0
"""In place of the rounding of a tensor that a rank lacks; those of a held one may be NaN."""


@dataclass(frozen=True, slots=True)
class Drift:
    """Replicas of a tensor that differ.

    Attributes:
        place: Number of the tensor.
        ranks: Two ranks whose tensors differ most.
        apart: Norm of the difference of their tensors.
        way: Norm of the change of the tensor by training.
    """

    place: int
    ranks: tuple[int, int]
    apart: float
    way: float


def compared_after(num_steps: int) -> bool:
    """Whether ranks compare replicas after so many steps."""
    is_early = 0 < num_steps < EVERY and num_steps.bit_count() == 1
    return is_early or (num_steps > 0 and num_steps % EVERY == 0)


class Replicas:
    """Facts about a rank's tensors, and how they have changed since this object was made.

    Args:
        tensors: Tensors that several ranks may hold; ``None`` for one that this rank lacks.
    """

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        self._tensors = list(tensors)
        drawn = torch.randint(0, 2, (MOST_ELEMENTS,), generator=torch.Generator().manual_seed(0))
        self._signs = drawn.to(torch.float32).mul_(2).sub_(1)
        self._begin = [signed for signed, _ in self._sums()]

    def facts(self) -> list[float]:
        """The sum, the way and the rounding of each tensor; one that is not held has neither."""
        found: list[float] = []
        for begin, (signed, rounding) in zip(self._begin, self._sums(), strict=True):
            found += [signed, abs(signed - begin), rounding]
        return found

    def ways(self) -> list[float]:
        """How far each held tensor has moved; 0 for one that has not changed."""
        pairs = zip(self._begin, self._sums(), strict=True)
        return [abs(signed - begin) for begin, (signed, _) in pairs]

    def _sums(self) -> list[tuple[float, float]]:
        """Signed sum and rounding of each tensor, with one transfer from each device."""
        found = [(0.0, _NOT_HELD)] * len(self._tensors)
        by_device = grouped(
            (each.device, (place, each))
            for place, each in enumerate(self._tensors)
            if each is not None
        )
        for device, held in by_device.items():
            signs = self._signs.to(device)
            pairs = torch.stack([_sum_and_squares(each, signs) for _, each in held]).tolist()
            for (place, tensor), (signed, squares) in zip(held, pairs, strict=True):
                coarse = max(1.0, torch.finfo(tensor.dtype).eps / _EPS_32)
                found[place] = signed, ROUNDING * math.sqrt(squares * coarse)
        return found


def drift(told: Sequence[Sequence[float]], num_steps: int) -> Drift | None:
    """The tensor whose replicas differ most, if that is more than rounding.

    Args:
        told: The facts of each rank.
        num_steps: Number of steps since the ``Replicas`` were made.
    """
    worst: Drift | None = None
    worst_excess = 1.0
    for place in range(len(told[0]) // _NUM_FACTS):
        begin = place * _NUM_FACTS
        facts = {
            rank: each[begin : begin + _NUM_FACTS]
            for rank, each in enumerate(told)
            if each[begin + _NUM_FACTS - 1] != _NOT_HELD
        }
        if len(facts) < 2:
            continue
        finite = {rank: each for rank, each in facts.items() if math.isfinite(each[0])}
        low = min(finite or facts, key=lambda rank: facts[rank][0])
        high = max(finite or facts, key=lambda rank: facts[rank][0])
        way, rounding = (max((each[n] for each in finite.values()), default=0.0) for n in (1, 2))
        apart = facts[high][0] - facts[low][0] if finite else 0.0
        if len(finite) < len(facts) and finite:
            apart, high = math.inf, next(rank for rank in facts if rank not in finite)
        allowed = max(PART_OF_WAY * way, rounding * math.sqrt(num_steps))
        if apart > worst_excess * allowed:
            worst_excess = apart / allowed if allowed else math.inf
            worst = Drift(place, (min(low, high), max(low, high)), apart, way)
    return worst


def _sum_and_squares(tensor: Tensor, signs: Tensor) -> Tensor:
    """The sum of a tensor's elements with signs, and the sum of their squares."""
    flat = tensor.detach()
    flat = torch.view_as_real(flat.resolve_conj()) if flat.is_complex() else flat
    flat = flat.reshape(-1)
    looked_at = flat[:: max(1, -(-flat.numel() // MOST_ELEMENTS))].double()
    return torch.stack([(looked_at * signs[: len(looked_at)]).sum(), looked_at.square().sum()])


Signature = tuple[tuple[str, tuple[int, ...], str], ...]
"""Name, shape and dtype of every tensor of a batch."""


def signature(batch: Any) -> Signature:
    """A key that is equal for batches that can use the same program."""
    leaves = named_leaves(batch)
    return tuple(sorted((name, tuple(value.shape), str(value.dtype)) for _, name, value in leaves))


def planned_signature(graph: OpGraph) -> Signature:
    """The signature of the batches that a step was planned for."""
    tensors = [graph.tensors[tensor] for tensor in graph.batch]
    return tuple(sorted((each.name, each.shape, f"torch.{each.dtype}") for each in tensors))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ResizedStep:
    """A plan's decisions applied to another batch.

    Attributes:
        captured: The step on that batch; its groups are those of the plan's graph.
        strategy: The plan's strategy, for that batch.
        program: Program lowered from both. Its tasks may run in program order.
    """

    captured: CapturedStep
    strategy: Strategy
    program: Program


def resize(
    planned: OpGraph, program: Program, workload: Workload, plan: Plan, batch: Any, *, clips: bool
) -> ResizedStep:
    """Capture a step on another batch and apply the plan's decisions in proportion.

    Args:
        planned: The graph as captured here on the plan's batch.
        program: Program of the plan.
        workload: The workload that the plan was made for.
        plan: The plan whose decisions are kept.
        batch: A batch of other shapes; only its shapes matter.
        clips: Whether gradients are clipped.

    Raises:
        StrategyError: the model runs other ops on this batch, or the plan's decisions cannot be
            executed on it; says why.
    """
    shapes = pytree.tree_map_only(
        torch.Tensor, lambda leaf: torch.empty_like(leaf, device="cpu"), batch
    )
    size = ", ".join(str(tuple(value.shape)) for _, _, value in named_leaves(batch))
    try:
        captured = capture_step(replace(workload, example_batch=lambda: shapes), planned)
    except HeterogError as error:
        raise StrategyError(f"a batch of {size} cannot be captured: {error}") from error
    if not same_ops(captured.graph, planned):
        raise StrategyError(
            f"on a batch of {size} the model runs other ops than on the planned one; make batches "
            "of the planned shapes (drop_last=True leaves out the last, smaller one), or plan for "
            "this one, too."
        )
    graph = replace(captured.graph, grouped_like=planned, seen_scope=planned.seen_scope)
    captured = replace(captured, graph=graph)
    strategy = plan.strategy.resized(captured.graph)
    resized = lower_resized(captured.graph, plan.cluster, strategy)
    fault = ""
    if (resized.bucket != program.bucket).any():
        fault = "its gradients would be in other buckets"
    fault = fault or rehearse(captured, strategy, resized, range(resized.num_tasks), clips=clips)
    if fault:
        raise StrategyError(
            f"the plan for '{workload.name}' cannot be run on a batch of {size}: {fault}; make "
            "batches of the planned shapes, or plan for this one, too."
        )
    return ResizedStep(captured=captured, strategy=strategy, program=resized)


def batch_by_tensor(graph: OpGraph, batch: Any) -> dict[int, Tensor]:
    """Tensors of a batch by their ids in the graph; tensors of a dict are found by key.

    Raises:
        StrategyError: tensors are missing or unknown, or one has a wrong shape or dtype.
    """
    by_name = {name: value for _, name, value in named_leaves(batch)}
    ids = {graph.tensors[tensor].name: tensor for tensor in graph.batch}
    if by_name.keys() != ids.keys():
        raise StrategyError(
            f"the batch has {len(by_name)} tensors ({', '.join(by_name)}); the step was planned "
            f"with {len(ids)} ({', '.join(ids)})."
        )
    for name, tensor in ids.items():
        meta, value = graph.tensors[tensor], by_name[name]
        if tuple(value.shape) != meta.shape or str(value.dtype) != f"torch.{meta.dtype}":
            raise StrategyError(
                f"{meta.name} is {tuple(value.shape)} {value.dtype}; the step was planned with "
                f"{meta.shape} {meta.dtype}. Every rank gets the whole global batch."
            )
    return {tensor: by_name[name] for name, tensor in ids.items()}


COMPARED_EVERY = 16
"""Steps from one comparison to the next. A comparison takes as long as a small message, a few
tenths of a millisecond between machines: a percent of a step of two milliseconds."""

_SCHEDULED = ("lr", "weight_decay", "momentum", "betas")
"""Options that loops and schedulers change. Other options may be an optimizer's counters, which
differ between ranks that step different tensors."""

_SAMPLED = 256
"""Elements of each tensor of a batch that are compared, at equal distances."""

_MOST_TOLD = 3
"""Most differences that an error names."""

_STEPS_KEPT = 4
"""Number of last steps whose shapes a rank publishes: without a barrier, it may be ahead."""

_POLL_S = 1e-3
_COMPILED_IN_S, _COMPILED_POLL_S = 3600.0, 0.05
"""Longer than any model compiles; if a rank is lost, the job ends sooner."""

Facts = dict[str, str]
"""Facts about a rank's training, by names in words."""


def compare(facts: Facts, when: str) -> None:
    """Compare facts with those of all other ranks; every rank calls it.

    Args:
        facts: Facts of this rank.
        when: Time of the comparison in words, for the message.

    Raises:
        StrategyError: facts differ; says which, and on which ranks. All ranks raise.
    """
    text = json.dumps(facts, sort_keys=True)
    mine = torch.tensor([_number(text)], dtype=torch.int64)
    if all(torch.equal(each, mine) for each in from_every_rank(mine)):
        return
    told = [json.loads(each) for each in gather_texts(text)]
    names = [name for name in told[0] if len({each.get(name) for each in told}) > 1]
    found = "; ".join(_difference(name, told) for name in names[:_MOST_TOLD])
    more = f" (and {len(names) - _MOST_TOLD} more)" if len(names) > _MOST_TOLD else ""
    raise StrategyError(
        f"ranks do not train alike {when}: {found}{more}. Give every rank the same: replicas "
        "would drift apart."
    )


def compared_at(num_steps: int) -> bool:
    """Whether ranks compare the facts of a step before it, after so many steps."""
    return num_steps < 2 or num_steps % COMPARED_EVERY == 0


def of_workload(workload: Workload, groups: tuple[ParameterGroup, ...], extra: Facts) -> Facts:
    """Facts about a workload that no step changes.

    Args:
        workload: The workload.
        groups: Its parameter groups.
        extra: Further facts.
    """
    optimizer = workload.optimizer
    found = {
        "torch": torch.__version__,
        "optimizer": f"{optimizer.__module__}.{optimizer.__qualname__}",
        "master_dtype": str(workload.master_dtype),
        "state_dtype": str(workload.state_dtype),
        **extra,
    }
    for key, value in workload.optimizer_options.items():
        found[f"the optimizer's {key}"] = _in_words(value)
    for number, group in enumerate(groups):
        found[f"parameters of group {number}"] = ", ".join(group.names)
        for key, value in group.options.items():
            found[f"{key} of group {number}"] = _in_words(value)
    return found


def of_step(optimizer: torch.optim.Optimizer, batch: Any) -> Facts:
    """Facts about a step: options that change, and some elements of its batch.

    Args:
        optimizer: The rank's optimizer.
        batch: The global batch.
    """
    found = {}
    for number, group in enumerate(optimizer.param_groups):
        for key in _SCHEDULED:
            if key in group:
                found[f"{key} of group {number}"] = _in_words(group[key])
    for _, name, value in named_leaves(batch):
        found[f"shape of the batch's {name}"] = f"{tuple(value.shape)} {value.dtype}"
        found[f"values of the batch's {name}"] = _digest(value)
    return found


class BatchShapes:
    """Finds a rank whose batch has other shapes than those of the others, in any step.

    Each rank writes the shapes of its batch to the job's store, which takes microseconds and waits
    for no rank. A rank whose shapes change waits until all others have begun that step, and
    compares; otherwise it could wait for messages that no rank sends.

    Args:
        store: The store of the process group.
        name: Prefix of this object's keys in the store, the same on all ranks.
        rank: This rank.
        num_ranks: Number of ranks.
    """

    def __init__(self, store: Store, name: str, rank: int, num_ranks: int) -> None:
        self._store, self._name, self._rank = store, name, rank
        self._keys = [f"{name}/{each}" for each in range(num_ranks)]
        self._num_begun = 0  # counted here, because a step's own number can be repeated
        self._begun: dict[int, str] = {}

    def begin_step(self, shapes: Signature) -> None:
        """Note the shapes of this rank's batch in a step that begins."""
        self._num_begun += 1
        text = ", ".join(f"{name} {shape} {dtype}" for name, shape, dtype in shapes)
        self._begun[self._num_begun] = text
        self._begun.pop(self._num_begun - _STEPS_KEPT, None)
        self._store.set(self._keys[self._rank], json.dumps(self._begun))

    def check(self, when: str) -> None:
        """Compare the shapes of the step that has begun, if they have changed.

        Args:
            when: The step in words, for the message.

        Raises:
            StrategyError: another rank has other shapes, or has not begun the step in time.
        """
        now = self._begun[self._num_begun]
        if self._begun.get(self._num_begun - 1, now) != now:
            self._compare(self._num_begun, now, when)

    def steps_begun(self) -> list[int]:
        """Steps that each rank has begun; asks the store, and waits for no rank."""
        found = (self._store.get(key) if self._store.check([key]) else "{}" for key in self._keys)
        return [max(map(int, json.loads(each)), default=0) for each in found]

    def wait_for_compilers(self) -> None:
        """Wait until every rank has compiled; every rank calls it, once.

        A collective would time out if one rank compiles for minutes while another has everything
        in its cache.

        Raises:
            StrategyError: another rank still compiles after an hour.
        """
        key, end = f"{self._name}/compiled", time.monotonic() + _COMPILED_IN_S
        done = self._store.add(key, 1)
        while done < len(self._keys):
            if time.monotonic() > end:
                raise StrategyError(
                    f"{len(self._keys) - done} of {len(self._keys)} ranks still compile after "
                    f"{_COMPILED_IN_S:g} s; plan for a cluster with `execution: eager`."
                )
            time.sleep(_COMPILED_POLL_S)
            done = self._store.add(key, 0)

    def _compare(self, number: int, mine: str, when: str) -> None:
        limit_s = self._store.timeout.total_seconds()  # type: ignore[attr-defined]
        end = time.monotonic() + limit_s
        while True:
            told = [json.loads(each) for each in self._store.multi_get(self._keys)]
            late = [rank for rank, each in enumerate(told) if max(map(int, each)) < number]
            if not late:
                break
            if time.monotonic() > end:
                raise StrategyError(
                    f"rank {self._rank} has a batch of other shapes {when} than before ({mine}), "
                    f"and ranks {late} have not begun that step in {limit_s:g} s."
                )
            time.sleep(_POLL_S)
        shapes = [{"shapes": each.get(str(number), mine)} for each in told]
        if any(each["shapes"] != mine for each in shapes):
            raise StrategyError(
                f"ranks do not train alike {when}: {_difference('shapes', shapes)}. Give every "
                "rank the same global batch."
            )


_num_made = itertools.count()


def batch_shapes() -> BatchShapes:
    """Make the object that compares shapes in the running job; every rank calls it."""
    number = torch.tensor([next(_num_made)])
    dist.broadcast(number, 0)
    store = dist.distributed_c10d._get_default_store()
    name = f"heterog/shapes/{int(number)}"
    return BatchShapes(store, name, dist.get_rank(), dist.get_world_size())


def compare_weights(names: Sequence[str], replicas: Replicas, num_steps: int, when: str) -> None:
    """Compare the parameters that several ranks have whole; every rank calls it.

    Args:
        names: Names of the parameters.
        replicas: Facts about this rank's parameters.
        num_steps: Number of steps since ``replicas`` was made.
        when: Time of the comparison in words, for the message.

    Raises:
        StrategyError: replicas differ; names the first. All ranks raise.
    """
    mine = torch.tensor(replicas.facts(), dtype=torch.float64)
    found = drift([each.tolist() for each in from_every_rank(mine)], num_steps)
    if found is None:
        return
    raise StrategyError(
        f"replicas of '{names[found.place]}' on ranks {found.ranks[0]} and {found.ranks[1]} have "
        f"drifted apart {when}, by {found.apart:.3g} where training has moved them by "
        f"{found.way:.3g}. Something changes weights on some ranks only: an optimizer that draws "
        "random numbers, or code that writes to parameters; do it alike on all ranks."
    )


def _digest(value: Tensor) -> str:
    """A few hexadecimal digits that depend on elements of a tensor at equal distances."""
    flat = value.detach().reshape(-1)
    some = flat[:: max(1, len(flat) // _SAMPLED)].resolve_conj().resolve_neg().contiguous().cpu()
    return hashlib.sha256(some.view(torch.uint8).numpy().tobytes()).hexdigest()[:8]


def _number(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest()[:15], 16)


def _in_words(value: Any) -> str:
    """An option as text that is the same on all ranks: no addresses."""
    if isinstance(value, Tensor):
        return str(value.tolist())
    if isinstance(value, str | int | float | bool | tuple | list | None):
        return str(value)
    return type(value).__qualname__ if isinstance(value, nn.Module) else own_name(value)


def _difference(name: str, told: list[Facts]) -> str:
    """One difference in words: each value with the ranks that have it."""
    ranks = grouped((facts.get(name, "none"), rank) for rank, facts in enumerate(told))
    values = ", ".join(
        f"{_cut(value)} on rank{'s' * (len(own) > 1)} {', '.join(map(str, own))}"
        for value, own in ranks.items()
    )
    return f"{name} ({values})"


def _cut(value: str) -> str:
    return value if len(value) <= 120 else value[:117] + "..."
