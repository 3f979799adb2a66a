"""The search of HAP: equal to brute force, with a heuristic that never exceeds what is left."""

from collections.abc import Iterator
from itertools import permutations
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from heterog.graph.op_graph import Phase
from heterog.methods.hap.a_star import Codes, Search
from heterog.methods.hap.fold import assign_steps, fold, fold_in_order
from heterog.methods.hap.prices import Delivery
from heterog.methods.hap.programs import data_parallel, program_cost
from heterog.methods.hap.segments import Segments
from heterog.methods.hap.theory import Theory, build_theory
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.division import split_in_proportion
from tests.methods.hap_cases import (
    UNLIMITED,
    brute_force,
    captured,
    prices_of,
    random_problem,
    searched,
)
from tests.thorough import one_in


def uneven(evaluator: Evaluator) -> tuple[int, ...]:
    weights = (2.0,) + (1.0,) * (evaluator.cluster.num_devices - 1)
    return split_in_proportion(evaluator.graph.batch_size, weights)


def deep_theory(num_layers: int) -> Theory:
    def model() -> nn.Module:
        layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(num_layers)]
        return nn.Sequential(*layers)

    return build_theory(captured(model, (torch.zeros(32, 64), torch.zeros(32, 64))))


@one_in(3)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("most_ops", [3, 6])
def test_search_is_equal_to_brute_force(seed: int, most_ops: int) -> None:
    evaluator = random_problem(seed, most_ops)
    theory = build_theory(evaluator.graph)
    prices = prices_of(evaluator, uneven(evaluator), theory)
    result = searched(theory, prices)
    best = result.programs[0]
    assert result.is_exact
    # The program costs what the search says, by the definition, and nothing costs less.
    assert program_cost(theory, prices, best.triples) == pytest.approx(best.cost_s, rel=1e-9)
    limit_s = best.cost_s * (1.0 + 1e-9)
    assert brute_force(theory, prices, limit_s) == pytest.approx(best.cost_s, rel=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_cutting_the_beam_is_reported_and_never_gains(seed: int) -> None:
    evaluator = random_problem(seed, 6)
    theory = build_theory(evaluator.graph)
    prices = prices_of(evaluator, uneven(evaluator), theory)
    exact = searched(theory, prices)
    narrow = searched(theory, prices, width=1)
    assert exact.is_exact
    assert narrow.programs[0].cost_s >= exact.programs[0].cost_s * (1.0 - 1e-12)
    if narrow.programs[0].cost_s > exact.programs[0].cost_s * (1.0 + 1e-12):
        assert not narrow.is_exact


def expansions(search: Search) -> Iterator[tuple[int, Codes, float, Codes]]:
    """(segment, entries, cost, entries after) of everything that can be reached."""
    boundary: set[Codes] = {()}
    for number, segment in enumerate(search.segments.segments):
        after: set[Codes] = set()
        for codes in boundary:
            inner = tuple(codes[place] for place in segment.inlets)
            for result, cost, _ in search.solve(number, inner):
                reached = tuple(
                    result[place] if is_inner else codes[place]
                    for is_inner, place in segment.outlets
                )
                yield number, codes, cost, reached
                after.add(reached)
        boundary = after


@pytest.mark.parametrize("seed", range(6))
def test_heuristic_is_consistent_and_admissible(seed: int) -> None:
    evaluator = random_problem(seed, 6)
    theory = build_theory(evaluator.graph)
    prices = prices_of(evaluator, uneven(evaluator), theory)
    search = Search(Segments(theory, fold(theory)), prices, UNLIMITED)
    left = search.heuristic()
    assert left[-1] == 0.0
    edges = list(expansions(search))
    for number, _, cost, _ in edges:
        assert left[number] <= cost + left[number + 1] + 1e-15
    # What is really left from every boundary, backwards.
    real: dict[tuple[int, Codes], float] = {(len(left) - 1, ()): 0.0}
    for number, codes, cost, reached in reversed(edges):
        rest = real.get((number + 1, reached), float("inf"))
        key = (number, codes)
        real[key] = min(real.get(key, float("inf")), cost + rest)
    assert all(left[number] <= rest + 1e-15 for (number, _), rest in real.items())


@given(st.integers(0, 10**6))
def test_delivering_more_never_costs_less(seed: int) -> None:
    rng = Random(seed)
    count = rng.randint(2, 5)
    price = [[0.0 if i == j else rng.random() for j in range(count)] for i in range(count)]
    delivery = Delivery(price)
    made = rng.randrange(count)
    for forms in range(1 << count):
        for form in range(count):
            assert delivery.price(made, forms | 1 << form) >= delivery.price(made, forms)
    direct = sum(price[made])
    assert delivery.price(made, (1 << count) - 1) <= direct + 1e-12
    # In whichever order forms are made, each from the cheapest form that is there.
    others = [form for form in range(count) if form != made]
    for forms in range(1 << count):
        wanted = {form for form in others if forms >> form & 1}
        costs = []
        for order in permutations(others):
            there, cost = [made], 0.0
            while not wanted <= set(there):
                form = order[len(there) - 1]
                cost += min(delivery.conversions[source][form] for source in there)
                there.append(form)
            costs.append(cost)
        assert delivery.price(made, forms) == pytest.approx(min(costs), abs=1e-12)


def test_delivery_shares_what_is_gathered() -> None:
    # Whole (form 0) costs 3; from whole everything is free, directly the others cost 2 each.
    delivery = Delivery([[0, 0, 0, 0], [3, 0, 2, 2], [3, 2, 0, 2], [3, 2, 2, 0]])
    assert delivery.price(1, 0b0100) == 2
    assert delivery.price(1, 0b1100) == 3  # both by way of the whole
    assert delivery.price(1, 0b1101) == 3


def test_every_row_is_in_exactly_one_step_and_cotangents_flow_to_earlier_steps() -> None:
    theory = deep_theory(4)
    graph = theory.graph
    folded = fold(theory)
    assert sorted(visit.row for visit in folded.visits) == list(range(len(theory.rows)))
    step = assign_steps(theory)
    maker = {write: number for number, row in enumerate(theory.rows) for write in row.writes}
    phases = [graph.ops[row.op].phase for row in theory.rows]
    for number, row in enumerate(theory.rows):
        assert phases[step[number]] == Phase.FORWARD
        for read in row.reads:
            before = maker.get(read.value)
            if before is not None and phases[number] != Phase.FORWARD != phases[before]:
                assert step[number] <= step[before]
    # A product's step holds its two backward products, its bias's sum and both updates.
    products = [
        n for n, row in enumerate(theory.rows) if graph.ops[row.op].kind == "addmm.default"
    ]
    for product in products[1:]:
        kinds = [graph.ops[r.op].kind for n, r in enumerate(theory.rows) if step[n] == product]
        assert kinds.count("mm.default") == 2
        assert kinds.count("sum.dim_IntList") == 1
        assert kinds.count("update") == 2


def test_a_folded_graph_carries_the_same_at_any_depth() -> None:
    def widest(theory: Theory, *, folded: bool) -> int:
        order = list(range(len(theory.rows)))
        plain = fold_in_order(theory, order, [0] * len(order))
        return max(map(len, (fold(theory) if folded else plain).carried))

    shallow, deep = deep_theory(4), deep_theory(12)
    assert widest(deep, folded=True) == widest(shallow, folded=True)
    assert widest(deep, folded=False) >= widest(shallow, folded=False) + 8


def test_repeated_layers_share_their_theory() -> None:
    shallow, deep = deep_theory(5), deep_theory(12)
    segments = [Segments(theory, fold(theory)) for theory in (shallow, deep)]
    assert len(segments[0].actions) == len(segments[1].actions)
    distinct = [{segment.signature for segment in each.segments} for each in segments]
    assert len(distinct[0]) == len(distinct[1])
    assert len(segments[1].segments) > len(segments[0].segments)


def test_data_parallelism_is_a_program() -> None:
    theory = deep_theory(3)
    rules = [row.triples[n] for row, n in zip(theory.rows, data_parallel(theory), strict=True)]
    by_op = {
        row.op: triple.rule for row, triple in zip(theory.rows, rules, strict=True) if triple.rule
    }
    from heterog.graph.batch_plan import batch_plan

    plan = batch_plan(theory.graph)
    for op, rule in by_op.items():
        assert rule.inputs == plan.needed[op]
        assert rule.outputs == tuple(plan.placements[t] for t in theory.graph.outputs[op])
