"""A stash in a rehearsal: the stages of a pipeline that do not wait, played side by side."""

from collections.abc import Sequence

from heterog.modes.on_ranks import MakeExecutor, Rehearsal
from heterog.modes.stash.ranks import Moment, StashedTraining, Turns, TurnsByMoment
from heterog.modes.stash.value import stages_of
from heterog.runtime.measure.rehearsal import BEGIN, CHECKED_EVERY, END, Stage
from heterog.runtime.step.collectives import Communicator
from heterog.runtime.step.model_part import ModelPart
from heterog.runtime.step.rank_program import RankProgram
from heterog.runtime.step.step_order import StepOrder


class RehearsedStash(Rehearsal):
    """The batches under way on all ranks.

    Args:
        stage: All ranks of the plan.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._turns: TurnsByMoment | None = None
        self._stashed: list[StashedTraining] = []

    def ordered(self, seen: RankProgram, order: StepOrder) -> StepOrder:
        """The turns of the forward pass first."""
        self._turns = TurnsByMoment(seen, order)
        return self._turns.order

    def add_rank(
        self,
        seen: RankProgram,
        part: ModelPart,
        communicator: Communicator,
        make_executor: MakeExecutor,
    ) -> bool:
        """Make the executors of the batches that a rank has under way."""
        assert self._turns is not None
        strategy, parameters = self._stage.strategy, part.parameters
        self._stashed.append(
            StashedTraining(self._turns, strategy, seen.rank, parameters, make_executor)
        )
        return True

    def play(self) -> bool:
        """Run batches until the pipeline is full and every stage has ended one.

        In a moment a stage waits only for what earlier stages send in it, or later ones if it is
        the backward pass, so stages may take it one after another; the ranks of a stage take it
        turn by turn. Then all batches end, the last stage first.
        """
        turns = self._turns
        assert turns is not None
        stages = stages_of(self._stage.strategy)
        idle = tuple(sorted(set(self._stage.every_rank).difference(*stages)))
        by_stage = [(own, turns.of(number)) for number, own in enumerate(stages)]
        if idle:
            by_stage.append((idle, turns.of(-1)))
        for number in range(self._stashed[0].loss_delay + 2):
            for rank in self._stage.every_rank:
                self._stage.now = rank, BEGIN
                self._stashed[rank].begin(self._stage.batch, number)
            for _ in range(turns.num_micro):
                for rank in self._stage.every_rank:
                    self._stashed[rank].begin_micro_batch()
                for moment in Moment:
                    backwards = moment == Moment.BACKWARD
                    for own, own_turns in reversed(by_stage) if backwards else by_stage:
                        self._play_moment(own, moment, own_turns)
            for rank in self._stage.every_rank:
                self._stage.now = rank, END
                self._stashed[rank].end()
        for own, own_turns in reversed(by_stage):
            while not self._stashed[own[0]].is_alike:
                for moment in (Moment.RECEIVE_GRADIENTS, Moment.BACKWARD):
                    self._play_moment(own, moment, own_turns, is_last=True)
        return True

    def _play_moment(
        self, ranks: Sequence[int], moment: Moment, turns: Turns, *, is_last: bool = False
    ) -> None:
        """Run a moment of the ranks of a stage, turn by turn.

        Args:
            ranks: The ranks.
            moment: The moment.
            turns: Turns of the stage.
            is_last: Whether no more batches come.
        """
        about = {rank: self._stashed[rank].enter(moment, is_last=is_last) for rank in ranks}
        # All ranks of a stage are at the same micro-batch.
        number = next((each.number for each in about.values() if each is not None), 0)
        for place, turn in enumerate(turns[number, moment]):
            if place % CHECKED_EVERY == 0:
                self._stage.check()
            for rank in self._stage.ranks_of(turn.task):
                micro_batch = about.get(rank)
                if micro_batch is not None:
                    self._stage.now = rank, turn.task
                    micro_batch.batch.executor.take(turn)
        for rank in ranks:
            self._stashed[rank].leave(moment, about[rank])
