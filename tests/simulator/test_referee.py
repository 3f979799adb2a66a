"""The referee against a slow reference, and against answers by hand."""

from collections import Counter
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterog.cluster import Cluster, Link
from heterog.lowering.channels import Channel
from heterog.lowering.choice import Choice
from heterog.lowering.program import FIRST_FREE_KIND, LAST_OP_KIND, FloatArray, Program
from heterog.lowering.resident import held_bytes
from heterog.lowering.tape import NUM_TASKS
from heterog.pricing.cost_model import ChannelSeconds
from heterog.pricing.roofline import Roofline
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import MEMORY_MARGIN, Evaluator, Outcome
from heterog.simulator.referee import fair_rates, replay_order
from heterog.strategy.strategy import Decision, Sync
from tests.simulator import reference
from tests.simulator.builders import Tasks, cluster_of, linear_chain, random_case, strategy_of
from tests.thorough import cases

GIGA = 1e9


def with_teams_together(
    program: Program, evaluator: Evaluator, choice: Choice, start: FloatArray
) -> list[float]:
    """Starts of tasks, where like ops of a team have the latest of their starts."""
    if program.is_in_turn or max(choice.teams.size.flat) == 1:
        return list(start)
    tables = evaluator.tables_of(choice)
    seen: Counter[tuple[int, ...]] = Counter()
    members: dict[tuple[int, ...], list[int]] = {}  # of what, by which team, the how manieth time
    before: dict[int, int] = {}  # the task before one in its turn
    last: dict[tuple[int, int], int] = {}
    for task in np.flatnonzero(program.kind < FIRST_FREE_KIND).tolist():
        what = tuple(int(each[task]) for each in (program.kind, program.subject, program.micro))
        device, turn = int(program.device[task]), int(program.turn[task])
        if (device, turn) in last:
            before[task] = last[device, turn]
        last[device, turn] = task
        if what[0] <= LAST_OP_KIND and tables.op_group[what[1]] >= 0:  # no constant
            team = choice.teams.number[choice.division[tables.op_group[what[1]]], device]
            seen[*what, device] += 1
            members.setdefault((*what, int(team), seen[*what, device]), []).append(task)
    together = [float(each) for each in start]
    is_settled = False
    while not is_settled:  # until nothing moves any more
        old = list(together)
        for task in range(program.num_tasks):
            needed = [together[maker] for maker in program.dependencies(task)]
            needed += [together[before[task]]] if task in before else []
            together[task] = max([together[task], *needed])
        for team_tasks in members.values():
            for task in team_tasks:
                together[task] = max(together[each] for each in team_tasks)
        is_settled = old == together
    return together


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=cases(150, 25), deadline=None)
def test_equals_the_slow_reference(seed: int) -> None:
    rng = Random(seed)
    evaluator, choice = random_case(rng)
    order = rng.choice(list(Order))
    program, engine_start, _ = evaluator.timings(choice, order)
    tasks = reference.price(program, evaluator.graph, evaluator.cluster, evaluator.cost_model)
    replayed, start, finish = evaluator.referee_timings(choice, order)
    assert replayed.hash == program.hash
    reference.assert_legal(tasks, start, finish)
    seconds: list[float] = []
    reference.simulate(tasks, order, seconds, is_in_turn=program.is_in_turn)
    together = with_teams_together(program, evaluator, choice, engine_start)
    slow_start, slow_finish = reference.replay(tasks, together, seconds)
    np.testing.assert_allclose(start, slow_start, rtol=1e-9, atol=0)
    np.testing.assert_allclose(finish, slow_finish, rtol=1e-9, atol=0)
    step_time_s = evaluator.referee(choice, order).step_time_s
    assert step_time_s == pytest.approx(max(finish) / choice.num_steps, rel=1e-12)
    assert max(reference.upward_rank(tasks)) <= max(finish) * (1 + 1e-9)


def test_members_of_a_team_take_their_ops_in_one_order() -> None:
    """Though their messages leave a host one after another, by one NIC."""
    rng, num_teams = Random(11), 0
    while num_teams < 20:
        evaluator, choice = random_case(rng)
        order = rng.choice(list(Order))
        program, start, _ = evaluator.referee_timings(choice, order)
        group_of = evaluator.tables_of(choice).op_group
        taken: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for task in np.lexsort((np.arange(program.num_tasks), start)).tolist():
            if program.kind[task] <= LAST_OP_KIND:
                subject, device = int(program.subject[task]), int(program.device[task])
                division = int(choice.division[group_of[subject]])
                what = int(program.kind[task]), subject, int(program.micro[task])
                taken.setdefault((division, device), []).append(what)
        for (division, device), ops in taken.items():
            number = choice.teams.number[division]
            mates = np.flatnonzero((number == number[device]) & (number >= 0)).tolist()
            for other in (taken.get((division, mate), ops) for mate in mates):
                both = {*ops} & {*other}  # a mate may have nothing of a micro-batch
                assert [op for op in ops if op in both] == [op for op in other if op in both]
            num_teams += len(mates) > 1 and device == mates[0]


def rates_of(held: list[dict[int, float]], weights: list[float] | None = None) -> FloatArray:
    """Rates of flows by the kernel."""
    num_links = 1 + max(link for links in held for link in links)
    starts = np.concatenate([[0], np.cumsum([len(links) for links in held])])
    rate = np.empty(len(held))
    users = np.zeros(num_links, np.int32)
    # As it is written: only kernels call the compiled one.
    getattr(fair_rates, "py_func", fair_rates)(
        len(held),
        np.arange(len(held), dtype=np.int32),
        np.array(weights or [1.0] * len(held)),
        starts.astype(np.int32),
        np.array([link for links in held for link in links], np.int32),
        np.array([seconds for links in held for seconds in links.values()]),
        rate,
        np.empty(num_links),
        np.empty(num_links),
        users,
        np.empty(num_links, np.int32),
    )
    assert not users.any()
    return rate


FLOWS = st.lists(
    st.dictionaries(
        st.integers(0, 7), st.sampled_from([0.1, 0.5, 1.0, 1.5, 1.75]), min_size=1, max_size=4
    ),
    min_size=1,
    max_size=12,
)


@given(FLOWS)
@settings(max_examples=cases(200, 40), deadline=None)
def test_rates_are_max_min_fair(held: list[dict[int, float]]) -> None:
    rates = rates_of(held)
    assert rates == pytest.approx(reference.progressive_filling(held), rel=1e-9)
    load = {link: 0.0 for links in held for link in links}
    for links, rate in zip(held, rates, strict=True):
        for link, seconds in links.items():
            load[link] += seconds * rate
    assert max(load.values()) <= 1 + 1e-9
    # Bertsekas & Gallager: every flow has a full link on which none is faster.
    for links, rate in zip(held, rates, strict=True):
        assert any(
            load[link] > 1 - 1e-9
            and all(
                rate >= other * (1 - 1e-9)
                for others, other in zip(held, rates, strict=True)
                if link in others
            )
            for link in links
        )


def test_rates_by_hand() -> None:
    # Flows on links {0}, {0, 1}, {1}: link 0 takes 1 s per byte, link 1 a quarter of it.
    assert rates_of([{0: 1.0}, {0: 1.0, 1: 0.25}, {1: 0.25}]) == pytest.approx([0.5, 0.5, 3.5])


@given(FLOWS, st.randoms(use_true_random=False))
@settings(max_examples=cases(200, 40), deadline=None)
def test_weighted_rates_are_max_min_fair(held: list[dict[int, float]], random: Random) -> None:
    weights = [random.choice([0.25, 1.0, 3.0]) for _ in held]
    rates = rates_of(held, weights)
    assert rates == pytest.approx(reference.progressive_filling(held, weights), rel=1e-9)
    # A flow of weight 3 is three flows of weight 1 that use the same links.
    apart = [
        links for links, weight in zip(held, weights, strict=True) for _ in range(int(4 * weight))
    ]
    alone = iter(rates_of(apart).tolist())
    together = [sum(next(alone) for _ in range(int(4 * weight))) for weight in weights]
    assert rates == pytest.approx(together, rel=1e-9)


def test_two_weights_on_one_link() -> None:
    """Twice the weight is twice the rate, until the other one has ended."""

    class Paced(Roofline):
        def channel_seconds(self, cluster: Cluster, channel: Channel) -> ChannelSeconds:
            cost = super().channel_seconds(cluster, channel)
            return cost._replace(weight=2.0 if channel.devices == (0, 1) else 1.0)

    tasks = Tasks(hosts(8.0, 8.0, 8.0), Paced())  # 1 GB/s each
    tasks.send(0, 1, GIGA)
    tasks.send(0, 2, GIGA)
    assert tasks.run().fair_finish == pytest.approx([1.5, 2.0])


def hosts(*gbit_per_s: float, latency_s: float = 0.0) -> Cluster:
    return cluster_of(*((rate, ["T4"]) for rate in gbit_per_s), latency_s=latency_s)


def test_the_longer_flow_gets_the_rest() -> None:
    tasks = Tasks(hosts(8.0, 8.0, 8.0))  # 1 GB/s each
    tasks.send(0, 1, GIGA)
    tasks.send(0, 2, 2 * GIGA)
    times = tasks.run()
    for finish in (times.finish, times.fair_finish):
        assert finish == pytest.approx([2.0, 3.0])


def test_a_flow_that_joins_later() -> None:
    tasks = Tasks(hosts(8.0, 8.0, 8.0))
    tasks.send(0, 1, 2 * GIGA)
    tasks.send(0, 2, GIGA, tasks.op(0, 1.0))
    # One second alone, then half the rate each for two seconds.
    assert tasks.run().fair_finish == pytest.approx([3.0, 1.0, 3.0])


def test_one_channel_runs_one_task_at_a_time() -> None:
    tasks = Tasks(hosts(8.0, 8.0))
    tasks.send(0, 1, GIGA)
    tasks.send(0, 1, GIGA)
    times = tasks.run()
    assert times.fair_start == pytest.approx([0.0, 1.0])
    assert times.fair_finish == pytest.approx([1.0, 2.0])


def test_a_collective_shares_with_a_transfer() -> None:
    tasks = Tasks(hosts(8.0, 8.0, 8.0, latency_s=0.25))
    ring = tasks.channels.all_reduce((0, 1), hierarchical=False)
    tasks.collective(ring, GIGA)
    tasks.send(0, 2, GIGA)
    times = tasks.run(Order.PROGRAM)
    # In the engine both flow from the start: 2 s, and 2 steps of latency or one.
    assert times.finish == pytest.approx([2.5, 2.25])
    # The referee lets it flow alone during the collective's latency, then share: 0.5 s for half
    # of it, 1 s for the other half, its latency; the collective's other half takes 0.5 s more.
    assert times.fair_start == pytest.approx([0.0, 0.0])
    assert times.fair_finish == pytest.approx([2.0, 1.75])


def test_phases_overlap_within_an_operation_and_not_between_two() -> None:
    port = Link(kind="pcie3", bandwidth_bytes_per_s=GIGA, latency_s=0.0)
    cluster = cluster_of((8.0, ["T4"] * 2), (8.0, ["T4"] * 2), latency_s=0.0, intra=port)
    tasks = Tasks(cluster)
    channel = tasks.channels.all_reduce((0, 1, 2, 3), hierarchical=True)
    tasks.collective(channel, GIGA)
    tasks.collective(channel, GIGA)
    # Half a payload over the ports, one over the NICs, half over the ports: 1 s of both, as chunks
    # are in all phases at once. Ranks begin the next operation when the first one is done.
    times = tasks.run()
    assert times.finish == pytest.approx([1.0, 2.0])
    assert times.fair_start == pytest.approx([0.0, 1.0])
    assert times.fair_finish == pytest.approx([1.0, 2.0])


def test_empty_payloads() -> None:
    tasks = Tasks(hosts(8.0, 8.0, latency_s=0.25))
    ring = tasks.channels.all_reduce((0, 1), hierarchical=False)
    sent = tasks.send(0, 1, 0.0)
    tasks.collective(ring, 0.0, sent)
    assert tasks.run().fair_finish == pytest.approx([0.25, 0.75])


def test_an_illegal_order_is_refused() -> None:
    graph, cluster = linear_chain(), hosts(8.0)
    evaluator = Evaluator(graph, cluster)
    strategy = strategy_of(graph, cluster, Decision(devices=(0,), shares=(8,)))
    choice = evaluator.encode(strategy)
    evaluator.simulate(choice, Order.FIFO)
    lowered = evaluator.lower(choice)
    num_tasks = int(lowered.tape.counts[NUM_TASKS])
    backwards = np.arange(num_tasks, dtype=np.int32)[::-1].copy()
    with pytest.raises(AssertionError):
        replay_order(lowered.tape, lowered.prices, evaluator.last, 1, backwards, np.inf)


def test_the_best_order_is_the_referees() -> None:
    rng = Random(7)
    for _ in range(10):
        evaluator, choice = random_case(rng)
        each = [evaluator.referee(choice, order) for order in Order]
        best = evaluator.referee(choice)
        assert best in each
        assert best.step_time_s == min(result.step_time_s for result in each)


def test_out_of_memory_is_an_outcome() -> None:
    graph = linear_chain(("a",), width=2048)
    full = hosts(8.0)
    tight = replace(full, devices=(replace(full.devices[0], usable_memory_bytes=20_000_000),))
    strategy = strategy_of(graph, tight, Decision(devices=(0,), shares=(8,)))
    result = Evaluator(graph, tight).referee(strategy, Order.FIFO)
    assert result.outcome == Outcome.OUT_OF_MEMORY
    assert result.overflow_bytes == result.peak_memory_bytes[0] - 20_000_000
    assert "A:0 (T4) needs" in result.shortage
    assert "more than its" in result.shortage


def test_memory_is_the_larger_of_both_predictions() -> None:
    rng = Random(3)
    for _ in range(20):
        evaluator, choice = random_case(rng)
        order = rng.choice(list(Order))
        engine = evaluator.evaluate(choice, order).peak_memory_bytes
        program, start, finish = evaluator.referee_timings(choice, order)
        tables = evaluator.tables_of(choice)
        inside = evaluator.inside(tables, choice, held_bytes(tables, choice))
        made = reference.made_inside(program, inside)
        peaks = reference.memory(program, start, finish, inside=made)
        replayed = (1.0 + MEMORY_MARGIN) * np.array(peaks)
        expected = np.maximum(engine, replayed)
        judged = evaluator.referee(choice, order).peak_memory_bytes
        assert judged == pytest.approx(expected, rel=1e-9, abs=1.0)


def test_each_channel_keeps_the_order_of_the_engine() -> None:
    graph = linear_chain(("a", "b"), batch_size=6)
    cluster = hosts(10.0, 10.0, 10.0, 10.0)
    decision = Decision(devices=(0, 1, 2), shares=(2, 2, 2), sync=Sync.PARAMETER_SERVER)
    evaluator = Evaluator(graph, cluster)
    choice = evaluator.encode(strategy_of(graph, cluster, decision, homes=3))
    _, start, _ = evaluator.timings(choice, Order.FIFO)
    program, fair_start, _ = evaluator.referee_timings(choice, Order.FIFO)
    for channel in set(program.channel.tolist()) - {-1}:
        mine = np.flatnonzero(program.channel == channel)
        assert (
            np.argsort(start[mine], kind="stable").tolist()
            == np.argsort(fair_start[mine], kind="stable").tolist()
        )
