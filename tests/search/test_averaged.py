"""Averaging as a row beside exact methods: what it is asked by, priced and judged."""

from dataclasses import replace
from pathlib import Path

import pytest

from heterog.cluster import Cluster
from heterog.errors import HeterogError, StrategyError
from heterog.export.folder import ExportError
from heterog.export.uniform import uniform_micro_batches
from heterog.graph.grouping import group_ops
from heterog.healing.job import HealingJob
from heterog.lowering.channels import ChannelTable
from heterog.lowering.program import TaskKind
from heterog.lowering.tape import NUM_TASKS
from heterog.methods.planner import Budget, Problem
from heterog.modes.averaging.method import AveragedReplicas, parse_averaging
from heterog.modes.averaging.value import (
    AverageWeights,
    Averaging,
    averaged_buckets,
    averaging_seconds,
    averaging_tape,
)
from heterog.modes.codecs.method import with_codec
from heterog.modes.codecs.value import CodecRule, Traffic, codec_rules, parse_codec, with_rules
from heterog.runtime.request import RunRequest
from heterog.search.plan import Plan
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.serialize import strategy_from_dict, strategy_to_dict
from heterog.strategy.strategy import Decision, Strategy
from tests.runtime.strategies import cluster, graph_of, plan_of, strategy_of
from tests.search.asking import make_plan
from tests.simulator.builders import by_sheets, cluster_of

THREE = Decision(devices=(0, 1, 2), shares=(5, 2, 1), teams=((0,), (1,), (2,)))


def strategy(decision: Decision = THREE, every: int = 8, **options: float) -> Strategy:
    graph = graph_of("mlp")
    exact = strategy_of(graph, [decision] * len(graph_groups()))
    return exact.with_mode(Averaging(every=every, **options))  # type: ignore[arg-type]


def graph_groups() -> range:
    return range(group_ops(graph_of("mlp")).num_groups)


def test_communication_of_a_step_is_a_part_of_one_averaging() -> None:
    """T = T_local + T_average / H, and T tends to T_local."""
    evaluator = Evaluator(graph_of("mlp"), cluster())
    seconds = {
        every: evaluator.referee(strategy(every=every), Order.FIFO).step_time_s
        for every in (1, 2, 4, 1_000_000)
    }
    local = seconds[1_000_000]
    averaging = averaging_seconds(evaluator, strategy(), evaluator.encode(strategy()))
    for every in (1, 2, 4):
        assert seconds[every] == pytest.approx(local + averaging / every, rel=1e-4)
    assert averaging > 0


def test_a_delay_hides_an_averaging_behind_steps() -> None:
    evaluator = Evaluator(graph_of("mlp"), cluster())
    local = evaluator.referee(strategy(every=1_000_000), Order.FIFO).step_time_s
    averaging = averaging_seconds(evaluator, strategy(), evaluator.encode(strategy()))
    for delay in (1, 7):
        found = evaluator.referee(strategy(delay=delay), Order.FIFO).step_time_s
        wanted = local + max(averaging - delay * local, 0.0) / 8
        assert found == pytest.approx(wanted, rel=1e-4)


def test_copies_that_averaging_keeps_are_counted() -> None:
    evaluator = Evaluator(graph_of("mlp"), cluster())
    plain, outer, late = (
        evaluator.referee(strategy(**options), Order.FIFO).peak_memory_bytes
        for options in ({}, {"outer_momentum": 0.9}, {"delay": 2})
    )
    copies = 2.0 * evaluator.tables.parameter_bytes.sum() * 1.04
    assert outer[0] - plain[0] == pytest.approx(copies, abs=2)
    assert late == outer


def changed_by(codec: str, exact: Strategy) -> Strategy:
    """The strategy with a codec on what devices 0, 1 and 2 average."""
    devices = exact.decisions[0].devices
    rule = CodecRule(traffic=Traffic.PARAMETER_CHANGES, devices=devices, codec=parse_codec(codec))
    return with_rules(exact, (rule,))


def test_a_codec_shortens_an_averaging_by_what_its_messages_are_shorter() -> None:
    """Two islands on a slow link: the ring carries each parameter once, the gather each message.

    T_average -> T_average / r, where encoding costs nothing beside the link.
    """
    graph = graph_of("mlp")
    slow = cluster_of((0.001, ["T4"]), (0.001, ["T4"]))
    two = Decision(devices=(0, 1), shares=(5, 3), teams=((0,), (1,)))
    exact = replace(
        strategy_of(graph, [two] * len(graph_groups())), cluster=slow.fingerprint
    ).with_mode(Averaging(every=8))
    evaluator = Evaluator(graph, slow)

    def averaging_s(asked: Strategy) -> float:
        return averaging_seconds(evaluator, asked, evaluator.encode(asked))

    latency = slow.latency_s(0, 1)
    whole = averaging_s(exact) - 2 * latency
    for codec, ratio in (("fp16", 2.0), ("top_k=10", 10.0)):
        found = averaging_s(changed_by(codec, exact)) - latency
        assert found == pytest.approx(whole / ratio, rel=0.1)


def test_codecs_keep_the_parameters_of_before_and_what_they_leave_out() -> None:
    evaluator = Evaluator(graph_of("mlp"), cluster())
    masters = Evaluator(replace(graph_of("mlp"), master_dtype="float64"), cluster())
    check_kept_by_codecs(evaluator, evaluator.tables.parameter_bytes.sum() * 1.04)
    # They are averaged, and kept, in the dtype of the optimizer's own copies.
    check_kept_by_codecs(masters, 2 * evaluator.tables.parameter_bytes.sum() * 1.04)


def check_kept_by_codecs(evaluator: Evaluator, parameters: float) -> None:
    for momentum, num_copies in ((0.0, 2), (0.9, 1)):
        exact = strategy(outer_momentum=momentum)
        plain, short = (
            evaluator.referee(each, Order.FIFO).peak_memory_bytes
            for each in (exact, changed_by("int8", exact))
        )
        assert short[0] - plain[0] == pytest.approx(num_copies * parameters, abs=2)


OUTER = {"outer_rate": 0.7, "outer_momentum": 0.9}


@pytest.mark.parametrize(
    ("options", "codec", "filled", "replica", "ended"),
    [
        ({}, "", 2, 2, 2),  # weighed; copied back
        ({"delay": 2}, "", 4, 4, 6),  # kept and weighed; what was learned since is added
        (OUTER, "", 2, 2, 16),  # a difference 3, momentum 2 + 3, direction 3, parameters 3 + 2
        ({}, "int8", 5, 0, 6),  # a difference, weighed; a sum from zeros 1, parameters 3 + 2
        ({**OUTER, "delay": 2}, "int8", 7, 2, 18),  # 2 + 5; 1 + 5 + 3 + 3, and 6 instead of 2
    ],
)
@pytest.mark.parametrize("master_dtype", ["", "float64"])
def test_every_pass_over_parameters_is_priced(
    options: dict[str, float],
    codec: str,
    filled: int,
    replica: int,
    ended: int,
    master_dtype: str,
) -> None:
    """Bytes moved for each byte of the bucket, by the first replica of an island and another."""
    two = Decision(devices=(0, 1, 2), shares=(3, 4, 1), teams=((0,), (1, 2)))
    exact = strategy(two, 8, **options)
    asked = changed_by(codec, exact) if codec else exact
    averaging = asked.mode(Averaging)
    assert averaging is not None
    graph = replace(graph_of("mlp"), master_dtype=master_dtype)
    (bucket,) = averaged_buckets(graph, asked)
    tape = averaging_tape(
        averaging,
        [bucket],
        ChannelTable(cluster()),
        num_parameters=len(graph.updates),
        num_devices=3,
    )
    own = float(sum(graph.tensor_bytes[parameter] for _, parameter, _ in graph.updates))
    size = 2.0 * own if master_dtype else own
    found = tape.tasks[: tape.counts[NUM_TASKS]]
    copies = found["kind"] == TaskKind.FLATTEN
    for device, before in ((1, filled), (2, replica)):
        moved = found["num_bytes"][copies & (found["device"] == device)].tolist()
        rounded = size + own if master_dtype else 0.0  # masters, into the model's own values
        assert moved == [size * before] * (before > 0) + [size * ended + rounded]
    if not codec:
        assert found["num_bytes"][found["kind"] == TaskKind.ALL_REDUCE].tolist() == [size]


def test_what_is_sent_is_as_wide_as_the_masters() -> None:
    """Halves would not shorten bfloat16, but do shorten its masters."""
    graph = graph_of("mlp")
    tensors = [
        replace(each, dtype="bfloat16") if each.dtype == "float32" else each
        for each in graph.tensors
    ]
    half = replace(graph, tensors=tuple(tensors))
    for master_dtype, is_coded, sent in (("", False, 1.0), ("float32", True, 0.5)):
        stepped = replace(half, master_dtype=master_dtype)
        (bucket,) = averaged_buckets(stepped, changed_by("fp16", strategy()))
        assert (bucket.rule is not None) == is_coded
        assert bucket.message_bytes == sent * bucket.num_bytes == 2 * bucket.num_elements


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (replace(strategy(), modes=()), "and no averaging; codecs on parameter changes"),
        (strategy(), "brings together parameters of devices"),
    ],
)
def test_codecs_of_nothing_that_is_averaged_are_refused(asked: Strategy, text: str) -> None:
    rule = CodecRule(traffic=Traffic.PARAMETER_CHANGES, devices=(0, 1), codec=parse_codec("fp16"))
    with pytest.raises(StrategyError, match=text):
        with_rules(asked, (rule,)).check(graph_of("mlp"), cluster())
    other = CodecRule(traffic=Traffic.GRADIENTS, devices=(0, 1), codec=parse_codec("fp16"))
    with pytest.raises(StrategyError, match="go with each other alone"):
        with_rules(strategy(), (other,)).check(graph_of("mlp"), cluster())


def test_pipelines_of_unlike_cuts_meet_in_one_ring_for_each_range() -> None:
    """Ravnest's golden case: cuts (22, 22, 45, 11) and (50, 50) of 100 layers give five rings."""
    cuts = (
        [range(0, 22), range(22, 44), range(44, 89), range(89, 100)],
        [range(50), range(50, 100)],
    )
    pairs = [
        tuple(next(n for n, part in enumerate(own) if layer in part) for own in cuts)
        for layer in range(100)
    ]
    ranges = [layer for layer in range(100) if layer == 0 or pairs[layer] != pairs[layer - 1]]
    assert ranges == [0, 22, 44, 50, 89]
    # The same by decisions: as many buckets as there are pairs of owners.
    graph, groups = graph_of("mlp"), graph_groups()
    decisions = [
        Decision(devices=(0, 1 if g < 2 else 2), shares=(4, 4), teams=((0,), (1 if g < 2 else 2,)))
        for g in groups
    ]
    piped = strategy_of(graph, decisions).with_mode(Averaging(every=2))
    piped.check(graph, cluster())
    buckets = averaged_buckets(graph, piped)
    assert {bucket.devices for bucket in buckets} == {(0, 1), (0, 2)}
    assert all(bucket.weights == (0.5, 0.5) for bucket in buckets)
    rows = sorted(row for bucket in buckets for row in bucket.rows)
    assert rows == list(range(len(graph.updates)))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"decisions": Decision(devices=(0, 1), shares=(5, 3))}, "at least two teams"),
        (
            {"decisions": replace(THREE, shares=(5, 0, 3))},
            r"islands get \[5, 0, 3\] samples",
        ),
        ({"step_barrier": False}, "steps that end with all updates"),
    ],
)
def test_what_is_no_island_is_refused(change: dict[str, object], text: str) -> None:
    graph = graph_of("mlp")
    if "decisions" in change:
        change = {"decisions": (change["decisions"],) * len(graph_groups())}
    with pytest.raises(StrategyError, match=text):
        replace(strategy(), **change).check(graph, cluster())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"every": 0}, "averaging every 0 steps"),
        ({"every": 4, "outer_rate": 0.0}, "outer learning rate is 0"),
        ({"every": 4, "outer_momentum": 1.0}, "outer momentum is 1"),
        ({"every": 4, "delay": 4}, "delay is 4 steps of a window of 4"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, float], text: str) -> None:
    with pytest.raises(StrategyError, match=text):
        Averaging(**options)  # type: ignore[arg-type]


def test_a_strategy_survives_its_file_and_hostile_ones_are_refused() -> None:
    whole = strategy(outer_rate=0.7, outer_momentum=0.9, delay=3)
    document = strategy_to_dict(whole)
    assert strategy_from_dict(document) == whole
    assert "averaging" not in strategy_to_dict(replace(whole, modes=()))
    for wrong in ({"weights": "norm"}, {"every": 0}, {"every": "8"}, {"delay": -1}, {"more": 1}):
        with pytest.raises(StrategyError):
            strategy_from_dict(document | {"averaging": document["averaging"] | wrong})


@pytest.mark.parametrize(
    "text",
    [
        *("average", "average=", "average=x", "average=8,average=9", "rate=0.5", "weights=equal"),
        *("average=8,weights=best", "average=8,rate=fast", "average=8,delay=", "average=\u0663"),
    ],
)
def test_words_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(HeterogError, match="`asynchronous`"):
        parse_averaging(text)


def test_words_are_read() -> None:
    found = parse_averaging("average=8,weights=equal,delay=2,rate=0.7,momentum=0.9")
    assert found == Averaging(
        every=8, weights=AverageWeights.EQUAL, outer_rate=0.7, outer_momentum=0.9, delay=2
    )


def test_it_is_a_row_of_its_own_and_never_comes_unasked() -> None:
    graph = graph_of("mlp")
    slow = cluster_of((0.001, ["T4"]), (0.001, ["T4"]), (0.001, ["P100-16GB"]))
    options = {"methods": ("cp_ar",), "budget": "10e"}
    exact = make_plan(graph, slow, **options)  # type: ignore[arg-type]
    assert exact.strategy.mode(Averaging) is None
    asked = make_plan(
        graph,
        slow,
        asynchronous=AveragedReplicas(Averaging(every=8)),
        **options,  # type: ignore[arg-type]
    )
    assert [row.method for row in asked.rows] == ["cp_ar", "average"]
    assert asked.rows[0].step_time_s == exact.step_time_s
    assert asked.strategy.mode(Averaging) == Averaging(every=8)
    assert "not exact" in asked.rows[1].note
    assert "as the best exact plan" in asked.rows[1].note
    assert asked.summary()["strategy"]["averaging"]["every"] == 8


def averaged_plan(slow: Cluster, every: int) -> tuple[Plan, Evaluator]:
    """The best plan of an MLP that averages, and its evaluator."""
    graph = graph_of("mlp")
    evaluator = Evaluator(graph, slow)
    asked = make_plan(
        graph,
        slow,
        evaluator=evaluator,
        methods=("cp_ar",),
        budget="10e",
        asynchronous=AveragedReplicas(Averaging(every=every)),
    )
    return asked, evaluator


def test_a_codec_is_put_on_what_islands_average() -> None:
    """The row names both, the reduction is the one asked for, and the gain is told."""
    asked, evaluator = averaged_plan(cluster_of(*((0.001, ["T4"]),) * 3), every=8)
    assert asked.method == "average"
    lossy, said = with_codec(asked, evaluator, parse_codec("top_k=10"))
    assert lossy.method == "average + top_k=10 (lossy)"
    assert "the uncompressed average" in said
    assert lossy.strategy.mode(Averaging) == asked.strategy.mode(Averaging)
    assert [rule.traffic for rule in codec_rules(lossy.strategy)] == [Traffic.PARAMETER_CHANGES]
    # As many messages are gathered as there are islands, where a ring carries two parts in each.
    num_islands = len(lossy.strategy.decisions[0].teams)
    assert codec_rules(lossy.strategy)[0].codec.reduction == pytest.approx(5.0 * num_islands)
    assert "not exact" in lossy.rows[-1].note
    assert "lossy" in lossy.rows[-1].note
    assert lossy.step_time_s is not None
    assert asked.step_time_s is not None
    assert lossy.step_time_s < asked.step_time_s


def test_a_codec_may_want_fewer_islands() -> None:
    """All islands gather each other's messages: of eight int8 gains nothing, of two hosts 3.5x."""
    slow = by_sheets(cluster_of(*((0.001, ["T4"] * 4),) * 2))
    asked, evaluator = averaged_plan(slow, every=2)
    assert asked.strategy.decisions[0].teams == tuple((device,) for device in range(8))
    lossy, _ = with_codec(asked, evaluator, parse_codec("int8"))
    assert lossy.strategy.decisions[0].teams == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert lossy.step_time_s is not None
    assert asked.step_time_s is not None
    assert lossy.step_time_s < asked.step_time_s / 3


def test_an_island_that_costs_more_than_it_computes_is_left_out() -> None:
    """A slow device behind a very slow link; with averaging every step it is not worth it."""
    graph = graph_of("mlp")
    lame = cluster_of((10.0, ["T4"]), (10.0, ["T4"]), (0.0001, ["T4"]))
    evaluator = Evaluator(graph, lame)
    problem = Problem(evaluator=evaluator, budget=Budget(evaluations=100))
    found = AveragedReplicas(Averaging(every=1)).plan(problem)
    assert found.candidates[0].strategy.decisions[0].devices == (0, 1)


def test_what_cannot_average_refuses_the_plan(tmp_path: Path) -> None:
    """Other launchers would train exactly, and healing would keep one island's weights."""
    graph = graph_of("mlp")
    plan = plan_of(graph, strategy())
    with pytest.raises(ExportError, match="averaged every 8 steps by samples; export to"):
        uniform_micro_batches(plan, "ddp")
    plan.save(tmp_path / "plan.json")
    with pytest.raises(HeterogError, match="exactly; run it without `heal`"):
        HealingJob(RunRequest(plan=tmp_path / "plan.json"))
