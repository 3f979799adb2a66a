"""What is left of clusters, what it costs to move, and what is decided."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from heterog.cluster.hardware import PairLimit
from heterog.envs.toy import chain_graph
from heterog.errors import ClusterError, HeterogError
from heterog.graph.grouping import group_ops
from heterog.healing.choices import Choice, Question
from heterog.healing.costs import held, slowed, transfer_s
from heterog.healing.options import HealOptions
from heterog.healing.record import Move, Trained
from heterog.healing.service import Service
from heterog.healing.steering import PlanChange, Steering
from heterog.strategy.strategy import REPLICATED, Decision, Strategy, Sync
from tests.simulator.builders import cluster_of


def test_hosts_without_devices_go_and_the_others_keep_what_lies_between_them() -> None:
    whole = cluster_of((1.0, ["T4", "T4"]), (1.0, ["T4"]), (1.0, ["V100-16GB"]))
    line = PairLimit(sources=(0, 1), targets=(2,), bandwidth_bytes_per_s=1e6)
    gone = PairLimit(sources=(1,), targets=(0,), bandwidth_bytes_per_s=1e6)
    whole = replace(whole, pairs=(line, gone))
    left = whole.part((1, 3))
    assert [host.name for host in left.hosts] == ["A", "C"]
    assert left.host_of == (0, 1)
    assert left.pairs == (replace(line, sources=(0,), targets=(1,)),)
    with pytest.raises(ClusterError, match="no device of 'tiny' is left"):
        whole.part(())


def test_a_slow_device_has_a_type_of_its_own() -> None:
    whole = cluster_of((1.0, ["T4"]), (1.0, ["T4"]))
    slow = slowed(slowed(whole, {1: 2.0}), {0: 3.0})
    assert [device.type.name for device in slow.devices] == ["T4@0.333333", "T4@0.5"]
    assert slow.devices[0].type.memory_bytes == whole.devices[0].type.memory_bytes


def test_moving_costs_what_is_not_on_the_same_host() -> None:
    graph = chain_graph()
    whole = cluster_of((8.0, ["T4"]), (8.0, ["T4"]))

    def strategy(sync: Sync, devices: tuple[int, ...]) -> Strategy:
        shares = (graph.batch_size, *(0 for _ in devices[1:]))
        decision = Decision(devices=devices, shares=shares, sync=sync)
        return Strategy(
            graph=graph.fingerprint,
            cluster=whole.fingerprint,
            decisions=(decision,) * (int(group_ops(graph).group.max()) + 1),
            homes=(REPLICATED,) * len(graph.updates),
        )

    both, one = strategy(Sync.RING, (0, 1)), strategy(Sync.RING, (0,))
    sizes = sum(graph.tensors[each].num_bytes for _, each, _ in graph.updates)
    state = sizes * (1 + graph.optimizer_state_ratio)
    # Device 0 owns everything: to stay there is free, the other host reads all of it at 1 GB/s.
    assert transfer_s(graph, whole, (both, (0, 1)), (one, (0,))) == 0.0
    assert transfer_s(graph, whole, (both, (0, 1)), (one, (1,))) == pytest.approx(state / 1e9)
    sharded = held(graph, strategy(Sync.ZERO3, (0, 1)), 2)
    assert sharded.shape == (3, len(graph.updates), 2)
    assert np.allclose(sharded, 0.5)


def test_steps_that_are_done_again_count_once() -> None:
    trained = Trained()

    def hear(event: str, **said: Any) -> None:
        trained.hear({"event": event, "at_s": float(len(trained.losses)), **said})

    for step in (1, 2, 3):
        hear("step", step=step, loss=float(step), seconds=1.0)
    trained.moves.append(Move(kind="lost", why=""))
    hear("taken up", step=2)
    hear("step", step=3, loss=30.0, seconds=1.0)
    assert trained.losses == {1: 1.0, 2: 2.0, 3: 30.0}
    assert trained.moves[0].steps_done_again == 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"redundancy": -1}, "the redundancy is -1; 0 is the least"),
        ({"slow_factor": 0.5}, "slow from 0.5 times the planned time on; give more than 1"),
        ({"checkpoint_s": 0.0}, "between checkpoints not 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(change: Mapping[str, Any], text: str) -> None:
    with pytest.raises(HeterogError, match=text):
        HealOptions(**change)


def lost(devices: Iterable[int]) -> tuple[int, ...]:
    """Which of three devices are missing."""
    return tuple(sorted({0, 1, 2} - set(devices)))


class Prompt(Service):
    """Answers questions at once, with step times by the devices that are lost."""

    def __init__(self, step_s: Mapping[tuple[int, ...], float], stay_step_s: float) -> None:
        self._step_s, self._stay_step_s = step_s, stay_step_s
        self._said: deque[tuple[int, Any]] = deque()
        self._num_asked = 0

    def ask(self, question: Any, *, niceness: int = 0) -> int:
        self._num_asked += 1
        self._said.append((self._num_asked, self._answer(question)))
        return self._num_asked

    def next_answer(self, timeout_s: float = 0.0) -> tuple[int, Any] | None:
        return self._said.popleft() if self._said else None

    def _answer(self, question: Question | None) -> Any:
        if question is None:
            return 1.0, 1.0, 1.0
        return Choice(
            path=question.path,
            method="some",
            kind=question.kind,
            devices=question.devices,
            slow={d: each for d, each in question.slow.items() if d in question.devices},
            step_time_s=self._step_s.get(lost(question.devices), 1.0),
            moving_s=10.0,
            stay_step_s=self._stay_step_s,
            busy_s=tuple(1.0 for _ in question.devices),
        )


def steered(prompt: Prompt, said: list[str], **options: Any) -> Steering:
    whole = cluster_of((1.0, ["T4"]), (1.0, ["T4"]), (1.0, ["T4"]))
    running = Choice(path="first.json", method="given", devices=(0, 1, 2))
    crew = mock.Mock(
        is_here=lambda device: True,
        lost_with=lambda device: [device],
        is_leaving=lambda device: False,
        is_silent=lambda device: False,
    )
    steering = Steering(whole, running, Path(), HealOptions(**options), said.append, prompt, crew)
    prompt.ask(None)  # about the first plan
    steering.look()
    trained(steering, 2.0, steps_left=1000)
    return steering


def crew_of(steering: Steering) -> Any:
    """A mock, whose methods can be replaced."""
    return steering._crew


def trained(steering: Steering, step_s: float, *, steps_left: int) -> None:
    """Have steps take so long now, of which so many are left."""
    steering.steps_left, steering._seconds = steps_left, [step_s] * 8


@pytest.mark.parametrize(
    ("rebalanced_s", "left_out_s", "steps_left", "what"),
    [
        (1.0, 1.5, 1000, "rebalanced"),
        (1.5, 1.0, 1000, "left out"),
        (1.0, 1.5, 5, "left as it is"),
    ],
)
def test_a_slow_device_is_rebalanced_left_out_or_left_as_it_is(
    rebalanced_s: float, left_out_s: float, steps_left: int, what: str
) -> None:
    said: list[str] = []
    prompt = Prompt({(): rebalanced_s, (1,): left_out_s}, stay_step_s=2.0)
    steering = steered(prompt, said)
    steering.steps_left = steps_left
    for _ in range(3):
        steering.hear_busy([1.0, 3.0, 1.0])
    looks = [steering.look() for _ in range(4)]
    goings = [each for each in looks if each is not None]
    if what == "left as it is":
        assert not goings
        (text,) = said
    else:
        (going,) = goings
        text = going.why
        steering.begin_generation(going.choice, going.kind)
        assert steering.absent == ({1} if what == "left out" else set())
        assert steering.running.slow == ({} if what == "left out" else {1: 3.0})
    assert text.startswith(f"B:0 takes 3.0 times as long as planned: {what}")
    assert "steps 2.00 s as it is, " in text
    assert f"{left_out_s:.2f} s left out" in text


@pytest.mark.parametrize(
    ("measured_s", "steps_left", "changes", "last_line"),
    [
        # It takes what was promised: nothing more happens.
        ([1.0], 1000, [], "take 1.00 s instead of 1.00 s: stays so, left out (1.50 s) would not"),
        # More, and less than the other choice.
        ([1.4], 1000, [], "take 1.40 s instead of 1.00 s: stays so, left out (1.50 s) would not"),
        # More than the other choice, in too few steps for another move, which takes 10 s.
        ([1.9], 20, [], "take 1.90 s instead of 1.00 s: stays so, left out (1.50 s) would not"),
        ([1.9, 1.6], 1000, ["left out (1.50 s)"], "1.60 s instead of 1.50 s: stays so, rebal"),
        ([1.9, 1.2], 1000, ["left out (1.50 s)"], "1.20 s instead of 1.50 s: stays so, rebal"),
        # Both were tried, and the first was better; what then happens changes nothing.
        ([1.9, 3.0, 9.0], 1000, ["left out (1.50 s)", "rebalanced (1.90 s)"], ""),
    ],
)
def test_a_choice_that_is_slower_than_the_other_one_is_changed_once(
    measured_s: Sequence[float], steps_left: int, changes: Sequence[str], last_line: str
) -> None:
    said: list[str] = []
    prompt = Prompt({(): 1.0, (1,): 1.5}, stay_step_s=2.0)
    steering = steered(prompt, said, search_budget="", back_after_s=0.0)
    going, done = change_after([1.0, 3.0, 1.0], steering), []
    assert going is not None
    for number, step_s in enumerate(measured_s):
        steering.begin_generation(going.choice, going.kind)
        assert steering.absent == (set() if number % 2 == 0 else {1})
        steering.hear_step(9.0)  # plans are prepared; steps take longer meanwhile
        for _ in range(4):
            steering.look()
        steering.steps_left = steps_left
        going = going_after([9.0, 9.0, *[step_s] * 16], steering)
        if going is None:
            break
        assert going.kind == "slow"
        done.append(going.why.partition(": ")[2])
    assert going is None
    assert done == changes
    assert [last_line in line for line in said] == ([True] if last_line else [])


def change_after(busy_s: Sequence[float], steering: Steering) -> PlanChange | None:
    """What is gone to after three reports, and then never again, if anything is."""
    goings = []
    for _ in range(3):
        steering.hear_busy(busy_s)
    for _ in range(4):
        goings.append(steering.look())
    found = [each for each in goings if each is not None]
    assert len(found) <= 1
    return found[0] if found else None


def test_a_choice_is_not_changed_after_something_else_has_happened() -> None:
    said: list[str] = []
    prompt = Prompt({(): 1.0, (1,): 1.5}, stay_step_s=2.0)
    steering = steered(prompt, said, search_budget="", back_after_s=0.0)
    going = change_after([1.0, 3.0, 1.0], steering)
    assert going is not None
    steering.begin_generation(going.choice, going.kind)
    steering.leave_out([2])
    steering.begin_generation(steering.plan_for_loss(1.0), "lost")
    assert going_after([100.0] * 40, steering) is None
    assert not said


def test_a_device_that_is_not_there_is_not_taken_in_again() -> None:
    said: list[str] = []
    prompt = Prompt({(): 1.5, (1,): 1.0}, stay_step_s=2.0)
    steering = steered(prompt, said, search_budget="", back_after_s=0.0)
    going = change_after([1.0, 3.0, 1.0], steering)
    assert going is not None
    assert "left out (steps" in going.why
    steering.begin_generation(going.choice, going.kind)
    for _ in range(4):
        steering.look()
    crew_of(steering).is_here = lambda device: False
    assert going_after([3.0] * 18, steering) is None
    assert said == [
        "B:0 was left out and steps take 3.00 s instead of 1.00 s: stays so, rebalanced (1.50 s) "
        "would not pay"
    ]


def test_a_device_that_changes_often_does_not_change_the_plan_each_time() -> None:
    """Slow, quick again, slow: each change needs twice as many reports as the one before."""
    said: list[str] = []
    steering = steered(Prompt({(): 1.0, (1,): 1.5}, stay_step_s=2.0), said, search_budget="")
    needed = []
    for is_slow in (True, False, True):
        for count in range(1, 50):
            # Beside what was planned, which is 1 for each.
            known = steering.running.slow.get(1, 1.0)
            steering.hear_busy([1.0, (4.0 if is_slow else 1.0) / known, 1.0])
            goings = [each for each in (steering.look() for _ in range(4)) if each is not None]
            if goings:
                needed.append(count)
                steering.begin_generation(goings[0].choice, goings[0].kind)
                trained(steering, 1.0, steps_left=1000)
                assert steering.running.slow == ({1: 4.0} if is_slow else {})
                break
    assert needed == [3, 6, 12]


def test_a_slow_device_ends_a_search_that_nobody_waits_for() -> None:
    """The search for something better is asked again behind the questions about the device."""
    prompt = Prompt({(): 1.0, (1,): 1.5}, stay_step_s=2.0)
    steering = steered(prompt, [])
    steering.leave_out([2])
    steering.begin_generation(steering.plan_for_loss(1.0), "lost")
    steering.look()  # asks for one of those to prepare
    interrupted = steering._asked
    assert interrupted is not None
    for _ in range(3):
        steering.hear_busy([1.0, 3.0])
    assert [each.kind for each in steering._queue[:2]] == ["rebalanced", "left out"]
    assert steering._queue[-1] == interrupted[1]


def test_a_plan_that_is_being_prepared_is_not_asked_for_again() -> None:
    prompt = Prompt({}, stay_step_s=2.0)
    steering = steered(prompt, [], search_budget="")
    steering.begin_generation(None, "first")
    steering.look()  # asks about the loss of the first device
    assert steering._asked is not None
    number, question = steering._asked
    steering.leave_out(lost(question.devices))
    answer = steering.plan_for_loss(1.0)
    assert (answer.path, prompt._num_asked) == (question.path, number)
    steering.leave_out([1])
    assert steering.plan_for_loss(1.0).devices == (2,)
    assert prompt._num_asked == number + 1


def test_a_question_that_ends_the_process_is_not_waited_for() -> None:
    prompt = Prompt({}, stay_step_s=2.0)
    steering = steered(prompt, [], search_budget="")
    steering.begin_generation(None, "first")
    steering.look()
    prompt.next_answer = lambda timeout_s=0.0: None  # type: ignore[method-assign]
    prompt.has_ended = True
    asked = steering._asked
    steering.look()
    assert asked is not None
    assert steering._asked not in (None, asked), "the next one starts it again"


def test_a_device_that_does_not_answer_is_planned_without_first() -> None:
    steering = steered(Prompt({}, stay_step_s=2.0), [], search_budget="")
    steering.begin_generation(None, "first")
    steering.look()

    def waiting() -> list[tuple[int, ...]]:
        return [lost(each.devices) for each in steering._queue]

    assert waiting() == [(1,), (2,)], "that of the first device was asked"
    crew_of(steering).is_silent = lambda device: device == 2
    steering.look()
    asked = steering._asked
    assert asked is not None
    assert lost(asked[1].devices) == (2,), "at once, instead of that"
    assert waiting() == [(1,), (0,)]
    steering.look()
    assert waiting() == [(0,)], "it was prepared"


def test_the_loss_of_a_host_is_planned_for_once_whatever_devices_it_has() -> None:
    steering = steered(Prompt({}, stay_step_s=2.0), [], search_budget="")
    crew_of(steering).lost_with = lambda device: [0, 1] if device < 2 else [2]
    steering.begin_generation(None, "first")
    assert [lost(each.devices) for each in steering._queue] == [(0, 1), (2,)]


def test_a_device_that_is_known_to_be_slow_is_not_the_measure_of_the_others() -> None:
    """Of two devices one is quick again: it is not the other one that has become slow."""
    said: list[str] = []
    steering = steered(Prompt({(2,): 1.0}, stay_step_s=2.0), said, search_budget="")
    steering.running = Choice(path="", method="", devices=(0, 1), busy_s=(1.0, 1.0), slow={1: 4.0})
    steering.leave_out([2])
    for _ in range(3):
        steering.hear_busy([1.0, 0.25])
    (going,) = [each for each in (steering.look() for _ in range(4)) if each is not None]
    assert going.kind == "quick"
    assert going.why == (
        "B:0 is quicker again, at 1.0 times as long as planned (steps 1.00 s instead of 2.00 s)"
    )


def test_a_device_that_is_back_is_taken_in_if_it_pays() -> None:
    for steps_left, is_taken in ((1000, True), (5, False)):
        said: list[str] = []
        prompt = Prompt({(2,): 2.0, (): 1.0}, stay_step_s=2.0)
        steering = steered(prompt, said, back_after_s=1e-9, search_budget="")
        steering.leave_out([2])
        steering.begin_generation(steering.plan_for_loss(1.0), "lost")
        assert steering.running.devices == (0, 1)
        trained(steering, 2.0, steps_left=steps_left)
        looks = [steering.look() for _ in range(3)]
        goings = [each for each in looks if each is not None]
        assert [each.why for each in goings[:1]] == (
            ["C:0 is back (steps 1.00 s instead of 2.00 s)"] if is_taken else []
        )
        if not is_taken:
            assert said[0].startswith("C:0 is back and not taken in: moving takes 10.00 s")


def test_devices_of_a_host_come_back_together_once_it_is_there() -> None:
    is_there = False
    prompt = Prompt({(1, 2): 2.0, (): 1.0}, stay_step_s=2.0)
    said: list[str] = []
    steering = steered(prompt, said, back_after_s=1e-9, search_budget="")
    crew_of(steering).is_here = lambda device: is_there
    steering.leave_out([1, 2])
    steering.begin_generation(steering.plan_for_loss(1.0), "lost")
    trained(steering, 2.0, steps_left=1000)
    assert [steering.look() for _ in range(4)] == [None] * 4
    is_there = True
    (going,) = [each for each in (steering.look() for _ in range(3)) if each is not None]
    assert going.why == "B:0, C:0 are back (steps 1.00 s instead of 2.00 s)"
    steering.begin_generation(going.choice, going.kind)
    assert steering.running.devices == (0, 1, 2)


def test_an_answer_saves_what_steps_save_less_the_move() -> None:
    answer = Choice(
        path="", method="", devices=(), step_time_s=1.0, moving_s=5.0, stay_step_s=2.0
    )  # fmt: skip
    assert answer.saved_s(10, 3.0) == 10 * 1.0 * 3.0 - 5.0


def test_a_host_that_announces_its_end_is_left_before_it_goes() -> None:
    """Whatever it saves; with the plan that was prepared, or with one that is asked for first."""
    for is_prepared in (True, False):
        steering = steered(Prompt({}, stay_step_s=1.0), [], search_budget="", back_after_s=1e-9)
        if is_prepared:
            steering.begin_generation(None, "first")
            assert not any(steering.look() for _ in range(6))
        crew_of(steering).is_leaving = lambda device: device == 1
        crew_of(steering).is_here = lambda device: device != 1
        going = steering.look() or steering.look()
        assert going is not None
        assert (going.kind, going.why) == ("leaving", "B:0 leaves: its host announced its end")
        steering.begin_generation(going.choice, going.kind)
        assert steering.running.devices == (0, 2)
        assert not any(steering.look() for _ in range(4)), "nor is it taken in again"


@pytest.mark.parametrize(
    ("after_s", "steps_left", "is_kept"),
    [
        (1.9, 1000, True),
        (1.98, 1000, False),  # 1 % less may be the machine
        (2.1, 1000, False),
        (2.1, 50, True),  # 50 steps of 0.1 s more are 5 s, and moving takes 10
    ],
)
def test_a_plan_that_was_tried_is_taken_back_if_that_pays(
    after_s: float, steps_left: int, is_kept: bool
) -> None:
    said: list[str] = []
    steering = steered(Prompt({}, stay_step_s=2.0), said, search_budget="", num_trials=1)
    assert going_after([2.0] * 17, steering) is None, "too few steps are known"
    tried = going_after([2.0], steering)
    assert tried is not None
    assert (tried.kind, tried.choice.path, steering._tried) == (
        "tried", "plan1.json", ["first.json", "plan1.json"]
    )  # fmt: skip
    steering.begin_generation(tried.choice, tried.kind)
    steering.hear_step(99.0)  # while plans are prepared, which takes cores from the ranks
    for _ in range(6):
        steering.look()
    steering.steps_left = steps_left
    back = going_after([99.0, 99.0, *[after_s] * 16], steering)
    (trial,) = steering.trials
    assert (trial.other_s, trial.after_s) == pytest.approx((2.0, after_s))
    assert trial.is_kept == is_kept
    assert (back is None) == is_kept
    if back is not None:
        assert (back.kind, back.why) == (
            "taken back",
            f"steps take {after_s:.2f} s instead of 2.00 s: the move is taken back",
        )
        steering.begin_generation(back.choice, back.kind)
    assert steering.running.path == ("plan1.json" if is_kept else "first.json")
    assert going_after([2.0] * 40, steering) is None, "one trial was asked for"


def going_after(seconds: Sequence[float], steering: Steering) -> PlanChange | None:
    """What is gone to after some steps."""
    for each in seconds:
        steering.hear_step(each)
    goings = [each for each in (steering.look() for _ in range(6)) if each is not None]
    return goings[0] if goings else None


def test_a_trial_ends_when_something_else_happens() -> None:
    said: list[str] = []
    steering = steered(Prompt({}, stay_step_s=2.0), said, search_budget="", num_trials=1)
    tried = going_after([2.0] * 18, steering)
    assert tried is not None
    steering.begin_generation(tried.choice, tried.kind)
    steering.leave_out([2])
    steering.begin_generation(steering.plan_for_loss(1.0), "lost")
    assert going_after([9.0] * 40, steering) is None
    assert not steering.trials


def test_the_last_host_cannot_be_left() -> None:
    steering = steered(Prompt({}, stay_step_s=1.0), [], search_budget="")
    crew_of(steering).is_leaving = lambda device: True
    assert not any(steering.look() for _ in range(4))
