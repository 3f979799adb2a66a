"""Segments make the numbers that single turns make, to the last bit, and drop what those drop."""

from pathlib import Path
from typing import NamedTuple

import pytest
from torch import Tensor

from heterog.runtime.step.executor import StepExecutor
from heterog.runtime.step.rank_program import OP_KINDS
from tests.runtime.cases import SGD, batch_of, deployed
from tests.runtime.ranks import Ranks
from tests.runtime.test_updates import saved_plan

CASES = ("ring", "hybrid", "uneven slices", "one device")


class Played(NamedTuple):
    """What came of three steps: losses, parameters, and how the last one was run."""

    losses: list[float]
    parameters: list[Tensor]
    left: int
    """Buffers that are held at the end."""
    in_segments: float
    """Fraction of the ops that were run in segments."""
    num_segments: int
    num_texts: int


def played(rank: int, name: str, plan_path: str, is_single: bool) -> Played:
    """Three steps, in segments or turn by turn."""
    step = deployed(name, plan_path, SGD)
    executor: StepExecutor = step._executor
    losses = []
    for number in range(3):
        if is_single:
            executor._pieces.clear()
            executor._noted.clear()  # as in a first step
        losses.append(float(step(batch_of(name, number))))
    left = len(executor._values.held)
    pieces = [piece for run in executor._pieces.values() for piece in run]
    kinds = executor.seen.kinds
    singles = [each for each in pieces if each.segment is None and each.turn.task >= 0]
    ops = [turn for turn in executor.turns if turn.task >= 0 and kinds[turn.task] in OP_KINDS]
    outside = sum(kinds[each.turn.task] in OP_KINDS for each in singles)
    codes = [each.segment.__code__ for each in pieces if each.segment is not None]
    return Played(
        losses,
        [value.detach().clone() for value in step.parameters.values()],
        left,
        1 - outside / max(len(ops), 1),
        len(codes),
        len(set(codes)),
    )


@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES)
def test_segments_do_what_single_turns_do(ranks: Ranks, tmp_path: Path, case: str) -> None:
    path = saved_plan(tmp_path, "gpt", case, step_barrier=case != "hybrid")
    together = ranks.run(played, "gpt", path, False)
    for one, other in zip(together, ranks.run(played, "gpt", path, True), strict=True):
        assert other.num_segments == 0
        assert one.losses == other.losses
        for value, wanted in zip(one.parameters, other.parameters, strict=True):
            assert value.equal(wanted)
        assert one.left <= other.left
        assert one.in_segments >= 0.9
        assert one.num_texts <= one.num_segments
