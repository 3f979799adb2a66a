"""Jobs that heal on a Ray cluster: an actor that Ray restarts leads, and whoever asks watches.

The actor that leads, and those of the hosts, belong to no process: a job goes on when the command
that started it is lost, and the same command watches it again. Ctrl-C ends the job.
"""

import hashlib
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from heterog.errors import HeterogError
from heterog.files import write_atomically
from heterog.healing.job import HealingJob, check_can_heal
from heterog.healing.options import HealOptions
from heterog.healing.ray_crew import RayCrew, end_job
from heterog.runtime.launch import temporary_folder
from heterog.runtime.ranks.on_ray import QUICK_NEWS, SILENT_S, connected, for_nodes
from heterog.runtime.request import RunRequest
from heterog.workers import connect_to_ray

_POLL_S = 0.1
_ON_HEAD = {"node:__internal_head__": 0.001}
"""Where the leader is: a job does not survive Ray's head, so no further node can stop it."""
_HEAD_IS_NEEDED = (
    "the job ends if Ray's head is lost, which keeps its state in memory only (started with "
    "RAY_REDIS_ADDRESS, it keeps it there)"
)
_KEPT_S = 600.0
"""Seconds for which what came of a job is kept for who asks for it."""


@dataclass(frozen=True, slots=True)
class _JobStatus:
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
        """Remove the job's files, before all is ended."""
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
        except HeterogError as error:
            self._say(error=str(error))
        except Exception as error:  # whoever watches has to be told
            self._say(error=f"{type(error).__name__}: {error}")
        time.sleep(_KEPT_S)
        ray.kill(ray.get_runtime_context().current_actor)

    def _say(self, **what: Any) -> None:
        self._said = replace(self._said, **what)


def heal_on_ray(
    request: RunRequest,
    options: HealOptions,
    *,
    progress: Callable[[str], None] = lambda stage: None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Run a job that heals on the Ray cluster of ``RAY_ADDRESS``, or watch it if it runs there.

    Args:
        request: The first plan, and how to train.
        options: Settings of healing.
        progress: Called with what rank 0 does, whenever that changes.
        say: Called with one line about each change of plan.

    Returns:
        What ``HealingJob.run`` does.

    Raises:
        HeterogError: Ray or devices are missing, or the job failed.
    """
    plan = request.load()
    check_can_heal(plan, request.plan)
    content, asked = request.plan.read_bytes(), for_nodes(request)
    about = content + asked.to_json().encode() + repr(asdict(options)).encode()
    name = f"heterog-{hashlib.sha256(about).hexdigest()[:12]}"
    with connected() as ray:
        try:
            leader = ray.get_actor(name)
            say("this job is on the cluster already: watching it")
        except ValueError:
            leader = (
                ray.remote(_Leader)
                .options(
                    name=name,
                    lifetime="detached",
                    max_restarts=-1,
                    num_cpus=0,
                    resources=_ON_HEAD,
                    runtime_env=QUICK_NEWS,
                )
                .remote(name, asked, content, options)
            )
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
            time.sleep(_POLL_S)
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
        time.sleep(_POLL_S)
