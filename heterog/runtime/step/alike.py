"""What has to be alike on all ranks, compared in the first step and again every so often.

Ranks that train with other learning rates, options or batches run to the end without an error, and
their replicas drift apart. A comparison is one number of eight bytes from each rank; only where
these differ do ranks tell each other what they have.

A plan's step on batches of other shapes: the last one of an epoch, other sequence lengths.
"""

import hashlib
import itertools
import json
import time
from collections.abc import Mapping, Sequence
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
from heterog.lowering import lower_resized
from heterog.lowering.program import Program
from heterog.names import own_name
from heterog.runtime.accelerators import from_every_rank
from heterog.runtime.measure.rehearsal import rehearse
from heterog.runtime.step.collectives import gather_texts
from heterog.runtime.step.replicas import Replicas, drift
from heterog.search.plan import Plan
from heterog.strategy.strategy import Strategy

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
    shapes = pytree.tree_map(_without_memory, batch)
    size = _differences_in_words(batch)
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
    graph = replace(captured.graph, grouped_like=planned, seen_scope=planned.scope)
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


def _without_memory(leaf: Any) -> Any:
    return torch.empty_like(leaf, device="cpu") if isinstance(leaf, torch.Tensor) else leaf


def _differences_in_words(batch: Any) -> str:
    return ", ".join(str(tuple(value.shape)) for _, _, value in named_leaves(batch))


def by_name(graph: OpGraph, values: Mapping[int, Any]) -> dict[str, Any]:
    """Change the keys of a mapping from tensor ids to the tensors' names in a graph."""
    return {graph.tensors[tensor].name: value for tensor, value in values.items()}


def batch_by_tensor(graph: OpGraph, batch: Any) -> dict[int, Tensor]:
    """Tensors of a batch by their ids in the graph; those of a dict are found by key.

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
"""Options that loops and schedulers change; an optimizer counts in others, and only where it has
something to step."""

_SAMPLED = 256
"""Elements of each tensor of a batch that are compared, at equal distances."""

_MOST_TOLD = 3
"""Most differences that an error names."""

_STEPS_KEPT = 4
"""Steps of which a rank's shapes can be asked for: without a barrier, others may be ahead."""

_POLL_S = 1e-3
_COMPILED_IN_S, _COMPILED_POLL_S = 3600.0, 0.05
"""Longer than any model takes; a rank that is gone ends its job sooner."""

Facts = dict[str, str]
"""What a rank has, by a name in words."""


def compare(facts: Facts, when: str) -> None:
    """Compare facts with those of all other ranks; every rank calls it.

    Args:
        facts: What this rank has.
        when: When it has that, for the message.

    Raises:
        StrategyError: ranks have different ones; says which, and on which ranks. All ranks raise.
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
    """Whether ranks compare what they have before a step, after some number of others."""
    return num_steps < 2 or num_steps % COMPARED_EVERY == 0


def of_workload(workload: Workload, groups: tuple[ParameterGroup, ...], extra: Facts) -> Facts:
    """What a workload says that no step changes.

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
    """What a step trains with: options that change, and some elements of its batch.

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

    Each rank notes the shapes of its batch in the job's store, which takes microseconds and waits
    for nobody. A rank whose shapes change waits until all others have begun that step, and
    compares: otherwise it would wait for messages that nobody sends.

    Args:
        store: The store of the process group.
        name: What tells this step's notes from those of others, the same on all ranks.
        rank: This rank.
        num_ranks: Number of ranks.
    """

    def __init__(self, store: Store, name: str, rank: int, num_ranks: int) -> None:
        self._store, self._name, self._rank = store, name, rank
        self._keys = [f"{name}/{each}" for each in range(num_ranks)]
        self._num_begun = 0  # steps can be repeated, so their numbers are not asked for
        self._begun: dict[int, str] = {}

    def begin_step(self, shapes: Signature, when: str) -> None:
        """Note the shapes of a step's batch, and compare them if they are others than before.

        Args:
            shapes: Those of this rank's batch.
            when: Which step it is, for the message.

        Raises:
            StrategyError: another rank has other shapes, or has not begun the step in time.
        """
        number = self._num_begun = self._num_begun + 1
        text = ", ".join(f"{name} {shape} {dtype}" for name, shape, dtype in shapes)
        before = self._begun.get(number - 1, text)
        self._begun[number] = text
        self._begun.pop(number - _STEPS_KEPT, None)
        self._store.set(self._keys[self._rank], json.dumps(self._begun))
        if before != text:
            self._compare(number, text, when)

    def wait_for_compilers(self) -> None:
        """Wait until every rank has compiled; every rank calls it, once.

        A collective would give up on a rank that compiles for minutes while another found
        everything in its cache.

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
        replicas: This rank's.
        num_steps: Number of steps since they were first seen.
        when: When it has them, for the message.

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
    ranks: dict[str, list[int]] = {}
    for rank, facts in enumerate(told):
        ranks.setdefault(facts.get(name, "none"), []).append(rank)
    values = ", ".join(
        f"{_cut(value)} on rank{'s' * (len(own) > 1)} {', '.join(map(str, own))}"
        for value, own in ranks.items()
    )
    return f"{name} ({values})"


def _cut(value: str) -> str:
    return value if len(value) <= 120 else value[:117] + "..."
