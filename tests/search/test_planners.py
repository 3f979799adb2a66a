"""One conformance suite for every registered method, and what each method promises."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations_with_replacement
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import heterog.search.sharing as sharing
from heterog.cluster import Cluster
from heterog.envs.toy import chain_graph
from heterog.errors import (
    BudgetError,
    ConformanceError,
    HeterogError,
    StrategyError,
    UnknownNameError,
)
from heterog.graph.capture import capture
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.graph.workload import Workload
from heterog.lowering.program import FloatArray
from heterog.methods.data_parallel import even_shares, uniform_strategy
from heterog.methods.local_search.planner import LocalSearch
from heterog.methods.model_parallel import balanced_chain
from heterog.methods.planner import Budget, Candidate, Planner, PlanResult, Problem, Spending
from heterog.methods.registry import built_in_methods
from heterog.methods.repair import repair
from heterog.search import conformance
from heterog.search.conformance import CHECKS, Check, check_planner, load_planner
from heterog.search.judging import run_method
from heterog.search.portfolio import best_row
from heterog.search.rows import MethodRow
from heterog.simulator.compile_kernels import smallest_graph
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.lower_bound import LowerBound
from heterog.simulator.space import StepSettings, balanced_homes, device_sets
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES, FIRST_BUCKET_BYTES, Decision, Sync
from tests.search.asking import run_methods
from tests.simulator.builders import cluster_of
from tests.thorough import few_of, one_in


def deep_mlp() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(2048, 2048), nn.ReLU()) for _ in range(6)]
    return nn.Sequential(*layers, nn.Linear(2048, 64))


@lru_cache(maxsize=1)
def graph() -> OpGraph:
    batch = (torch.zeros(512, 2048), torch.zeros(512, 64))
    return capture(
        Workload(deep_mlp, batch, functional.mse_loss, torch.optim.Adam, name="deep_mlp")
    )


@lru_cache(maxsize=1)
def evaluator() -> Evaluator:
    return Evaluator(graph(), Cluster.load("paper_8gpu"))


def problem(budget: str = "300e", **changes: object) -> Problem:
    return replace(Problem(evaluator=evaluator(), budget=Budget.parse(budget)), **changes)  # type: ignore[arg-type]


def every_planner() -> list[Planner]:
    return list(built_in_methods())


@one_in(3)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("planner", every_planner(), ids=lambda planner: planner.name)
def test_every_method_conforms(planner: Planner, check: Check) -> None:
    check(planner, evaluator())


@pytest.mark.parametrize("planner", every_planner(), ids=lambda planner: planner.name)
def test_every_method_is_found_by_its_name_and_applies(planner: Planner) -> None:
    found = built_in_methods()[planner.name]
    assert (type(found), found.name) == (type(planner), planner.name)
    result = planner.plan(problem("50e"))
    if planner.name in ("spatial", "sequences"):  # nothing to cut here; see their own tests
        reasons = ("no convolution", "samples are enough", "nothing in the batch is a sequence")
        assert any(each in result.reason for each in reasons)
    else:
        assert result.candidates


class Broken(Planner):
    """A method that does one thing wrong."""

    name = "broken"
    stage = "search"

    def __init__(self, **wrong: object) -> None:
        self.wrong = wrong
        self.name = str(wrong.get("name", self.name))
        self.stage = str(wrong.get("stage", self.stage))
        self.rng = np.random.default_rng(0)

    def plan(self, problem: Problem) -> PlanResult:
        found = built_in_methods()["ev_ar"].plan(replace(problem, step_barrier=True)).candidates[0]
        strategy = replace(found.strategy, step_barrier=problem.step_barrier)
        if "barrier" in self.wrong:
            strategy = replace(strategy, step_barrier=True)
        if "random" in self.wrong:
            strategy = replace(strategy, bucket_bytes=int(self.rng.integers(1 << 30)))
        if "illegal" in self.wrong:
            strategy = replace(strategy, decisions=strategy.decisions[:-1])
        orders = () if "orders" in self.wrong else (Order.FIFO,)
        return PlanResult(
            candidates=()
            if "empty" in self.wrong
            else (replace(found, strategy=strategy, orders=orders),),
            num_evaluations=1000 if "spent" in self.wrong else 1,
            search_seconds=0.0,
        )


def test_a_method_that_conforms_passes() -> None:
    check_planner(Broken())
    check_planner(Broken(), evaluator())


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("name", r"has the name 'a,b', which has a comma"),
        ("stage", r"has the stage 'later'; known are baseline, zero_shot, search"),
        ("empty", r"no candidate and gives no reason"),
        ("orders", r"without any order to run in"),
        ("illegal", r"broken makes an illegal strategy: .*group"),
        ("random", r"other candidates for the same problem the second time"),
        ("spent", r"spent 1000 evaluations of 50"),
        ("barrier", r"asked for step_barrier=False and answers otherwise"),
    ],
)
def test_a_method_that_breaks_the_contract_is_told_how(wrong: str, text: str) -> None:
    values = {"name": "a,b", "stage": "later"}
    with pytest.raises(ConformanceError, match=text):
        check_planner(Broken(**{wrong: values.get(wrong, True)}), evaluator())


def test_a_claim_below_the_bound_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = LowerBound(seconds=1e3, compute_s=1e3, path_s=0.0)
    monkeypatch.setattr(conformance, "lower_bound_s", lambda *_: bound)
    with pytest.raises(ConformanceError, match=r"below the lower bound of 1000.0 s"):
        check_planner(Broken(), evaluator())


def test_a_planner_needs_a_way_to_plan() -> None:
    class Idle:
        name, stage = "idle", "search"

    with pytest.raises(ConformanceError, match="Idle has no plan; a method is a class"):
        check_planner(Idle())  # type: ignore[arg-type]


def test_methods_of_one_problem_do_not_answer_for_each_other() -> None:
    graph, cluster = chain_graph(batch_size=32), Cluster.load("paper_8gpu")
    methods, budget = built_in_methods(), Budget(evaluations=60)
    shared = Problem(evaluator=Evaluator(graph, cluster), budget=budget)
    for name in ("best_ddp", "tuned_uniform", "deeppool", "hap"):
        alone = Problem(evaluator=Evaluator(graph, cluster), budget=budget)
        found, own = methods[name].plan(shared), methods[name].plan(alone)
        assert found.candidates == own.candidates, name


def test_methods_that_do_not_apply_say_why() -> None:
    """Nothing to choose from is the asker's to mend, not a failed assertion."""
    known = built_in_methods().having(Broken(empty=True))
    with pytest.raises(StrategyError, match=r"no method applies here \(broken: no reason given"):
        best_row(run_methods(evaluator(), ["broken"], known=known, budget=Budget(evaluations=5)))


def test_a_method_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from heterog.methods.registry import built_in_methods\n"
        "class Mine:\n"
        "    name, stage = 'mine', 'search'\n"
        "    def plan(self, problem):\n"
        "        return built_in_methods()['ev_ar'].plan(problem)\n"
        "class Taken(Mine):\n"
        "    name = 'ddp'\n"
        "class Asks(Mine):\n"
        "    def __init__(self, width): pass\n"
        "class Nothing:\n"
        "    pass\n"
    )
    known = built_in_methods()
    own = load_planner(f"{file}:Mine", known)
    assert own.name == "mine"
    (row,) = run_methods(
        evaluator(), ["mine"], known=known.having(own), budget=Budget(evaluations=5)
    )
    assert row.outcome == "ok"
    assert "mine" not in built_in_methods().names, "nothing changes for anybody else"
    for name, text in (
        ("Taken", "is named 'ddp', as a method that there is already"),
        ("Asks", r"cannot be made without arguments: TypeError: .*'width'"),
        ("Nothing", "Nothing has no name and no stage and no plan; a method is a class with"),
        ("Gone", r"there is no 'Gone'; it has Asks, Mine, Nothing, Taken"),
    ):
        with pytest.raises(HeterogError, match=text):
            load_planner(f"{file}:{name}", known)


class Wrong(Planner):
    """A method whose candidate gives two of the batch's samples, or that returns a list."""

    name, stage = "wrong", "search"

    def __init__(self, *, is_list: bool) -> None:
        self._is_list = is_list

    def plan(self, problem: Problem) -> PlanResult:
        if self._is_list:
            return []  # type: ignore[return-value]
        strategy = uniform_strategy(problem.evaluator, Decision(devices=(0, 1), shares=(1, 1)))
        candidate = Candidate(strategy=strategy, orders=problem.orders)
        return PlanResult(candidates=(candidate,), num_evaluations=1)


def test_a_search_without_time_says_nothing_about_its_points() -> None:
    """What a method would say if no point made sense is no reason where none was tried."""
    row = run_method(built_in_methods()["poplar"], problem(budget="0.000001ms"))
    assert row.outcome == "not_applicable"
    assert row.shortage == "its part of the budget was over before it had a strategy"


@pytest.mark.parametrize(
    ("is_list", "text"),
    [
        (True, r"wrong: plan\(\) returns list; return a .*PlanResult"),
        (False, r"a candidate of wrong is no legal plan: .*2 samples in all"),
    ],
)
def test_what_a_method_does_wrong_is_said_with_its_name(is_list: bool, text: str) -> None:
    with pytest.raises(HeterogError, match=text):
        run_method(Wrong(is_list=is_list), problem("5e"))


def test_the_four_baselines_are_what_the_paper_says() -> None:
    rows = {row.method: row for row in run_methods(
        evaluator(), ["ev_ps", "ev_ar", "cp_ps", "cp_ar", "ddp"], budget=Budget(evaluations=1)
    )}  # fmt: skip
    everywhere = tuple(range(8))
    for name, row in rows.items():
        assert row.candidate is not None
        strategy = row.candidate.strategy
        (decision,) = set(strategy.decisions)
        assert decision.devices == everywhere
        assert row.order == "fifo"
        assert strategy.num_micro_batches == 1
        buckets = strategy.bucket_bytes, strategy.first_bucket_bytes
        assert buckets == ((DEFAULT_BUCKET_BYTES, FIRST_BUCKET_BYTES) if name == "ddp" else (0, 0))
        by_server = decision.sync == Sync.PARAMETER_SERVER
        assert by_server == name.endswith("_ps")
        if name.startswith("cp"):
            assert decision.shares[0] > decision.shares[-1], "a V100 gets more than a P100"
        else:
            assert decision.shares == (64,) * 8


def test_proportional_shares_follow_measured_speed() -> None:
    speeds = evaluator().speeds
    assert speeds[0] == speeds[1] > speeds[2]
    assert even_shares(evaluator()) == (64,) * 8


def test_homes_are_balanced_by_bytes() -> None:
    sizes = evaluator().tables.parameter_bytes
    homes = balanced_homes(sizes, (0, 3, 5))
    load = [sizes[homes == server].sum() for server in (0, 3, 5)]
    assert set(homes) == {0, 3, 5}
    assert max(load) - min(load) <= sizes.max()


def test_ddp_accumulates_as_little_as_fits() -> None:
    tight = Cluster.load("paper_8gpu")
    batch = (torch.zeros(65536, 2048), torch.zeros(65536, 64))
    large = capture(Workload(deep_mlp, batch, functional.mse_loss, torch.optim.Adam))
    plain = built_in_methods()["ddp"].plan(
        Problem(evaluator=Evaluator(large, tight), budget=Budget(evaluations=1))
    )
    evaluation = Evaluator(large, tight).referee(plain.candidates[0].strategy, Order.FIFO)
    needed = max(evaluation.peak_memory_bytes)
    devices = tuple(
        replace(device, usable_memory_bytes=int(needed * 0.75)) for device in tight.devices
    )
    small = Evaluator(large, replace(tight, devices=devices))
    row = run_method(
        built_in_methods()["ddp_accumulate"],
        Problem(evaluator=small, budget=Budget(evaluations=1)),
    )
    assert row.outcome == "ok"
    assert row.candidate is not None
    count = row.candidate.strategy.num_micro_batches
    assert count > 1
    without = run_method(
        built_in_methods()["ddp"], Problem(evaluator=small, budget=Budget(evaluations=1))
    )
    assert without.outcome == "out_of_memory"


def test_balanced_chain_by_hand() -> None:
    seconds = np.array([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0]])
    assert balanced_chain(seconds, np.zeros((3, 2)), np.full(2, 1.0)) == [0, 0, 1]
    # Without room for two groups on the first device, the second takes more than is fast.
    assert balanced_chain(seconds, np.ones((3, 2)), np.array([1.0, 9.0])) == [0, 1, 1]


def slowest_s(
    stages: Sequence[int], seconds: FloatArray, memory: FloatArray, room: FloatArray
) -> float:
    """Seconds of the slowest stage of a chain, an overflow charged in proportion."""
    each = np.array(stages)[:, None] == np.arange(len(room))
    over = np.maximum((memory * each).sum(axis=0) - room, 0.0) / room
    penalty = 10.0 * seconds.sum(axis=0).max()
    return float(((seconds * each).sum(axis=0) + penalty * over).max())


def test_a_balanced_chain_is_the_best_of_all_chains() -> None:
    rng = np.random.default_rng(0)
    for _ in range(10):
        seconds, memory = rng.random((2, 6, 3))
        costs = seconds, memory, rng.choice([0.5, 2.0, np.inf], 3)
        chains = combinations_with_replacement(range(3), 6)
        least = min(slowest_s(each, *costs) for each in chains)
        assert slowest_s(balanced_chain(*costs), *costs) == pytest.approx(least)


def test_local_search_is_not_worse_than_its_seeds_and_improves_with_budget() -> None:
    rows = run_methods(evaluator(), ["auto"], budget=Budget(evaluations=400))
    winner = best_row(rows)
    assert all(
        winner.step_time_s <= row.step_time_s  # type: ignore[operator]
        for row in rows
        if row.step_time_s is not None
    )
    search = next(row for row in rows if row.method == "local_search")
    replicas = ("ev_ps", "ev_ar", "cp_ps", "cp_ar", "ddp")
    baselines = [row.step_time_s for row in rows if row.method in replicas and row.step_time_s]
    assert search.step_time_s is not None
    assert search.step_time_s < min(baselines)


def test_a_searching_method_alone_is_seeded_by_the_baselines() -> None:
    rows = run_methods(evaluator(), ["local_search"], budget=Budget(evaluations=50))
    assert [row.method for row in rows] == ["local_search"]


def test_what_is_left_out_gives_no_start_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """A baseline left out of ``auto`` ran all the same, and searches started from its plans."""
    asked: list[str] = []

    def heard(planner: Planner, problem: Problem) -> MethodRow:
        asked.append(planner.name)
        return run_method(planner, problem)

    monkeypatch.setattr(sharing, "run_method", heard)
    without = ("megatron_grid", "local_search")
    rows = run_methods(evaluator(), ["auto"], budget=Budget(evaluations=60), without=without)
    assert "tuned_uniform" in asked
    assert set(without).isdisjoint(asked)
    assert set(without).isdisjoint(row.method for row in rows)


@pytest.mark.parametrize("most_tasks", few_of([2000, 1], 1))
def test_methods_pass_over_what_is_too_large(most_tasks: int) -> None:
    """Programs that are not simulated have no peaks, and repairs and poplar counted on some."""
    small = Evaluator(graph(), cluster_of((1.0, ["T4"] * 4), (1.0, ["V100-16GB"] * 4)))
    small.most_tasks = most_tasks
    for method in built_in_methods():
        run_method(method, Problem(evaluator=small, budget=Budget(evaluations=30)))
    alike = Decision(devices=tuple(range(8)), shares=even_shares(small))
    given = uniform_strategy(small, alike)
    assert repair(small, given, Order.FIFO, budget=Budget(evaluations=30)) == given


def test_space_rows_round_trip() -> None:
    own = evaluator()
    space = own.space()
    rng = np.random.default_rng(0)
    for _ in range(20):
        row = rng.integers(len(space.candidates), size=group_ops(graph()).num_groups)
        strategy = space.decode(row.astype(np.int32), StepSettings(), step_barrier=True)
        strategy.check(graph(), own.cluster)
        again = space.row_of(strategy)
        assert again is not None
        assert (again == row).all()
        # The quick encoding means the same as the careful one.
        quick = own.evaluate(
            space.encode(row.astype(np.int32), StepSettings(), step_barrier=True), Order.RANK
        )
        assert quick == own.evaluate(strategy, Order.RANK)


def test_device_sets_are_named_by_a_stated_rule() -> None:
    sets = device_sets(Cluster.load("paper_8gpu"))
    assert sets[0] == tuple(range(8))
    assert (0, 1) in sets
    assert (2, 3, 4, 5) in sets, "all cards of one type"
    assert {(device,) for device in range(8)} <= set(sets)
    assert len(sets) == 8 + 15
    assert len(device_sets(Cluster.load("hap_v100_p100"))) <= 256


@pytest.mark.parametrize("text", ["", "30", "s", "-3s", "3.5e", "ten s"])
def test_budgets_that_cannot_be_read(text: str) -> None:
    with pytest.raises(BudgetError, match=r"cannot read budget|whole number"):
        Budget.parse(text)


def test_a_budget_is_of_one_kind() -> None:
    with pytest.raises(BudgetError, match=r"of 30 s and 5 evaluations: only the evaluations"):
        Budget(seconds=30.0, evaluations=5)


@pytest.mark.parametrize("text", ["0s", "0e", "0.0m"])
def test_budgets_of_nothing(text: str) -> None:
    with pytest.raises(BudgetError, match="allows no search"):
        Budget.parse(text)


def test_spending_counts_evaluations() -> None:
    spending = Spending(Budget(evaluations=2), evaluator())
    strategy = built_in_methods()["ddp"].plan(problem()).candidates[0].strategy
    spending = Spending(Budget(evaluations=2), evaluator())
    evaluator().evaluate(strategy, Order.FIFO)
    assert spending.fraction == 0.5
    evaluator().evaluate(strategy, Order.FIFO)
    assert spending.is_over


def test_unknown_methods_name_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'cp_ar'"):
        run_methods(evaluator(), ["cp_arr"], budget=Budget(evaluations=1))


def test_best_row_prefers_what_fits() -> None:
    rows = run_methods(evaluator(), ["ddp", "ev_ps"], budget=Budget(evaluations=1))
    broken = replace(rows[0], step_time_s=None, outcome="out_of_memory", overflow_bytes=2.0)
    assert isinstance(broken, MethodRow)
    assert best_row([broken, rows[1]]).method == rows[1].method
    nearer = replace(broken, method="nearer", overflow_bytes=1.0)
    assert best_row([broken, nearer]).method == "nearer"


@pytest.mark.parametrize("num_devices", [1, 2])
def test_every_method_works_on_the_smallest_clusters(num_devices: int) -> None:
    small = Evaluator(graph(), cluster_of((1.0, ["T4"] * num_devices)))
    rows = run_methods(small, ["auto"], budget=Budget(evaluations=200))
    assert [row.method for row in rows if row.outcome != "ok"] == []
    if num_devices == 1:
        times = {row.step_time_s for row in rows if row.method in ("ev_ar", "ev_ps", "cp_ar")}
        assert len(times) == 1, "without others there is nothing to synchronise"


def test_a_search_ends_when_it_has_seen_everything() -> None:
    alone = Evaluator(smallest_graph(), cluster_of((1.0, ["T4"])))
    problem = Problem(evaluator=alone, budget=Budget(evaluations=10**9))
    assert LocalSearch().plan(problem).num_evaluations < 1000
