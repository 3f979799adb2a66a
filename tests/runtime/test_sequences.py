"""Sequences cut in unequal shares give the numbers of one device."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.search.plan import load_plan
from heterog.strategy.sequence_split import sequence_split
from heterog.strategy.strategy import Decision, Strategy, Sync
from tests.runtime.cases import Trained, assert_same
from tests.runtime.ranks import PARENT, Ranks
from tests.runtime.sequences import train, trained_alone, workload_of
from tests.runtime.strategies import ALL, plan_of, strategy_of
from tests.thorough import THOROUGH, one_in

IN_TWO = ((0, 1), (2,))
TOGETHER = Decision(devices=ALL, shares=(2, 0, 0), teams=(ALL,), parts=(5, 3, 2))


@cache
def graph_of(name: str, batch_size: int) -> OpGraph:
    return PARENT.capture((name, batch_size), workload_of, name, batch_size)


def strategy(graph: OpGraph, units: int, decision: Decision) -> Strategy:
    split = sequence_split(graph, units)
    assert split is not None
    decisions = [decision] * group_ops(graph).num_groups
    return replace(strategy_of(graph, decisions), op_rules=split.op_rules)


def trained(
    ranks: Ranks, folder: Path, name: str, chosen: Strategy, batch_size: int
) -> list[Trained]:
    path = folder / "plan.json"
    plan_of(graph_of(name, batch_size), chosen).save(path)
    assert load_plan(path).strategy == chosen
    results: list[Trained] = ranks.run(train, name, batch_size, str(path))
    return results


# transformers makes the loss of Llama in single precision, whatever the model's is.
SINGLE = 1e-6, 1e-6
DOUBLE = 1e-9, 1e-11
"""Differences of gradients and weights, and of losses, that are allowed."""


@one_in(6)
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("gpt", DOUBLE),
        ("gpt of products", DOUBLE),
        ("llama of transformers", SINGLE),
        ("mistral of transformers", SINGLE),
        ("tiny llama", DOUBLE),
        ("bert of transformers", DOUBLE),
    ],
)
def test_unequal_runs_of_positions_give_the_numbers_of_one_device(
    ranks: Ranks, tmp_path: Path, name: str, limits: tuple[float, float]
) -> None:
    chosen = strategy(graph_of(name, 2), 10, TOGETHER)
    results = trained(ranks, tmp_path, name, chosen, 2)
    assert_same(results, trained_alone(name, 2), rtol=limits[0], loss_rtol=limits[1])


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "decision", "micro_batches"),
    [
        # Batch and sequences together; the second team is one device. A micro-batch of each.
        (
            "gpt",
            replace(TOGETHER, shares=(2, 0, 1), teams=IN_TWO, parts=(4, 1, 1), recompute=True),
            ((1, 1), (0, 0), (0, 1)),
        ),
        # A device without positions, another order of devices, parameters in slices.
        pytest.param(
            "gpt2 of transformers",
            replace(
                TOGETHER, shares=(0, 0, 3), teams=((2, 0, 1),), parts=(3, 0, 7), sync=Sync.ZERO3
            ),
            (),
            marks=THOROUGH,
        ),
    ],
)  # fmt: skip
def test_batch_and_sequences_together(
    ranks: Ranks,
    tmp_path: Path,
    name: str,
    decision: Decision,
    micro_batches: tuple[tuple[int, ...], ...],
) -> None:
    chosen = replace(strategy(graph_of(name, 3), 10, decision), micro_batches=micro_batches)
    results = trained(ranks, tmp_path, name, chosen, 3)
    limits = SINGLE if "transformers" in name else DOUBLE
    wanted = trained_alone(name, 3)
    if decision.sync == Sync.ZERO3:  # gradients are kept in slices
        results = [each._replace(gradients={}) for each in results]
    assert_same(results, wanted, rtol=limits[0], loss_rtol=limits[1], all_gradients=False)
