"""A rehearsal says of a plan what ranks would say, without ranks and without data."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from random import Random
from unittest import mock

import pytest
import torch
from torch import Tensor

from heterog.graph.axis_plan import axis_plan
from heterog.graph.capture import CapturedStep
from heterog.graph.grouping import group_ops
from heterog.lowering import lower
from heterog.lowering.program import TaskKind
from heterog.runtime.measure.rehearsal import _rehearsed_ops, rehearse
from heterog.runtime.step.local_op import LocalOp
from heterog.runtime.step.rank_program import Need
from heterog.runtime.step.spans import Spans
from heterog.runtime.step.values import Reader, Values
from heterog.search.plan import Plan
from heterog.strategy.strategy import Decision
from tests.runtime.cases import (
    EVERY,
    MODELS,
    OWN_LOSS,
    SGD,
    Trained,
    assert_same,
    capture_case,
    reference,
    refusal,
    train,
    workload_of,
)
from tests.runtime.ranks import PARENT, Ranks
from tests.runtime.strategies import (
    SYNCS,
    graph_of,
    homes_of,
    plan_of,
    random_strategy,
    strategy_of,
)
from tests.thorough import cases, one_in

NUM_RANDOM = int(os.environ.get("HETEROG_RANDOM_STRATEGIES", str(cases(12, 6))))
"""Random strategies that are rehearsed and then run; the 500 of the results take half an hour."""


@cache
def captured_of(name: str) -> CapturedStep:
    return capture_case(workload_of(name))


def uniform(name: str, case: str, micro: tuple[tuple[int, ...], ...] = ()) -> Plan:
    graph = graph_of(name)
    decisions = [SYNCS[case]] * group_ops(graph).num_groups
    homes = homes_of(graph, case)
    return plan_of(graph, strategy_of(graph, decisions, homes=homes, micro_batches=micro))


def verdict(name: str, plan: Plan) -> str:
    program = lower(captured_of(name).graph, plan.cluster, plan.strategy, num_steps=1)
    return rehearse(
        captured_of(name),
        plan.strategy,
        program,
        plan.task_order,
        sent_before=plan.sent_before,
        clips=len(plan.task_order) % 2 == 0,
    )


@one_in(7)
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("case", SYNCS)
def test_what_ranks_run_is_accepted(name: str, case: str) -> None:
    plan = uniform(name, case)
    assert PARENT.call(verdict, name, plan) == ""


@pytest.mark.parametrize("name", ["mlp", "own loss"])
def test_a_kernel_runs_once_for_alike_shapes(name: str) -> None:
    captured = captured_of(name)
    ops = _rehearsed_ops(captured, axis_plan(captured.graph, ()))
    for op in ops.values():
        if op.is_of_whole_batch:
            continue
        inputs = [
            torch.empty(meta.shape, dtype=getattr(torch, meta.dtype), device="meta")
            for meta in op.call.inputs
        ]
        for first, again in zip(op(inputs, op.whole), op(inputs, op.whole), strict=True):
            assert first is again


def test_a_kernel_that_makes_another_shape() -> None:
    with mock.patch.object(LocalOp, "local_shape_of_output", return_value=(7, 7)):
        assert "instead of (7, 7)" in verdict("mlp", uniform("mlp", "ring"))


@pytest.mark.distributed
def test_norms_in_eval_mode_train_as_on_one_device(ranks: Ranks, tmp_path: Path) -> None:
    """Where BatchNorm is frozen, its statistics are empty on CPUs, and not on other devices."""
    plan = uniform("frozen norms", "ring")
    assert verdict("frozen norms", plan) == ""
    plan.save(tmp_path / "plan.json")
    results = ranks.run(train, "frozen norms", SGD, str(tmp_path / "plan.json"))
    assert_same(results, reference("frozen norms"))


def test_the_whole_batch_in_micro_batches() -> None:
    text = verdict("gathered", uniform("gathered", "ring", ((3, 2), (1, 1), (0, 1))))
    assert "2 micro-batches cannot be combined with ops that need the whole batch" in text


# --- the crashes of before -----------------------------------------------------------------------


@contextmanager
def labels_read_from_buffers() -> Iterator[None]:
    """As it was: labels are looked for among what ops have made, before any has run."""

    def known(self: Values, need: Need, reader: Reader) -> Tensor:
        return self.follow(self.read(need, {}, reader))

    with mock.patch.object(Values, "known", known):
        yield


@pytest.mark.parametrize("name", ["own loss", "masked target"])
def test_labels_that_no_op_has_made_yet(name: str) -> None:
    with labels_read_from_buffers():
        text = verdict(name, uniform(name, "ring"))
    assert "is not here" in text


def test_labels_that_the_model_makes() -> None:
    plan = uniform("pseudo-labels", "ring")
    with mock.patch("heterog.graph.batch_plan.counts_known_labels", return_value=True):
        graph = replace(captured_of("pseudo-labels").graph)  # whose batch plan is made anew
        captured = replace(captured_of("pseudo-labels"), graph=graph)
        strategy = replace(plan.strategy, graph=graph.fingerprint)
        program = lower(graph, plan.cluster, strategy, num_steps=1)
        order = range(program.num_tasks)
        with labels_read_from_buffers():
            assert "is not here" in rehearse(captured, strategy, program, order)


# --- what is wrong between ranks -----------------------------------------------------------------


@pytest.mark.parametrize("kind", [TaskKind.PUSH, TaskKind.COMPUTE, TaskKind.PULL])
def test_a_task_that_nobody_plays(kind: TaskKind) -> None:
    plan = uniform("mlp", "server")
    program = lower(captured_of("mlp").graph, plan.cluster, plan.strategy, num_steps=1)
    task = next(t for t in plan.task_order if program.kind[t] == kind)
    order = tuple(t for t in plan.task_order if t != task)
    text = rehearse(captured_of("mlp"), plan.strategy, program, order)
    assert f"not each of the {program.num_tasks} once" in text


def test_an_order_against_the_data() -> None:
    plan = uniform("mlp", "ring")
    program = lower(captured_of("mlp").graph, plan.cluster, plan.strategy, num_steps=1)
    text = rehearse(captured_of("mlp"), plan.strategy, program, plan.task_order[::-1])
    assert "whose result it needs" in text


def test_messages_that_do_not_match() -> None:
    """One rank believes in other shares than the rest: what it sends is not what is expected."""
    plan = uniform("mlp", "ring")
    range_of = Spans.own_samples

    def other(self: Spans, micro: int, device: int) -> tuple[int, int]:
        begin, count = range_of(self, micro, device)
        return (begin, count + 1) if device == 1 and self.devices == (1, 2) else (begin, count)

    graph = captured_of("mlp").graph
    groups = group_ops(graph).num_groups
    decisions = [SYNCS["ring"], *[Decision(devices=(1, 2), shares=(4, 4))] * (groups - 1)]
    plan = plan_of(graph, strategy_of(graph, decisions))
    assert verdict("mlp", plan) == ""
    with mock.patch.object(Spans, "own_samples", other):
        assert "rank " in verdict("mlp", plan)


# --- random strategies ---------------------------------------------------------------------------


def train_or_say_why(rank: int, name: str, path: str) -> Trained | str:
    """What a rank does with a plan; why it refuses to."""
    why = refusal(rank, name, path)
    return why or train(rank, name, SGD, path)


class Verdict(StrEnum):
    """What became of a random strategy, said before and seen on ranks."""

    RUN = "accepted and run"
    REFUSED = "refused by both in the same words"
    BROKEN = "refused, and fails on ranks"
    TOO_STRICT = "refused, but runs"
    FAILED = "accepted, but fails on ranks"


def verdict_on_ranks(ranks: Ranks, name: str, said: str, path: str) -> tuple[Verdict, str]:
    """Compare what rehearsal said of a plan (nothing: it accepts) with what ranks do; details."""
    try:
        results = ranks.run(train_or_say_why, name, path)
        if isinstance(results[0], str):
            if results[0] == said:
                return Verdict.REFUSED, said
            raise AssertionError(results[0])
        assert_same(results, reference(name), rtol=2e-4)
    except AssertionError as error:
        return Verdict.BROKEN if said else Verdict.FAILED, f"{said} / {error}"
    return Verdict.TOO_STRICT if said else Verdict.RUN, said


@pytest.mark.distributed
def test_random_strategies_run_as_they_rehearse(ranks: Ranks, tmp_path: Path) -> None:
    """None that is accepted fails, and what is refused, ranks refuse, too."""
    rng = Random(int(os.environ.get("HETEROG_SEED", "7")))
    names = [*MODELS, *OWN_LOSS, "gathered"]
    counts: Counter[Verdict] = Counter()
    wrong = []
    path = tmp_path / "plan.json"
    for number in range(NUM_RANDOM):
        name = names[number % len(names)]
        graph = graph_of(name)
        strategy = random_strategy(rng, graph)
        plan = plan_of(graph, strategy)
        plan.save(path)
        found, details = verdict_on_ranks(ranks, name, PARENT.call(verdict, name, plan), str(path))
        counts[found] += 1
        if found in (Verdict.TOO_STRICT, Verdict.FAILED):
            wrong.append((number, name, found, details, strategy))
            print(*wrong[-1], sep="\n  ")
        if number % 50 == 49 or number == NUM_RANDOM - 1:
            print(", ".join(f"{counts[each]} {each}" for each in Verdict), flush=True)
    assert not wrong
    assert counts[Verdict.RUN] > counts[Verdict.REFUSED]
