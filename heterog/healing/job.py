"""A job that runs a plan on local processes and goes on when one of them is lost.

Ranks live in *generations*: all ranks of a plan are started together, and when one is lost, or
another plan is better, all end and the next generation begins. Beside them live a keeper for each
host and a process that plans, which all end with this process, whatever happens to it.
"""

import os
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from subprocess import Popen
from typing import Any

from heterog.errors import HeterogError, HeterogWarning
from heterog.files import check_writable, read_json
from heterog.healing.assignment import Assignment
from heterog.healing.checkpoints import Writing
from heterog.healing.journal import JournalReader
from heterog.healing.keepers import KeeperPlace, Keepers, start_keeper
from heterog.healing.options import HealOptions, Move, Trained
from heterog.healing.snapshots import Moment
from heterog.healing.steering import Going, Running, Steering
from heterog.healing.wire import new_token
from heterog.planners.plan import load_plan
from heterog.runtime.launch import (
    CHECKPOINT_INDEX,
    STEP_TIMEOUT_S,
    LaunchError,
    run_commands,
    signals_as_exit,
    temporary_folder,
)
from heterog.user_code import trusted_source

_FIRST_PLAN_S = 300.0
"""Longest wait for a plan after a loss: a search keeps its budget, but loading and compiling for
the first time may take minutes."""
_RECENT_STEPS = 8
"""Number of last steps whose median is the current step time."""


class HealingJob:
    """Trains with a plan, and with other plans when that becomes necessary or better.

    Args:
        plan: Path of the first plan.
        num_steps: Number of steps to train after the first one, which warms up.
        model: Source of the workload; the plan's own if empty.
        sources: Python files that may be run although only the plan names them.
        options: Settings for keepers, checkpoints and changes of plan.
        timeout_s: Seconds that a generation may take.
        step_timeout_s: Seconds that a step may take.
        save: Folder for a checkpoint after the last step.
        resume: Folder of a checkpoint to begin with.
        allow_nonfinite: Go on when the loss is infinite or not a number.
        progress: Called with what rank 0 does, whenever that changes.
        say: Called with one line about each change of plan.

    Attributes:
        options: The settings given.
        trained: Losses, times and changes of plan so far.
        last: Number of the last step to train.
        generation: Number of times ranks were started before.
    """

    def __init__(
        self,
        plan: Path,
        *,
        num_steps: int,
        model: str = "",
        sources: Sequence[str] = (),
        options: HealOptions | None = None,
        timeout_s: float = 300.0,
        step_timeout_s: float = STEP_TIMEOUT_S,
        save: Path | None = None,
        resume: Path | None = None,
        allow_nonfinite: bool = False,
        progress: Callable[[str], None] = lambda stage: None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.options = options or HealOptions()
        self.trained = Trained()
        self._plan, self._path = load_plan(plan), plan.resolve()
        if self._plan.strategy.inexact is not None:
            raise HeterogError(
                f"{plan} has {self._plan.strategy.inexact.words}, and jobs that heal keep "
                "copies of one model only; run it without --heal, with --save."
            )
        self._whole = self._plan.cluster
        self._source = model or trusted_source(self._plan.graph.source, sources, str(plan))
        self._arguments = ["--timeout", str(timeout_s), "--model", model]
        for source in sources:
            self._arguments += ["--source", source]
        if save is not None:
            check_writable(save / CHECKPOINT_INDEX if save.is_dir() else save)
            self._arguments += ["--save", str(save.resolve())]
        if allow_nonfinite:
            self._arguments.append("--allow-nonfinite")
        self._resume = "" if resume is None else str(resume.resolve())
        steps_before = 0
        if resume is not None:
            steps_before = int(read_json(resume / CHECKPOINT_INDEX, "checkpoint")["num_steps"])
        self.last = steps_before + 1 + num_steps
        self._timeout_s, self._step_timeout_s = timeout_s, step_timeout_s
        self._progress, self._say = progress, say
        self._token = new_token()
        hosts = self._whole.num_hosts
        if self.options.redundancy > max(hosts - 1, 1):
            warnings.warn(
                f"a redundancy of {self.options.redundancy} needs as many other hosts; the plan's "
                f"cluster has {hosts}, so each part is held {hosts} times.",
                HeterogWarning,
                stacklevel=2,
            )
        self._keepers: dict[int, tuple[Popen[bytes], KeeperPlace]] = {}
        self.generation = 0
        self._begun_s = 0.0
        self._why_not = ""
        self._is_begun = self._is_restart_measured = False
        self._writing: Writing | None = None
        self._going: Going | None = None

    @property
    def running(self) -> Running:
        """The plan that the ranks run now, and on which devices."""
        return self._steering.running

    @property
    def keeper_pids(self) -> dict[int, int]:
        """Process id of each host's keeper, by host."""
        return {host: process.pid for host, (process, _) in self._keepers.items()}

    def run(self) -> dict[str, Any]:
        """Train to the end and return what was measured and what happened.

        Raises:
            LaunchError: a rank failed by its own fault, or too many were lost.
            HeterogError: the state is lost, or nothing fits on what is left.
        """
        with ExitStack() as stack:
            stack.enter_context(signals_as_exit())
            self._folder = stack.enter_context(temporary_folder())
            stack.callback(self._end_keepers)
            running = Running(
                path=str(self._path),
                method=self._plan.method,
                device_of=tuple(range(self._whole.num_devices)),
            )
            self._steering = Steering(
                self._whole, running, self._source, self._folder, self.options, self._say
            )
            stack.callback(self._steering.close)
            if self.options.checkpoint:
                self._writing = Writing(
                    Path(self.options.checkpoint), self.options.checkpoint_s, self._token
                )
                stack.callback(self._writing.close)
            self._start_keepers()
            while not self.trained.is_done:
                self._run_generation()
                self.generation += 1
        return self._measured()

    # --- generations -----------------------------------------------------------------------------

    def _run_generation(self) -> None:
        """Run ranks until they are done, stop, or one of them is lost."""
        assignment = self._folder / f"assignment{self.generation}.json"
        journal = self._folder / f"journal{self.generation}.jsonl"
        self._reader = JournalReader(journal)
        self._stop = self._folder / f"stop{self.generation}"
        self._begun_s = time.monotonic()
        # The lost devices: now, or in the question about the plan that the job moves to.
        lost = self._going.answer.question.lost if self._going else self._steering.lost
        deciding = threading.Thread(target=self._decide, args=(assignment,), daemon=True)
        deciding.start()
        try:
            run_commands(
                [
                    *("-m", "heterog.healing.rank", str(assignment), *self._arguments),
                    *("--journal", str(journal), "--stop", str(self._stop)),
                ],
                self._whole.num_devices - len(lost),
                timeout_s=self._timeout_s,
                step_timeout_s=self._step_timeout_s,
                progress=self._watch,
            )
        except LaunchError as error:
            deciding.join()
            self._hear()
            if self._why_not:
                raise HeterogError(self._why_not) from error
            if not error.lost or len(self.trained.moves) >= self.options.most_losses:
                raise
            self._lose(error.lost)
            return
        finally:
            deciding.join()
        self._hear()
        if not self.trained.is_done and self._going is not None:
            self._begin_move(Move(kind=self._going.kind, why=self._going.why))

    def _lose(self, ranks: Sequence[int]) -> None:
        """Record that some ranks of the generation are lost."""
        gone = sorted(self._steering.running.device_of[rank] for rank in ranks)
        if len(gone) == len(self._steering.running.device_of):
            raise HeterogError("all ranks were killed; nothing is left to go on with.")
        self._going = None
        self._steering.leave_out(gone)
        names = ", ".join(self._whole.devices[device].name for device in gone)
        done = max(self.trained.losses, default=0)
        self._begin_move(Move(kind="lost", why=f"{names} was lost after step {done}"))

    def _begin_move(self, move: Move) -> None:
        now_s = time.monotonic()
        move.detect_s = now_s - self.trained.last_event_s
        self.trained.moves.append(move)
        self.trained.last_event_s = now_s
        self._say(move.why)

    def _decide(self, path: Path) -> None:
        """Decide what the generation runs, while its ranks are being started."""
        moment = None
        try:
            if self.generation:
                moment = self._newest()
                self._choose()
        except (HeterogError, OSError, RuntimeError, ValueError) as error:
            self._why_not = str(error)  # the ranks wait and have to be told of any error
        steering = self._steering
        Assignment(
            generation=self.generation,
            plan=steering.running.path,
            last=self.last,
            moment=moment,
            checkpoint=self._resume if moment is None else "",
            keepers=tuple(self._places()),
            token=self._token,
            host_of=tuple(self._whole.host_of[each] for each in steering.running.device_of),
            copies=1 + self.options.redundancy,
            why_not=self._why_not,
        ).write(path)
        if self.trained.moves:
            move, now_s = self.trained.moves[-1], time.monotonic()
            move.plan_s = now_s - self.trained.last_event_s
            self.trained.last_event_s = now_s
            move.method = steering.running.method
            move.num_ranks = len(steering.running.device_of)

    def _newest(self) -> Moment | None:
        """The snapshot to go on from; ``None`` means the checkpoint.

        Raises:
            HeterogError: there is neither a snapshot nor a checkpoint.
        """
        all_alive = all(process.poll() is None for process, _ in self._keepers.values())
        self._start_keepers()
        with Keepers(self._places(), self._token) as keepers:
            moment = keepers.newest()
        if moment is not None or self._resume:
            return moment
        if all_alive:  # too early for a snapshot: only a step or two is repeated
            return None
        raise HeterogError(
            "the state is lost: no complete snapshot is left in memory, and no checkpoint was "
            "written. A larger redundancy survives more, and so do checkpoints beside training "
            "(--checkpoint)."
        )

    def _choose(self) -> None:
        """Take the plan that was decided for, or make one for what is left."""
        going, self._going = self._going, None
        if going is not None:
            self._steering.begin_generation(going.answer, going.kind)
            return
        self._steering.steps_left = self._steps_left()
        self._steering.begin_generation(self._steering.plan_for_loss(_FIRST_PLAN_S), "lost")

    # --- while ranks train -----------------------------------------------------------------------

    def _watch(self, stage: str) -> None:
        """Read rank 0's events and check for a better plan; called when rank 0 changes stage."""
        self._progress(stage)
        self._hear()
        if not stage.startswith("step ") or self._going is not None:
            return
        steering = self._steering
        steering.steps_left = self._steps_left()
        recent = list(self.trained.seconds.values())[-_RECENT_STEPS:]
        steering.step_s = statistics.median(recent) if len(recent) == _RECENT_STEPS else 0.0
        if self.generation == 0 and not self._is_begun:
            self._is_begun = True
            steering.begin_generation(None, "first")
        self._going = steering.look()
        if self._going is not None:
            self._stop.touch()
        if self._writing is not None:
            self._resume = self._writing.look(self._places()) or self._resume

    def _hear(self) -> None:
        """Read the events that rank 0 has written since the last call."""
        for event in self._reader.new_events():
            match event["event"]:
                case "busy":
                    self._steering.hear_busy(event["busy_s"])
                case "keeper lost":
                    self._say(f"a keeper was lost: {event['why']}")
                case "step" if not self._is_restart_measured:
                    self._is_restart_measured = True
                    self._steering.restart_s = float(event["at_s"]) - self._begun_s
            self.trained.hear(event)

    def _steps_left(self) -> int:
        return self.last - max(self.trained.losses, default=0)

    # --- keepers ---------------------------------------------------------------------------------

    def _start_keepers(self) -> None:
        """Start a keeper on every host in use that has none running."""
        lost = self._steering.lost
        for host in range(self._whole.num_hosts):
            process = self._keepers.get(host, (None, None))[0]
            is_used = not set(self._whole.host_devices(host)) <= lost
            if is_used and (process is None or process.poll() is not None):
                self._keepers[host] = start_keeper(host, self._token, pid=os.getpid())

    def _places(self) -> list[KeeperPlace]:
        return [place for process, place in self._keepers.values() if process.poll() is None]

    def _end_keepers(self) -> None:
        for process, _ in self._keepers.values():
            process.kill()
            process.wait()

    # --- the end ---------------------------------------------------------------------------------

    def _measured(self) -> dict[str, Any]:
        """The measurements of ``run_ranks`` and a report of the healing."""
        trained = self.trained
        numbers = sorted(trained.losses)
        seconds = [trained.seconds[number] for number in numbers if number in trained.seconds]
        median_s = statistics.median(seconds) if seconds else 0.0
        return {
            "model": self._plan.graph.name,
            "cluster": self._whole.name,
            "method": self._steering.running.method,
            "num_ranks": len(self._steering.running.device_of),
            "num_steps_before": self.last - len(numbers),
            "step_time_s": median_s,
            "step_time_min_s": min(seconds, default=0.0),
            "step_time_max_s": max(seconds, default=0.0),
            "step_times_s": seconds,
            "predicted_step_time_s": self._plan.step_time_s,
            "losses": [trained.losses[number] for number in numbers],
            "steps": numbers,
            "moves": [asdict(move) for move in trained.moves],
            "snapshots": {
                "number": trained.num_snapshots,
                "bytes_of_rank_0": trained.snapshot_bytes,
                "copy_s": trained.copy_s,
                "redundancy": self.options.redundancy,
            },
        }
