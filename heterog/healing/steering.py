"""Decides while a job trains whether it should go on with another plan.

Every decision compares seconds until the job is done: with the plan that runs, and with another
one plus what it costs to go there. Predicted seconds are scaled by what steps really take.
"""

import statistics
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from heterog.cluster.topology import Cluster
from heterog.errors import HeterogError
from heterog.healing.choices import WARM_STEPS, Choice, Question, Trial, recent_step_s
from heterog.healing.crew import Crew
from heterog.healing.options import HealOptions
from heterog.healing.service import Service
from heterog.units import format_seconds

_MOST_PREPARED = 8
"""Number of losses, of one device or of one host, that are planned for in advance."""
_LOOKS = 3
"""Number of consecutive reports in which a device has to be slow, or quick again. It doubles with
each decision about the device, so that one that changes often does not always change the plan."""
_MOST_FACTOR = 100.0
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


class PlanChange(NamedTuple):
    """The plan that a job has decided to change to, the kind of change (see ``Move``), and why."""

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
        looks: The last consecutive reports in which it was slow, or quick again.
        looks_needed: Number of them that matter.
    """

    num_absences: int = 0
    since_s: float = 0.0
    wait_s: float = 0.0
    was_slow: bool = False
    looks: list[float] = field(default_factory=list)
    looks_needed: int = _LOOKS


class Steering:
    """Asks the planning process for plans and decides which to change to.

    Args:
        whole: Cluster with all devices.
        running: The first plan.
        folder: Folder for plans.
        options: Settings of healing.
        say: Called with one line about each plan that was considered and not taken.
        service: Answers the questions, as the process of ``heterog.healing.planning`` does, which
            begins with the first plan.
        crew: Knows whose hosts are there, answer, or are leaving.

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
        crew: Crew,
    ) -> None:
        self.running = running
        self.absent: set[int] = set()
        self.steps_left = 0
        self.restart_s = 0.0
        self.trials: list[Trial] = []
        self.num_left = options.num_trials
        self._whole, self._folder, self._options, self._say = whole, folder, options, say
        self._service, self._crew = service, crew
        self._devices = [_Device() for _ in whole.devices]
        self._prepared: dict[tuple[int, ...], Choice] = {}
        self._queue: list[Question] = []
        self._asked: tuple[int, Question] | None = None
        self._num_plans = 0
        self._rebalanced: Choice | None = None
        self._no_plan: tuple[int, ...] = ()
        self._trial: Trial | None = None
        self._tried: list[str] = []
        # Of this generation: seconds of all steps, of those while nothing was planned, and how
        # long each device computes beside what was planned.
        self._seconds: list[float] = []
        self._quiet_s: list[float] = []
        self._ratios: dict[int, float] = {}

    def without(self, devices: Collection[int] = ()) -> tuple[int, ...]:
        """The devices that take part, but for these."""
        gone = self.absent.union(devices)
        return tuple(each for each in range(self._whole.num_devices) if each not in gone)

    def names(self, devices: Iterable[int]) -> str:
        """Names of devices, in a sentence."""
        return ", ".join(self._whole.devices[device].name for device in sorted(devices))

    # --- a loss ----------------------------------------------------------------------------------

    def leave_out(self, devices: Iterable[int], *, was_slow: bool = False) -> None:
        """Leave out lost or slow devices; the wait before a new try doubles with each time."""
        for number in devices:
            self.absent.add(number)
            device = self._devices[number]
            device.since_s, device.was_slow = time.monotonic(), was_slow
            device.wait_s = self._options.back_after_s * 2.0**device.num_absences
            device.num_absences += 1

    def plan_for_loss(self, timeout_s: float) -> Choice:
        """A plan for what is left: the one that is or is being prepared, or else a new one.

        Raises:
            HeterogError: nothing fits, or the process that plans does not answer.
        """
        self._queue.clear()
        left = self.without()
        if left in self._prepared:
            return self._prepared[left]
        number, asked = self._asked or (0, None)
        self._asked = None
        try:
            if asked is None or (asked.kind, asked.devices) != ("prepared", left):
                number = self._service.ask(self._question("lost", left))
            found = self._service.answer_to(number, timeout_s)
        except HeterogError:
            number = self._service.ask(self._question("lost", left, methods=_AUTO))
            found = self._service.answer_to(number, timeout_s)
        assert isinstance(found, Choice)
        return found

    # --- while all is well -----------------------------------------------------------------------

    def begin_generation(self, choice: Choice | None, kind: str) -> None:
        """Note that the ranks now run another plan."""
        if choice is not None:
            if choice.slow != self.running.slow and kind not in _TRIALS:
                self._prepared.clear()
            self.absent.difference_update(choice.devices)
            self.leave_out(set(self.without()) - set(choice.devices), was_slow=kind == "slow")
            self.running = choice
        for each in self._devices:
            each.looks.clear()
        self._rebalanced = None
        if self._trial is not None and choice is not self._trial.chosen:
            self._trial = None  # something else has happened
        self._seconds.clear()
        self._quiet_s.clear()
        self._ratios.clear()
        losses = [self.without(self._crew.lost_with(each)) for each in self.running.devices]
        left = [each for each in dict.fromkeys(losses) if each and each not in self._prepared]
        self._queue = [self._question("prepared", each) for each in left[:_MOST_PREPARED]]
        if kind in ("lost", "leaving") and (budget := self._options.search_budget):
            self._queue.append(
                self._question("better", self.without(), methods=_AUTO, budget=budget)
            )

    def look(self) -> PlanChange | None:
        """Decide whether to change to another plan now; called again and again."""
        self._prepare_for_who_is_silent()
        self._ask_about_who_is_back()
        going = self._before_end() or self._after_trial()
        for number, answer in iter(self._service.next_answer, None):
            if isinstance(answer, tuple) and not self.running.busy_s:  # of the first plan
                self.running = replace(self.running, busy_s=answer)
            if self._asked is not None and number == self._asked[0]:
                question, self._asked = self._asked[1], None
                going = self._weigh(question, answer) or going
        if self._service.has_ended:
            self._asked = None  # it may have been too much for the process
        if going is not None:
            return going
        if self._asked is None and self._queue:
            question = self._queue.pop(0)
            niceness = _NICENESS.get(question.kind, 0)
            with suppress(HeterogError):  # nobody needs a plan that was prepared
                self._asked = self._service.ask(question, niceness=niceness), question
        if self._is_quiet and self.num_left and self._trial is None and self._measured_s:
            self._ask_for_a_trial()
        return None

    def hear_step(self, seconds: float) -> None:
        """Take in the seconds of a step, except those of the first one of a generation."""
        self._seconds.append(seconds)
        if self._is_quiet:  # who plans takes cores from the ranks
            self._quiet_s.append(seconds)

    def hear_busy(self, busy_s: Sequence[float]) -> None:
        """Check the measured compute seconds of each rank in a step for slow devices."""
        planned = self.running.busy_s
        if not self._options.slow_factor or len(planned) != len(busy_s) or len(busy_s) < 2:
            return
        told = zip(self.running.devices, busy_s, planned, strict=True)
        self._ratios = {device: own_s / plan_s for device, own_s, plan_s in told if plan_s > 0}
        # How much a step takes of what was planned, where nothing is known to be wrong.
        known = self.running.slow
        well = [ratio for device, ratio in self._ratios.items() if device not in known]
        usual = statistics.median_low(well or list(self._ratios.values()) or [0.0])
        for device, ratio in self._ratios.items() if usual > 0 else ():
            self._look_at(device, min(ratio / usual, _MOST_FACTOR))

    # --- parts -----------------------------------------------------------------------------------

    @property
    def _is_quiet(self) -> bool:
        """Whether nothing is planned."""
        return self._asked is None and not self._queue

    @property
    def _step_s(self) -> float:
        """Measured step time; 0 where it is not yet known."""
        return recent_step_s(self._seconds, *_RECENT)

    @property
    def _measured_s(self) -> float:
        """Measured step time of the plan that runs, while nothing was planned."""
        return recent_step_s(self._quiet_s[WARM_STEPS:], *_MEASURED)

    def _look_at(self, device: int, factor: float) -> None:
        """Take in one report: time over planned time of a device, relative to the others."""
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
        seen.looks_needed *= 2
        slow = {**self.running.slow, device: whole}  # beside the first plan
        if is_slow:
            why = f"{self.names([device])} takes {whole:.1f} times as long as planned: "
            self._ask_first(
                self._question("rebalanced", self.without(), slow=slow),
                self._question("left out", self.without([device]), why, slow=slow),
            )
            return
        if whole < self._options.slow_factor:
            del slow[device]
            whole = 1.0
        why = f"{self.names([device])} is quicker again, at {whole:.1f} times as long as planned"
        self._ask_first(self._question("quick", self.without(), why, slow=slow))

    def _ask_first(self, *questions: Question) -> None:
        """Put questions first; a search that nobody waits for ends and is repeated later."""
        if self._asked is not None and self._asked[1].kind in _NICENESS:
            self._queue.append(self._asked[1])
            self._asked = None
        self._queue[:0] = questions

    def _prepare_for_who_is_silent(self) -> None:
        """Prepare the plan without the hosts that do not answer before other plans."""
        left = self.without(list(filter(self._crew.is_silent, self.running.devices)))
        for question in self._queue:
            if (question.kind, question.devices) == ("prepared", left):
                self._queue.remove(question)
                self._ask_first(question)
                return

    def _before_end(self) -> PlanChange | None:
        """Change to a plan without the hosts that have announced their end, or ask for one."""
        leaving = set(filter(self._crew.is_leaving, self.running.devices))
        left = self.without(leaving)
        if not leaving or not left or left == self._no_plan:
            return None
        leave = "leaves" if len(leaving) == 1 else "leave"
        why = f"{self.names(leaving)} {leave}: its host announced its end"
        if left in self._prepared:
            return PlanChange(self._prepared[left], "leaving", why)
        questions = [*self._queue, *([self._asked[1]] if self._asked is not None else [])]
        if ("leaving", left) not in ((each.kind, each.devices) for each in questions):
            self._ask_first(self._question("leaving", left, why))
        return None

    def _ask_about_who_is_back(self) -> None:
        if not self._options.back_after_s or self._asked is not None:
            return
        now_s, back = time.monotonic(), list[int]()
        for number in sorted(self.absent):
            device = self._devices[number]
            if now_s - device.since_s > device.wait_s and self._crew.is_here(number):
                device.since_s, device.wait_s = now_s, 2 * device.wait_s
                back.append(number)
        if back:  # those of a host come back together, and moving twice would cost twice
            is_again = all(self._devices[each].was_slow for each in back)
            are = "is" if len(back) == 1 else "are"
            why = f"{self.names(back)} {are} {'tried again' if is_again else 'back'}"
            self._queue.insert(
                0, self._question("back", tuple(sorted({*self.without(), *back})), why)
            )

    def _question(
        self, kind: str, devices: tuple[int, ...], why: str = "", **how: Any
    ) -> Question:
        """The question for a plan on some devices, by default a quick one."""
        self._num_plans += 1
        usual = {"slow": self.running.slow, "budget": self._options.first_budget}
        return Question(
            kind=kind,
            why=why,
            devices=devices,
            steps_left=self.steps_left,
            restart_s=self.restart_s,
            running=self.running,
            path=str(self._folder / f"plan{self._num_plans}.json"),
            **{**usual, **how},
        )

    def _weigh(self, question: Question, answer: Choice | HeterogError) -> PlanChange | None:
        """Decide whether an answer is worth changing to."""
        kind, why = question.kind, question.why
        if isinstance(answer, HeterogError):
            if kind == "left out":
                self._rebalanced = None
            elif kind == "leaving":
                self._no_plan = question.devices
                self._say(f"a host announced its end, and training stays: {answer}")
            elif kind == "tried":
                self.num_left = 0
                self._say(f"nothing more is tried: {answer}")
            return None
        match kind:
            case "prepared":
                self._prepared[question.devices] = answer
            case "rebalanced":
                self._rebalanced = answer
            case "left out":
                return self._weigh_slow(answer, why)
            case "tried":
                return self._try(answer)
            case "better":
                return self._if_it_pays(answer, kind, f"{answer.method} found a better plan")
            case "back" | "quick":
                return self._if_it_pays(answer, kind, why)
            case _:
                return PlanChange(answer, kind, why)
        return None

    def _weigh_slow(self, without: Choice, why: str) -> PlanChange | None:
        """Decide on a slow device: rebalance, leave it out, or go on, whichever ends first."""
        (device,) = set(self.without()) - set(without.devices)
        scale = self._scale(without)
        steps = f"steps {format_seconds(without.stay_step_s * scale)} as it is"
        options = [without] if self._rebalanced is None else [self._rebalanced, without]
        for each in options:
            steps += f", {format_seconds(each.step_time_s * scale)} {each.kind}"
        best = max(reversed(options), key=lambda each: each.saved_s(self.steps_left, scale))
        self._trial = self._rebalanced = None
        if best.saved_s(self.steps_left, scale) <= 0:
            self._say(f"{why}left as it is, moving would take longer ({steps})")
            return None
        for other in options:
            if other is not best:
                step_s, other_s = best.step_time_s * scale, other.step_time_s * scale
                self._trial = Trial(
                    chosen=best,
                    chosen_s=step_s,
                    other=other,
                    other_s=other_s,
                    device=self.names([device]),
                )
        return PlanChange(best, "slow", f"{why}{best.kind} ({steps})")

    def _if_it_pays(self, choice: Choice, kind: str, why: str) -> PlanChange | None:
        scale = self._scale(choice)
        saved_s = choice.saved_s(self.steps_left, scale)
        steps = f"steps {_instead(choice.step_time_s * scale, choice.stay_step_s * scale)}"
        if saved_s > 0 and self._step_s:
            return PlanChange(choice, kind, f"{why} ({steps})")
        if kind == "back":
            moving = format_seconds(choice.moving_s)
            self._say(f"{why} and not taken in: moving takes {moving} ({steps})")
        return None

    def _scale(self, choice: Choice) -> float:
        return self._step_s / choice.stay_step_s if self._step_s else 1.0

    # --- trials ----------------------------------------------------------------------------------

    def _ask_for_a_trial(self) -> None:
        """Ask for a plan to try, where devices compute as quickly as they were measured to."""
        known = self.running.slow
        slow = {**known, **{d: known.get(d, 1.0) * each for d, each in self._ratios.items()}}
        self._tried = list(dict.fromkeys([*self._tried, self.running.path]))
        tried = tuple(self._tried)
        self._queue.append(
            self._question(
                "tried", self.without(), slow=slow, methods=(), budget=_TRIAL_BUDGET, tried=tried
            )
        )

    def _try(self, choice: Choice) -> PlanChange:
        """Change to a plan that might be better, with a way back."""
        self.num_left -= 1
        self._tried.append(choice.path)
        self._trial = Trial(
            chosen=choice,
            chosen_s=choice.step_time_s,
            other=replace(self.running, moving_s=choice.moving_s),
            other_s=self._measured_s,
            has_other_run=True,
        )
        steps = f"{_instead(choice.step_time_s, choice.stay_step_s)} predicted"
        return PlanChange(choice, "tried", f"tries a move of {choice.method} ({steps})")

    def _after_trial(self) -> PlanChange | None:
        """Change to the other plan of a trial once steps are measured, if that pays."""
        after_s = self._measured_s
        if self._trial is None or not after_s or self._trial.chosen is not self.running:
            return None
        trial, self._trial = self._trial.measured(after_s, self.steps_left), None
        other = trial.other
        if trial.device:
            steps = _instead(after_s, trial.chosen_s)
            text = f"{trial.device} was {trial.chosen.kind} and steps take {steps}"
            goes = f"{other.kind} ({format_seconds(trial.other_s)})"
            stays = f"stays so, {goes} would not pay"
        else:
            self.trials.append(trial)
            text = f"steps take {_instead(after_s, trial.other_s)}"
            stays, goes = "the plan that was tried is kept", "the move is taken back"
        is_there = all(map(self._crew.is_here, self.absent & set(other.devices)))
        if trial.is_kept or not is_there:
            self._say(f"{text}: {stays}")
            return None
        self._trial = trial.then()
        return PlanChange(other, "slow" if trial.device else "taken back", f"{text}: {goes}")


def _instead(new_s: float, old_s: float) -> str:
    return f"{format_seconds(new_s)} instead of {format_seconds(old_s)}"
