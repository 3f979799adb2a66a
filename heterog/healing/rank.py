"""What one rank of a job that heals does: load the state, train, take snapshots.

    python -m heterog.healing.rank run.json assignment.json

The run file says how to train, and the assignment with which plan.

After each step the ranks agree on a few numbers (one all-reduce of 40 bytes, which is also the
barrier): whether parts of a snapshot are on their way from some rank, whether it is too early for
the next one or the last one failed there, whether somebody wants the ranks to stop, and whether it
is time to say how long each computes.
"""

import math
import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from heterog.errors import InputFileError
from heterog.files import read_json
from heterog.graph.capture import CapturedStep, capture_step
from heterog.healing.costs import BusyClock, device_seconds
from heterog.healing.elastic import any_rank, say, set_silence
from heterog.healing.record import Assignment, Event, write_events
from heterog.healing.shelf import INDEX, Shelf, Snapshot, part_of, parts_of
from heterog.healing.snapshots import SLOW_BYTES_PER_S, SnapshotWriter
from heterog.lowering import lower
from heterog.records import parse_dataclass
from heterog.runtime.accelerators import is_accelerated
from heterog.runtime.checkpoint.files import needed, read_boxes
from heterog.runtime.checkpoint.state import NewState, check_can_save, check_fits, own_entries
from heterog.runtime.checkpoint.steps import load_checkpoint, save_checkpoint
from heterog.runtime.rank import as_rank, check_loss, end_together, set_up, tell, workload_of
from heterog.runtime.request import RunRequest, read_request
from heterog.search.plan import Plan, load_plan

SILENT_STEPS = 10.0
"""Least time to wait for another rank, in steps as long as the last one, which nobody planned."""
LOOK_STEPS = 16
"""Number of steps between reports of which rank is slow. On an accelerator one step of them is
recorded: that drains its queue, so recording each step would cost what it finds."""
LOOK_S = 1.0
"""Least seconds between reports of ranks on CPUs: ten periods of a cgroup's quota, within which a
throttled process first runs at full speed and then stands still."""

_captured: dict[Path, CapturedStep] = {}
"""Steps of jobs by the folder of their files, captured where this process was forked off."""


class HealingRank:
    """One rank of one generation.

    Args:
        request: How it trains.
        assignment: What the generation runs.
        silent_s: Least seconds without an answer after which a rank gives up waiting for another
            one, from the second step on; 0 leaves the timeout of the process group.
    """

    def __init__(
        self,
        request: RunRequest,
        assignment: Assignment,
        *,
        silent_s: float = 0.0,
    ) -> None:
        self._request, self._assignment, self._silent_s = request, assignment, silent_s
        self._patience_s = request.limits.timeout_s
        self._plan = plan = load_plan(assignment.plan)
        folder = Path(assignment.folder)
        graph = plan.graph
        num_bytes = sum(graph.tensors[each].num_bytes for _, each, _ in graph.updates)
        # Whoever writes a snapshot is waited for as if the disk were slow.
        self._written_s = (1 + graph.optimizer_state_ratio) * num_bytes / SLOW_BYTES_PER_S
        self._step, workload = set_up(plan, request, _captured.get(folder))
        self._rank = dist.get_rank()
        host_of, redundancy = plan.cluster.host_of, assignment.redundancy
        if redundancy is None:
            host_of, redundancy = (0,) * len(host_of), 0
        # The first rank of each host writes a journal, as any host may be lost.
        is_first = host_of.index(host_of[self._rank]) == self._rank
        self._journal = assignment.journal if is_first else None
        self._program = lower(plan.graph, plan.cluster, plan.strategy, num_steps=1)
        self._batch = workload.make_batch()
        tell("taking the state up")
        self._shelf = Shelf(folder)
        # All of this rank, but for that by which files are copied, which may take long.
        self._groups = list(dist.distributed_c10d._world.pg_map)
        self._writer = SnapshotWriter(
            self._shelf,
            assignment.generation,
            (self._rank, dist.get_world_size()),
            host_of,
            redundancy,
            self._say_failed,
        )
        self._is_kept = False  # any snapshot of this generation, as was told
        self._untold: list[Event] = []
        self._take_up()
        self._clock = None if is_accelerated(self._step.device) else BusyClock(self._program)
        self._step.notify(self._clock)
        self._looked = 0, 0.0  # number of steps and time at the last report

    def train(self) -> bool:
        """Train until the last step or until asked to stop; returns whether all is done."""
        step, last = self._step, self._assignment.last
        first = step.num_steps + 1
        begin_s, step_s, is_next = time.perf_counter(), 0.0, False
        for number in range(first, last + 1):
            tell(f"step {number} of {last}")
            dist.barrier()  # for which those wait longer that have written sooner
            if number > first:
                self._be_patient(max(self._silent_s, SILENT_STEPS * step_s))
            busy_s: list[float] = []
            if self._clock is None and number % LOOK_STEPS == 0 and number > first:
                loss_tensor, start_s, finish_s = step.record(self._batch)
                busy_s = device_seconds(self._program, start_s, finish_s)
                loss = float(loss_tensor)
            else:
                loss = float(step(self._batch))
            check_loss(loss, number, self._request)
            if number == first:
                check_can_save(step)
                self._begin_look(number)
            is_next, is_wanted, is_due = self._writer.end_step(
                self._assignment.stop.exists(), self._rank == 0 and self._is_due(number)
            )
            end_s = time.perf_counter()
            step_s = end_s - begin_s
            told = loss if math.isfinite(loss) else None  # JSON has nothing else
            # Before the snapshot, from which others may go on although this rank ends within it.
            self._write("step", step=number, loss=told, seconds=step_s)
            if self._writer.settled is not None and not self._is_kept:
                self._is_kept = True
                self._write("kept", step=number)
            begin_s = end_s
            if is_next:
                self._take_snapshot(number)
            if is_due:
                busy_s = self._busy_seconds(number)
            if busy_s:
                self._write("busy", step=number, busy_s=busy_s)
            if is_wanted and number < last:
                self._leave_all(number)
                return False
            self.look()
        return True

    def look(self) -> None:
        """What is done beside training after a step."""

    def end(self, is_done: bool) -> None:
        """Finish pending updates, save, and report how it ended."""
        if is_done and self._request.save is not None:
            tell("saving the checkpoint")
            self._be_patient(math.inf)
            save_checkpoint(self._step, self._request.save)
        self._step.flush()
        tell("leaving")
        self._writer.wait()
        dist.barrier()
        self._write("done" if is_done else "stopped", step=self._step.num_steps)

    def _write(self, event: str, **said: Any) -> None:
        """Write an event, and those for which there was no room before."""
        if self._journal is not None:
            self._untold.append({"event": event, "at_s": time.monotonic(), **said})
            with suppress(OSError):
                write_events(self._journal, self._untold)
                self._untold.clear()

    def _say_failed(self, why: str) -> None:
        host = self._plan.cluster.hosts[self._plan.cluster.host_of[self._rank]].name
        self._write("no snapshot", why=f"{host}: {why}")

    def _be_patient(self, seconds: float) -> None:
        """Say for how long ranks wait for others that give no answer."""
        seconds = min(seconds, self._request.limits.timeout_s)
        if self._silent_s and seconds != self._patience_s:
            self._patience_s = seconds
            set_silence(seconds, self._groups)

    def _take_up(self) -> None:
        """Load the state that the job had reached."""
        step, moment = self._step, self._assignment.moment
        if moment is not None:
            names = [part.name for part in parts_of(moment)]
            self._bring(f"{name}{INDEX}" for name in names)
            snapshot = Snapshot(self._shelf, moment)
            contents, where = snapshot.contents, Path("in memory")
            check_fits(step, step.model, contents, where)
            state = NewState(step, step.model, contents)
            wanted = needed(contents, state.wanted)
            self._bring({names[part_of(contents.tensors[each])] for each in wanted})
            read_boxes(contents, where, state.wanted, read=snapshot.read)
            state.check_counters()
            state.take_over()
        elif self._assignment.checkpoint:
            load_checkpoint(step, self._assignment.checkpoint)
        dist.barrier()
        self._write("taken up", step=step.num_steps)

    def _bring(self, names: Iterable[str]) -> None:
        """Bring files here; without room for them this rank counts as lost, and others go on."""
        try:
            self._writer.bring(names)
        except InputFileError as error:
            if "TORCHELASTIC_RUN_ID" in os.environ:  # its agent leaves
                raise
            say(f"rank {self._rank}: {error}")
            os.kill(os.getpid(), signal.SIGKILL)

    def _is_due(self, number: int) -> bool:
        """Whether it is time to say how long each rank on a CPU computes."""
        after, since_s = self._looked
        has_waited = number - after >= LOOK_STEPS and time.perf_counter() - since_s >= LOOK_S
        return self._clock is not None and has_waited

    def _begin_look(self, number: int) -> None:
        """Begin to measure how long this rank computes, after a step."""
        self._looked = number, time.perf_counter()
        if self._clock is not None:
            self._clock.seconds = 0.0

    def _busy_seconds(self, number: int) -> list[float]:
        """Seconds that each rank computed in a step since the last report, on average."""
        assert self._clock is not None
        every = torch.zeros(dist.get_world_size(), dtype=torch.float64)
        every[self._rank] = self._clock.seconds / (number - self._looked[0])
        dist.all_reduce(every)
        self._begin_look(number)
        return every.tolist()

    def _take_snapshot(self, number: int) -> None:
        step, graph = self._step, self._step.captured.graph
        about = {
            "model": graph.name,
            "graph": graph.fingerprint,
            "optimizer": graph.optimizer,
            "num_steps": step.num_steps,
        }
        writer = self._writer
        self._be_patient(self._patience_s + self._written_s)
        writer.take(number, *own_entries(step, step.model), about)
        if self._rank == 0:
            told = {"num_bytes": writer.num_bytes, "copy_s": writer.copy_s}
            self._write("snapshot", step=number, **told)

    def _leave_all(self, number: int) -> None:
        """Take a snapshot of this step, unless there is one, and wait until it is copied."""
        self._writer.wait()
        newest = self._writer.newest
        if any_rank(newest is None or newest.step != number)[0]:
            self._take_snapshot(number)
            self._writer.wait()


def warm(plan: str, run_file: str = "") -> None:
    """Do in the process that ranks are forked off what each of them would do otherwise.

    Args:
        plan: Path of a plan like theirs; lowering it loads the kernels, which takes 0.4 s.
        run_file: That of the job whose step is captured; not where there is an accelerator, which
            the model's code might touch.
    """
    loaded = load_plan(plan)
    lower(loaded.graph, loaded.cluster, loaded.strategy, num_steps=1)
    if run_file:
        capture_for(Path(run_file).parent, loaded, read_request(Path(run_file)))


def capture_for(folder: Path, plan: Plan, request: RunRequest) -> None:
    """Capture the step of a job with this folder, unless it is captured: 0.25 s or longer."""
    if folder not in _captured:
        _captured[folder] = capture_step(workload_of(plan, request))


def main() -> None:
    """Run a rank with the files named; errors are one line on stderr and exit code 2.

    Without any, it has imported what others that are forked later need.
    """
    if not sys.argv[1:]:
        return
    run_file, path = map(Path, sys.argv[1:])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with as_rank(int(os.environ.get("RANK", "0"))):
        told = parse_dataclass(read_json(path, "assignment"), Assignment, f"assignment {path}")
        rank = HealingRank(read_request(run_file), told)
        rank.end(rank.train())
    end_together()


if __name__ == "__main__":
    main()
