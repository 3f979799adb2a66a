"""Prices of a stash: the pace of its stages, from a step on its own."""

from heterog.lowering import Choice
from heterog.lowering.tape import NUM_TASKS
from heterog.modes.stash.memory import encoded_stash
from heterog.modes.stash.paces import StagedStep, StagePace, held_s
from heterog.modes.stash.value import WeightStash
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.runs import Lowered


def more_seconds(stash: WeightStash, evaluator: Evaluator, choice: Choice) -> float:
    """Seconds that a step takes longer than on its own, mostly below 0: steps overlap."""
    if evaluator.tasks_of(choice) > evaluator.most_tasks:  # it will not be simulated
        return 0.0
    pace, local_s, lowered = stage_pace(evaluator, choice)
    return max(pace.step_s(stash), held_s(lowered.tape, lowered.prices)) - local_s


def stage_pace(evaluator: Evaluator, choice: Choice) -> tuple[StagePace, float, Lowered]:
    """Pace of stages by the referee's times of a step alone, its seconds, and what was lowered.

    Not counted as an evaluation: it belongs to that of the strategy.
    """
    lowered, _, timings = evaluator.alone(choice)
    local_s, replayed = evaluator.replayed(lowered)
    assert replayed is not None
    number = int(lowered.tape.counts[NUM_TASKS])
    stage = encoded_stash(choice).stage
    staged = StagedStep(lowered.tape, evaluator.tables_of(choice), stage, choice.num_micro)
    pace = staged.pace(timings.seconds[:number], replayed.finish[:number])
    return pace, local_s, lowered
