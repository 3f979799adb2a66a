"""Codecs: golden messages, their lengths, and what they make of programs and steps."""

import math
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from heterog.errors import HeterogError, StrategyError
from heterog.graph.capture import capture
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.graph.workload import Workload
from heterog.lowering import lower
from heterog.lowering.program import TaskKind
from heterog.modes.codecs.method import adaptive_reductions, lossy_strategy, reductions_to
from heterog.modes.codecs.tensors import add_decoded, decode, encode
from heterog.modes.codecs.value import (
    Codec,
    CodecKind,
    CodecRule,
    Codecs,
    Traffic,
    codec_rules,
    parse_codec,
    with_rules,
)
from heterog.runtime.step.gradients import ErrorFeedback
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.serialize import strategy_from_dict, strategy_to_dict
from heterog.strategy.strategy import REPLICATED, Decision, Strategy, Sync
from tests.runtime.codec_reference import meant
from tests.simulator.builders import cluster_of

FP16, INT8 = Codec(kind=CodecKind.FP16), Codec(kind=CodecKind.INT8)


def top_k(reduction: float, index_bytes: int = 4) -> Codec:
    return Codec(kind=CodecKind.TOP_K, reduction=reduction, index_bytes=index_bytes)


def through(tensor: Tensor, codec: Codec) -> Tensor:
    message = encode(tensor, codec)
    assert message.dtype == torch.uint8
    assert message.numel() == codec.message_bytes(tensor.numel(), tensor.element_size())
    found = decode(message, tensor.numel(), tensor.dtype, codec)
    total = torch.ones_like(found)
    add_decoded(total, message, codec)
    assert torch.equal(total, found + 1.0) or found.isnan().any()
    return found


# --- messages ------------------------------------------------------------------------------------


def test_the_largest_stay_in_place_and_ties_go_to_the_first() -> None:
    values = torch.tensor([1.0, -5.0, 2.0, 4.0, -3.0])
    codec = top_k(5 * 4 / 9.5)  # room for two values and a bitmap
    assert codec.kept(5, 4) == (2, True)
    assert through(values, codec).tolist() == [0.0, -5.0, 0.0, 4.0, 0.0]
    tied = torch.tensor([2.0, -3.0, 3.0, -2.0, 3.0])
    assert through(tied, codec).tolist() == [0.0, -3.0, 3.0, 0.0, 0.0]


def test_what_keeps_everything_is_the_identity() -> None:
    values = torch.randn(40, generator=torch.Generator().manual_seed(0))
    assert top_k(1.0).is_plain(40, 4)  # sent as it is
    assert torch.equal(meant(values, top_k(1.0)), values)


@pytest.mark.parametrize(
    ("dtype", "index_bytes", "per_reduction"),
    [
        (torch.float32, 8, 3.0),
        (torch.float32, 4, 2.0),
        (torch.bfloat16, 4, 3.0),
        (torch.bfloat16, 8, 5.0),
    ],
)
def test_the_density_follows_from_the_reduction_in_bytes(
    dtype: torch.dtype, index_bytes: int, per_reduction: float
) -> None:
    """``k / d = v / (r (v + x))``: 1/(3r) for fp32 values with int64 indices, say."""
    num_elements, codec = 30_000, top_k(100.0, index_bytes)
    kept, has_bitmap = codec.kept(num_elements, dtype.itemsize)
    assert not has_bitmap
    assert kept / num_elements == pytest.approx(1.0 / (per_reduction * 100.0))
    plain, message = (
        num_elements * dtype.itemsize,
        codec.message_bytes(num_elements, dtype.itemsize),
    )
    assert message == kept * (dtype.itemsize + index_bytes)
    assert plain / message == pytest.approx(100.0)
    values = torch.randn(num_elements, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert int((through(values, codec) != 0).sum()) == kept
    # Below (v + x) / v the message would be dense anyway.
    break_even = (dtype.itemsize + index_bytes) / dtype.itemsize
    assert top_k(break_even * 0.999, index_bytes).is_plain(num_elements, dtype.itemsize)
    assert not top_k(break_even, index_bytes).is_plain(num_elements, dtype.itemsize)


def test_a_bitmap_is_taken_where_it_is_shorter() -> None:
    """From one kept element in 8 x on: of fp32 with int32 indices below a reduction of 16."""
    for reduction, has_bitmap in ((4.0, True), (15.0, True), (17.0, False), (100.0, False)):
        codec = top_k(reduction)
        kept, found = codec.kept(100_000, 4)
        assert found == has_bitmap, reduction
        assert (kept / 100_000 > 1 / 32) == has_bitmap
        assert codec.message_bytes(100_000, 4) <= 400_000 / reduction
    values = torch.randn(1001, generator=torch.Generator().manual_seed(1))
    assert torch.equal(through(values, top_k(4.0)), meant(values, top_k(4.0)))
    assert torch.equal(through(values, top_k(40.0)), meant(values, top_k(40.0)))


@pytest.mark.parametrize("codec", [FP16, INT8])
@pytest.mark.parametrize("size", [1, 255, 256, 1000])
def test_narrow_numbers_are_those_of_the_slow_reference(codec: Codec, size: int) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(2)) * 10.0
    if codec.is_plain(size, 4):
        return
    assert torch.allclose(through(values, codec), meant(values, codec), rtol=1e-6, atol=0.0)


def test_what_is_not_finite_stays_so_and_what_is_too_large_does_not_become_infinite() -> None:
    values = torch.tensor([1.0, 1e6, -1e6, torch.inf, -torch.inf, torch.nan, 2.0, 3.0])
    half = through(values, FP16)
    assert half[:5].tolist() == [1.0, 65504.0, -65504.0, math.inf, -math.inf]
    assert half[5].isnan()
    for broken in (torch.inf, torch.nan):
        spoilt = torch.ones(600)
        spoilt[300] = broken
        assert not through(spoilt, INT8)[256:512].isfinite().any()
        assert not through(spoilt, top_k(20.0)).isfinite().all()


def test_feedback_loses_nothing_over_time() -> None:
    """What messages meant and what they left out is what there was."""
    generator = torch.Generator().manual_seed(3)
    feedback, sent, there_was = ErrorFeedback(), torch.zeros(500), torch.zeros(500)
    for _ in range(5):
        gradient = torch.randn(500, generator=generator)
        message = feedback.encode((0, (0, 1)), gradient, top_k(20.0))
        sent += decode(message, 500, torch.float32, top_k(20.0))
        there_was += gradient
    assert torch.allclose(sent + feedback.left_out[0, (0, 1)], there_was, atol=1e-5)


# --- reductions ----------------------------------------------------------------------------------


def test_reductions_by_the_slowest_boundary() -> None:
    seconds = [0.1, 0.5, 1.0, 4.0]
    reductions = adaptive_reductions(seconds, 100.0)
    assert reductions == pytest.approx([2.5, 12.5, 25.0, 100.0])
    shorter = [each / r for each, r in zip(seconds, reductions, strict=True)]
    assert shorter == pytest.approx([0.04] * 4)
    mild = adaptive_reductions(seconds, 5.0)
    shorter = [each / r for each, r in zip(seconds, mild, strict=True)]
    assert shorter[-1] == pytest.approx(4.0 / 5.0)  # the slowest falls by exactly R
    exact = [each for each, r in zip(seconds, mild, strict=True) if r == 1.0]
    assert exact == [0.1, 0.5]
    assert max(exact) <= 4.0 / 5.0
    assert shorter == sorted(shorter)
    assert reductions_to(seconds, 0.8, 100.0) == pytest.approx(mild)


def test_what_is_asked_for_by_name() -> None:
    assert (parse_codec("fp16"), parse_codec("int8")) == (FP16, INT8)
    assert str(parse_codec("top_k=12.5")) == "top_k=12.5"
    for text, said in (
        ("fp8", "is no codec; choose fp16, int8, top_k"),
        ("top_k=many", "is no codec"),
        ("int8=4", "int8 takes no number"),
        ("top_k=0.5", "choose a reduction from 1 to"),
        ("top_k=nan", "choose a reduction from 1 to"),
    ):
        with pytest.raises(StrategyError, match=said):
            parse_codec(text)


# --- programs and steps --------------------------------------------------------------------------

DEPTH, WIDTH, SAMPLES = 4, 64, 8


def perceptron() -> Workload:
    torch.manual_seed(0)
    return Workload(
        lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)]),
        (torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)),
        nn.functional.mse_loss,
        torch.optim.SGD,
        {"lr": 0.1},
    )


@cache
def graph_of_perceptron() -> OpGraph:
    return capture(perceptron())


SLOW = cluster_of((0.01, ["T4"]), (1.0, ["T4"]), (1.0, ["T4"]))


def strategy(decisions: list[Decision], codecs: tuple[CodecRule, ...] = ()) -> Strategy:
    return Strategy(
        graph=graph_of_perceptron().fingerprint,
        cluster=SLOW.fingerprint,
        decisions=tuple(decisions),
        homes=(REPLICATED,) * len(graph_of_perceptron().updates),
        modes=(Codecs(rules=codecs),) if codecs else (),
    )


def staged() -> Strategy:
    """Three stages, on one device each."""
    groups = group_ops(graph_of_perceptron()).num_groups
    return strategy(
        [Decision(devices=(min(g * 3 // groups, 2),), shares=(SAMPLES,)) for g in range(groups)]
    )


def replicas() -> Strategy:
    decision = Decision(devices=(0, 1, 2), shares=(4, 2, 2), sync=Sync.RING)
    return strategy([decision] * group_ops(graph_of_perceptron()).num_groups)


def sends(codec: Codec) -> CodecRule:
    return CodecRule(traffic=Traffic.ACTIVATIONS, devices=(0, 1), codec=codec)


def test_a_coded_transfer_is_three_tasks_and_the_others_stay() -> None:
    exact = lower(graph_of_perceptron(), SLOW, staged())
    coded = lower(graph_of_perceptron(), SLOW, with_rules(staged(), (sends(FP16),)))
    assert coded.num_tasks == exact.num_tasks + 2
    (encodes,) = [t for t in range(coded.num_tasks) if coded.kind[t] == TaskKind.ENCODE]
    (decodes,) = [t for t in range(coded.num_tasks) if coded.kind[t] == TaskKind.DECODE]
    assert (coded.device[encodes], coded.device[decodes]) == (0, 1)
    (send,) = [t for t in coded.dependencies(decodes) if coded.kind[t] == TaskKind.SEND]
    assert coded.dependencies(send) == [encodes]
    assert coded.num_bytes[send] == 2 * SAMPLES * WIDTH
    assert coded.hash != exact.hash
    assert exact.hash == lower(graph_of_perceptron(), SLOW, staged()).hash
    plain = [int(kind) for kind in coded.kind if kind not in (TaskKind.ENCODE, TaskKind.DECODE)]
    assert plain == exact.kind.tolist()


def test_a_coded_sum_is_a_gather_that_everybody_adds_up() -> None:
    rule = CodecRule(traffic=Traffic.GRADIENTS, devices=(2, 0, 1), codec=INT8)
    exact = lower(graph_of_perceptron(), SLOW, replicas())
    coded = lower(graph_of_perceptron(), SLOW, with_rules(replicas(), (rule,)))
    sums = int((exact.kind == TaskKind.ALL_REDUCE).sum())
    assert int((coded.kind == TaskKind.ENCODE).sum()) == 3 * sums
    assert int((coded.kind == TaskKind.DECODE_SUM).sum()) == 3 * sums
    size = WIDTH * WIDTH
    for task in range(coded.num_tasks):
        if coded.kind[task] == TaskKind.ALL_REDUCE:
            assert coded.num_bytes[task] == 3 * (size + 4 * size // 256)
        if coded.kind[task] == TaskKind.UPDATE:
            kinds = {TaskKind(int(coded.kind[each])) for each in coded.dependencies(task)}
            assert TaskKind.DECODE_SUM in kinds
            assert TaskKind.ALL_REDUCE not in kinds
    # Each replica keeps what its messages leave out.
    kept = coded.resident_bytes - exact.resident_bytes
    assert kept.tolist() == pytest.approx([4.0 * size * DEPTH] * 3)


def test_a_codec_pays_on_a_slow_link_and_costs_on_a_fast_one() -> None:
    evaluator = Evaluator(graph_of_perceptron(), SLOW)
    exact = evaluator.referee(staged(), Order.RANK)
    coded = evaluator.referee(with_rules(staged(), (sends(INT8),)), Order.RANK)
    assert coded.step_time_s < exact.step_time_s
    fast = CodecRule(traffic=Traffic.ACTIVATIONS, devices=(1, 2), codec=top_k(100.0))
    with_fast = evaluator.referee(with_rules(staged(), (fast,)), Order.RANK)
    assert with_fast.peak_memory_bytes
    found = lossy_strategy(evaluator, staged(), Order.RANK, FP16)
    assert found.is_lossy
    assert all(0 in rule.devices for rule in codec_rules(found.strategy))  # the slow links alone
    assert found.evaluation.step_time_s <= found.halves.step_time_s * 1.01
    assert found.exact.step_time_s == exact.step_time_s


def test_a_target_is_reached_with_the_least_reductions() -> None:
    evaluator = Evaluator(graph_of_perceptron(), SLOW)
    exact = evaluator.referee(staged(), Order.RANK).step_time_s
    strongest = lossy_strategy(evaluator, staged(), Order.RANK, top_k(50.0))
    target = (exact + strongest.evaluation.step_time_s) / 2.0
    found = lossy_strategy(evaluator, staged(), Order.RANK, top_k(50.0), target_s=target)
    assert found.evaluation.step_time_s <= target
    assert not found.misses_target
    reductions = [rule.codec.reduction for rule in codec_rules(found.strategy)]
    assert max(reductions) < 10.0
    tight = lossy_strategy(evaluator, staged(), Order.RANK, top_k(50.0), target_s=1e-9)
    assert tight.misses_target
    with pytest.raises(StrategyError, match="no reduction to choose for a target"):
        lossy_strategy(evaluator, staged(), Order.RANK, FP16, target_s=1.0)


def test_files_hold_codecs_and_exact_ones_say_nothing_of_them(tmp_path: Path) -> None:
    assert "codecs" not in strategy_to_dict(staged())
    coded = with_rules(staged(), (sends(top_k(7.5, 8)),))
    record = strategy_to_dict(coded)
    assert strategy_from_dict(record) == coded
    for field, value, said in (
        ("traffic", "letters", "field 'codecs.0.traffic' is 'letters', none of"),
        ("codec", "zip", "field 'codecs.0.codec' is 'zip', none of fp16, int8, top_k"),
        ("reduction", 0.0, "choose a reduction from 1"),
        ("devices", [3], "needs at least two different ones"),
    ):
        broken = record | {"codecs": [record["codecs"][0] | {field: value}]}
        with pytest.raises(HeterogError, match=said):
            strategy_from_dict(broken)


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ((CodecRule(traffic=Traffic.GRADIENTS, devices=(0, 1), codec=FP16),), "no such message"),
        ((sends(FP16), sends(INT8)), "two codecs on activations"),
        (
            (CodecRule(traffic=Traffic.ACTIVATIONS, devices=(0, 9), codec=FP16),),
            "the cluster has devices 0 to 2",
        ),
    ],
)
def test_a_rule_that_means_nothing_is_refused(rules: tuple[CodecRule, ...], said: str) -> None:
    with pytest.raises(StrategyError, match=said):
        lower(graph_of_perceptron(), SLOW, with_rules(staged(), rules))


def test_rules_that_cannot_be_written() -> None:
    with pytest.raises(StrategyError, match="would set most of them to 0"):
        CodecRule(traffic=Traffic.PARAMETERS, devices=(0, 1), codec=top_k(2.0))
    with pytest.raises(StrategyError, match="names 3 devices"):
        CodecRule(traffic=Traffic.ACTIVATIONS, devices=(0, 1, 2), codec=FP16)
    with pytest.raises(StrategyError, match="only top_k has"):
        Codec(kind=CodecKind.INT8, reduction=3.0)
    with pytest.raises(StrategyError, match="must be 4 or 8"):
        top_k(2.0, 2)
