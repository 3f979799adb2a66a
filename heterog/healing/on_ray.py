"""Jobs that heal on a Ray cluster: whose nodes are the hosts, and who leads.

Each host of the plan has a bundle of a placement group and an actor in it. Ray places the bundle
of a lost node again when there is one with the same devices, and starts the actor there, without
ranks or snapshots: the host is back. Another actor, which Ray restarts when it is lost, leads the
job, and whoever asks watches it. No actor belongs to a process: a job goes on when the command
that started it is lost, and the same command watches it again. Ctrl-C ends the job.
"""

import hashlib
import os
import pickle
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from heterog.cluster.topology import Cluster
from heterog.errors import HeterogError
from heterog.files import write_atomically
from heterog.healing.crew import Crew, HealingHost
from heterog.healing.job import HealingJob, check_can_heal
from heterog.healing.options import HealOptions
from heterog.healing.record import Assignment, Trained
from heterog.healing.shelf import Part, Shelf, newest_complete
from heterog.runtime.launch import temporary_folder
from heterog.runtime.ranks.on_ray import (
    QUICK_NEWS,
    SILENT_S,
    NodeHost,
    actor_of,
    connected,
    end_hosts,
    for_nodes,
    placed,
)
from heterog.runtime.ranks.ray_nodes import asked_of_nodes, offers
from heterog.runtime.request import RunRequest
from heterog.workers import connect_to_ray

_STARTED_S = 300.0
"""Seconds for nodes to start actors that have imported all that ranks need."""
_WATCH_S = 0.1
_ON_HEAD = {"node:__internal_head__": 0.001}
"""Where the leader is: a job does not survive Ray's head, so no further node can stop it."""
_HEAD_IS_NEEDED = (
    "the job ends if Ray's head is lost, which keeps its state in memory only (started with "
    "RAY_REDIS_ADDRESS, it keeps it there)"
)
_KEPT_S = 600.0
"""Seconds for which what came of a job is kept for who asks for it."""


class RayCrew(Crew):
    """A ``Crew`` of Ray's nodes.

    Args:
        ray: The module, connected.
        name: Name of the job in the cluster.
        cluster: The whole cluster of the plan.
        request: What every rank gets, but for the plan.
        redundancy: Number of further hosts that hold each part of a snapshot.
    """

    def __init__(
        self, ray: Any, name: str, cluster: Cluster, request: RunRequest, redundancy: int
    ) -> None:
        super().__init__(cluster, request)
        self._ray, self._name, self._redundancy = ray, name, redundancy
        self._host_of = cluster.host_of

    def open(self, folder: Path) -> Trained | None:
        """See ``Crew``; waits until all nodes are there, or those that a lost leader has left."""
        self._folder = folder
        group = self._group()
        for number in range(self._cluster.num_hosts):
            actor = self._actor(group, number)
            self._hosts.append(NodeHost(self._ray, actor, self.hear))
        kept = self._ray.experimental.internal_kv._internal_kv_get(self._name)
        if kept is not None:
            return self._as_it_is(*pickle.loads(kept))
        self._look_at_all(_STARTED_S, 0)
        if not all(host.is_here for host in self._hosts):
            raise HeterogError(
                f"some node did not start its actor within {_STARTED_S:g} s; see ray status."
            )
        return None

    def lost_with(self, device: int) -> Sequence[int]:
        """See ``Crew``: those of its host."""
        return self._cluster.host_devices[self._host_of[device]]

    def lend(self) -> Path:
        """See ``Crew``; what there was before of what hosts lend is removed."""
        self._stack.close()
        shelf = Shelf(self._stack.enter_context(temporary_folder()))

        def take(part: Part, files: Sequence[Any], giver: NodeHost) -> bool:
            return shelf.take(part, [self._answer(each, [giver]) for each in files])

        held = self._held()
        if (moment := newest_complete(held.values())) is not None:
            self._hand_over(held, moment, (), take)
        return shelf.folder

    def close(self) -> None:
        """See ``Crew``."""
        super().close()
        lost = [number for number, host in enumerate(self._hosts) if not host.is_here]
        end_job(self._ray, self._name, self._cluster.num_hosts, lost)

    # --- parts -----------------------------------------------------------------------------------

    def _begin(self, trained: Trained, assignment: Assignment) -> None:
        """See ``Crew``; first, Ray keeps the job as it is, for another leader."""
        kept = pickle.dumps((trained, Path(assignment.plan).read_bytes()))
        self._ray.experimental.internal_kv._internal_kv_put(self._name, kept)
        super()._begin(trained, assignment)

    def _group(self) -> Any:
        """The job's placement group, which a leader before this one may have made."""
        with suppress(ValueError):
            return self._ray.util.get_placement_group(self._name)
        # What is kept is of a job whose hosts have ended because nobody led it any more.
        self._ray.experimental.internal_kv._internal_kv_del(self._name)
        return placed(self._ray, self._cluster, name=self._name, lifetime="detached")

    def _actor(self, group: Any, number: int) -> Any:
        """The actor of a host, started unless it is there."""
        name = f"{self._name}-{number}"
        with suppress(ValueError):
            return self._ray.get_actor(name)
        asked = asked_of_nodes(self._cluster, offers(self._ray))[number]
        options = {"name": name, "lifetime": "detached", "max_restarts": -1}
        return actor_of(self._ray, group, HealingHost, number, asked, **options)

    def _look_at_all(self, limit_s: float, generation: int) -> None:
        """See which hosts are there, and take in what has happened in a generation."""
        asked = {n: host.actor.look.remote(generation, 0) for n, host in enumerate(self._hosts)}
        for host in self._hosts:
            host.is_here, host.position = False, (generation, 0)
        answers = self._answers(asked, limit_s)
        for number, told in answers.items():
            self._hosts[number].is_here = True
            self._hosts[number].hear(told)

    def _as_it_is(self, trained: Trained, plan: bytes) -> Trained:
        """The job, which began as another leader has left it; and whether its ranks are there."""
        of_ranks = [self._host_of[device] for device in trained.running.devices]
        self._generation = trained.generation
        self._look_at_all(SILENT_S, trained.generation)
        for event in self.new_events():
            trained.hear(event)
        path = self._folder / "remembered.json"
        write_atomically(path, plan)
        trained.running = replace(trained.running, path=str(path))
        used = [self._hosts[host] for host in of_ranks]
        trained.is_running = all(
            host.is_here
            and host.told is not None
            and host.told.generation == trained.generation
            and not any(rank.code for rank in host.told.ranks.values())
            for host in used
        )
        return trained


def end_job(ray: Any, job: str, num_hosts: int, lost: Sequence[int] = ()) -> None:
    """End all that a job has in the cluster, but for who leads it."""
    actors = []
    for number in range(num_hosts):
        with suppress(ValueError):
            actor = ray.get_actor(f"{job}-{number}")
            ray.kill(actor) if number in lost else actors.append(actor)
    with suppress(ValueError):
        end_hosts(ray, ray.util.get_placement_group(job), actors)
    ray.experimental.internal_kv._internal_kv_del(job)


class _JobStatus(NamedTuple):
    """What the actor that leads says of the job.

    Attributes:
        leader: The actor, another one after a restart.
        lines: All that was said since it was started.
        stage: What rank 0 does.
        measured: The measurements at the end.
        error: Why the job ended without them.
    """

    leader: str
    lines: tuple[str, ...] = ()
    stage: str = ""
    measured: dict[str, Any] | None = None
    error: str = ""


class _Leader:
    """The class of the actor that leads a job."""

    def __init__(self, name: str, request: RunRequest, plan: bytes, options: HealOptions) -> None:
        self._said = _JobStatus(uuid.uuid4().hex)
        self._folder: Path | None = None
        given = name, request, plan, options
        threading.Thread(target=self._lead, args=given, daemon=True).start()

    def said(self) -> _JobStatus:
        """How it goes."""
        return self._said

    def clear(self) -> None:
        """Remove the job's files: who is killed does not, and Ray kills its processes, too."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _lead(self, name: str, request: RunRequest, plan: bytes, options: HealOptions) -> None:
        ray = connect_to_ray()[0]
        if not os.environ.get("RAY_REDIS_ADDRESS"):  # of the head, where this actor is
            self._say(lines=(*self._said.lines, _HEAD_IS_NEEDED))
        try:
            with temporary_folder() as folder:
                self._folder = folder
                here = replace(request, plan=folder / "plan.json")
                write_atomically(here.plan, plan)
                job = HealingJob(
                    here,
                    options=options,
                    crew=RayCrew(ray, name, here.load().cluster, here, options.redundancy),
                    progress=lambda stage: self._say(stage=stage),
                    say=lambda line: self._say(lines=(*self._said.lines, line)),
                )
                measured = job.run()
            self._say(measured=measured)  # then this actor may be killed at any time
        except Exception as error:  # whoever watches has to be told
            kind = "" if isinstance(error, HeterogError) else f"{type(error).__name__}: "
            self._say(error=f"{kind}{error}")
        time.sleep(_KEPT_S)
        ray.kill(ray.get_runtime_context().current_actor)

    def _say(self, **what: Any) -> None:
        self._said = self._said._replace(**what)


def heal_on_ray(
    request: RunRequest,
    options: HealOptions,
    *,
    progress: Callable[[str], None] = lambda stage: None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Run a job that heals on the Ray cluster of ``RAY_ADDRESS``, or watch it if it runs there.

    Its arguments are those of ``HealingJob``, and it returns what that does.

    Raises:
        HeterogError: Ray or devices are missing, or the job failed.
    """
    plan = request.load()
    check_can_heal(plan, request.plan)
    if options.checkpoint:
        options = replace(options, checkpoint=str(Path(options.checkpoint).resolve()))
    content, asked = request.plan.read_bytes(), for_nodes(request)
    about = content + asked.to_json().encode() + repr(asdict(options)).encode()
    name = f"heterog-{hashlib.sha256(about).hexdigest()[:12]}"
    with connected() as ray:
        try:
            leader = ray.get_actor(name)
            say("this job is on the cluster already: watching it")
        except ValueError:
            how = {"name": name, "lifetime": "detached", "max_restarts": -1, "num_cpus": 0}
            made = ray.remote(_Leader).options(resources=_ON_HEAD, runtime_env=QUICK_NEWS, **how)
            leader = made.remote(name, asked, content, options)
        try:
            return _watch(ray, leader, progress, say)
        except KeyboardInterrupt:
            with suppress(ray.exceptions.RayError):
                ray.get(leader.clear.remote(), timeout=SILENT_S)
            ray.kill(leader)
            end_job(ray, name, plan.cluster.num_hosts)
            raise


def _watch(
    ray: Any, leader: Any, progress: Callable[[str], None], say: Callable[[str], None]
) -> dict[str, Any]:
    """Pass on what is said until the job ends."""
    heard = _JobStatus("")
    while True:
        try:
            said = ray.get(leader.said.remote(), timeout=10 * SILENT_S)
        except ray.exceptions.ActorDiedError as error:
            raise HeterogError(
                "the actor that leads the job was ended; run again, with `resume` if there is a "
                "checkpoint."
            ) from error
        except ray.exceptions.RayError:  # Ray restarts it
            time.sleep(_WATCH_S)
            continue
        for line in said.lines[len(heard.lines) * (said.leader == heard.leader) :]:
            say(line)
        if said.stage and said.stage != heard.stage:
            progress(said.stage)
        heard = said
        if said.error or said.measured is not None:
            ray.kill(leader)
            if said.error:
                raise HeterogError(said.error)
            return dict(said.measured or {})
        time.sleep(_WATCH_S)
