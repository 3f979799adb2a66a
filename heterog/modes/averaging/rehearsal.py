"""An averaging in a rehearsal: one of all ranks, after the steps."""

from heterog.modes.averaging.ranks import Averager
from heterog.modes.on_ranks import MakeExecutor, Rehearsal
from heterog.runtime.measure.rehearsal import AFTER, Stage
from heterog.runtime.step.collectives import Communicator
from heterog.runtime.step.masters import Masters
from heterog.runtime.step.model_part import ModelPart
from heterog.runtime.step.rank_program import RankProgram


class RehearsedAveraging(Rehearsal):
    """The averagers of all ranks.

    Args:
        stage: All ranks of the plan.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._averagers: list[Averager] = []

    def add_rank(
        self,
        seen: RankProgram,
        part: ModelPart,
        communicator: Communicator,
        make_executor: MakeExecutor,
    ) -> bool:
        """Make the averager of a rank."""
        graph, strategy = self._stage.graph, self._stage.strategy
        masters, parameters = Masters(None, ()), part.parameters
        self._averagers.append(
            Averager(graph, strategy, seen.rank, parameters, masters, communicator)
        )
        return False

    def after_steps(self) -> None:
        """Average the islands' parameters."""
        for rank, averager in enumerate(self._averagers):
            self._stage.now = rank, AFTER
            averager.begin_average()
        for rank, averager in enumerate(self._averagers):
            self._stage.now = rank, AFTER
            averager.end_average()
