"""Decides while a job trains whether it should go on with another plan.

Every decision compares seconds until the job is done: with the plan that runs, and with another
one plus what it costs to go there. Predicted seconds are scaled by what steps really take.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from heterog.cluster.topology import Cluster
from heterog.errors import HeterogError
from heterog.healing.improving import BUDGET, Improving
from heterog.healing.options import HealOptions
from heterog.healing.question import FIRST_METHODS, Answer, Question
from heterog.healing.service import Message, Service
from heterog.healing.trial import Choice, Trial
from heterog.units import format_seconds

_MOST_PREPARED = 8
"""Number of losses of one device that are planned for in advance."""
_LOOKS = 3
"""Number of consecutive reports in which a device has to be slow, or quick again. Twice as many
after each time that it was thought about, so that a device that changes does not lead to a change
of plan each time."""
_MOST_FACTOR = 100.0
_CLEARLY = 1.25
"""Factor by which a device has to be slower than when it was last thought about."""
_AUTO = ("auto",)
_TRIALS = ("tried", "taken back")
"""Changes whose small corrections of speeds leave the plans for a loss as good as they were."""
_NICENESS = {"prepared": 5, "better": 10}
"""Values of ``nice`` for questions that nobody waits for, because ranks need the cores."""


@dataclass(slots=True, kw_only=True)
class Running:
    """The plan that the ranks of the current generation run.

    Attributes:
        path: Path of the plan.
        method: Name of the method that found it.
        device_of: Device of the whole cluster of each rank.
        busy_s: Predicted seconds that each rank computes in a step; empty if not yet known.
        slow: Factor by which kernels take longer than planned, by device, as the plan assumes.
    """

    path: str
    method: str
    device_of: tuple[int, ...]
    busy_s: tuple[float, ...] = ()
    slow: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Going:
    """A plan that the job has decided to change to.

    Attributes:
        answer: The plan.
        kind: Kind of the change: ``"leaving"``, ``"back"``, ``"slow"``, ``"quick"``,
            ``"better"``, ``"tried"`` or ``"taken back"``.
        why: The reason in one line.
    """

    answer: Answer
    kind: str
    why: str


@dataclass(slots=True, kw_only=True)
class _Absence:
    """Time of a device's loss, and how long to wait before it is tried again."""

    since_s: float
    wait_s: float
    was_slow: bool = False


class Steering:
    """Asks the planning process for plans and decides which to change to.

    Args:
        whole: Cluster with all devices.
        running: The first plan.
        folder: Folder for plans.
        options: Settings of healing.
        say: Called with one line about each plan that was considered and not taken.
        service: Answers the questions, as the process of ``heterog.healing.planning`` does, which
            was asked to load the first plan.
        is_here: Whether a rank could be started for a device.
        is_leaving: Whether the host of a device has announced its end.

    Attributes:
        running: The plan that the current generation runs.
        absent: Devices that do not take part.
        steps_left: Number of steps left to train.
        step_s: Measured step time; 0 where it is not yet known.
        restart_s: Seconds until restarted ranks have done a step.
        improving: Plans near the running one that are tried.
    """

    def __init__(
        self,
        whole: Cluster,
        running: Running,
        folder: Path,
        options: HealOptions,
        say: Callable[[str], None],
        service: Service,
        is_here: Callable[[int], bool] = lambda device: True,
        is_leaving: Callable[[int], bool] = lambda device: False,
    ) -> None:
        self.running = running
        self.absent: dict[int, _Absence] = {}
        self.steps_left = 0
        self.step_s = 0.0
        self.restart_s = 0.0
        self.improving = Improving(num_left=options.num_trials)
        self._whole, self._folder, self._options, self._say = whole, folder, options, say
        self._is_here, self._is_leaving = is_here, is_leaving
        self._prepared: dict[frozenset[int], Answer] = {}
        self._wishes: list[tuple[str, Question]] = []
        self._asked: tuple[int, str, Question] | None = None
        self._num_plans = 0
        self._num_absences: dict[int, int] = {}
        self._slow_looks: dict[int, list[float]] = {}
        self._weighed: dict[int, float] = {}
        self._looks_needed: dict[int, int] = {}
        self._rebalanced: Answer | None = None
        self._no_plan: frozenset[int] = frozenset()
        self._trial: Trial | None = None
        self._tried_s: list[float] = []
        self._service = service

    @property
    def lost(self) -> frozenset[int]:
        """Devices that do not take part."""
        return frozenset(self.absent)

    # --- a loss ----------------------------------------------------------------------------------

    def leave_out(self, devices: Sequence[int], *, was_slow: bool = False) -> None:
        """Leave out lost or slow devices; the wait before a new try doubles with each time."""
        for device in devices:
            times = self._num_absences[device] = self._num_absences.get(device, 0) + 1
            self.absent[device] = _Absence(
                since_s=time.monotonic(),
                wait_s=self._options.back_after_s * 2.0 ** (times - 1),
                was_slow=was_slow,
            )

    def plan_for_loss(self, timeout_s: float) -> Answer:
        """A plan for what is left: the one that is or is being prepared, or else a new one.

        Raises:
            HeterogError: nothing fits, or the process that plans does not answer.
        """
        self._wishes.clear()
        prepared = self._prepared.get(self.lost)
        if prepared is not None:
            return prepared
        asked, self._asked = self._asked, None
        try:
            if asked and asked[1] == "prepared" and frozenset(asked[2].lost) == self.lost:
                return self._first_answer(timeout_s, asked[2], asked[0])
            return self._ask_now(timeout_s, self._question(self.lost))
        except HeterogError:
            return self._ask_now(timeout_s, self._question(self.lost, methods=_AUTO))

    def _ask_now(self, timeout_s: float, question: Question) -> Answer:
        return self._first_answer(timeout_s, question, self._service.ask(asdict(question)))

    def _first_answer(self, timeout_s: float, question: Question, number: int) -> Answer:
        """Wait for the answer to a question that was asked."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            reply = self._service.next_reply(max(deadline_s - time.monotonic(), 0.0))
            if reply is None:
                raise HeterogError("the process that plans for what is left does not answer.")
            self._note_setup(reply)
            if reply["id"] == number:
                if "error" in reply:
                    raise HeterogError(str(reply["error"]))
                return Answer.from_reply(question, reply)

    # --- while all is well -----------------------------------------------------------------------

    def begin_generation(self, answer: Answer | None, kind: str) -> None:
        """Note that the ranks now run another plan."""
        if answer is not None:
            lost = frozenset(answer.question.lost)
            slow = {d: f for d, f in answer.question.slow.items() if d not in lost}
            if slow != self.running.slow and kind not in _TRIALS:
                self._prepared.clear()
            for device in self.lost - lost:
                del self.absent[device]
                self._weighed.pop(device, None)
            self.leave_out(sorted(lost - self.lost), was_slow=kind == "slow")
            self.running = Running(
                path=answer.path,
                method=answer.method,
                device_of=tuple(d for d in range(self._whole.num_devices) if d not in lost),
                busy_s=answer.busy_s,
                slow=slow,
            )
        self._slow_looks.clear()
        self._rebalanced = None
        if answer is None or self._trial is None or answer is not self._trial.chosen.answer:
            self._trial = None  # something else has happened
        self.improving.begin_generation(answer)
        self._tried_s.clear()
        self.step_s = 0.0
        self._wishes = []
        for device in self.running.device_of[:_MOST_PREPARED]:
            lost_too = self.lost | {device}
            if len(self.running.device_of) > 1 and lost_too not in self._prepared:
                self._wishes.append(("prepared", self._question(lost_too)))
        if kind in ("lost", "leaving") and self._options.search_budget:
            budget = self._options.search_budget
            question = self._question(self.lost, methods=_AUTO, budget=budget)
            self._wishes.append(("better", question))

    def prepare_first(self, devices: Iterable[int]) -> None:
        """Ask for what is to be prepared for the loss of these devices before all else."""
        lost = self.lost | frozenset(devices)
        for wish in self._wishes:
            if wish[0] == "prepared" and frozenset(wish[1].lost) == lost:
                self._wishes.remove(wish)
                self._ask_first(wish)
                return

    def look(self) -> Going | None:
        """Decide whether to change to another plan now; called again and again."""
        self._wish_for_who_is_back()
        going = self._before_end() or self._after_trial()
        for reply in self._service.replies():
            if not reply:
                continue  # it has ended; the next loss will show that
            self._note_setup(reply)
            if self._asked is not None and reply["id"] == self._asked[0]:
                _, kind, question = self._asked
                self._asked = None
                going = self._weigh(kind, question, reply) or going
        if going is None and self._asked is None and self._wishes:
            kind, question = self._wishes.pop(0)
            number = self._service.ask(asdict(question), niceness=_NICENESS.get(kind, 0))
            self._asked = number, kind, question
        return going or self._improve()

    def hear_step(self, seconds: float) -> None:
        """Take in the seconds of a step, except those of the first one of a generation."""
        if self._asked is None and not self._wishes:  # who plans takes cores from the ranks
            self.improving.hear_step(seconds)

    def hear_busy(self, busy_s: Sequence[float]) -> None:
        """Check the measured compute seconds of each rank in a step for slow devices."""
        self._note_tried()
        planned = self.running.busy_s
        if not self._options.slow_factor or len(planned) != len(busy_s) or len(busy_s) < 2:
            return
        devices = self.running.device_of
        ratios = {
            device: told / plan
            for device, told, plan in zip(devices, busy_s, planned, strict=True)
            if plan > 0
        }
        self.improving.factors = dict(ratios)
        # How much a step takes of what was planned, where nothing is known to be wrong.
        well = [ratio for device, ratio in ratios.items() if device not in self.running.slow]
        usual = statistics.median_low(well or list(ratios.values()) or [0.0])
        if usual <= 0:
            return
        for device, ratio in ratios.items():
            self._look_at(device, min(ratio / usual, _MOST_FACTOR))

    # --- parts -----------------------------------------------------------------------------------

    def _look_at(self, device: int, factor: float) -> None:
        """Take in one report: how long a device takes beside the others, over what was planned."""
        known = self.running.slow.get(device, 1.0)
        is_slow = factor >= self._options.slow_factor
        is_quick = known > 1 and factor <= 1 / self._options.slow_factor
        looks = self._slow_looks.setdefault(device, [])
        if not (is_slow or is_quick) or (looks and is_slow != (looks[-1] > 1)):
            looks.clear()
        if is_slow or is_quick:
            looks.append(factor)
        needed = self._looks_needed.get(device, _LOOKS)
        if len(looks) < needed:
            return
        whole = known * statistics.median_low(looks)
        looks.clear()
        if is_slow and whole <= _CLEARLY * self._weighed.get(device, 0.0):
            return
        self._looks_needed[device] = 2 * needed
        self._weighed[device] = whole
        self._wish_about_speed(device, whole, is_slow=is_slow)

    def _wish_about_speed(self, device: int, factor: float, *, is_slow: bool) -> None:
        """Ask for plans in which a device takes so many times as long as in the first plan."""
        slow = {**self.running.slow, device: factor}
        if is_slow:
            self._ask_first(
                ("rebalanced", self._question(self.lost, slow)),
                ("left out", self._question(self.lost | {device}, slow)),
            )
        else:
            if factor < self._options.slow_factor:
                del slow[device]
            self._ask_first(("quick", self._question(self.lost, slow)))

    def _ask_first(self, *wishes: tuple[str, Question]) -> None:
        """Ask before all else; a search that nobody waits for ends, and comes later."""
        if self._asked is not None and self._asked[1] in _NICENESS:
            self._wishes.append(self._asked[1:])
            self._asked = None
        self._wishes[:0] = wishes

    def _improve(self) -> Going | None:
        """Ask for a plan to try, or go back from one that does not pay."""
        if self._trial is not None or self._asked is not None or self._wishes:
            return None
        improving = self.improving
        if improving.is_due:
            slow = improving.slow(self.running.slow)
            question = self._question(self.lost, slow, methods=(), budget=BUDGET)
            tried = tuple(dict.fromkeys((self.running.path, *improving.tried)))
            self._wishes.append(("tried", replace(question, tried=tried)))
            return None
        found = improving.judged(self.steps_left)
        if found is None:
            return None
        trial, before = found
        steps = f"steps take {_instead(trial.after_s, trial.before_s)}"
        if trial.is_kept:
            self._say(f"{steps}: the plan that was tried is kept")
            return None
        return Going(answer=before, kind="taken back", why=f"{steps}: the move is taken back")

    def _try(self, answer: Answer) -> Going:
        """Go to a plan that is tried, with a way back."""
        running = self.running
        back = replace(
            answer,
            question=replace(answer.question, slow=running.slow),
            path=running.path,
            method=running.method,
            step_time_s=answer.stay_step_s,
            busy_s=running.busy_s,
        )
        self.improving.begin(answer, back)
        steps = f"{_instead(answer.step_time_s, answer.stay_step_s)} predicted"
        return Going(answer=answer, kind="tried", why=f"tries a move of {answer.method} ({steps})")

    def _before_end(self) -> Going | None:
        """Change to a plan without the hosts that have announced their end, or ask for one."""
        leaving = frozenset(filter(self._is_leaving, self.running.device_of))
        lost = self.lost | leaving
        if not leaving or lost == self._no_plan or len(lost) == self._whole.num_devices:
            return None
        if lost in self._prepared:
            return self._leave(self._prepared[lost])
        wishes = [*self._wishes, *([self._asked[1:]] if self._asked is not None else [])]
        if ("leaving", lost) not in ((kind, frozenset(wish.lost)) for kind, wish in wishes):
            self._ask_first(("leaving", self._question(lost)))
        return None

    def _leave(self, answer: Answer) -> Going:
        leaving = sorted(set(answer.question.lost) - self.lost)
        names = ", ".join(self._name(device) for device in leaving)
        why = f"{names} {'leaves' if len(leaving) == 1 else 'leave'}: its host announced its end"
        return Going(answer=answer, kind="leaving", why=why)

    def _wish_for_who_is_back(self) -> None:
        if not self._options.back_after_s or self._asked is not None:
            return
        now_s = time.monotonic()
        due = {
            device: absence
            for device, absence in self.absent.items()
            if now_s - absence.since_s > absence.wait_s and self._is_here(device)
        }
        if not due:
            return
        for absence in due.values():
            absence.since_s, absence.wait_s = now_s, 2 * absence.wait_s
        # Those of a host come back together, and moving twice would cost twice.
        self._wishes.insert(0, ("back", self._question(self.lost - set(due))))

    def _question(
        self,
        lost: frozenset[int],
        slow: dict[int, float] | None = None,
        *,
        methods: tuple[str, ...] = FIRST_METHODS,
        budget: str = "",
    ) -> Question:
        """The question for a plan without some devices, by default a quick one."""
        self._num_plans += 1
        return Question(
            lost=tuple(sorted(lost)),
            slow=self.running.slow if slow is None else slow,
            methods=methods,
            budget=budget or self._options.first_budget,
            steps_left=self.steps_left,
            restart_s=self.restart_s,
            running=self.running.path,
            running_on=self.running.device_of,
            path=str(self._folder / f"plan{self._num_plans}.json"),
        )

    def _note_setup(self, reply: Message) -> None:
        """Take in the answer about the first plan, which has no path as it is known."""
        if "busy_s" in reply and "path" not in reply and not self.running.busy_s:
            self.running.busy_s = tuple(reply["busy_s"])

    def _weigh(self, kind: str, question: Question, reply: dict[str, Any]) -> Going | None:
        """Decide whether an answer is worth changing to."""
        if "error" in reply:
            self._rebalanced = None if kind == "left out" else self._rebalanced
            if kind == "leaving":
                self._no_plan = frozenset(question.lost)
                self._say(f"a host announced its end, and training stays: {reply['error']}")
            if kind == "tried":
                self.improving.num_left = 0
                self._say(f"nothing more is tried: {reply['error']}")
            return None
        answer = Answer.from_reply(question, reply)
        match kind:
            case "prepared":
                self._prepared[frozenset(question.lost)] = answer
                return None
            case "leaving":
                return self._leave(answer)
            case "tried":
                return self._try(answer)
            case "better":
                return self._if_it_pays(answer, kind, f"{answer.method} found a better plan")
            case "back":
                why = self._back_again(sorted(self.lost - set(question.lost)))
                if self._options.is_back_always:
                    return Going(answer=answer, kind=kind, why=why)
                return self._if_it_pays(answer, kind, why)
            case "quick":
                (device,) = [
                    each
                    for each, factor in self.running.slow.items()
                    if question.slow.get(each, 1.0) != factor
                ]
                factor = question.slow.get(device, 1.0)
                name = self._name(device)
                why = f"{name} is quicker again, at {factor:.1f} times as long as planned"
                return self._if_it_pays(answer, kind, why)
            case "rebalanced":
                self._rebalanced = answer
                return None
        return self._weigh_slow(answer)

    def _weigh_slow(self, without: Answer) -> Going | None:
        """Decide on a slow device: rebalance, leave it out, or go on, whichever ends first."""
        (device,) = set(without.question.lost) - self.lost
        factor = without.question.slow[device]
        name, scale = self._name(device), self._scale(without)
        rebalanced, self._rebalanced = self._rebalanced, None
        text = f"{name} takes {factor:.1f} times as long as planned: "
        steps = f"steps {format_seconds(without.stay_step_s * scale)} as it is"
        options = [(without, "left out")]
        if rebalanced is not None:
            options.insert(0, (rebalanced, "rebalanced"))
        for answer, what in options:
            steps += f", {format_seconds(answer.step_time_s * scale)} {what}"
        options.sort(key=lambda each: each[0].saved_s(self.steps_left, scale))
        best, what = options[-1]
        self._trial = None
        if best.saved_s(self.steps_left, scale) <= 0:
            self._say(f"{text}left as it is, moving would take longer ({steps})")
            return None
        if len(options) > 1:
            other, chosen = (
                Choice(what=what, answer=answer, step_s=answer.step_time_s * scale)
                for answer, what in options
            )
            self._trial = Trial(device=name, chosen=chosen, other=other)
        return Going(answer=best, kind="slow", why=f"{text}{what} ({steps})")

    def _note_tried(self) -> None:
        """Note the step time if it shows what a choice about a slow device has led to.

        Not while the planning process is busy: it takes cores from the ranks.
        """
        is_tried = self._trial is not None and self._trial.chosen.answer.path == self.running.path
        if is_tried and self._asked is None and not self._wishes and self.step_s:
            self._tried_s.append(self.step_s)

    def _after_trial(self) -> Going | None:
        """Change to the other choice about a slow device, if steps take longer than with that."""
        if self._trial is None or len(self._tried_s) < _LOOKS:
            return None
        trial, turned = self._trial, self._trial.swapped(self._tried_s)
        self._trial = None
        self._tried_s.clear()
        steps = _instead(turned.other.step_s, trial.chosen.step_s)
        text = f"{trial.device} was {trial.chosen.what} and steps take {steps}: "
        other = f"{turned.chosen.what} ({format_seconds(turned.chosen.step_s)})"
        taken_in = self.lost - set(turned.chosen.answer.question.lost)
        if not turned.pays(self.steps_left) or not all(map(self._is_here, taken_in)):
            self._say(f"{text}stays so, {other} would not pay")
            return None
        if not turned.chosen.is_measured:
            self._trial = turned
        return Going(answer=turned.chosen.answer, kind="slow", why=text + other)

    def _if_it_pays(self, answer: Answer, kind: str, why: str) -> Going | None:
        scale = self._scale(answer)
        saved_s = answer.saved_s(self.steps_left, scale)
        steps = f"steps {_instead(answer.step_time_s * scale, answer.stay_step_s * scale)}"
        if saved_s <= 0 or not self.step_s:
            if kind == "back":
                moving = format_seconds(answer.moving_s)
                self._say(f"{why} and not taken in: moving takes {moving} ({steps})")
            return None
        return Going(answer=answer, kind=kind, why=f"{why} ({steps})")

    def _scale(self, answer: Answer) -> float:
        return self.step_s / answer.stay_step_s if self.step_s else 1.0

    def _back_again(self, devices: Sequence[int]) -> str:
        names = ", ".join(self._name(device) for device in devices)
        are_slow = all(self.absent[device].was_slow for device in devices)
        return f"{names} {'is' if len(devices) == 1 else 'are'} " + (
            "tried again" if are_slow else "back"
        )

    def _name(self, device: int) -> str:
        return self._whole.devices[device].name


def _instead(new_s: float, old_s: float) -> str:
    return f"{format_seconds(new_s)} instead of {format_seconds(old_s)}"
