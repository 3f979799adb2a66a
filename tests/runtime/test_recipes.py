"""How inputs are read is noted in the first step, and the same in all others."""

from pathlib import Path

import pytest
from torch import Tensor

from heterog.runtime.step.op_inputs import Need
from heterog.runtime.step.values import Reader, Values
from tests.runtime.cases import SGD, batch_of, deployed
from tests.runtime.ranks import Ranks
from tests.runtime.test_updates import saved_plan

CASES = ("ring", "hybrid", "uneven slices", "one device")


def followed(rank: int, name: str, plan_path: str) -> tuple[int, int, float]:
    """Inputs that are read as noted, all inputs, and the largest difference to a plain reading."""
    step = deployed(name, plan_path, SGD)
    executor = step._executor
    step(batch_of(name, 0))
    calls = executor._calls.values()
    noted = sum(recipe is not None for call in calls for _, recipe in call.recipes)
    whole = sum(len(call.recipes) for call in calls)
    off = [0.0]

    class Compared(Values):
        def follow(self, recipe: object) -> Tensor:
            found = super().follow(recipe)  # type: ignore[arg-type]
            need, near, reader = readings[id(recipe)]
            plain = self.read(need, near, reader)
            assert found.shape == plain.shape
            off.append(float((found - plain).abs().max()) if found.numel() else 0.0)
            return found

    readings: dict[int, tuple[Need, dict[tuple[int, int], int], Reader]] = {
        id(recipe): (need, call.near, call.reader)
        for call in calls
        for need, recipe in call.recipes
        if recipe is not None
    }
    executor._values.__class__ = Compared
    step(batch_of(name, 1))
    return noted, whole, max(off)


@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES)
def test_what_is_read_as_noted_is_what_a_plain_reading_finds(
    ranks: Ranks, tmp_path: Path, case: str
) -> None:
    path = saved_plan(tmp_path, "gpt", case, step_barrier=True)
    for noted, whole, off in ranks.run(followed, "gpt", path):
        assert off == 0.0
        assert noted >= 0.8 * whole, "most inputs are buffers, views and cuts"
