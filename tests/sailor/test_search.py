"""Searches under Sailor's rules: their tables against the rules, and against trying everything."""

from itertools import product
from math import inf, isclose
from random import Random

import pytest
from sailor import columns, uneven
from sailor.columns import Columns, Kind, Pace, time_for
from sailor.even import best_even
from sailor.inputs import Inputs, read_plan, written
from sailor.moves import Moves, UnevenMoves
from sailor.score import INTERPOLATED, UNLIKE_COUNTS, score_of
from sailor.search import Found, Limit, Rules, search
from sailor.tables import Tables

from heterog.errors import BudgetError, StrategyError
from tests.thorough import THOROUGH, cases

MIXED = {"A100-40": 8, "V100-16": 8}
RTX = {"RTX-3090": 8, "Titan-RTX": 8, "RTX-2080": 8}
EVERY_RULE = tuple(Rules)


def walk_columns(tables: Tables, count: int, *, is_uniform: bool) -> list[Columns]:
    """Possible plans that a search would meet."""
    moves = Moves(tables, Random(1), is_uniform=is_uniform, is_zero1=not is_uniform)
    price = columns.sailors_time_s if is_uniform else columns.time_of
    found: list[Columns] = []
    state = moves.start(2)
    while len(found) < count:
        changed = moves.change(state)
        if changed is None or price(changed, tables) == inf:
            state = moves.start(1 + len(found) % 5) if price(state, tables) == inf else state
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
    for state in walk_columns(tables, 300, is_uniform=True):
        plan = columns.sailors_plan(state, tables)
        score = score_of(plan, inputs)
        assert score.is_valid
        assert score.extensions == ()
        assert all(plan.num_gpus[card] <= num_gpus[card] for card in plan.num_gpus)
        guess = columns.sailors_time_s(state, tables)
        # Tables take the slower direction of every pair; rates of RTX cards differ by it.
        assert guess >= score.timing.total_s - 1e-9
        exact += isclose(guess, score.timing.total_s, rel_tol=1e-9)
    assert exact == 300 or num_gpus is RTX


@pytest.mark.parametrize("num_gpus", [MIXED, RTX], ids=["A100 and V100", "RTX"])
@pytest.mark.parametrize("is_tight", [False, True])
def test_lists_are_priced_as_the_rules_say(
    inputs: Inputs, num_gpus: dict[str, int], is_tight: bool
) -> None:
    tables = Tables(inputs=inputs, num_gpus=num_gpus, is_tight=is_tight, may_interpolate=True)
    for state in walk_columns(tables, 150, is_uniform=False):
        score = score_of(columns.plan_of(state, tables), inputs)
        assert score.is_valid
        assert score.samples == 1024
        assert UNLIKE_COUNTS not in score.extensions
        assert not is_tight or not score.flags
        # A rest at the end of a list counts for its slowest stage, in every stage.
        guess = columns.time_of(state, tables)
        assert guess >= score.timing.total_s - 1e-9
        assert guess <= score.timing.total_s * 1.2


def test_unlike_numbers_are_priced_as_the_rules_say(inputs: Inputs) -> None:
    tables = Tables(inputs=inputs, num_gpus=MIXED, may_interpolate=True)
    moves = UnevenMoves(tables, Random(2), is_zero1=True)
    met = exact = 0
    state = moves.start(3)
    while met < 150:
        changed = moves.change(state)
        if changed is None or uneven.time_of(changed, tables) == inf:
            state = moves.start(1 + met % 4) if uneven.time_of(state, tables) == inf else state
            continue
        state = changed
        met += 1
        score = score_of(uneven.plan_of(state, tables), inputs)
        assert score.is_valid
        guess = uneven.time_of(state, tables)
        assert guess >= score.timing.total_s - 1e-9
        exact += isclose(guess, score.timing.total_s, rel_tol=1e-9)
    assert exact > 100


def test_time_for_samples_is_the_shortest() -> None:
    """Against every moment at which a column has taken up more."""
    random = Random(3)
    for _ in range(200):
        found = []
        for _ in range(random.randint(1, 3)):
            size = random.randint(1, 4)
            steps = [random.uniform(0.5, 1.0) for _ in range(size)]
            seconds = (0.0, *(sum(steps[: index + 1]) for index in range(size)))
            found.append(
                Pace(micro_batch=size, seconds=seconds, is_free=bool(random.randint(0, 1)))
            )
        counts = [random.randint(1, 3) for _ in found]
        samples = random.randint(20, 60)
        time_s = time_for(found, counts, samples)

        def done(at_s: float, found: list[Pace] = found, counts: list[int] = counts) -> int:
            return sum(
                count * pace.samples_in(at_s) for pace, count in zip(found, counts, strict=True)
            )

        moments = sorted(
            full * pace.seconds[-1] + rest
            for pace in found
            for full in range(samples + 1)
            for rest in pace.seconds[:-1]
        )
        slowly = next(moment for moment in moments if done(moment) >= samples)
        assert time_s == pytest.approx(slowly, abs=1e-9)


def every_plan_of_sailors(tables: Tables) -> float:
    """The best of all plans of one or two stages with columns of at most two kinds, by trying."""
    teams = range(len(tables.teams))
    layers = tables.inputs.num_layers
    best = inf
    for bounds in [(0, layers), *((0, bound, layers) for bound in range(1, layers - 1))]:
        kinds = list(product(teams, repeat=len(bounds) - 1))
        for one, other in product(kinds, repeat=2):
            for first, second in product(range(1, 5), range(4)):
                for size in (1, 2, 4, 8):
                    made = (
                        Kind(teams=one, micro_batch=size, count=first),
                        Kind(teams=other, micro_batch=size, count=second),
                    )
                    state = Columns(bounds=bounds, kinds=made if second else made[:1])
                    best = min(best, columns.sailors_time_s(state, tables))
    return best


@pytest.mark.slow
def test_no_plan_on_few_gpus_is_better(inputs: Inputs) -> None:
    few = {"A100-40": 2, "V100-16": 2}
    best = every_plan_of_sailors(Tables(inputs=inputs, num_gpus=few))
    found = search(inputs, few, (Rules.SAILOR,), limit=Limit(evaluations=20_000))
    assert found.score.timing.total_s <= best + 1e-9


def quick(
    inputs: Inputs, num_gpus: dict[str, int], *rules: Rules, is_tight: bool = False
) -> Found:
    return search(
        inputs, num_gpus, rules, limit=Limit(evaluations=40_000), is_tight=is_tight, seed=1
    )


@THOROUGH
@pytest.mark.slow
def test_plans_are_better_than_sailors(inputs: Inputs) -> None:
    """By Sailor's rules alone, and with the others; both are valid, and the batch is whole."""
    strict = search(
        inputs, MIXED, (Rules.SAILOR,), limit=Limit(evaluations=cases(200_000, 50_000))
    )
    free = quick(inputs, MIXED, *EVERY_RULE)
    begun = search(inputs, MIXED, EVERY_RULE, limit=Limit(evaluations=100), start=strict.state)
    assert begun.score.timing.total_s <= strict.score.timing.total_s
    for found in (strict, free):
        assert found.score.is_valid
        assert found.score.samples >= 1024
        assert found.evaluations >= 40_000
    assert free.score.timing.total_s < strict.score.timing.total_s < 22.990843
    assert strict.score.extensions == ()
    assert INTERPOLATED in free.score.extensions


def test_plans_that_hold_what_real_runs_do(inputs: Inputs) -> None:
    found = quick(inputs, MIXED, *EVERY_RULE, is_tight=True)
    assert found.score.flags == ()
    assert all(each.fits_tightly for each in found.score.memory)


def test_the_same_seed_finds_the_same_plan(inputs: Inputs) -> None:
    one, other = (
        search(inputs, RTX, EVERY_RULE, limit=Limit(evaluations=5_000), seed=4) for _ in range(2)
    )
    assert one.plan == other.plan
    assert read_plan(written(one.plan, "us-central1-a")) == one.plan


def test_even_plans(inputs: Inputs) -> None:
    """Sixteen of each: as the table says, four and four teams of four or better."""
    found = best_even(inputs, {"A100-40": 16, "V100-16": 16})
    assert found is not None
    plan, score = found
    assert score.is_valid
    assert score.extensions == ()
    assert score.timing.total_s <= 24.808642
    assert len({replica.tensor for stage in plan.stages for replica in stage.replicas}) == 1
    alone = best_even(inputs, {"A100-40": 1})
    assert alone is not None
    assert best_even(inputs, {"RTX-2080": 1}) is None


def test_what_cannot_be_searched_for_is_refused(inputs: Inputs) -> None:
    with pytest.raises(StrategyError, match="no plan for 1 RTX-2080 was found in"):
        search(inputs, {"RTX-2080": 1}, (Rules.SAILOR,), limit=Limit(evaluations=2_000))
    with pytest.raises(BudgetError, match="0 s and 5 evaluations"):
        Limit(seconds=0, evaluations=5)
