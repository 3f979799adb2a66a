"""Kinds of recomputation that are worth trying, what each frees, and which ops run again for it.

Kinds are ordered: each recomputes everything that the kinds before it recompute, and frees at
least as much memory. So a search first tries the last kind for a strategy that is too large. Only
if it fits are the cheaper kinds tried, the dearest of them first, until one does not fit. A
strategy that fits with no kind takes no more evaluations than if there were one kind.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np

from heterog.graph.op_graph import FloatArray, OpGraph, Phase
from heterog.lowering.choice import BoolArray
from heterog.lowering.tables import GraphTables, reading_ops, values_read
from heterog.strategy.keeping import Keeps, attention_scores, kept_products
from heterog.strategy.layouts.layout import Layout, Recompute
from heterog.strategy.layouts.pipelines import KEEPS

LEAST_SPARED = 0.05
"""Least part of the forward FLOPs that keeping products must save: in a convolutional net it saves
the last layer alone."""


@lru_cache(maxsize=16)
def kinds_worth_trying(graph: OpGraph) -> tuple[Keeps, ...]:
    """Kinds of recomputation that differ on a graph, the one that recomputes the least first.

    If attention is fused, there are no scores to recompute.
    """
    forward = [index for index, op in enumerate(graph.ops) if op.phase == Phase.FORWARD]
    spared = sum(graph.ops[index].flops for index in kept_products(graph, (0,) * graph.num_ops))
    whole = sum(graph.ops[index].flops for index in forward)
    return (
        *[Keeps.ALL_BUT_SCORES] * bool(attention_scores(graph)),
        *[Keeps.PRODUCTS] * bool(spared > LEAST_SPARED * whole),
        Keeps.NOTHING,
    )


def words_worth_trying(graph: OpGraph) -> tuple[Recompute, ...]:
    """The kinds of ``kinds_worth_trying`` in the words of layouts."""
    of_keeps = {keeps: word for word, keeps in KEEPS.items()}
    return tuple(of_keeps[keeps] for keeps in kinds_worth_trying(graph))


def cheaper_layouts(graph: OpGraph, layout: Layout) -> Iterator[Layout]:
    """Layouts that recompute less and less; none unless ``layout`` recomputes everything."""
    if layout.recompute == Recompute.FULL:
        for word in reversed(words_worth_trying(graph)[:-1]):
            yield replace(layout, recompute=word)


def surely_kept(recompute: Recompute) -> float:
    """Part of the activations that is surely held; a layout that overflows even so is skipped.

    With long sequences, scores alone may be most of the activations, so any kind may free nearly
    all: under full recomputation a layer keeps its input, one of some 34 such values.
    """
    return 0.5 if recompute == Recompute.NONE else 0.02


def runs_again(tables: GraphTables, keeps: Keeps) -> BoolArray:
    """Whether each compute op runs again where its block recomputes.  # [num_compute_ops]

    Args:
        tables: Tables of a graph with its blocks.
        keeps: Kind of recomputation.
    """
    again = np.zeros(len(tables.op_id), np.bool_)
    ops = tables.recompute_op
    if keeps != Keeps.NOTHING:
        first, end = (int(keeps) - 1) * len(again), int(keeps) * len(again)
        ops = tables.partly_op[tables.partly_start[first] : tables.partly_start[end]]
    again[ops] = True
    return again


def freed_bytes(tables: GraphTables, keeps: Keeps) -> tuple[FloatArray, FloatArray]:
    """Bytes that recomputation frees in each group on a device, if all blocks recompute.

    Without recomputation, values that the backward pass reads are kept. With it, values that the
    backward pass or ops that run again read are kept if they come from an op that does not run
    again, or from another block.

    Returns:
        (bytes for each sample, bytes independent of samples).  # [num_groups] each
    """
    again, is_backward = runs_again(tables, keeps), tables.op_is_backward == 1
    reader = reading_ops(tables)
    late = is_backward[reader] | again[reader]
    is_remade = again[tables.value_op[tables.read_value]] & (tables.read_slot < 0)
    kept = values_read(tables, late & ~is_remade)
    was_kept = values_read(tables, is_backward[reader])
    change = (was_kept.astype(np.float64) - kept) * ~is_backward[tables.value_op]
    changes = np.flatnonzero((change != 0.0) & (tables.op_group[tables.value_op] >= 0))
    groups = tables.op_group[tables.value_op[changes]]
    of_sample, once = (
        np.bincount(groups, (change * sizes)[changes], tables.num_groups).astype(np.float64)
        for sizes in (tables.value_bytes_per_unit, tables.value_bytes)
    )
    return of_sample, once
