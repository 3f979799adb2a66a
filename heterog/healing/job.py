"""A job that runs a plan and goes on when one of its ranks is lost.

Ranks live in *generations*: all ranks of a plan are started together, and when one is lost, or
another plan is better, all end and the next generation begins. Beside them are their snapshots and
a process that plans, which end with this process, whatever happens to it.
"""

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from heterog.errors import HeterogError, HeterogWarning
from heterog.files import CHECKPOINT_INDEX, check_save_folder, read_json
from heterog.healing.checkpoints import Writing
from heterog.healing.choices import Choice
from heterog.healing.crew import Crew
from heterog.healing.options import HealOptions
from heterog.healing.record import Assignment, Trained
from heterog.healing.service import Service
from heterog.healing.shelf import to_go_on_from
from heterog.healing.steering import PlanChange, Steering
from heterog.runtime.launch import RANKS_OWN, temporary_folder
from heterog.runtime.ranks.forks import rank_forks
from heterog.runtime.ranks.place import HERE, Place
from heterog.runtime.ranks.watching import LaunchError
from heterog.runtime.request import RunRequest
from heterog.search.plan import Plan
from heterog.workers import signals_as_exit

_FIRST_PLAN_S = 300.0
"""Longest wait for a plan after a loss: a search keeps its budget, but loading and compiling for
the first time may take minutes."""
_MOST_MOVES = 100
"""Number of changes of plan after which a job is given up that loses a rank."""
_BACK_S = 30.0
"""Longest wait for hosts that do not answer, where those that do have no complete snapshot."""


def check_can_heal(plan: Plan, path: Path) -> None:
    """Check that a plan has one model, which is trained exactly.

    Raises:
        HeterogError: it is trained in a mode that changes results.
    """
    if modes := plan.strategy.modes:
        raise HeterogError(
            f"{path} has {modes[0].words}, and jobs that heal keep copies of one model only, and "
            "train what is left of a cluster exactly; run it without `heal`, with `save`."
        )


def last_step(request: RunRequest) -> int:
    """Number of the last step to train, counted from before the checkpoint that is resumed.

    Raises:
        InputFileError: there is no such checkpoint.
    """
    before = 0
    if request.resume is not None:
        index = read_json(request.resume / CHECKPOINT_INDEX, "checkpoint")
        before = int(index["num_steps"])
    return before + 1 + request.num_steps


class HealingJob:
    """Trains with a plan, and with other plans when that becomes necessary or better.

    Args:
        request: The first plan, and how to train. Its limit of the whole job is that of what each
            generation does beside steps.
        options: Settings for snapshots, checkpoints and changes of plan.
        place: Where the rank of each device runs.
        crew: Runs ranks and keeps snapshots, instead of this machine.
        progress: Called with what rank 0 does, whenever that changes.
        say: Called with one line about each change of plan.

    Attributes:
        options: The settings given.
        trained: Losses, times and changes of plan so far.
        last: Number of the last step to train.
        steering: Decides about changes of plan; from ``run`` on.
    """

    steering: Steering

    def __init__(
        self,
        request: RunRequest,
        *,
        options: HealOptions | None = None,
        place: Place = HERE,
        crew: Crew | None = None,
        progress: Callable[[str], None] = lambda stage: None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.options = options or HealOptions()
        self.trained = Trained(checkpoint_ns=self._checkpoint_ns())
        self._request = request
        self._plan, self._path = request.load(), request.plan.resolve()
        check_can_heal(self._plan, request.plan)
        self._whole = self._plan.cluster
        self._source = request.source_of(self._plan)
        if request.save is not None:
            check_save_folder(request.save)
        self._crew = crew or Crew(self._whole, request, place)
        self.last = last_step(request)
        self._progress, self._say = progress, say
        wanted, num_hosts = self.options.redundancy, self._whole.num_hosts
        if wanted > max(num_hosts - 1, 1):
            warnings.warn(
                f"a redundancy of {wanted} needs as many other hosts; the plan's cluster has "
                f"{num_hosts}, so each part is held {num_hosts} times.",
                HeterogWarning,
                stacklevel=2,
            )
        self._begun_s = 0.0
        self._writing: Writing | None = None
        self._change: PlanChange | None = None

    def run(self) -> dict[str, Any]:
        """Train to the end and return what was measured and what happened.

        Raises:
            LaunchError: a rank failed by its own fault, or too many were lost.
            HeterogError: the state is lost, or nothing fits on what is left.
        """
        with ExitStack() as stack:
            stack.enter_context(signals_as_exit())
            self._folder = stack.enter_context(temporary_folder())
            stack.enter_context(rank_forks(RANKS_OWN))  # one for all generations
            stack.callback(self._crew.close)
            # It imports while others start.
            planning = Service("heterog.healing.planning", (self._path, self._source))
            stack.callback(planning.close)
            every = tuple(range(self._whole.num_devices))
            first = Choice(path=str(self._path), method=self._plan.method, devices=every)
            begun = self._crew.open(self._folder)
            self.steering = Steering(
                self._whole,
                first if begun is None else begun.running,
                self._folder,
                self.options,
                self._say,
                planning,
                self._crew,
            )
            if begun is not None:
                self._go_on(begun)
            elif self.trained.checkpoint_ns and (
                self._resume != str(Path(self.options.checkpoint).resolve())
            ):
                self._say(
                    f"{self.options.checkpoint} has a checkpoint that will be replaced; "
                    "`resume` goes on from it"
                )
            self.steering.steps_left = self._steps_left()
            self.steering.begin_generation(None, "first")  # a rank may be lost in the first step
            if self.options.checkpoint:
                folder, every_s = Path(self.options.checkpoint), self.options.checkpoint_s
                self._writing = Writing(folder, every_s, self._say)
                stack.callback(self._writing.close)
            while not self.trained.is_done:
                self._run_generation(None if self.trained.is_running else self._decide())
                self.trained.is_running = False
                self.trained.generation += 1
        return self._measured()

    def _go_on(self, begun: Trained) -> None:
        """Go on with a job whose process like this one was lost."""
        self.trained = begun
        self.trained.last_event_s = time.monotonic()
        used = set(begun.running.devices)
        if not begun.is_running:
            used = set(filter(self._crew.is_here, used))
        self.steering.leave_out(set(range(self._whole.num_devices)) - used)
        done = max(self.trained.losses, default=0)
        why = f"who leads the job was lost, and is there again after step {done}"
        if begun.is_running:
            self._say(why)
        else:
            begun.generation += 1
            self._begin_move("lost", why)

    def _checkpoint_ns(self) -> int:
        """When the checkpoint in the folder for them was written; 0 if none can be seen."""
        if not self.options.checkpoint:
            return 0
        try:
            return (Path(self.options.checkpoint) / CHECKPOINT_INDEX).stat().st_mtime_ns
        except OSError:
            return 0

    @property
    def _resume(self) -> str:
        """The checkpoint to begin with where no snapshot is: the job's own, once it has one."""
        has_own = self._checkpoint_ns() not in (0, self.trained.checkpoint_ns)
        folder = Path(self.options.checkpoint) if has_own else self._request.resume
        return str(folder.resolve()) if folder is not None else ""

    # --- generations -----------------------------------------------------------------------------

    def _run_generation(self, assignment: Assignment | None) -> None:
        """Run ranks until they are done, stop, or one of them is lost.

        Args:
            assignment: What they run; ``None`` if they run already.
        """
        self._begun_s, self.trained.running = time.monotonic(), self.steering.running
        try:
            self._crew.run(self.trained, assignment, self._watch)
        except LaunchError as error:
            self._hear()
            if not error.lost or len(self.trained.moves) >= _MOST_MOVES:
                raise
            self._lose(error.lost)
            return
        self._hear()
        if not self.trained.is_done and self._change is not None:
            self._begin_move(self._change.kind, self._change.why)

    def _lose(self, ranks: Sequence[int]) -> None:
        """Record that some ranks of the generation are lost."""
        gone = sorted(self.steering.running.devices[rank] for rank in ranks)
        if len(gone) == len(self.steering.running.devices):
            raise HeterogError("all ranks were killed; nothing is left to go on with.")
        self._change = None
        self.steering.leave_out(gone)
        done = max(self.trained.losses, default=0)
        was = "was" if len(gone) == 1 else "were"
        self._begin_move("lost", f"{self.steering.names(gone)} {was} lost after step {done}")

    def _begin_move(self, kind: str, why: str) -> None:
        self.trained.begin_move(kind, why, time.monotonic())
        self._say(why)

    def _decide(self) -> Assignment:
        """Decide what the next generation runs.

        Raises:
            HeterogError: nothing fits on what is left, or the state is lost.
        """
        trained, steering = self.trained, self.steering
        moment, checkpoint = None, self._resume
        if trained.generation:
            change, self._change = self._change, None
            steering.steps_left = self._steps_left()
            try:
                choice = change.choice if change else steering.plan_for_loss(_FIRST_PLAN_S)
                steering.begin_generation(choice, change.kind if change else "lost")
            except (OSError, ValueError) as error:
                raise HeterogError(str(error)) from error
        running = steering.running
        trained.planned(running.method, len(running.devices), time.monotonic())
        if trained.generation:
            wait_s = _BACK_S if trained.was_kept else 0.0
            moment = self._crew.newest(running.devices, wait_s)
            checkpoint = to_go_on_from(
                moment, checkpoint, was_kept=trained.was_kept, say=self._say
            )
            trained.was_kept |= moment is not None
        return Assignment(
            generation=trained.generation,
            plan=running.path,
            last=self.last,
            moment=moment,
            checkpoint=checkpoint,
        )

    # --- while ranks train -----------------------------------------------------------------------

    def _watch(self, stage: str) -> None:
        """Read rank 0's events, and check for a better plan."""
        self._progress(stage)
        self._hear()
        steering, is_training = self.steering, stage.startswith("step ")
        if self._change is not None or (self.trained.generation and not is_training):
            return  # who plans would take cores from ranks that start
        steering.steps_left = self._steps_left()
        self._change = steering.look()
        if self._change is not None:
            self._crew.ask_to_stop()
        if self._writing is not None and is_training:
            self._writing.look(self._crew.lend)

    def _hear(self) -> None:
        """Read the events that rank 0 has written since the last call."""
        for event in self._crew.new_events():
            match event["event"]:
                case "busy":
                    self.steering.hear_busy(event["busy_s"])
                case "no snapshot":
                    self._say(f"no snapshot was taken: {event['why']}")
                case "step" if not self.steering.restart_s:
                    self.steering.restart_s = float(event["at_s"]) - self._begun_s
            self.trained.hear(event)
            if event["event"] == "step" and event["step"] in self.trained.seconds:
                self.steering.hear_step(float(event["seconds"]))

    def _steps_left(self) -> int:
        return self.last - max(self.trained.losses, default=0)

    # --- the end ---------------------------------------------------------------------------------

    def _measured(self) -> dict[str, Any]:
        """The measurements of ``run_ranks`` and a report of the healing."""
        trained = self.trained
        return {
            "method": self.steering.running.method,
            "num_ranks": len(self.steering.running.devices),
            "num_steps_before": self.last - len(trained.losses),
            **trained.measured(self._plan),
            "trials": [trial.to_json() for trial in self.steering.trials],
            "snapshots": {
                "number": trained.num_snapshots,
                "bytes_of_rank_0": trained.snapshot_bytes,
                "copy_s": trained.copy_s,
                "redundancy": self.options.redundancy,
            },
        }
