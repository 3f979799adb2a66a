"""A stash of weights as a row beside exact methods: asked for, priced, kept in files."""

from dataclasses import replace
from pathlib import Path

import pytest

from heterog.errors import HeterogError, StrategyError
from heterog.explain.explanation import explain
from heterog.export.folder import ExportError
from heterog.export.uniform import uniform_micro_batches
from heterog.healing.job import HealingJob
from heterog.modes.averaging.value import Averaging
from heterog.modes.built_in import method_of
from heterog.modes.codecs.method import with_codec
from heterog.modes.codecs.value import Codec, CodecKind, CodecRule, Codecs, Traffic
from heterog.modes.stash.method import StashedPipelines
from heterog.modes.stash.value import WeightStash, stages_of
from heterog.runtime.request import RunRequest
from heterog.search.plan import load_plan
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.memory_breakdown import MemoryKind, memory_fit
from heterog.strategy.pipeline_schedule import PipelineSchedule
from heterog.strategy.serialize import strategy_from_dict, strategy_to_dict
from heterog.strategy.strategy import Decision, Strategy, Sync
from tests.runtime.strategies import cluster, graph_of, plan_of
from tests.search.asking import make_plan
from tests.simulator.builders import cluster_of
from tests.simulator.test_stash import pipeline

STASH = WeightStash(boundary_steps=1)


def test_stages_are_devices_that_share_decisions() -> None:
    strategy = pipeline("mlp", 1)
    assert stages_of(strategy) == ((0,), (1,), (2,))
    first, *_, last = strategy.decisions
    pair = Decision(devices=(0, 2), shares=(3, 5))
    joined = replace(strategy, decisions=(first, *strategy.decisions[1:-1], pair))
    assert stages_of(joined) == ((0, 2), (1,))
    assert last != pair


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"step_barrier": False}, "needs steps that end with all updates"),
        ({"schedule": PipelineSchedule(in_flight=((2,),))}, "plan without a schedule"),
        ({"modes": (Averaging(every=2), STASH)}, "keep one"),
        (
            {
                "modes": (
                    Codecs(
                        rules=(
                            CodecRule(
                                traffic=Traffic.GRADIENTS,
                                devices=(0, 1),
                                codec=Codec(kind=CodecKind.FP16),
                            ),
                        )
                    ),
                    STASH,
                )
            },
            "between devices 0, 1, and stages that do not wait",
        ),
    ],
)
def test_what_does_not_go_with_a_stash_is_refused(change: dict[str, object], text: str) -> None:
    strategy = replace(pipeline("mlp", 1), **change)  # type: ignore[arg-type]
    with pytest.raises(StrategyError, match=text):
        strategy.check(graph_of("mlp"), cluster())


@pytest.mark.parametrize(
    ("decision", "text"),
    [
        (Decision(devices=(0, 1, 2), shares=(5, 2, 1)), "at least two stages"),
        (Decision(devices=(0, 1), shares=(5, 3), sync=Sync.ZERO1), "not with zero1"),
        (Decision(devices=(0, 1), shares=(5, 3), teams=((0,), (1,))), "stages of one team"),
    ],
)
def test_what_is_no_pipeline_of_whole_replicas_is_refused(decision: Decision, text: str) -> None:
    strategy = pipeline("mlp", 1)
    whole = replace(strategy, decisions=(decision,) * len(strategy.decisions))
    with pytest.raises(StrategyError, match=text):
        whole.check(graph_of("mlp"), cluster())


def test_a_strategy_survives_its_file_and_hostile_ones_are_refused() -> None:
    strategy = pipeline("mlp", 2)
    document = strategy_to_dict(strategy)
    assert strategy_from_dict(document) == strategy
    assert "stash" not in strategy_to_dict(replace(strategy, modes=()))
    for wrong in ({"boundary_steps": -1}, {"boundary_steps": 10**6}, {"more": 1}, {}):
        with pytest.raises(StrategyError):
            strategy_from_dict(document | {"stash": wrong})


@pytest.mark.parametrize(
    "text",
    [
        *("stash", "stash=", "stash=x", "stash=-1", "stash=1,delay=2", "stash=1,micro_batches=0"),
        "stash=1,micro_batches=2,micro_batches=4",
    ],
)
def test_words_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(HeterogError, match="`asynchronous`"):
        method_of(text)


def test_it_is_a_row_of_its_own_and_never_comes_unasked(tmp_path: Path) -> None:
    graph = graph_of("mlp")
    unlike = cluster_of((0.1, ["T4"]), (0.1, ["T4"]), (0.1, ["P100-16GB"]))
    method = method_of("stash=2")
    assert isinstance(method, StashedPipelines)
    plan = make_plan(graph, unlike, methods=("cp_ar",), budget="10e", asynchronous=method)
    assert [row.method for row in plan.rows] == ["cp_ar", "stash"]
    assert "not exact: stages that do not wait" in plan.rows[1].note
    assert "as the best exact plan" in plan.rows[1].note
    candidate = plan.rows[1].candidate
    assert candidate is not None
    assert candidate.strategy.mode(WeightStash) == WeightStash(boundary_steps=2)
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").strategy == plan.strategy


def test_micro_batches_are_as_asked_or_chosen_where_memory_is_short() -> None:
    graph = graph_of("mlp")
    asked = method_of("stash=1,micro_batches=4")
    plan = make_plan(graph, cluster(), methods=("cp_ar",), budget="60e", asynchronous=asked)
    assert plan.rows[1].candidate is not None
    assert plan.rows[1].candidate.strategy.num_micro_batches == 4
    more = StashedPipelines(STASH, num_micro=9)
    plan = make_plan(graph, cluster(), methods=("cp_ar",), budget="10e", asynchronous=more)
    assert "9 micro-batches are more than 8 samples" in plan.rows[1].shortage


@pytest.mark.parametrize(
    ("boundary_steps", "num_micro", "text"),
    [
        (2, 1, "runs 4 more batches forward before a gradient comes back, with weights up to 4 s"),
        (1, 4, "runs 2 more micro-batches forward before a gradient comes back, with weights up"),
        (1, 4, "to 1 step old, of which it keeps 2 versions."),
        (0, 4, "Each stage waits for the gradient of its own micro-batch."),
    ],
)
def test_the_explanation_says_what_the_first_stage_keeps(
    boundary_steps: int, num_micro: int, text: str
) -> None:
    plan = plan_of(graph_of("mlp"), pipeline("mlp", boundary_steps, num_micro))
    assert any(text in each for each in explain(plan, changes=False).paragraphs)


def test_a_tied_parameter_of_the_first_and_the_last_stage_is_refused_in_words() -> None:
    graph = graph_of("language")
    plan = make_plan(
        graph, cluster(), methods=("cp_ar",), budget="10e", asynchronous=StashedPipelines(STASH)
    )
    row = plan.rows[1]
    assert row.candidate is None or len(stages_of(row.candidate.strategy)) > 1
    if row.candidate is None:
        assert "keep shared parameters in one stage" in row.shortage


def test_what_cannot_wait_refuses_the_plan_and_memory_says_what_is_kept(tmp_path: Path) -> None:
    strategy: Strategy = pipeline("mlp", 1)
    plan = plan_of(graph_of("mlp"), strategy)
    with pytest.raises(ExportError, match="stages that do not wait"):
        uniform_micro_batches(plan, "ddp")
    plan.save(tmp_path / "plan.json")
    with pytest.raises(HeterogError, match="copies of one model only; run it without `heal`"):
        HealingJob(RunRequest(plan=tmp_path / "plan.json"))
    evaluator = Evaluator(graph_of("mlp"), cluster())
    with pytest.raises(StrategyError, match="where codecs are not planned; plan with a codec or"):
        with_codec(plan, evaluator, Codec(kind=CodecKind.FP16))
    fit = memory_fit(evaluator, strategy, Order.FIFO)
    kept = [device.bytes_of(MemoryKind.STASH) for device in fit.devices]
    assert kept[2] < min(kept[:2])  # messages that come early, and no older weights
