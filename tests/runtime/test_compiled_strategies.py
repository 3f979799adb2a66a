"""Random strategies run compiled on four ranks: the numbers of one device.

Sums that inductor takes in another order are off by as much as those that devices share, so the
limits are those of ``test_any_strategy``.
"""

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import pytest

from heterog.cluster.topology import Execution
from heterog.runtime.step import compiled
from heterog.runtime.step.compiled import Compiler, _inductor
from tests.runtime.any_strategy import any_strategy
from tests.runtime.cases import (
    NORMALISED,
    SGD,
    Recipe,
    Trained,
    assert_same,
    reference,
    train_sharded,
)
from tests.runtime.grids import grid_cluster
from tests.runtime.local_groups import reference_in_groups
from tests.runtime.ranks import Ranks
from tests.runtime.strategies import graph_of
from tests.runtime.test_segments import traced
from tests.simulator.builders import plan_by_hand
from tests.thorough import few_of

FAMILIES = ("mlp", "normalised residual", "encodings", "gpt", "moe", "translation")
QUICK = [("traced", 0, name) for name in FAMILIES[:4]]
CASES = [("inductor", seed, name) for seed in range(10) for name in FAMILIES]


class Compiled(NamedTuple):
    """What a rank has trained, how many functions it compiled, and what it said."""

    trained: Trained
    num_compiled: int
    said: list[str]


def train_compiled(rank: int, name: str, recipe: Recipe, plan_path: str, how: str) -> Compiled:
    """Train a plan whose cluster is compiled."""
    compilers: list[Compiler] = []
    said: list[str] = []
    begin = Compiler.__init__
    backends = {"traced": traced, "inductor": _inductor}

    def noted(self: Compiler, *given: Any) -> None:
        begin(self, *given)
        compilers.append(self)

    with (
        mock.patch.object(compiled, "_inductor", backends[how]),
        mock.patch.object(Compiler, "__init__", noted),
        mock.patch.object(compiled._LOG, "warning", lambda text, *a: said.append(text % a)),
    ):
        trained = train_sharded(rank, name, recipe, plan_path)
    return Compiled(trained, compilers[0].num_compiled, said)


def check_compiled(ranks: Ranks, folder: Path, name: str, seed: int, how: str) -> list[int]:
    """The numbers of one device; numbers of functions that were compiled."""
    graph = graph_of(name)
    strategy = any_strategy(Random(f"{seed} {name} 4"), graph, 4)
    cluster = replace(grid_cluster(4), execution=Execution.COMPILED)
    plan = plan_by_hand(graph, cluster, strategy)
    plan.save(folder / "plan.json")
    found = ranks.run(train_compiled, name, SGD, str(folder / "plan.json"), how)
    results = [each.trained for each in found]
    said = {text for each in found for text in each.said}
    assert not said, said
    if name in NORMALISED:
        wanted = reference_in_groups(name, plan)
        assert_same(results, wanted, rtol=1e-8, loss_rtol=1e-8, all_gradients=False)
    else:
        assert_same(results, reference(name), all_gradients=False)
    return [each.num_compiled for each in found]


@pytest.mark.distributed
@pytest.mark.parametrize(("how", "seed", "name"), few_of([*QUICK, *CASES], len(QUICK)))
def test_compiled_strategies_train_as_one_device(
    four_ranks: Ranks, tmp_path: Path, how: str, seed: int, name: str
) -> None:
    assert any(check_compiled(four_ranks, tmp_path, name, seed, how))
