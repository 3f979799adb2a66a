"""A plan's step on batches of other shapes: the last one of an epoch, other sequence lengths."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from heterog.errors import HeterogError, StrategyError
from heterog.graph.capture import CapturedStep, capture_step
from heterog.graph.op_graph import OpGraph, TensorKind, same_ops
from heterog.graph.workload import Workload, named_leaves
from heterog.lowering import lower_resized
from heterog.lowering.program import Program
from heterog.runtime.measure.rehearsal import rehearse
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
    tensors = [graph.tensors[tensor] for tensor in graph.inputs_of_kind(TensorKind.BATCH)]
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
    size = _in_words(batch)
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


def _in_words(batch: Any) -> str:
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
    ids = {graph.tensors[tensor].name: tensor for tensor in graph.inputs_of_kind(TensorKind.BATCH)}
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
