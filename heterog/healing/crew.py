"""Who runs the ranks of a job that heals and keeps its snapshots: this machine, or Ray's nodes."""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from heterog.cluster.topology import Cluster
from heterog.healing.assignment import Assignment
from heterog.healing.journal import Event, JournalReader
from heterog.healing.options import Trained
from heterog.healing.question import Choice
from heterog.healing.shelf import Moment, Part, Shelf
from heterog.runtime.accelerators import has_accelerator
from heterog.runtime.launch import run_commands, temporary_folder
from heterog.runtime.ranks.forks import open_forks
from heterog.runtime.ranks.place import HERE, Place
from heterog.runtime.request import RunRequest

RANK_MODULE = "heterog.healing.rank"


@dataclass(slots=True, kw_only=True)
class JobState:
    """What has to be known to go on with a job.

    Attributes:
        generation: Number of times ranks were started before.
        running: The plan that the generation runs.
        trained: Progress so far.
        is_running: Whether the ranks of the generation are there.
    """

    generation: int
    running: Choice
    trained: Trained
    is_running: bool = True


def rank_command(run_file: Path, assignment: Path, journal: Path, stop: Path) -> list[str]:
    """Arguments of Python for a rank; see ``heterog.healing.rank``."""
    return ["-m", RANK_MODULE, *map(str, (run_file, assignment, journal, stop))]


def warm_ranks(run_file: Path, plan: Path) -> None:
    """Let ranks of later generations begin quicker, with a plan like theirs."""
    forks = open_forks()
    if forks is not None:
        forks.warm(RANK_MODULE, str(plan), "" if has_accelerator() else str(run_file))


class Crew:
    """Runs the ranks of one generation after another, beside snapshots that stay.

    All ranks are processes of this machine, whose memory has the snapshots: all leave with it.
    ``RayCrew`` overrides all of that.

    Args:
        cluster: The whole cluster.
        request: What every rank gets, but for the plan.
        place: Where the rank of each device of the whole cluster runs.
    """

    def __init__(self, cluster: Cluster, request: RunRequest, place: Place = HERE) -> None:
        self._cluster, self._request, self._place = cluster, request, place
        self._stack = ExitStack()

    def open(self, folder: Path, state: Callable[[], JobState]) -> JobState | None:
        """Begin.

        Args:
            folder: Where files may be written.
            state: Says what would have to be known to go on with the job.

        Returns:
            What is known of the job if it has begun before; here it ends with this process.
        """
        self._folder = folder
        self._shelf = Shelf(self._stack.enter_context(temporary_folder()))
        return None

    def run(
        self,
        generation: int,
        devices: Sequence[int],
        decide: Callable[[], Assignment],
        watch: Callable[[str], None],
    ) -> None:
        """Run a rank for each device until all are done.

        Args:
            generation: Number of times ranks were started before.
            devices: Device of the whole cluster of each rank.
            decide: Says what they run; called in another thread while they start.
            watch: Called with what rank 0 does, whenever that changes, and while a host is silent.

        Raises:
            LaunchError: a rank failed or is lost; all have ended.
        """
        run_file = self._folder / "run.json"
        self._request.write(run_file)
        assignment = self._folder / f"assignment{generation}.json"
        journal = self._folder / f"journal{generation}.jsonl"
        self._reader = JournalReader(journal)
        self._stop = self._folder / f"stop{generation}"

        def assign() -> None:
            decided = replace(decide(), shelf=str(self._shelf.folder))
            decided.write(assignment)
            warm_ranks(run_file, Path(decided.plan))

        deciding = threading.Thread(target=assign, daemon=True)
        deciding.start()
        try:
            run_commands(
                rank_command(run_file, assignment, journal, self._stop),
                len(devices),
                limits=self._request.limits,
                place=_DevicesLeft(self._place, self._cluster.num_devices, devices),
                progress=watch,
            )
        finally:
            deciding.join()

    def new_events(self) -> list[Event]:
        """Events of rank 0 since the last call, in this process's monotonic time."""
        return self._reader.new_events()

    def ask_to_stop(self) -> None:
        """Ask the ranks to stop after a step."""
        self._stop.touch()

    def parts(self) -> list[list[Part]]:
        """Parts of snapshots that each host holds."""
        return [self._shelf.parts()]

    def has_forgotten(self) -> bool:
        """Whether some host's snapshots were lost since the last call."""
        return False

    def lend(self) -> tuple[Path, Moment | None]:
        """A folder where the newest snapshot can be read until the next call; and which."""
        return self._shelf.lend()

    def is_here(self, device: int) -> bool:
        """Whether a rank could be started for a device."""
        return True

    def is_silent(self, device: int) -> bool:
        """Whether the host of a device does not answer and may be lost."""
        return False

    def is_leaving(self, device: int) -> bool:
        """Whether the host of a device has announced its end."""
        return False

    def close(self, why: str) -> None:
        """End everything; ``why`` is the reason if the job has failed, else empty."""
        self._stack.close()


@dataclass(frozen=True, slots=True)
class _DevicesLeft(Place):
    """The place of some devices of a cluster, which is that of the whole.

    Attributes:
        place: Place of the whole cluster.
        num_devices: Number of its devices.
        devices: Device of each rank.
    """

    place: Place
    num_devices: int
    devices: Sequence[int]

    def command(self, rank: int, argv: Sequence[str]) -> list[str]:
        """See ``Place``."""
        return self.place.command(self.devices[rank], argv)

    def environment(self, rank: int) -> Mapping[str, str]:
        """Variables of a device's rank: it keeps its accelerator when others are lost."""
        device = self.devices[rank]
        local = {"LOCAL_RANK": str(device), "LOCAL_WORLD_SIZE": str(self.num_devices)}
        return {**local, **self.place.environment(device)}
