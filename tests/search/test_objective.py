"""The least money before a deadline: against all sets of hosts, and what must always hold."""

import math
from dataclasses import replace
from functools import lru_cache
from itertools import combinations
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from heterog.cluster.hardware import HourlyPrices
from heterog.cluster.spec import parse_cluster
from heterog.cluster.topology import Cluster
from heterog.errors import ClusterError, HeterogError, InputFileError
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph
from heterog.graph.workload import Workload
from heterog.methods.planner import Budget
from heterog.search.cheapest import (
    MOST_SETS,
    HostSubset,
    differing_sets,
    on_part,
    ranked_host_sets,
)
from heterog.search.objective import (
    FASTEST,
    Aim,
    Objective,
    Offer,
    best_trades,
    cost_per_s,
    hosts_used,
    rent_per_s,
    tokens_per_sample,
)
from heterog.search.plan import Plan, load_plan
from heterog.simulator.evaluator import Evaluator
from tests.search.asking import make_plan, run_methods
from tests.thorough import THOROUGH, few_of

FILE = """
schema_version: 1
name: lab
prices: {currency: USD, device_hour: {V100-16GB: 2.48, T4: 0.35}, host_hour: {C: 1.90}}
hosts:
  - name: A
    devices: [{type: V100-16GB, count: 2}]
    intra: nvlink_v100
    nic: {line_rate: 100 Gbit/s}
  - name: B
    count: 2
    devices: [{type: T4, count: 2}]
    intra: pcie3
    nic: {line_rate: 50 Gbit/s}
  - name: C
    devices: [{type: V100-16GB}, {type: T4}]
    intra: pcie3
    nic: {line_rate: 25 Gbit/s}
pairs: {lines: [{between: [[A, C], [B]], line_rate: 10 Gbit/s}]}
"""
METHODS = ("cp_ar", "cp_ps", "model_parallel", "single_device")
STEPS = 100_000
FORTY = Budget(evaluations=40)


def lab() -> Cluster:
    return parse_cluster(FILE, Path("lab.yaml"))


def mlp() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(1024, 64))


@lru_cache(maxsize=1)
def graph() -> OpGraph:
    batch = (torch.zeros(1024, 1024), torch.zeros(1024, 64))
    return capture(Workload(mlp, batch, functional.mse_loss, torch.optim.Adam, name="mlp"))


@lru_cache
def planned(objective: Objective, methods: tuple[str, ...] = METHODS, budget: str = "40e") -> Plan:
    return make_plan(graph(), lab(), methods=methods, budget=budget, objective=objective)


def money(plan: Plan) -> float:
    assert plan.cost is not None
    return plan.cost.per_step


CHEAPEST = Objective(aim=Aim.COST_PER_TOKEN)


@lru_cache(maxsize=1)
def every_offer() -> tuple[Offer, ...]:
    """The methods on each of the 15 sets of hosts, without anything clever."""
    cluster = lab()
    offers = []
    for size in range(1, cluster.num_hosts + 1):
        for hosts in combinations(range(cluster.num_hosts), size):
            part = HostSubset(whole=cluster, hosts=hosts).part
            for row in run_methods(Evaluator(graph(), part), METHODS, budget=FORTY, seed=0):
                if row.step_time_s is None or row.candidate is None:
                    continue
                rent = cost_per_s(row.candidate.strategy, part)
                offers.append(
                    Offer(
                        hosts=(str(hosts),),
                        method=row.method,
                        step_time_s=row.step_time_s,
                        cost_per_step=row.step_time_s * rent,
                    )
                )
    return best_trades(offers)


def test_the_cheapest_plan_is_that_of_all_sets_of_hosts() -> None:
    best = min(offer.cost_per_step for offer in every_offer())
    assert money(planned(CHEAPEST)) == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("slack", few_of([1.3, 1.01, 2.0], 1))
def test_the_cheapest_plan_in_time_is_that_of_all_sets_of_hosts(slack: float) -> None:
    fastest_s = every_offer()[0].step_time_s
    in_time = [offer for offer in every_offer() if offer.step_time_s <= slack * fastest_s]
    asked = Objective(aim=Aim.COST, num_steps=STEPS, deadline_s=slack * fastest_s * STEPS)
    plan = planned(asked)
    assert plan.cost is not None
    assert plan.cost.missed_s == 0.0
    assert money(plan) <= min(offer.cost_per_step for offer in in_time) * (1.0 + 1e-9)


def test_without_an_objective_nothing_changes() -> None:
    """Prices in the file or not, the same rows, bit for bit, and no word of money without."""
    bare = make_plan(graph(), replace(lab(), prices=None), methods=METHODS, budget="40e")
    priced = planned(FASTEST)
    assert bare.strategy == priced.strategy
    assert [row.step_time_s for row in bare.rows] == [row.step_time_s for row in priced.rows]
    assert not {"objective", "cost", "offers"} & set(bare.summary())
    assert "cost_per_step" not in bare.summary()["methods"][0]
    assert "prices" not in bare.cluster.to_dict()


@THOROUGH
def test_the_cheapest_plan_costs_no_more_than_the_fastest() -> None:
    methods = (*METHODS, "pipeline", "local_search")
    fastest, cheapest = (planned(each, methods, "12e") for each in (FASTEST, CHEAPEST))
    assert money(cheapest) <= money(fastest)
    assert fastest.step_time_s is not None
    loose = Objective(aim=Aim.COST, num_steps=STEPS, deadline_s=fastest.step_time_s * STEPS)
    assert money(planned(loose, methods, "12e")) <= money(fastest)


@THOROUGH
def test_a_budget_in_seconds_goes_on_with_the_hosts_of_the_best_plan() -> None:
    """Without any claim about times: the plan fits, is paid for, and names one of its offers."""
    methods = ("cp_ar", "local_search")
    plan = make_plan(graph(), lab(), methods=methods, budget="5s", objective=CHEAPEST)
    assert plan.cost is not None
    assert plan.cost.hosts in [offer.hosts for offer in plan.offers]
    assert {row.method for row in plan.rows} == set(methods)


def test_a_budget_that_is_over_before_the_first_search_still_finds_a_plan() -> None:
    plan = make_plan(graph(), lab(), methods=("cp_ar",), budget="1ms", objective=CHEAPEST)
    assert plan.cost is not None


@THOROUGH
def test_a_tighter_deadline_never_gets_cheaper() -> None:
    slowest_s = planned(CHEAPEST).step_time_s
    fastest_s = planned(FASTEST).step_time_s
    assert slowest_s is not None
    assert fastest_s is not None
    costs = []
    for part in range(5):
        step_s = fastest_s * (slowest_s / fastest_s) ** (part / 4)
        asked = Objective(aim=Aim.COST, num_steps=STEPS, deadline_s=1.0001 * step_s * STEPS)
        costs.append(money(planned(asked)))
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] < costs[0]


def test_an_impossible_deadline_is_missed_by_the_fastest_plan() -> None:
    fastest_s = planned(FASTEST).step_time_s
    assert fastest_s is not None
    plan = planned(Objective(aim=Aim.COST, num_steps=STEPS, deadline_s=1.0))
    assert plan.cost is not None
    assert plan.step_time_s is not None
    # Nothing that was found on any hosts is less late: some hosts alone may even be faster.
    assert plan.step_time_s == plan.offers[0].step_time_s <= fastest_s
    assert plan.cost.missed_s == pytest.approx(STEPS * plan.step_time_s - 1.0)


def test_a_plan_of_some_hosts_is_one_of_the_whole_cluster() -> None:
    """Same seconds, same memory, no hosts besides; and back again."""
    cluster, evaluator = lab(), Evaluator(graph(), lab())
    for hosts in ((0,), (1, 2), (0, 3), (1, 3)):
        subset = HostSubset(whole=cluster, hosts=hosts)
        methods = ("cp_ps", "pipeline", "megatron_grid")
        budget = Budget(evaluations=10)
        for row in run_methods(Evaluator(graph(), subset.part), methods, budget=budget):
            if row.candidate is None or row.candidate.judged is None:
                continue
            lifted = subset.lifted(row.candidate.strategy)
            judged = evaluator.referee(lifted, row.candidate.orders[0])
            assert judged.step_time_s == pytest.approx(row.candidate.judged.step_time_s)
            peaks = [judged.peak_memory_bytes[device] for device in subset.devices]
            assert peaks == list(row.peak_memory_bytes)
            assert set(hosts_used(lifted, cluster)) <= set(hosts)
            assert on_part(lifted, cluster, subset.devices, subset.part) == row.candidate.strategy


def test_a_plan_with_an_objective_is_read_as_it_was_written(tmp_path: Path) -> None:
    plan = planned(Objective(aim=Aim.COST, num_steps=STEPS, deadline_s=1e6))
    plan.save(tmp_path / "plan.json")
    found = load_plan(tmp_path / "plan.json")
    assert (found.objective, found.offers, found.cost) == (plan.objective, plan.offers, plan.cost)
    plan.cluster.save(tmp_path / "lab.yaml")
    assert Cluster.load(tmp_path / "lab.yaml").prices == plan.cluster.prices


def test_a_host_is_rented_whole() -> None:
    cluster = lab()
    assert rent_per_s(cluster, [0]) * 3600 == pytest.approx(2 * 2.48)
    assert rent_per_s(cluster, [1, 3]) * 3600 == pytest.approx(0.70 + 1.90)
    strategy = planned(FASTEST, ("single_device",)).strategy
    (host,) = hosts_used(strategy, cluster)
    assert cost_per_s(strategy, cluster) == cluster.host_price_per_s(host)


def test_hosts_that_cost_nothing_are_ranked_by_time() -> None:
    nothing = HourlyPrices(currency="EUR", device_hour={"V100-16GB": 0, "T4": 0})
    free = replace(lab(), prices=nothing)
    plan = make_plan(graph(), free, methods=METHODS, budget="40e", objective=CHEAPEST)
    assert money(plan) == 0.0
    fastest_s = planned(FASTEST).step_time_s
    assert plan.step_time_s is not None
    assert fastest_s is not None
    assert plan.step_time_s <= fastest_s


def test_large_clusters_have_few_sets() -> None:
    cluster = Cluster.load("mixed_128")
    types = {each.name: 1.0 + number for number, each in enumerate(cluster.device_types)}
    priced = replace(cluster, prices=HourlyPrices(currency="USD", device_hour=types))
    sets = ranked_host_sets(Evaluator(graph(), priced))
    assert 0 < len(sets) <= MOST_SETS
    assert len(set(sets)) == len(sets)
    # Every host of another price: all differ, and there are 2^16 sets.
    own = {host.name: 1.0 + number for number, host in enumerate(cluster.hosts)}
    unlike = replace(cluster, prices=HourlyPrices(currency="USD", host_hour=own))
    assert sum(1 for _ in differing_sets(unlike)) <= MOST_SETS


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("0.35", "-0.35", "prices.device_hour.T4: -0.35 is not at least 0."),
        ("0.35", ".inf", "is not a finite number."),
        ("0.35", ".nan", "nan is not a finite number."),
        ("T4: 0.35", "T5: 0.35", "no device is of type 'T5'; there are T4, V100-16GB."),
        ("C: 1.90", "D: 1.90", "there is no host 'D'; there are A, B0, B1, C, B."),
        ("T4: 0.35", "T4: a lot", "prices.device_hour.T4"),
        (", T4: 0.35", "", "has no price for host 'B0'; add it to host_hour, or T4"),
        ("currency: USD, ", "", "prices.currency: this field is required."),
    ],
)
def test_wrong_prices_are_told_with_line_and_field(old: str, new: str, text: str) -> None:
    assert old in FILE
    with pytest.raises(InputFileError) as caught:
        parse_cluster(FILE.replace(old, new, 1), Path("lab.yaml"))
    assert text in str(caught.value)
    assert "lab.yaml, line 4" in str(caught.value)


def test_a_type_with_other_numbers_has_the_price_of_its_name() -> None:
    text = FILE.replace("{type: T4, count: 2}", "{type: T4, count: 2, compute_efficiency: 0.5}")
    cluster = parse_cluster(text, Path("lab.yaml"))
    assert cluster.devices[2].type.name == "T4-custom"
    assert cluster.host_price_per_s(1) * 3600 == pytest.approx(0.70)


def test_cost_without_prices_is_refused() -> None:
    with pytest.raises(ClusterError, match="has no prices; add to its file"):
        make_plan(graph(), replace(lab(), prices=None), budget="1e", objective=CHEAPEST)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"aim": Aim.COST}, "without a number of steps"),
        ({"deadline_s": 5.0}, "a deadline without a number of steps"),
        ({"num_steps": 0}, "a run of 0 steps"),
        ({"num_steps": 1, "deadline_s": math.nan}, "a deadline of nan s"),
    ],
)
def test_objectives_that_make_no_sense(fields: dict[str, object], text: str) -> None:
    with pytest.raises(HeterogError, match=text):
        Objective(**fields)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.floats(0.1, 10.0), st.floats(0.0, 10.0)), min_size=1))
def test_the_best_trades_are_those_that_nothing_beats(pairs: list[tuple[float, float]]) -> None:
    offers = [
        Offer(hosts=(), method="m", step_time_s=step_s, cost_per_step=cost)
        for step_s, cost in pairs
    ]
    kept = best_trades(offers)
    for each in offers:
        assert any(
            best.step_time_s <= each.step_time_s and best.cost_per_step <= each.cost_per_step
            for best in kept
        )
    steps = [offer.step_time_s for offer in kept]
    assert steps == sorted(set(steps))


def test_only_tables_of_token_numbers_have_tokens() -> None:
    assert tokens_per_sample(graph()) is None
    model = nn.Sequential(nn.Embedding(11, 8), nn.Flatten(), nn.Linear(48, 4))
    batch = (torch.zeros(5, 6, dtype=torch.int64), torch.zeros(5, 4))
    words = Workload(model, batch, functional.mse_loss, torch.optim.SGD, {"lr": 0.1})
    assert tokens_per_sample(capture(words)) == 6
