"""Plans near the one that runs, tried on the job's own steps and taken back if they do not pay.

The planning process goes on from the running plan by a short search, in which devices compute as
quickly as they were measured to, and answers with its best plan that does not repeat the changes
of an earlier trial: a prediction that errs, errs about all plans that share the change. The ranks
run that plan for ``NUM_STEPS`` steps. Then they go back to the one before if that ends the job
earlier,

    steps_left (after_s - before_s) > moving_s

and otherwise the next plan is looked for near this one. Nothing is planned while steps are
measured, since that takes cores from ranks. Each move begins a generation, so a few fit into a
minute.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from heterog.healing.question import Answer

NUM_STEPS = 16
"""Number of steps whose mean is compared."""
_WARM_STEPS = 2
"""Steps of a generation, after its first, in which ranks still write the code of a step."""
NEAR = 1.05
"""Times the running plan's predicted step up to which a plan is worth trying: predictions on
testbeds err by 6 to 8 % (``docs/notebook/testbeds.md``)."""
BUDGET = "300e"
"""Budget of the search for each of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTrial:
    """A plan that was tried.

    Attributes:
        plan: Path of its file, which exists as long as the job runs.
        predicted_s: Its predicted step time, where devices compute as measured.
        stay_predicted_s: The same of the plan before it.
        before_s: Mean seconds of a step before it.
        after_s: Mean seconds of a step with it.
        is_kept: Whether training went on with it.
    """

    plan: str
    predicted_s: float
    stay_predicted_s: float
    before_s: float
    after_s: float
    is_kept: bool


@dataclass(slots=True, kw_only=True)
class Improving:
    """What was tried, and what is being measured now.

    Attributes:
        num_left: Number of plans that may still be tried.
        tried: Paths of plans that were measured, also those that were kept.
        trials: What was found of each.
        factors: Measured seconds that each device computes over what was planned.
    """

    num_left: int = 0
    tried: list[str] = field(default_factory=list)
    trials: list[MeasuredTrial] = field(default_factory=list)
    factors: dict[int, float] = field(default_factory=dict)
    _seconds: list[float] = field(default_factory=list)
    _before: tuple[Answer, float] | None = None
    _tried: Answer | None = None

    def begin_generation(self, answer: Answer | None) -> None:
        """Note that the ranks now run the plan of an answer; another one than tried ends that."""
        if answer is not self._tried:
            self._tried = self._before = None
        self._seconds.clear()
        self.factors.clear()

    def hear_step(self, seconds: float) -> None:
        """Note the seconds of a step that was not the first of its generation."""
        self._seconds.append(seconds)

    @property
    def is_measured(self) -> bool:
        """Whether enough steps of the running plan are known."""
        return len(self._seconds) >= NUM_STEPS + _WARM_STEPS

    @property
    def step_s(self) -> float:
        """Mean seconds of a step of the running plan."""
        return statistics.fmean(self._seconds[-NUM_STEPS:])

    @property
    def is_due(self) -> bool:
        """Whether the next plan may be asked for."""
        return self.num_left > 0 and self._tried is None and self.is_measured

    @property
    def is_over(self) -> bool:
        """Whether nothing is tried, nor will be."""
        return self.num_left == 0 and self._tried is None

    def slow(self, known: Mapping[int, float]) -> dict[int, float]:
        """Factors over the cluster's description: those that the plan assumes, as measured."""
        return {**known, **{d: known.get(d, 1.0) * each for d, each in self.factors.items()}}

    def begin(self, answer: Answer, running: Answer) -> None:
        """Try a plan instead of the running one, which can be gone back to."""
        self.num_left -= 1
        self.tried += [path for path in (running.path, answer.path) if path not in self.tried]
        self._tried, self._before = answer, (running, self.step_s)
        self._seconds.clear()

    def judged(self, steps_left: int) -> tuple[MeasuredTrial, Answer] | None:
        """What the plan that is tried has come to, and the one before it; once it is measured."""
        if self._tried is None or self._before is None or not self.is_measured:
            return None
        (before, before_s), answer, after_s = self._before, self._tried, self.step_s
        trial = MeasuredTrial(
            plan=answer.path,
            predicted_s=answer.step_time_s,
            stay_predicted_s=answer.stay_step_s,
            before_s=before_s,
            after_s=after_s,
            is_kept=steps_left * (after_s - before_s) <= answer.moving_s,
        )
        self.trials.append(trial)
        self._tried = self._before = None
        return trial, before
