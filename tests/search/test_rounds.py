"""Methods go on where they were, time goes where it pays, and large plans say what they lack."""

import json
import math
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

import heterog.search.issue_order as issue_order
import heterog.search.portfolio as portfolio
from heterog import records
from heterog.cluster import Cluster
from heterog.cluster.spec import parse_cluster
from heterog.errors import InputFileError, StrategyError
from heterog.explain.explanation import explain
from heterog.export import make_export
from heterog.lowering.program import LAST_OP_KIND, FloatArray, IntArray, Program, TaskKind
from heterog.methods.local_search.planner import LocalSearch
from heterog.methods.planner import Budget, Planner, PlanResult, Problem
from heterog.methods.registry import built_in_methods
from heterog.report.tables import brief_answer
from heterog.search.issue_order import sends_by_op
from heterog.search.judging import FADES, Contender, next_of, run_method
from heterog.search.plan import load_plan
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.space import MAX_DEVICE_SETS, device_sets
from tests.search.asking import make_plan, run_methods
from tests.search.test_budget import clocked
from tests.search.test_planners import graph as mlp
from tests.simulator.builders import random_case
from tests.thorough import THOROUGH, one_in


def large(types: tuple[str, ...], hosts_of_each: int, devices: int = 1) -> Cluster:
    text = "".join(
        f"  - {{name: '{kind} {number}', devices: [{{type: {kind}, count: {devices}}}], "
        "intra: pcie3, nic: {line_rate: 25 Gbit/s}}\n"
        for kind in types
        for number in range(hosts_of_each)
    )
    return parse_cluster(f"schema_version: 1\nname: large\nhosts:\n{text}", Path("large.yaml"))


# --- alike hosts --------------------------------------------------------------------------------


def test_hosts_are_alike_by_all_but_their_names() -> None:
    cluster = large(("T4", "V100-16GB"), 3)
    assert cluster.host_kind == (0, 0, 0, 1, 1, 1)
    first, *rest = cluster.hosts
    slower = replace(first, nic_line_rate_bytes_per_s=1e9)
    assert replace(cluster, hosts=(slower, *rest)).host_kind == (0, 1, 1, 2, 2, 2)
    quota = replace(first, cpu_quota=0.5)
    assert replace(cluster, hosts=(quota, *rest)).host_kind == cluster.host_kind


@pytest.mark.parametrize("hosts_of_each", [4, 16, 64, 128])
def test_sets_of_many_hosts_are_named_at_once_and_hold_whole_kinds(hosts_of_each: int) -> None:
    """At 32 hosts every combination was tried: a day."""
    types = ("T4", "V100-16GB", "A10", "P100-12GB")
    cluster = large(types, hosts_of_each)
    sets = device_sets(cluster)
    assert len(sets) == len(set(sets)) <= MAX_DEVICE_SETS
    kinds = [frozenset(range(n * hosts_of_each, (n + 1) * hosts_of_each)) for n in range(4)]
    found = {frozenset(each) for each in sets}
    assert set(kinds) <= found
    assert {kinds[0] | kinds[1], kinds[1] | kinds[2] | kinds[3], kinds[0] | kinds[3]} <= found
    assert frozenset(range(hosts_of_each // 2)) in found, "half of a kind"
    assert sum(len(each) == 1 for each in sets) >= min(4 * hosts_of_each, 64)


def test_a_host_of_each_kind_is_a_set_wherever_the_file_lists_it() -> None:
    """A DLRM took 1.6 times as long where the only fast hosts came after 64 others."""
    cluster = Cluster.load("mixed_1024")
    firsts = [cluster.host_devices[cluster.host_kind.index(kind)] for kind in range(4)]
    assert set(firsts) <= set(device_sets(cluster))
    assert {(device,) for device in firsts[-1]} <= set(device_sets(cluster))


def test_hosts_of_a_hundred_kinds_are_named_too() -> None:
    cluster = large(("T4",), 100)
    hosts = tuple(
        replace(host, nic_line_rate_bytes_per_s=1e9 + number)
        for number, host in enumerate(cluster.hosts)
    )
    sets = device_sets(replace(cluster, hosts=hosts))
    assert len(sets) <= MAX_DEVICE_SETS, "and not a lifetime later"


# --- going on -----------------------------------------------------------------------------------


@one_in(2)
@pytest.mark.parametrize("method", ["two_segment", "pipeline", "megatron_grid"])
def test_an_enumeration_goes_on_where_it_was(method: str) -> None:
    """In two halves it evaluates what it does in one go, each point once."""
    planner = built_in_methods()[method]
    whole, _ = clocked(0.0)
    once = run_method(planner, Problem(evaluator=whole, budget=Budget(evaluations=100_000)))
    evaluator, clock = clocked(1.0)
    first = Problem(evaluator=evaluator, budget=Budget(seconds=10.5), clock=clock)
    before = planner.plan(first)
    made = evaluator.num_evaluations
    assert 0 < made <= 12
    after = planner.plan(replace(first, budget=Budget(seconds=1e9)))
    assert before.candidates
    assert after.candidates
    best = min(
        evaluator.referee(each.strategy, each.orders[0]).step_time_s for each in after.candidates
    )
    assert once.step_time_s is not None
    assert best <= once.step_time_s * 1.02


@pytest.mark.parametrize("method", ["two_segment", "pipeline", "megatron_grid", "islands"])
def test_what_was_too_large_in_a_short_round_is_tried_in_a_longer_one(method: str) -> None:
    evaluator = Evaluator(mlp(), Cluster.load("paper_8gpu"))
    evaluator.most_tasks = 1
    short = Problem(evaluator=evaluator, budget=Budget(evaluations=20))
    planner = built_in_methods()[method]
    planner.plan(short)
    evaluator.most_tasks = math.inf
    longer = replace(short, budget=Budget(evaluations=60))
    anew = planner.plan(replace(longer, memory={}))
    assert planner.plan(longer).candidates[0] == anew.candidates[0]


def test_local_search_goes_on_and_takes_up_what_others_found() -> None:
    evaluator, clock = clocked(1.0)
    planner = built_in_methods()["local_search"]
    first = Problem(evaluator=evaluator, budget=Budget(seconds=40.0), clock=clock)
    before = planner.plan(first)
    other = run_method(built_in_methods()["pipeline"], replace(first, memory={}))
    assert other.candidate is not None
    later = replace(first, budget=Budget(seconds=60.0), seeds=(other.candidate,))
    row = run_method(planner, later)
    assert before.candidates
    assert row.step_time_s is not None
    assert row.step_time_s <= (other.step_time_s or math.inf)


def test_what_was_kept_for_another_evaluator_is_not_used() -> None:
    """Its channels have other numbers: the kernel read beyond its arrays."""
    memory: dict[str, dict[str, object]] = {"two_segment": {}, "local_search": {}}
    for _ in range(2):
        evaluator = Evaluator(mlp(), Cluster.load("paper_8gpu"))
        for method, kept in memory.items():
            problem = Problem(evaluator=evaluator, budget=Budget(evaluations=30), memory=kept)
            assert built_in_methods()[method].plan(problem).candidates


@THOROUGH
def test_the_second_half_of_a_budget_goes_to_whom_it_pays() -> None:
    evaluator, clock = clocked(0.01)
    rows = run_methods(evaluator, ["auto"], budget=Budget(seconds=20.0), clock=clock)
    spent = {row.method: row.search_seconds for row in rows if row.stage == "search"}
    assert clock.now_s <= 20.0 * 1.05
    # Equal parts would be less than a tenth of the budget each.
    assert max(spent.values()) > 3.0
    assert not any(row.starved for row in rows)


def test_who_was_starved_has_every_second_round_and_who_is_done_none() -> None:
    planner = built_in_methods()["local_search"]
    rich, poor, done = (Contender(planner=planner) for _ in range(3))
    one = {"given_s": 1.0, "best_s": 1.0}
    rich.tell(seconds=1.0, evaluations=90, step_time_s=1.0, **one)
    poor.tell(seconds=1.0, evaluations=1, step_time_s=1.5, **one)
    done.tell(seconds=0.1, evaluations=1, step_time_s=1.0, **one)
    for _ in range(3):
        assert next_of([rich, poor, done]) is rich
        rich.tell(seconds=1.0, evaluations=90, step_time_s=1.0, **one)
        assert next_of([rich, poor, done]) is poor
        poor.tell(seconds=1.0, evaluations=1, step_time_s=1.5, **one)
    for _ in range(2):
        assert next_of([rich, poor, done]) is rich, "a few rounds are enough for the other"
        rich.tell(seconds=1.0, evaluations=90, step_time_s=1.0, **one)
    assert next_of([done]) is None


def test_gains_of_long_ago_count_less_once_others_are_ahead() -> None:
    planner = built_in_methods()["local_search"]
    early, leader = (Contender(planner=planner) for _ in range(2))
    one = {"given_s": 1.0, "seconds": 1.0}
    early.tell(evaluations=50, step_time_s=2.0, best_s=2.0, known_s=4.0, **one)
    leader.tell(evaluations=50, step_time_s=1.0, best_s=1.0, known_s=1.2, **one)
    assert early.gain_per_s > leader.gain_per_s
    assert next_of([early, leader]) is leader


def test_where_nothing_fits_the_nearest_to_fitting_goes_on() -> None:
    """After one that could not evaluate anything, of which nothing is known."""
    planner = built_in_methods()["local_search"]
    far, near, nothing = (Contender(planner=planner) for _ in range(3))
    one = {"given_s": 1.0, "best_s": math.inf, "seconds": 1.0, "step_time_s": math.inf}
    far.tell(evaluations=1, overflow_bytes=2e9, **one)
    near.tell(evaluations=9, overflow_bytes=1e9, **one)
    nothing.tell(evaluations=0, **one)
    assert next_of([far, near]) is near
    assert next_of([far, near, nothing]) is nothing


def test_who_gains_near_the_best_goes_on_and_who_stands_still_does_not() -> None:
    planner = built_in_methods()["local_search"]
    leader, runner_up, last = (Contender(planner=planner) for _ in range(3))
    for contender, times in ((leader, (1.0, 1.0)), (runner_up, (1.2, 1.1)), (last, (4.0, 2.0))):
        for step_time_s in times:
            contender.tell(
                given_s=1.0, seconds=1.0, evaluations=50, step_time_s=step_time_s, best_s=1.0
            )
    assert leader.gain_per_s == pytest.approx(0.1 * FADES)  # of what its first plan counted as
    assert runner_up.gain_per_s == pytest.approx(math.log(1.2 / 1.1) * 1.1**-8)
    assert last.gain_per_s == pytest.approx(math.log(2.0) * 2.0**-8)
    assert next_of([leader, runner_up, last]) is runner_up
    runner_up.tell(given_s=1.0, seconds=1.0, evaluations=50, step_time_s=1.1, best_s=1.0)
    assert next_of([leader, runner_up, last]) is leader


@pytest.mark.parametrize(("gains", "least", "most"), [(True, 0.4, 0.6), (False, 0.1, 0.3)])
def test_who_improves_the_best_has_half_of_the_rounds_while_it_gains(
    gains: bool, least: float, most: float
) -> None:
    """A fifth of them otherwise; the others have gained once, long ago."""
    local_search, islands = (built_in_methods()[name] for name in ("local_search", "islands"))
    improving, other = Contender(planner=local_search), Contender(planner=islands)
    step_s, rounds = 1.0, 20
    one = {"given_s": 1.0, "seconds": 1.0}
    other.tell(step_time_s=step_s, best_s=step_s, evaluations=50, **one)
    improving.tell(step_time_s=step_s, best_s=step_s, known_s=step_s, evaluations=50, **one)
    count = 0
    for _ in range(rounds):
        chosen = next_of([improving, other])
        assert chosen is not None
        known_s = step_s
        if chosen is improving:
            count, step_s = count + 1, step_s * (0.99 if gains else 1.0)
        own_s = step_s if chosen is improving else other.step_time_s
        chosen.tell(step_time_s=own_s, best_s=step_s, known_s=known_s, evaluations=50, **one)
    assert least * rounds <= count <= most * rounds


def test_a_first_round_may_be_longer_but_not_its_simulations() -> None:
    evaluator, clock = clocked(0.01)
    told: dict[str, list[tuple[float, float]]] = {"eager": [], "patient": []}

    def searching(name: str, least: float) -> Planner:
        class Method(LocalSearch):
            least_part = least

            def plan(self, problem: Problem) -> PlanResult:
                assert problem.budget.seconds is not None
                told[self.name].append((problem.budget.seconds, evaluator.most_tasks))
                return super().plan(problem)

        made = Method()
        made.name = name
        return made

    known = built_in_methods().having(searching("eager", 0.3), searching("patient", 0.0))
    run_methods(evaluator, ["auto"], known=known, budget=Budget(seconds=20.0), clock=clock)
    (eager_s, eager_tasks), (patient_s, patient_tasks) = (told[name][0] for name in told)
    assert eager_s == pytest.approx(0.3 * 20.0 * 0.85)  # the rest is for the referee
    assert patient_s < eager_s / 3.0
    assert eager_tasks == pytest.approx(patient_tasks, rel=0.5)
    assert all(seconds < eager_s for seconds, _ in told["eager"][1:])


# --- plans that are not written -----------------------------------------------------------------


def test_a_step_of_too_many_tasks_is_planned_but_not_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(issue_order, "MOST_WRITTEN", 5)
    cluster = Cluster.load("paper_8gpu")
    plan = make_plan(
        mlp(), cluster, methods=["tuned_uniform"], budget="20e", rehearse=lambda *_: "never asked"
    )
    assert not plan.is_written
    assert not len(plan.task_order)
    assert plan.step_time_s is not None
    assert "not rehearsed" in plan.rows[0].note
    plan.save(tmp_path / "plan.json")
    again = load_plan(tmp_path / "plan.json")
    assert again.summary() == plan.summary()
    for use in (plan.timeline, lambda: explain(plan), lambda: make_export(plan, "ddp")):
        with pytest.raises(StrategyError, match="neither run, exported nor shown"):
            use()
    lines = [line.plain for line in brief_answer(again, width=80)]
    assert len(lines) <= 15
    assert all(len(line) <= 80 for line in lines)
    assert lines[0].startswith(f"{plan.graph.name} on paper_8gpu: ")


def test_a_step_of_many_tasks_is_written_but_not_rehearsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(portfolio, "MOST_REHEARSED", 5)
    plan = make_plan(
        mlp(),
        Cluster.load("paper_8gpu"),
        methods=["tuned_uniform"],
        budget="20e",
        rehearse=lambda *_: "never asked",
    )
    assert plan.is_written
    assert portfolio.UNREHEARSED in plan.rows[0].note
    assert not plan.rows[0].is_rehearsed


def test_a_large_plan_packs_its_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(records, "_MOST_LISTED", 5)
    plan = make_plan(mlp(), Cluster.load("paper_8gpu"), methods=["model_parallel"], budget="20e")
    plan.save(tmp_path / "plan.json")
    again = load_plan(tmp_path / "plan.json")
    assert again.is_written
    assert len(again.sent_before)
    np.testing.assert_array_equal(again.task_order, plan.task_order)
    np.testing.assert_array_equal(again.sent_before, plan.sent_before)
    document = json.loads((tmp_path / "plan.json").read_text())
    document["task_order"] = document["sent_before"]
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(InputFileError, match="field 'task_order'"):
        load_plan(tmp_path / "plan.json")


def slow_sends_by_op(
    program: Program, start: FloatArray, finish: FloatArray, order: IntArray
) -> list[list[int]]:
    """Transfer by transfer, the first op of its source in order that begins when it has ended."""
    place = np.argsort(order)
    pairs = []
    for send in np.flatnonzero(program.kind == TaskKind.SEND).tolist():
        source = program.channels[int(program.channel[send])].devices[0]
        for task in order.tolist():
            is_op = program.kind[task] <= LAST_OP_KIND and program.device[task] == source
            if is_op and start[task] >= finish[send]:
                if place[task] > place[send]:
                    pairs.append([send, task])
                break
    return pairs


@pytest.mark.parametrize("seed", range(30))
def test_senders_let_go_as_the_slow_reference_says(seed: int) -> None:
    evaluator, choice = random_case(Random(seed))
    program, start, finish = evaluator.timings(choice._replace(num_steps=1), Order.RANK)
    order = issue_order.issue_order(program, start, finish)
    expected = slow_sends_by_op(program, start, finish, order)
    assert sends_by_op(program, start, finish, order).tolist() == expected
