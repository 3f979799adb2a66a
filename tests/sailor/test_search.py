"""Searches under Sailor's rules: their tables against the rules, and against trying everything."""

from itertools import product
from math import inf, isclose
from random import Random

import pytest
from sailor.columns import Columns, Kind, Tables, plan_of, time_of
from sailor.inputs import Inputs, read_plan, written
from sailor.score import score_of
from sailor.search import Limit, Moves, search
from sailor_table import best_even

from heterog.errors import BudgetError, StrategyError
from tests.thorough import THOROUGH, cases

MIXED = {"A100-40": 8, "V100-16": 8}
RTX = {"RTX-3090": 8, "Titan-RTX": 8, "RTX-2080": 8}


def walk_columns(tables: Tables, count: int) -> list[Columns]:
    """Possible plans that a search would meet."""
    moves = Moves(tables, Random(1))
    found: list[Columns] = []
    state = moves.start(2)
    while len(found) < count:
        changed = moves.change(state)
        if changed is None or time_of(changed, tables) == inf:
            state = moves.start(1 + len(found) % 5) if time_of(state, tables) == inf else state
            continue
        state = changed
        found.append(state)
    return found


@pytest.mark.parametrize("num_gpus", [MIXED, RTX], ids=["A100 and V100", "RTX"])
def test_plans_of_sailors_are_priced_as_the_rules_say(
    inputs: Inputs, num_gpus: dict[str, int]
) -> None:
    tables = Tables(inputs=inputs, num_gpus=num_gpus)
    exact = 0
    for state in walk_columns(tables, 300):
        plan = plan_of(state)
        score = score_of(plan, inputs)
        assert score.is_valid
        assert all(plan.num_gpus[card] <= num_gpus[card] for card in plan.num_gpus)
        guess = time_of(state, tables)
        # Tables take the slower direction of every pair; rates of RTX cards differ by it.
        assert guess >= score.timing.total_s - 1e-9
        exact += isclose(guess, score.timing.total_s, rel_tol=1e-9)
    assert exact == 300 or num_gpus is RTX


def every_plan_of_sailors(tables: Tables) -> float:
    """The best of all plans of one or two stages with columns of at most two kinds, by trying."""
    layers = tables.inputs.num_layers
    best = inf
    for bounds in [(0, layers), *((0, bound, layers) for bound in range(1, layers - 1))]:
        kinds = list(product(tables.teams, repeat=len(bounds) - 1))
        for one, other in product(kinds, repeat=2):
            for first, second in product(range(1, 5), range(4)):
                for size in (1, 2, 4, 8):
                    made = (
                        Kind(teams=one, count=first),
                        Kind(teams=other, count=second),
                    )
                    kinds_of = made if second else made[:1]
                    state = Columns(bounds=bounds, kinds=kinds_of, micro_batch=size)
                    best = min(best, time_of(state, tables))
    return best


@pytest.mark.slow
def test_no_plan_on_few_gpus_is_better(inputs: Inputs) -> None:
    few = {"A100-40": 2, "V100-16": 2}
    best = every_plan_of_sailors(Tables(inputs=inputs, num_gpus=few))
    found = search(inputs, few, Limit(evaluations=20_000))
    assert found.score.timing.total_s <= best + 1e-9


@THOROUGH
@pytest.mark.slow
def test_plans_are_better_than_sailors(inputs: Inputs) -> None:
    found = search(inputs, MIXED, Limit(evaluations=cases(200_000, 50_000)))
    assert found.score.is_valid
    assert found.score.samples >= 1024
    assert found.evaluations >= 40_000
    assert found.score.timing.total_s < 22.990843


def test_the_same_seed_finds_the_same_plan(inputs: Inputs) -> None:
    one, other = (search(inputs, RTX, Limit(evaluations=5_000), seed=4) for _ in range(2))
    assert one.plan == other.plan
    assert read_plan(written(one.plan, "us-central1-a")) == one.plan


def test_even_plans(inputs: Inputs) -> None:
    """Sixteen of each: as the table says, four and four teams of four or better."""
    found = best_even(inputs, {"A100-40": 16, "V100-16": 16})
    assert found is not None
    plan, score = found
    assert score.is_valid
    assert score.timing.total_s <= 24.808642
    assert len({replica.tensor for stage in plan.stages for replica in stage.replicas}) == 1
    alone = best_even(inputs, {"A100-40": 1})
    assert alone is not None
    assert best_even(inputs, {"RTX-2080": 1}) is None


def test_what_cannot_be_searched_for_is_refused(inputs: Inputs) -> None:
    with pytest.raises(StrategyError, match="no plan for 1 RTX-2080 was found in"):
        search(inputs, {"RTX-2080": 1}, Limit(evaluations=2_000))
    with pytest.raises(BudgetError, match="0 s and 5 evaluations"):
        Limit(seconds=0, evaluations=5)
