"""Decides while a job trains whether it should go on with another plan.

Every decision compares seconds until the job is done: with the plan that runs, and with another
one plus what it costs to go there. Predicted seconds are scaled by what steps really take.
"""

import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from heterog.cluster.topology import Cluster
from heterog.errors import HeterogError
from heterog.healing.options import HealOptions
from heterog.healing.question import FIRST_METHODS, Choice, Question
from heterog.healing.service import Service
from heterog.healing.trial import WARM_STEPS, Side, Trial, recent_step_s
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
_RECENT, _MEASURED = (8, 1.0), (16, 3.0)
"""The last steps, at least so many and for so many seconds, whose mean is the current step time,
and those of a plan that is measured."""
_AUTO = ("auto",)
_TRIAL_BUDGET = "300e"
"""Budget of the search for a plan to try."""
_TRIALS = ("tried", "taken back")
"""Changes whose small corrections of speeds leave the plans for a loss as good as they were."""
_NICENESS = {"prepared": 5, "better": 10}
"""Values of ``nice`` for questions that nobody waits for, because ranks need the cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Going:
    """A plan that the job has decided to change to.

    Attributes:
        choice: The plan.
        kind: Kind of the change; see ``Move``.
        why: The reason in one line.
    """

    choice: Choice
    kind: str
    why: str


@dataclass(slots=True)
class _Device:
    """What has happened to a device.

    Attributes:
        num_absences: Number of times that it was lost or left out.
        since_s: Time of the last of them.
        wait_s: Seconds from then until it is tried again.
        was_slow: Whether it was left out because it was slow.
        looks: The last consecutive reports in which it was slow, or quick again, as factors.
        looks_needed: Number of them that matter.
        weighed: Factor by which it was slow when that was last thought about.
    """

    num_absences: int = 0
    since_s: float = 0.0
    wait_s: float = 0.0
    was_slow: bool = False
    looks: list[float] = field(default_factory=list)
    looks_needed: int = _LOOKS
    weighed: float = 0.0


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
        restart_s: Seconds until restarted ranks have done a step.
        trials: What was found of each plan that was tried because it might be better.
        num_left: Number of plans that may still be tried.
    """

    def __init__(
        self,
        whole: Cluster,
        running: Choice,
        folder: Path,
        options: HealOptions,
        say: Callable[[str], None],
        service: Service,
        is_here: Callable[[int], bool] = lambda device: True,
        is_leaving: Callable[[int], bool] = lambda device: False,
    ) -> None:
        self.running = running
        self.absent: set[int] = set()
        self.steps_left = 0
        self.restart_s = 0.0
        self.trials: list[Trial] = []
        self.num_left = options.num_trials
        self._whole, self._folder, self._options, self._say = whole, folder, options, say
        self._service, self._is_here, self._is_leaving = service, is_here, is_leaving
        self._devices = [_Device() for _ in whole.devices]
        self._prepared: dict[tuple[int, ...], Choice] = {}
        self._wishes: list[tuple[str, Question]] = []
        self._asked: tuple[int, str, Question] | None = None
        self._num_plans = 0
        self._rebalanced: Choice | None = None
        self._no_plan: tuple[int, ...] = ()
        self._trial: Trial | None = None
        self._tried: list[str] = []
        # Of this generation: seconds of all steps, of those while nothing was planned, and how
        # long each device computes beside what was planned.
        self._seconds: list[float] = []
        self._quiet_s: list[float] = []
        self._num_quiet = 0
        self._ratios: dict[int, float] = {}

    @property
    def is_trying(self) -> bool:
        """Whether a plan is tried because it might be better, or will be."""
        return self.num_left > 0 or (self._trial is not None and not self._trial.device)

    # --- a loss ----------------------------------------------------------------------------------

    def leave_out(self, devices: Iterable[int], *, was_slow: bool = False) -> None:
        """Leave out lost or slow devices; the wait before a new try doubles with each time."""
        self.absent |= (gone := set(devices))
        for device in map(self._devices.__getitem__, gone):
            device.since_s, device.was_slow = time.monotonic(), was_slow
            device.wait_s = self._options.back_after_s * 2.0**device.num_absences
            device.num_absences += 1

    def plan_for_loss(self, timeout_s: float) -> Choice:
        """A plan for what is left: the one that is or is being prepared, or else a new one.

        Raises:
            HeterogError: nothing fits, or the process that plans does not answer.
        """
        self._wishes.clear()
        left = self.without()
        if left in self._prepared:
            return self._prepared[left]
        asked, self._asked = self._asked, None
        is_asked = asked is not None and asked[1] == "prepared" and asked[2].devices == left
        try:
            number = asked[0] if asked and is_asked else self._ask(self._question(left))
            return self._answer(number, timeout_s)
        except HeterogError:
            return self._answer(self._ask(self._question(left, methods=_AUTO)), timeout_s)

    def _ask(self, question: Question, kind: str = "") -> int:
        return self._service.ask(question, niceness=_NICENESS.get(kind, 0))

    def _answer(self, number: int, timeout_s: float) -> Choice:
        """Wait for the answer to a question."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            found = self._service.next_answer(max(deadline_s - time.monotonic(), 0.0))
            if found is None:
                raise HeterogError("the process that plans for what is left does not answer.")
            self._note_setup(found[1])
            if found[0] == number:
                if isinstance(found[1], HeterogError):
                    raise found[1]
                assert isinstance(found[1], Choice)
                return found[1]

    def without(self, devices: Collection[int] = ()) -> tuple[int, ...]:
        """The devices that take part, but for these."""
        every = range(self._whole.num_devices)
        return tuple(each for each in every if each not in self.absent and each not in devices)

    # --- while all is well -----------------------------------------------------------------------

    def begin_generation(self, choice: Choice | None, kind: str) -> None:
        """Note that the ranks now run another plan."""
        if choice is not None:
            if choice.slow != self.running.slow and kind not in _TRIALS:
                self._prepared.clear()
            for device in self.absent & set(choice.devices):
                self.absent.discard(device)
                self._devices[device].weighed = 0.0
            self.leave_out(set(self.without()) - set(choice.devices), was_slow=kind == "slow")
            self.running = choice
        for each in self._devices:
            each.looks.clear()
        self._rebalanced = None
        if self._trial is not None and choice is not self._trial.chosen.choice:
            self._trial = None  # something else has happened
        self._seconds.clear()
        self._quiet_s.clear()
        self._num_quiet = 0
        self._ratios.clear()
        self._wishes = []
        for device in self.running.devices[:_MOST_PREPARED]:
            left = self.without([device])
            if left and left not in self._prepared:
                self._wishes.append(("prepared", self._question(left)))
        if kind in ("lost", "leaving") and self._options.search_budget:
            budget = self._options.search_budget
            question = self._question(self.without(), methods=_AUTO, budget=budget)
            self._wishes.append(("better", question))

    def prepare_first(self, devices: Iterable[int]) -> None:
        """Ask for what is to be prepared for the loss of these devices before all else."""
        left = self.without(tuple(devices))
        for wish in self._wishes:
            if wish[0] == "prepared" and wish[1].devices == left:
                self._wishes.remove(wish)
                self._ask_first(wish)
                return

    def look(self) -> Going | None:
        """Decide whether to change to another plan now; called again and again."""
        self._wish_for_who_is_back()
        going = self._before_end() or self._after_trial()
        for number, answer in iter(self._service.next_answer, None):
            self._note_setup(answer)
            if self._asked is not None and number == self._asked[0]:
                _, kind, question = self._asked
                self._asked = None
                going = self._weigh(kind, question, answer) or going
        if going is None and self._asked is None and self._wishes:
            kind, question = self._wishes.pop(0)
            self._asked = self._ask(question, kind), kind, question
        if going is None and self._is_quiet and self.num_left and self._trial is None:
            self._wish_for_a_trial()
        return going

    def hear_step(self, seconds: float) -> None:
        """Take in the seconds of a step, except those of the first one of a generation."""
        self._seconds.append(seconds)
        if self._is_quiet:  # who plans takes cores from the ranks
            self._num_quiet += 1
            if self._num_quiet > WARM_STEPS:
                self._quiet_s.append(seconds)

    def hear_busy(self, busy_s: Sequence[float]) -> None:
        """Check the measured compute seconds of each rank in a step for slow devices."""
        planned = self.running.busy_s
        if not self._options.slow_factor or len(planned) != len(busy_s) or len(busy_s) < 2:
            return
        told = zip(self.running.devices, busy_s, planned, strict=True)
        ratios = {device: own_s / plan_s for device, own_s, plan_s in told if plan_s > 0}
        self._ratios = ratios
        # How much a step takes of what was planned, where nothing is known to be wrong.
        well = [ratio for device, ratio in ratios.items() if device not in self.running.slow]
        usual = statistics.median_low(well or list(ratios.values()) or [0.0])
        if usual <= 0:
            return
        for device, ratio in ratios.items():
            self._look_at(device, min(ratio / usual, _MOST_FACTOR))

    # --- parts -----------------------------------------------------------------------------------

    @property
    def _is_quiet(self) -> bool:
        """Whether nothing is planned."""
        return self._asked is None and not self._wishes

    @property
    def step_s(self) -> float:
        """Measured step time; 0 where it is not yet known."""
        return recent_step_s(self._seconds, *_RECENT)

    @property
    def _measured_s(self) -> float:
        """Measured step time of the plan that runs, while nothing was planned."""
        return recent_step_s(self._quiet_s, *_MEASURED)

    def _look_at(self, device: int, factor: float) -> None:
        """Take in one report: how long a device takes beside the others, over what was planned."""
        known, seen = self.running.slow.get(device, 1.0), self._devices[device]
        is_slow = factor >= self._options.slow_factor
        is_quick = known > 1 and factor <= 1 / self._options.slow_factor
        if not (is_slow or is_quick) or (seen.looks and is_slow != (seen.looks[-1] > 1)):
            seen.looks.clear()
        if is_slow or is_quick:
            seen.looks.append(factor)
        if len(seen.looks) < seen.looks_needed:
            return
        whole = known * statistics.median_low(seen.looks)
        seen.looks.clear()
        if is_slow and whole <= _CLEARLY * seen.weighed:
            return
        seen.looks_needed *= 2
        seen.weighed = whole
        # From now on it takes so many times as long as in the first plan.
        slow = {**self.running.slow, device: whole}
        if is_slow:
            self._ask_first(
                ("rebalanced", self._question(self.without(), slow)),
                ("left out", self._question(self.without([device]), slow)),
            )
        else:
            if whole < self._options.slow_factor:
                del slow[device]
            self._ask_first(("quick", self._question(self.without(), slow)))

    def _ask_first(self, *wishes: tuple[str, Question]) -> None:
        """Ask before all else; a search that nobody waits for ends, and comes later."""
        if self._asked is not None and self._asked[1] in _NICENESS:
            self._wishes.append(self._asked[1:])
            self._asked = None
        self._wishes[:0] = wishes

    def _before_end(self) -> Going | None:
        """Change to a plan without the hosts that have announced their end, or ask for one."""
        leaving = set(filter(self._is_leaving, self.running.devices))
        left = self.without(leaving)
        if not leaving or not left or left == self._no_plan:
            return None
        if left in self._prepared:
            return self._leave(self._prepared[left])
        wishes = [*self._wishes, *([self._asked[1:]] if self._asked is not None else [])]
        if ("leaving", left) not in ((kind, wish.devices) for kind, wish in wishes):
            self._ask_first(("leaving", self._question(left)))
        return None

    def _leave(self, choice: Choice) -> Going:
        leaving = set(self.without()) - set(choice.devices)
        why = f"{self._names(leaving)} {'leaves' if len(leaving) == 1 else 'leave'}"
        return Going(choice=choice, kind="leaving", why=f"{why}: its host announced its end")

    def _wish_for_who_is_back(self) -> None:
        if not self._options.back_after_s or self._asked is not None:
            return
        now_s, due = time.monotonic(), set[int]()
        for number in self.absent:
            device = self._devices[number]
            if now_s - device.since_s > device.wait_s and self._is_here(number):
                device.since_s, device.wait_s = now_s, 2 * device.wait_s
                due.add(number)
        if due:  # those of a host come back together, and moving twice would cost twice
            wish = "back", self._question(tuple(sorted({*self.without(), *due})))
            self._wishes.insert(0, wish)

    def _question(
        self, devices: tuple[int, ...], slow: Mapping[int, float] | None = None, **how: Any
    ) -> Question:
        """The question for a plan on some devices, by default a quick one."""
        self._num_plans += 1
        asked: dict[str, Any] = {"budget": self._options.first_budget, "methods": FIRST_METHODS}
        return Question(
            devices=devices,
            slow=self.running.slow if slow is None else slow,
            steps_left=self.steps_left,
            restart_s=self.restart_s,
            running=self.running,
            path=str(self._folder / f"plan{self._num_plans}.json"),
            **asked | how,
        )

    def _note_setup(self, answer: Any) -> None:
        """Take in the answer about the first plan: the seconds that each rank computes."""
        if isinstance(answer, tuple) and not self.running.busy_s:
            self.running = replace(self.running, busy_s=answer)

    def _weigh(self, kind: str, question: Question, answer: Choice | HeterogError) -> Going | None:
        """Decide whether an answer is worth changing to."""
        if isinstance(answer, HeterogError):
            self._rebalanced = None if kind == "left out" else self._rebalanced
            if kind == "leaving":
                self._no_plan = question.devices
                self._say(f"a host announced its end, and training stays: {answer}")
            if kind == "tried":
                self.num_left = 0
                self._say(f"nothing more is tried: {answer}")
            return None
        match kind:
            case "prepared":
                self._prepared[question.devices] = answer
                return None
            case "leaving":
                return self._leave(answer)
            case "tried":
                return self._try(answer)
            case "better":
                return self._if_it_pays(answer, kind, f"{answer.method} found a better plan")
            case "back":
                back = self.absent & set(answer.devices)
                are = "is" if len(back) == 1 else "are"
                are_slow = all(self._devices[each].was_slow for each in back)
                why = f"{self._names(back)} {are} {'tried again' if are_slow else 'back'}"
                if self._options.is_back_always:
                    return Going(choice=answer, kind=kind, why=why)
                return self._if_it_pays(answer, kind, why)
            case "quick":
                known = self.running.slow
                changed = {d for d, factor in known.items() if question.slow.get(d) != factor}
                factor = min(question.slow.get(device, 1.0) for device in changed)
                name = self._names(changed)
                why = f"{name} is quicker again, at {factor:.1f} times as long as planned"
                return self._if_it_pays(answer, kind, why)
            case "rebalanced":
                self._rebalanced = answer
                return None
        return self._weigh_slow(question, answer)

    def _weigh_slow(self, question: Question, without: Choice) -> Going | None:
        """Decide on a slow device: rebalance, leave it out, or go on, whichever ends first."""
        (device,) = set(self.without()) - set(without.devices)
        name, scale = self._names([device]), self._scale(without)
        text = f"{name} takes {question.slow[device]:.1f} times as long as planned: "
        steps = f"steps {format_seconds(without.stay_step_s * scale)} as it is"
        sides = [Side(without, without.step_time_s * scale, "left out")]
        if (other := self._rebalanced) is not None:
            sides.insert(0, Side(other, other.step_time_s * scale, "rebalanced"))
        for side in sides:
            steps += f", {format_seconds(side.step_s)} {side.what}"
        best = max(reversed(sides), key=lambda each: each.choice.saved_s(self.steps_left, scale))
        self._trial = self._rebalanced = None
        if best.choice.saved_s(self.steps_left, scale) <= 0:
            self._say(f"{text}left as it is, moving would take longer ({steps})")
            return None
        if len(sides) > 1:
            self._trial = Trial(chosen=best, other=sides[sides[0] is best], device=name)
        return Going(choice=best.choice, kind="slow", why=f"{text}{best.what} ({steps})")

    # --- trials ----------------------------------------------------------------------------------

    def _wish_for_a_trial(self) -> None:
        """Ask for a plan to try, once steps of this one were measured."""
        if not self._measured_s:
            return
        known = self.running.slow
        slow = {**known, **{d: known.get(d, 1.0) * each for d, each in self._ratios.items()}}
        self._tried = list(dict.fromkeys([*self._tried, self.running.path]))
        given = {"methods": (), "budget": _TRIAL_BUDGET, "tried": tuple(self._tried)}
        self._wishes.append(("tried", self._question(self.without(), slow, **given)))

    def _try(self, choice: Choice) -> Going:
        """Change to a plan that might be better, with a way back."""
        self.num_left -= 1
        self._tried.append(choice.path)
        back = replace(self.running, moving_s=choice.moving_s)
        self._trial = Trial(
            chosen=Side(choice, choice.step_time_s),
            other=Side(back, self._measured_s),
            has_other_run=True,
        )
        steps = f"{_instead(choice.step_time_s, choice.stay_step_s)} predicted"
        return Going(choice=choice, kind="tried", why=f"tries a move of {choice.method} ({steps})")

    def _after_trial(self) -> Going | None:
        """Change to the other plan of a trial once steps are measured, if that pays."""
        after_s = self._measured_s
        if self._trial is None or not after_s or self._trial.chosen.choice is not self.running:
            return None
        trial, self._trial = self._trial.measured(after_s, self.steps_left), None
        other = trial.other
        is_there = all(map(self._is_here, self.absent & set(other.choice.devices)))
        if trial.device:
            steps = _instead(after_s, trial.chosen.step_s)
            text = f"{trial.device} was {trial.chosen.what} and steps take {steps}"
            goes = f"{other.what} ({format_seconds(other.step_s)})"
            stays = f"stays so, {goes} would not pay"
        else:
            self.trials.append(trial)
            text = f"steps take {_instead(after_s, other.step_s)}"
            stays, goes = "the plan that was tried is kept", "the move is taken back"
        if trial.is_kept or not is_there:
            self._say(f"{text}: {stays}")
            return None
        self._trial = trial.then()
        kind = "slow" if trial.device else "taken back"
        return Going(choice=other.choice, kind=kind, why=f"{text}: {goes}")

    def _if_it_pays(self, choice: Choice, kind: str, why: str) -> Going | None:
        scale = self._scale(choice)
        saved_s = choice.saved_s(self.steps_left, scale)
        steps = f"steps {_instead(choice.step_time_s * scale, choice.stay_step_s * scale)}"
        if saved_s <= 0 or not self.step_s:
            if kind == "back":
                moving = format_seconds(choice.moving_s)
                self._say(f"{why} and not taken in: moving takes {moving} ({steps})")
            return None
        return Going(choice=choice, kind=kind, why=f"{why} ({steps})")

    def _scale(self, choice: Choice) -> float:
        return self.step_s / choice.stay_step_s if self.step_s else 1.0

    def _names(self, devices: Iterable[int]) -> str:
        return ", ".join(self._whole.devices[device].name for device in sorted(devices))


def _instead(new_s: float, old_s: float) -> str:
    return f"{format_seconds(new_s)} instead of {format_seconds(old_s)}"
