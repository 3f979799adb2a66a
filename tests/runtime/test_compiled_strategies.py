"""Random strategies run compiled on four ranks: the numbers of one device.

Sums that inductor takes in another order are off by as much as those that devices share, so the
limits are those of ``test_any_strategy``.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import pytest
from torch import Tensor, fx

from heterog.cluster.topology import Execution
from heterog.runtime.step import compiled
from heterog.runtime.step.compiled import Compiler, Kernels, _inductor, as_compiled, boxed
from heterog.runtime.step.recipes import Like
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
from tests.simulator.builders import plan_by_hand
from tests.thorough import IS_THOROUGH, few_of

FAMILIES = ("mlp", "gpt", "normalised residual", "encodings", "moe", "translation")


def passed(function: Kernels, likes: Sequence[Like]) -> Kernels:
    """What inductor makes of a graph before it writes C++, which takes it seconds."""
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.fx_passes.post_grad import post_grad_passes

    def interpreted(module: fx.GraphModule, _: Sequence[Tensor], **__: Any) -> Kernels:
        post_grad_passes(module, is_inference=True)
        module.recompile()

        def run(inputs: list[Tensor]) -> list[Tensor]:
            made: list[Tensor] = fx.Interpreter(module).boxed_run(inputs)
            return made

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return as_compiled(
        function,
        likes,
        lambda graph, given: boxed(compile_fx(graph, given, interpreted)),  # type: ignore[arg-type]
    )


class Compiled(NamedTuple):
    """What a rank has trained, how many functions it compiled, and what it said."""

    trained: Trained
    num_compiled: int
    said: list[str]


def train_compiled(
    rank: int, name: str, recipe: Recipe, plan_path: str, is_quick: bool
) -> Compiled:
    """Train a plan whose cluster is compiled."""
    compilers: list[Compiler] = []
    said: list[str] = []
    begin = Compiler.__init__

    def noted(self: Compiler) -> None:
        begin(self)
        compilers.append(self)

    with (
        mock.patch.object(compiled, "_inductor", passed if is_quick else _inductor),
        mock.patch.object(Compiler, "__init__", noted),
        mock.patch.object(compiled._LOG, "warning", lambda text, *a: said.append(text % a)),
    ):
        trained = train_sharded(rank, name, recipe, plan_path)
    return Compiled(trained, compilers[0].num_compiled, said)


def check_compiled(ranks: Ranks, folder: Path, name: str, seed: int, is_quick: bool) -> list[int]:
    """The numbers of one device; numbers of functions that were compiled."""
    graph = graph_of(name)
    strategy = any_strategy(Random(f"{seed} {name} 4"), graph, 4)
    cluster = replace(grid_cluster(4), execution=Execution.COMPILED)
    plan = plan_by_hand(graph, cluster, strategy)
    plan.save(folder / "plan.json")
    found = ranks.run(train_compiled, name, SGD, str(folder / "plan.json"), is_quick)
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
@pytest.mark.parametrize(
    ("seed", "name"), few_of([(seed, name) for seed in range(10) for name in FAMILIES], 4)
)
def test_compiled_strategies_train_as_one_device(
    four_ranks: Ranks, tmp_path: Path, seed: int, name: str
) -> None:
    assert any(check_compiled(four_ranks, tmp_path, name, seed, is_quick=not IS_THOROUGH))
