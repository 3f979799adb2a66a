"""Codecs on finished plans: which of them are tried, what is said, what is not done."""

from functools import lru_cache

import pytest

from heterog.errors import StrategyError
from heterog.modes.codecs.method import with_codec
from heterog.modes.codecs.value import parse_codec
from heterog.search.plan import Plan
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from tests.search.asking import make_plan
from tests.search.test_planners import graph
from tests.simulator.builders import by_sheets, cluster_of

METHODS = ("single_device", "cp_ar", "pipeline")


@lru_cache(maxsize=1)
def evaluator() -> Evaluator:
    return Evaluator(graph(), by_sheets(cluster_of(*((2.0, ["T4"]),) * 3)))


@lru_cache(maxsize=1)
def plan() -> Plan:
    return make_plan(
        graph(), evaluator().cluster, evaluator=evaluator(), methods=METHODS, budget="60e"
    )


def test_a_plan_that_sends_nothing_gives_way_to_one_with_codecs() -> None:
    """At 2 Gbit/s one device is the fastest, and a pipeline with shorter messages is faster."""
    exact = plan()
    assert exact.method == "single_device"
    lossy, said = with_codec(exact, evaluator(), parse_codec("int8"))
    assert lossy.method == "pipeline + int8 (lossy)"
    assert lossy.step_time_s is not None
    assert exact.step_time_s is not None
    assert lossy.step_time_s < exact.step_time_s
    assert "the exact single_device" in said
    again = evaluator().referee(lossy.strategy, Order[lossy.order.upper()])
    assert again.step_time_s == pytest.approx(lossy.step_time_s)
    assert lossy.rows[-1].method == lossy.method
    assert min(gain.speedup for gain in lossy.gains) > 1.0  # the same draws of noise for all
    assert lossy.rows[:-1] == exact.rows


def test_what_cannot_be_executed_is_not_taken() -> None:
    lossy, said = with_codec(
        plan(), evaluator(), parse_codec("int8"), rehearse=lambda *_: "a reason"
    )
    assert lossy is plan()
    assert said == "int8 is not used: it cannot be executed (a reason). The plan is exact"


def test_a_target_that_is_reached_needs_no_codec() -> None:
    lossy, said = with_codec(plan(), evaluator(), parse_codec("top_k=50"), target_s=1.0)
    assert lossy is plan()
    assert "not used" in said


def test_codecs_are_put_on_exact_plans_only() -> None:
    lossy, _ = with_codec(plan(), evaluator(), parse_codec("int8"))
    with pytest.raises(StrategyError, match="codecs already"):
        with_codec(lossy, evaluator(), parse_codec("fp16"))
