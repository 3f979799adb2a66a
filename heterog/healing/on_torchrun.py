"""A plan that heals under torchrun: every generation of ranks decides what it runs.

torchrun ends all ranks when one is lost, and starts them again on the hosts that are there. They
meet, find out which host of the plan each of them is, say which parts of snapshots lie there, and
the first of them has a plan for just these hosts: one that was prepared, or it makes one now.
Whoever decides may be lost, too: nothing is known to a process that has no successor.

What a host knows lies in a folder that ends with torchrun's agent (``elastic.folder_of_host``):

    3.120.1-4 ...       parts of snapshots; see ``shelf``
    left-0-1.json       a plan for these devices
    journal.jsonl       what happened in all generations; each begins with what it runs, and where
    stop1               the ranks of generation 1 shall end
"""

import json
import os
import signal
import sys
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from heterog.cluster.topology import Cluster
from heterog.errors import HeterogError
from heterog.files import read_json, write_atomically, write_json
from heterog.healing.choices import Choice, Question
from heterog.healing.elastic import (
    any_rank,
    end_cut_links,
    end_job,
    exit_now,
    folder_of_host,
    gather,
    has_met,
    on_sigterm,
    say,
    set_silence,
)
from heterog.healing.job import check_can_heal, last_step
from heterog.healing.options import HealOptions
from heterog.healing.rank import HealingRank
from heterog.healing.record import Assignment, Trained, read_events, write_event
from heterog.healing.service import Service
from heterog.healing.shelf import Moment, Part, Shelf, newest_complete, to_go_on_from
from heterog.records import parse_dataclass
from heterog.runtime.accelerators import CPU_BACKEND, has_accelerator, is_on_cpus
from heterog.runtime.rank import as_rank, end_together, is_of_another, join, meet
from heterog.runtime.ranks.forks import end_with_parent
from heterog.runtime.ranks.host_places import HOST, RankHas, own_place, ranks_in_plan, say_to_all
from heterog.runtime.request import RunRequest

_PLAN = "left-{}.json"
"""Name of a plan for some devices."""
_SILENT_S = 6.0
"""Least seconds without an answer after which a host counts as lost, as on Ray."""
_JOINED_S = 30.0
"""Longest wait for ranks that have met to join: one of them may be cut off by then."""
_PLANNED_S = 300.0
"""Least time to wait for a plan; who plans may have to compile."""
_LOOK_S = 0.05
"""Seconds between looks at whether there is a plan."""
_RESTART_S = 8.0
"""Seconds from a loss to the next step beside what is moved, in trials; moves are judged by it."""
_OTHERS_S = 60.0
"""Seconds to wait for hosts that may have what is missing, before the job ends without it."""
_NICENESS = 5
"""Value of ``nice`` for plans that are prepared: nobody waits for them."""


def read_healing(path: Path) -> tuple[RunRequest, HealOptions]:
    """The request in a run file that may have ``heal``, or the one for a plan alone.

    Raises:
        InputFileError: the file cannot be read, or a field is missing, unknown or wrong.
        HeterogError: it asks for what is not done under torchrun.
    """
    value = read_json(path, "run file")
    if not isinstance(value, dict) or "plan" not in value:
        return RunRequest(plan=path), HealOptions()
    asked = dict(value)
    options = parse_dataclass(asked.pop("heal", {}), HealOptions, f"`heal` of run file {path}")
    if options.checkpoint or options.num_trials:
        raise HeterogError(
            f"run file {path}: under torchrun no checkpoints are written beside training and no "
            "moves are tried; leave `checkpoint` and `num_trials` out, or run on Ray."
        )
    return parse_dataclass(asked, RunRequest, f"run file {path}"), options


class Generation:
    """The ranks that torchrun has started now, as this rank knows them.

    Args:
        request: The plan that was asked for, and how to train.
        options: How much is kept on other hosts, and how long is planned.

    Attributes:
        whole: The plan that was asked for.
        journal: Path of the events of all generations that this host knows.
        number: Number of times ranks were started before.
        devices: Device of the whole cluster of each rank of the plan.
        is_first: Whether this is rank 0 of the plan.
        is_first_of_host: Whether this is the first rank of its host.
        reports: Whether it is the one that reports at the end: of a host that came first.
    """

    def __init__(self, request: RunRequest, options: HealOptions) -> None:
        self._begun_s = time.monotonic()
        self.request, self.options = request, options
        self.whole = request.load()
        check_can_heal(self.whole, request.plan)
        self.folder, every = folder_of_host(), tuple(range(self.whole.cluster.num_devices))
        self.journal = self.folder / "journal.jsonl"
        before = read_events(self.journal, event="began")[0]
        self._before = tuple(before[-1]["devices"]) if before else every
        if before:
            os.environ[HOST] = before[-1]["host"]
        cluster, limit_s = self.whole.cluster, request.limits.timeout_s
        store = meet(limit_s)
        places = say_to_all(store, "heterog/place/", json.dumps(asdict(own_place())), limit_s)
        device_of = ranks_in_plan(cluster, [RankHas(**json.loads(each)) for each in places])
        device, self.devices = device_of[int(os.environ["RANK"])], tuple(sorted(device_of))
        first_of = {cluster.host_of[each]: each for each in reversed(self.devices)}
        self._firsts = sorted(first_of.values())  # the first device of each host that is there
        self.is_first, self.is_first_of_host = device == self.devices[0], device in self._firsts
        self._host = cluster.hosts[cluster.host_of[device]].name
        self.planning: Service | None = None
        if self.is_first:
            first = request.plan, request.source_of(self.whole)
            # Nothing was computed yet, and no accelerator, which no fork could use, is here.
            self.planning = Service(
                "heterog.healing.planning", first, is_forked=not has_accelerator()
            )
        # From here on it is seen at once that a host is cut off.
        join(
            min(limit_s, _JOINED_S),
            backend=CPU_BACKEND if is_on_cpus(cluster) else "",
            agreed=(store, self.devices.index(device)),
        )
        set_silence(limit_s)
        end_cut_links()
        # The last and first generation that each rank's host knows, whether it knows that a
        # snapshot was complete, and parts there.
        numbers = [before[each]["generation"] if before else -1 for each in (-1, 0)]
        kept = read_events(self.journal, event="kept")[0] or (before and before[-1]["was_kept"])
        said = zip(*gather([*numbers, bool(kept), Shelf(self.folder).parts()]), strict=True)
        lasts, told_since, was_kept, self._parts = said
        self.number, self._was_kept = 1 + max(lasts), any(was_kept)
        since = [(self.number if each < 0 else each) for each in told_since]
        self.reports = device == min(zip(since, self.devices, strict=True))[1]

    def decide(self) -> Assignment:
        """What this generation runs; all ranks call it.

        Raises:
            HeterogError: nothing fits on what is left, or the state is lost.
        """
        resume = self.request.resume
        checkpoint = str(resume.resolve()) if resume is not None else ""
        parts = [[Part(Moment(*when), number) for when, number in each] for each in self._parts]
        moment = newest_complete(parts)
        if moment is None and self._was_kept:
            self._wait_for_others("no complete snapshot is left here")
        if self.number or has_met():
            checkpoint = to_go_on_from(moment, checkpoint, was_kept=self._was_kept, say=self._say)
        # Ranks that wait for a plan go on talking, or nobody would miss one that is cut off.
        found = ThreadPoolExecutor(1).submit(self._plan_text) if self.is_first else None
        set_silence(_SILENT_S)
        while not any_rank(found is not None and found.done())[0]:
            time.sleep(_LOOK_S)
        set_silence(self.request.limits.timeout_s)
        (text, *_) = gather(found.result() if found is not None else "")
        if text.startswith("error "):
            why = text.removeprefix("error ")
            self._wait_for_others(why)
            raise HeterogError(why)
        plan = self._file_of(self.devices)
        if plan != self.request.plan:
            write_atomically(plan, text.encode())
        method, seconds = json.loads(text).get("method", ""), time.monotonic() - self._begun_s
        about = {"generation": self.number, "host": self._host, "devices": self.devices}
        was_kept = self._was_kept or moment is not None
        self.tell("began", **about, method=method, seconds=seconds, was_kept=was_kept)
        return Assignment(
            generation=self.number,
            plan=str(plan),
            last=last_step(self.request),
            moment=moment,
            checkpoint=checkpoint,
            folder=str(self.folder),
            redundancy=self.options.redundancy,
        )

    def questions(self) -> list[Question]:
        """A question about the loss of each host for which there is no plan, but for the last."""
        host_of = self.whole.cluster.host_of
        left = [
            tuple(each for each in self.devices if host_of[each] != host_of[first])
            for first in self._firsts
        ]
        without_plan = [each for each in left if each and not self._file_of(each).exists()]
        return [self._question(each, self.devices) for each in without_plan]

    def tell(self, event: str, **said: Any) -> None:
        """Write an event that each host knows, if this rank is its first."""
        if self.is_first_of_host:
            write_event(self.journal, event, **said)

    # --- parts -----------------------------------------------------------------------------------

    def _say(self, line: str) -> None:
        if self.is_first:
            say(line)

    def _wait_for_others(self, why: str) -> None:
        """Wait for hosts that are missing: when one comes, torchrun ends this rank meanwhile."""
        if len(self.devices) < self.whole.cluster.num_devices:
            self._say(f"{why}; waiting {_OTHERS_S:g} s for hosts that are missing")
            time.sleep(_OTHERS_S)

    def _plan_text(self) -> str:
        """The plan for the hosts that are there, or ``error`` and why there is none."""
        assert self.planning is not None
        planning, path, why = self.planning, self._file_of(self.devices), ""
        wait_s = max(_PLANNED_S, self.request.limits.timeout_s)
        while not path.exists():
            asked = planning.ask(self._question(self.devices, self._before))
            try:
                planning.answer_to(0, wait_s)
                planning.answer_to(asked, wait_s)
            except HeterogError as error:
                if why or not planning.has_ended:
                    return f"error {error}"
                why = str(error)  # it was killed: once more
        return path.read_text()

    def _file_of(self, devices: tuple[int, ...]) -> Path:
        """File of the plan for some devices; there may be none."""
        if len(devices) == self.whole.cluster.num_devices:
            return self.request.plan
        return self.folder / _PLAN.format("-".join(map(str, devices)))

    def _question(self, devices: tuple[int, ...], running: tuple[int, ...]) -> Question:
        """The question for a plan for some devices, by those that ran before."""
        plan = Choice(path=str(self._file_of(running)), method="", devices=running)
        return Question(
            devices=devices,
            budget=self.options.first_budget,
            steps_left=self.request.num_steps,
            restart_s=_RESTART_S,
            running=plan,
            path=str(self._file_of(devices)),
        )


class TorchrunRank(HealingRank):
    """A rank that has plans prepared if it is the first; hosts get them with parts."""

    def __init__(self, generation: Generation, assignment: Assignment) -> None:
        self._planning = generation.planning
        assignment.stop.unlink(missing_ok=True)  # of one that did not get as far as to train
        super().__init__(generation.request, assignment, silent_s=_SILENT_S)
        self._folder, self._given = generation.folder, set[str]()
        if self._planning is not None:
            self._asked = self._planning.ask(generation.questions(), niceness=_NICENESS)
        on_sigterm(assignment.stop.touch)

    def look(self) -> None:
        """Let other hosts have plans that were prepared."""
        if self._planning is not None:
            answered = [number for number, _ in iter(self._planning.next_answer, None)]
            plans = {path.name for path in self._folder.glob(_PLAN.format("*"))}
            self._writer.further += sorted(plans - self._given)
            self._given |= plans
            if self._asked in answered:
                self._planning.close()
                self._planning = None

    def end(self, is_done: bool) -> None:
        """See ``HealingRank``; what is not prepared by now is not needed."""
        super().end(is_done)
        if self._planning is not None:
            self._planning.close()

    def _write(self, event: str, **said: Any) -> None:
        super()._write(event, **said)
        if event == "no snapshot":  # nobody else tells it
            say(f"no snapshot was taken: {said['why']}")


def measured(generation: Generation) -> dict[str, Any]:
    """What this host knows of all generations, as ``HealingJob`` has it."""
    trained, before, detect_s = Trained(), set[int](), 0.0
    cluster = generation.whole.cluster
    for event in read_events(generation.journal)[0]:
        at_s = float(event["at_s"])
        if event["event"] == "gave up":
            detect_s = at_s - trained.last_event_s
        if event["event"] != "began":
            trained.hear(event)
            continue
        now = set(event["devices"])
        if trained.losses:
            gone, back = before - now, now - before
            kind = "lost" if gone or not back else "back"
            why = _in_words(cluster, gone, back)
            move = trained.begin_move(kind, why, trained.last_event_s)
            move.detect_s, detect_s = detect_s, 0.0
            trained.planned(event["method"], len(now), at_s)
        before = now
    return {"num_ranks": len(generation.devices), **trained.measured(generation.whole)}


def heal(path: Path) -> None:
    """Be a rank of the generation that torchrun has started."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise HeterogError(
            "torchrun's agents share one store, in which ranks would read what others wrote "
            "before a host was lost; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every host."
        )
    end_with_parent(os.getppid())  # without its agent nobody could restart it
    request, options = read_healing(path)
    generation = Generation(request, options)
    assignment = generation.decide()
    rank = TorchrunRank(generation, assignment)
    try:
        is_done = rank.train()
    except RuntimeError as error:
        if is_of_another(error):
            generation.tell("gave up")
        raise
    rank.end(is_done)
    if not is_done:
        exit_now()  # torchrun starts ranks again where no host leaves
    if generation.reports:
        found = measured(generation)
        if request.output is not None:
            write_json(request.output, found)
        else:
            print(json.dumps(found, indent=2), flush=True)
    end_together()


def main() -> None:
    """Run as one rank; an error of the job itself ends torchrun's agent, too."""
    # A host may join before this one trains. It ends at once then: a handler of Python would not
    # run while it waits for others, and torchrun waits for 30 s.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with as_rank(int(os.environ.get("RANK", "0"))):
        if len(sys.argv) != 2:
            raise HeterogError("heterog.heal takes one file: a plan, or a run file.")
        try:
            heal(Path(sys.argv[1]))
        except (Exception, SystemExit) as error:
            end_job(error)
            raise


def _in_words(cluster: Cluster, gone: Collection[int], back: Collection[int]) -> str:
    """Which devices were lost and which are there again."""
    parts = [
        f"{', '.join(cluster.devices[device].name for device in sorted(devices))} {words}"
        for devices, words in ((gone, "lost"), (back, "back"))
        if devices
    ]
    return ", ".join(parts) or "all ranks were started again"
