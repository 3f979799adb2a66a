"""Parts of a step that are replayed: the numbers of parts that are called, on moving inputs.

A tape on the CPU stands for a CUDA graph: it repeats what was recorded, in the same memory.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from heterog.cluster.topology import Execution
from heterog.runtime.step.replays import Kernels, Replay, Replays
from tests.runtime.any_strategy import any_strategy
from tests.runtime.cases import SGD, batch_of, deployed
from tests.runtime.grids import grid_cluster
from tests.runtime.ranks import Ranks
from tests.runtime.strategies import graph_of
from tests.runtime.test_segments import traced
from tests.simulator.builders import plan_by_hand
from tests.thorough import few_of

STEPS = 6


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Repeats the ops that were recorded; what they made is written anew."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[tuple[Any, ...]] = []
        self.num_replays = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, made))
        return made

    def replay(self) -> None:
        self.num_replays += 1
        for func, args, kwargs, made in self._calls:
            again = func(*args, **kwargs)
            olds, news = ([x] if isinstance(x, Tensor) else x for x in (made, again))
            for old, new in zip(olds, news, strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def recorded(pool: Any, run: Callable[[], Sequence[Tensor]]) -> tuple[Tape, Sequence[Tensor]]:
    with Tape() as tape:
        made = run()
    return tape, made


def in_same_memory(value: Tensor) -> Tensor:
    return value.detach()


def on_tape(record: Callable[..., Any] = recorded) -> Any:
    """Graphs are recorded on tapes."""
    return mock.patch.multiple(
        "heterog.runtime.step.replays",
        graph_pool=lambda: None,
        is_accelerated=lambda value: True,
        recorded_graph=record,
        same_memory=in_same_memory,
    )


def trained(name: str, plan_path: str) -> tuple[list[float], dict[str, Tensor] | None, int]:
    """Losses, weights and number of graphs."""
    step = deployed(name, plan_path, SGD)
    losses = [float(step(batch_of(name, number))) for number in range(STEPS)]
    compiler = step.compiler
    assert compiler is not None
    assert not compiler.refused
    replays = compiler.replays
    return losses, step.state_dict(), replays.num_recorded if replays else 0


def train_both(rank: int, name: str, called: str, replayed: str) -> list[Any]:
    with (
        mock.patch("heterog.runtime.step.compiled._inductor", traced),
        mock.patch("heterog.runtime.deploy.is_accelerated", return_value=True),
        on_tape(),
    ):
        return [trained(name, path) for path in (called, replayed)]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("seed", "name"),
    few_of([(seed, name) for seed in range(8) for name in ("mlp", "gpt", "normalised", "moe")], 4),
)
def test_replayed_parts_make_the_numbers_of_parts_that_are_called(
    four_ranks: Ranks, tmp_path: Path, seed: int, name: str
) -> None:
    graph = graph_of(name)
    rng = Random(f"{seed} {name} replays")
    strategy = replace(any_strategy(rng, graph, 4), step_barrier=True)
    paths = []
    for execution in (Execution.COMPILED, Execution.GRAPHS):
        plan = plan_by_hand(graph, replace(grid_cluster(4), execution=execution), strategy)
        paths.append(str(tmp_path / f"{execution}.json"))
        plan.save(Path(paths[-1]))
    found = four_ranks.run(train_both, name, *paths)
    assert any(replayed[2] for _, replayed in found)
    for called, replayed in found:
        assert replayed[0] == called[0]
        for key, value in (called[1] or {}).items():
            assert torch.equal(replayed[1][key], value), key


def scaled(given: list[Tensor]) -> Sequence[Tensor]:
    [weight, x] = given
    given.clear()
    return [weight * x]


def replay_of(kernels: Kernels) -> Replay:
    return Replay(kernels, Replays(), [True, False], [False])


def test_inputs_may_move_and_parameters_that_moved_are_read_where_they_are() -> None:
    with on_tape():
        replay, weight = replay_of(scaled), torch.full((3,), 2.0)

        def run(weight: Tensor, factor: float, number: int) -> list[float]:
            (made,) = replay.run([weight, torch.full((3,), factor)], number)
            found: list[float] = made.tolist()
            return found

        for number in range(4):
            assert run(weight, 1.0 + number, number) == [2.0 * (1 + number)] * 3
        assert replay._graph.num_replays == 3, "the first is called"
        weight += 1
        assert run(weight, 5.0, 4) == [15.0] * 3
        assert run(torch.full((3,), 7.0), 5.0, 5) == [35.0] * 3, "another tensor in its place"
        assert run(weight, 6.0, 6) == [18.0] * 3
        assert replay._graph.num_replays == 5


def test_graphs_are_recorded_in_one_step() -> None:
    with on_tape():
        replays = Replays()
        steps = [replays.records(number) for number in (0, 0, 3, 4, 4)]
        assert steps == [False, False, False, True, True], "step 1 was of another shape"
        replays.num_recorded = 1
        assert [replays.records(number) for number in (4, 5, 4)] == [True, False, False]


def test_copied_inputs_keep_their_strides() -> None:
    def strided(given: list[Tensor]) -> Sequence[Tensor]:
        [weight, x] = given
        assert x.stride() == (6, 1), "as the part was compiled for"
        return [x * weight]

    with on_tape():
        replay = replay_of(strided)
        for number in range(4):
            whole = torch.full((2, 6), float(number))
            (made,) = replay.run([torch.ones(()), whole[:, :-1]], number)
            assert torch.equal(made, whole[:, :-1])


def test_a_part_that_cannot_be_recorded_is_called(caplog: pytest.LogCaptureFixture) -> None:
    def refuses(pool: Any, run: Callable[[], Sequence[Tensor]]) -> Any:
        run()
        raise RuntimeError("operation not permitted when stream is capturing")

    with on_tape(refuses):
        replay = replay_of(scaled)
        for number in range(4):
            (made,) = replay.run([torch.ones(1), torch.ones(1)], number)
            assert made == 1
    assert "called and not replayed: operation not permitted" in caplog.text
