"""Kills hosts of a loop under torchrun, many times, and measures recovery.

    python experiments/healing_torchrun.py --fault node --kills 20 --json
    python experiments/healing_torchrun.py --of plan --fault node --kills 20 --json

Four hosts are network namespaces of this machine, which takes root, each with one of torchrun's
agents and a rank of ``healing_loop.py``, or of a plan that heals (``--of plan``). The rendezvous
is a store outside of these hosts, or etcd (``--etcd ENDPOINT``). Ranks are forked off their agent,
which has imported what they need, or start as torchrun's do by default (``--start-method spawn``).
Faults, at a random step: ``node`` (all processes of a host, by SIGKILL at once), ``first`` (the
host of rank 0), ``leader`` (only the agent of rank 0's host), ``two`` (two hosts at once, or one
``--apart`` seconds after the other), ``cut`` (a host's link), ``frozen`` (a host by SIGSTOP),
``stuck`` (its rank alone), ``paused`` (a host by SIGSTOP for 3 s: its ranks train on), ``leaving``
(SIGTERM to an agent), and ``plain`` (as ``node``, but from a checkpoint instead of memory). Losses
have to equal those of one process that trains on the same batches, with every sample of an epoch
dealt once. Losses of a plan are in float32, and their difference is reported.
"""

import itertools
import multiprocessing
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from fault_trials import (
    MODEL,
    PARTS,
    PAUSE_S,
    SIGNALS,
    Trial,
    cluster,
    left_behind,
    mark_processes,
    options,
    processes,
    run_trials,
)
from healing_loop import NUM_SAMPLES, losses_alone, losses_over
from namespaces import enter, namespaces, set_link
from rows import asked_of, option, progress

from heterog import heal
from heterog.files import read_json, write_json
from heterog.graph.capture import capture
from heterog.grouped import grouped
from heterog.healing.record import Event, read_events
from heterog.runtime.launch import free_port
from heterog.runtime.rank import draw_alike
from heterog.runtime.ranks.host_places import HOST
from heterog.search.plan import Plan, make_plan
from heterog.search.request import Request
from heterog.workers import signals_as_exit
from heterog.zoo import load_workload

HOSTS = 4
FAULTS = (
    *("node", "first", "leader", "two", "cut", "frozen", "stuck", "paused", "leaving", "plain"),
)
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch._dynamo", "heterog.healing.agent", "namespaces"])
LOOP = Path(__file__).with_name("healing_loop.py").resolve()
_LIMIT_S = 600.0
_AFTER = 200
"""Steps that are trained after the fault: enough for an agent that joins late to take part."""
_AFTER_OF_PLAN = 300
"""The same for a plan, whose steps have no pause."""


def run_agent(place: tuple[str, str], host: int, arguments: list[str], said: Path) -> None:
    """Run an agent on a host, as ``python -m heterog.heal`` does."""
    from heterog.healing import agent

    os.setsid()
    enter(place[0])
    for stream in (1, 2):
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ |= {
        "HOST": str(host),
        HOST: f"h{host}",
        "TMPDIR": str(said.parent),
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    tempfile.tempdir = None  # which was read from the environment before
    agent.run_agent(["--local-addr", place[1], *arguments], heal.__file__)


class Hosts:
    """Agents in namespaces, and the log of their ranks.

    Args:
        places: namespace and address of this machine and of each host.
        folder: of files.
        given: arguments of torchrun that say where hosts meet and how ranks start.
        script: what the ranks run, with its arguments.
    """

    def __init__(
        self, places: list[tuple[str, str]], folder: Path, given: list[str], script: list[str]
    ) -> None:
        self._folder = folder
        self._places, self._events = places, list[Event]()
        self._read: dict[Path, int] = {}
        arguments = ["--nnodes", f"2:{HOSTS}", "--nproc-per-node", "1", *given, *script]
        arguments = ["--rdzv-id", folder.name, *arguments]
        self.agents: list[BaseProcess] = []
        for host in range(HOSTS):
            of_agent = places[1 + host], host, arguments, folder / "said.txt"
            self.agents.append(FORKS.Process(target=run_agent, args=of_agent))
            self.agents[-1].start()

    def events(self) -> list[Event]:
        """All events that ranks have logged, in order of time."""
        for log in [self._folder / "log.jsonl", *self._folder.glob("*/journal.jsonl")]:
            events, self._read[log] = read_events(log, self._read.get(log, 0))
            self._events += events
        self._events.sort(key=lambda told: float(told["at_s"]))
        return self._events

    def wait_for(self, what: str, is_it: Callable[[Event], bool] = lambda told: True) -> Event:
        """Wait for an event that a condition holds for."""
        deadline_s = time.monotonic() + _LIMIT_S
        while time.monotonic() < deadline_s:
            for told in self.events():
                if told["event"] == what and is_it(told):
                    return told
            time.sleep(0.005)
        raise TimeoutError(f"{what} was not told; last {self.events()[-1:]}")

    def signal(self, host: int, what: signal.Signals, *, is_stuck: bool = False) -> None:
        """Signal all processes of a host, but for those that remove files, or its rank alone."""
        agent = self.agents[host].pid
        ranks = [pid for pid, (parent, _) in processes().items() if parent == agent]
        for pid in (*ranks,) if is_stuck else (agent, *ranks):
            with suppress(ProcessLookupError):
                os.kill(pid or 0, what)

    def hit(self, fault: str, hosts: tuple[int, ...], apart_s: float) -> None:
        """Cause a fault on hosts, one after another."""
        for number, host in enumerate(hosts):
            time.sleep(apart_s if number else 0.0)
            what = SIGNALS.get(fault, signal.SIGKILL)
            if fault in ("leader", "leaving"):
                os.kill(self.agents[host].pid or 0, what)
            elif fault == "cut":
                set_link(self._places[1 + host][0], "down")
            else:
                self.signal(host, what, is_stuck=fault == "stuck")
            if fault == "paused":
                threading.Timer(PAUSE_S, self.signal, (host, signal.SIGCONT)).start()

    def end(self, hosts: tuple[int, ...]) -> None:
        """End the remaining processes of hosts that were hit, and mend the hosts."""
        for host in hosts:
            self.signal(host, signal.SIGKILL)
            self.agents[host].join()
            set_link(self._places[1 + host][0], "up")


def run_trial(
    places: list[tuple[str, str]],
    folder: Path,
    fault: str,
    given: list[str],
    chance: random.Random,
    plan: Plan | None,
    apart_s: float,
) -> Trial:
    """Run one trial."""
    step = chance.randint(3, 300)
    kind = "plain" if fault == "plain" else "memory"
    script = [str(LOOP), str(folder / "log.jsonl"), str(step + _AFTER), kind]
    if plan is not None:
        script = [str(write_run(plan, folder, step + _AFTER_OF_PLAN))]
    hosts = Hosts(places, folder, given, script)
    try:
        last = hosts.wait_for("step", lambda told: told["step"] >= step)
        victims = tuple(chance.sample(range(HOSTS), 2 if fault == "two" else 1))
        if fault in ("first", "leader"):
            victims = (last.get("host", 0),)  # a plan's first is the first
        hit_s = time.monotonic()
        hosts.hit(fault, victims, apart_s)
        hosts.wait_for("done")
        for host in set(range(HOSTS)) - set(() if fault == "paused" else victims):
            hosts.agents[host].join(_LIMIT_S)
            if hosts.agents[host].exitcode != 0:
                raise RuntimeError(f"agent {host} ended with {hosts.agents[host].exitcode}")
    finally:
        hosts.end(tuple(range(HOSTS)))
    servers = {pid for pid, (_, words) in processes().items() if "multiprocessing" in words}

    def found() -> list[str]:
        every = processes().items()
        return [
            *(f"{pid} {words[:80]}" for pid, (_, words) in every if pid not in servers),
            *map(str, Path(tempfile.gettempdir()).glob("heterog-loop-*")),
        ]

    left = left_behind(found)
    losses = of_loop(hosts.events()) if plan is None else of_plan(folder)
    how = recovered(hosts.events(), hit_s)
    return Trial(victims=victims, left_behind=left, **how, **losses)


def write_run(plan: Plan, folder: Path, num_steps: int) -> Path:
    """A run file for a plan, which keeps each part on three hosts, so that two may be lost."""
    plan.save(folder / "plan.json")
    write_json(
        folder / "run.json",
        {
            "plan": str(folder / "plan.json"),
            "model": f"{MODEL}:workload",
            "num_steps": num_steps,
            "output": str(folder / "out.json"),
            "heal": {"redundancy": 2},
        },
    )
    return folder / "run.json"


def recovered(events: list[Event], hit_s: float) -> dict[str, Any]:
    """How ranks went on, from what they wrote: the fields of a trial about steps and seconds."""
    every = [each for each in events if each["event"] == "step"]
    later = [each for each in events if each["at_s"] > hit_s]
    steps = [each for each in later if each["event"] == "step"]
    before = max(each["step"] for each in every if each["at_s"] <= hit_s)
    taken_up = [each for each in later if each["event"] == "taken up"]
    if not taken_up:  # the same ranks trained on
        caught_up_s = next(each["at_s"] for each in steps if each["step"] > before) - hit_s
        total_s = steps[0]["at_s"] - hit_s
        return {"killed_in_step": before, "total_s": total_s, "caught_up_s": caught_up_s}
    again = taken_up[-1]
    began = [each for each in later if each["event"] == "began" and each["at_s"] < again["at_s"]][
        -1
    ]
    noticed_s = min((each["at_s"] for each in later if each["event"] == "gave up"), default=hit_s)
    most = max(each["step"] for each in every if each["at_s"] < again["at_s"])
    own = [each for each in steps if each["at_s"] > again["at_s"]]
    ends = hit_s, noticed_s, began["at_s"], again["at_s"], own[0]["at_s"]
    return {
        **dict(zip(PARTS, (b - a for a, b in itertools.pairwise(ends)), strict=True)),
        "killed_in_step": before,
        "decided_s": began.get("seconds", 0.0),
        "total_s": own[0]["at_s"] - hit_s,
        "caught_up_s": next(each["at_s"] for each in own if each["step"] > most) - hit_s,
        "steps_done_again": most - again["step"],
        "source": again.get("source") or f"step {again['step']} in memory, by {began['method']}",
    }


def of_plan(folder: Path) -> dict[str, Any]:
    """The fields about losses of a plan's trial, from its output."""
    output = read_json(folder / "out.json", "output")
    expected = losses_of(len(output["losses"]))
    pairs = zip(output["losses"], expected, strict=True)
    return {
        "num_ranks": output["num_ranks"],
        "most_difference": max(abs(told - other) for told, other in pairs) / expected[0],
        "is_complete": output["steps"] == list(range(1, len(expected) + 1)),
    }


def losses_of(num_steps: int) -> list[float]:
    """Losses of one process that trains the plan's model."""
    workload = load_workload(f"{MODEL}:workload", None)
    draw_alike()
    model = workload.make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    inputs, targets = workload.make_batch()
    return losses_alone(model, optimizer, itertools.repeat((inputs, targets), num_steps))


def of_loop(events: list[Event]) -> dict[str, Any]:
    """The fields about losses of a loop's trial, from its log."""
    counted = {each["step"]: each for each in events if each["event"] == "step"}
    ordered = [counted[number] for number in sorted(counted)]
    pairs = zip(ordered, losses_over([each["samples"] for each in ordered]), strict=True)
    dealt = grouped((each["epoch"], number) for each in ordered for number in each["samples"])
    whole = [sorted(dealt[epoch]) == list(range(NUM_SAMPLES)) for epoch in sorted(dealt)[:-1]]
    last = dealt[max(dealt)]
    return {
        "num_ranks": [each["ranks"] for each in events if each["event"] == "taken up"][-1],
        "most_difference": max(abs(told["loss"] / other - 1.0) for told, other in pairs),
        "is_complete": all(whole)
        and len(last) == len(set(last))
        and sorted(counted) == list(range(1, len(counted) + 1)),
    }


def main() -> None:
    """Run the trials and print a table, or JSON."""
    arguments = asked_of(
        __doc__,
        *options(FAULTS, "node"),
        option("--of", choices=("loop", "plan"), default="loop", help="what ranks train"),
        option("--start-method", choices=("fork", "spawn"), default="fork"),
        option("--apart", type=float, default=0.0, help="seconds between the faults of two hosts"),
        option("--etcd", default="", help="endpoint of an etcd server to meet at"),
    )
    from torch._C._distributed_c10d import TCPStore

    mark_processes()
    start, plan = arguments.start_method, None
    of = {"etcd": bool(arguments.etcd), "start": start}
    of |= {"apart": arguments.apart} if arguments.apart else {}
    if arguments.of == "plan":
        of["of"] = "plan"
        plan = make_plan(
            Request(
                graph=capture(load_workload(f"{MODEL}:workload", None)),
                cluster=cluster(),
                methods=("cp_ar",),
            )
        )
    with ExitStack() as stack:
        stack.enter_context(signals_as_exit())
        places = stack.enter_context(namespaces(HOSTS, "tr", "10.77.0"))
        port = free_port()
        backend, endpoint = "etcd-v2", arguments.etcd
        if not arguments.etcd:
            store = TCPStore(  # noqa: F841  # lives as long as its variable
                *(places[0][1], port, None, True),
                wait_for_workers=False,
                timeout=timedelta(seconds=60),
            )
            backend, endpoint = "c10d", f"{places[0][1]}:{port}"
        given = ["--rdzv-backend", backend, "--rdzv-endpoint", endpoint]
        given += ["--start-method", start]

        def run(chance: random.Random) -> Trial:
            with tempfile.TemporaryDirectory(prefix="healing-") as name:
                try:
                    how = given, chance, plan, arguments.apart
                    return run_trial(places, Path(name), arguments.fault, *how)
                except Exception:
                    said = Path(name) / "said.txt"
                    progress(said.read_text()[-5000:] if said.exists() else "")
                    raise

        run_trials(arguments, of, run, goes_on=True)


if __name__ == "__main__":
    main()
