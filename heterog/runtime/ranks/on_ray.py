"""Ranks on the nodes of a Ray cluster: an actor on each starts those of a host.

Each host of the plan is a bundle of a placement group, so its ranks share a node, and different
hosts have different nodes. Files that ranks read or write, except the plan, need the same path on
all nodes, like files in the working directory of ``ray job submit``.
"""

import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from heterog.cluster import Cluster
from heterog.errors import HeterogError
from heterog.files import read_json, write_atomically
from heterog.runtime.launch import (
    HEARTBEAT,
    RANKS_OWN,
    LocalRank,
    end_ranks,
    free_port,
    interface_of,
    start_rank,
    temporary_folder,
    with_package,
)
from heterog.runtime.ranks.forks import rank_forks
from heterog.runtime.ranks.links import CUT_S, cut_off
from heterog.runtime.ranks.place import HERE, Place
from heterog.runtime.ranks.ray_nodes import CPU, GPU, Resources, asked_of_nodes, in_words, offers
from heterog.runtime.ranks.watching import Watched, wait_for_ranks
from heterog.runtime.request import RunRequest
from heterog.user_code import is_from_file
from heterog.workers import connect_to_ray, signals_as_exit

PLACED_S = 60.0
"""Seconds to wait for nodes, and for the first answer of an actor."""
_GONE = -9
"""Exit code of a rank whose node or actor is lost: as if it had been killed."""
SILENT_S = 6.0
"""Seconds without an answer after which a node counts as lost even if its link is not cut."""
_THREADS = 8  # of an actor, so that it answers while ranks are being started
ASIDE = "aside"
"""Concurrency group of calls that take long: they hold none of these threads."""
_THREADS_ASIDE = 2
_OFTEN_S, _AGAIN_S = 0.01, 0.5
"""Seconds until a node is asked again, and one that is lost."""
END_S = 10.0
QUICK_NEWS = {"env_vars": {"RAY_timeout_ms_task_wait_for_death_info": "100"}}
"""Runtime environment of actors that have to notice a lost actor at once. When the connection to
an actor breaks, Ray waits this long for the reason before it reports the loss, by default 1 s (its
C++ configuration), although a node that died with its raylet cannot give one."""


def run_on_ray(
    request: RunRequest, *, progress: Callable[[str], None] = lambda stage: None
) -> dict[str, Any]:
    """Run a plan on the Ray cluster of ``RAY_ADDRESS``, each rank where the plan has its device.

    Args:
        request: What to run.
        progress: Called with the stage of rank 0, whenever it changes.

    Returns:
        The measurements of rank 0.

    Raises:
        LaunchError: a rank failed, its node was lost, or the time is over.
        HeterogError: Ray is missing or does not answer, or lacks devices; the text says which.
    """
    cluster = request.load().cluster
    content, asked_for = request.plan.read_bytes(), for_nodes(request)
    with signals_as_exit(), connected() as ray:
        hosts: list[NodeHost] = []
        group = placed(ray, cluster)
        try:
            hosts = [
                NodeHost(ray, actor_of(ray, group, Host, number, asked))
                for number, asked in enumerate(asked_of_nodes(cluster, offers(ray)))
            ]
            address, port = ray.get(hosts[0].actor.meeting_place.remote())
            variables = variables_of_ranks(
                cluster.host_of, range(cluster.num_devices), address, request.port or port
            )
            for number, host in enumerate(hosts):
                host.actor.run.remote(content, asked_for, variables[number])
            ranks = [HostRank(hosts[of], rank) for rank, of in enumerate(cluster.host_of)]
            wait_for_ranks(ranks, request.limits, progress)
            measured = ray.get(hosts[0].actor.measured.remote())
            assert isinstance(measured, dict)
            return measured
        finally:
            end_hosts(ray, group, [host.actor for host in hosts])


def end_hosts(ray: Any, group: Any, actors: Sequence[Any]) -> None:
    """End the actors of hosts with their ranks and files, and give their nodes back."""
    asked = [actor.close.remote() for actor in actors]
    ray.wait(asked, num_returns=len(asked), timeout=END_S) if asked else None
    for actor in actors:
        ray.kill(actor)
    ray.util.remove_placement_group(group)


def for_nodes(request: RunRequest) -> RunRequest:
    """A request that is valid in every folder: the model's file has an absolute path.

    Raises:
        HeterogError: the plan has a background job, or a model that nobody named.
    """
    plan = request.load()
    if plan.background is not None:
        raise HeterogError(
            "a plan with a background job runs on one machine only; plan without `background`, "
            "or run it there."
        )
    source = request.source_of(plan)
    if is_from_file(source):
        path, _, function = source.rpartition(":")
        source = f"{Path(path).expanduser().resolve()}:{function}"
    return replace(
        request,
        model=source if request.model else "",
        sources=(source,),
        save=request.save and request.save.resolve(),
        resume=request.resume and request.resume.resolve(),
    )


def variables_of_ranks(
    host_of: Sequence[int], devices: Sequence[int], address: str, port: int
) -> dict[int, dict[int, dict[str, str]]]:
    """The variables that torchrun would set, for each host and rank.

    Args:
        host_of: Host of each device of the whole cluster.
        devices: Device of each rank; a host's devices keep their numbers when others are lost.
        address: Address of the node of rank 0.
        port: Port that is free there.
    """
    found: dict[int, dict[int, dict[str, str]]] = {}
    for rank, device in enumerate(devices):
        members = [each for each, host in enumerate(host_of) if host == host_of[device]]
        found.setdefault(host_of[device], {})[rank] = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(devices)),
            "LOCAL_RANK": str(members.index(device)),
            "LOCAL_WORLD_SIZE": str(len(members)),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
    return found


# --- ranks ---------------------------------------------------------------------------------------


class RankStatus(NamedTuple):
    """The state of a rank as reported by its node; see ``watching.Watched``."""

    code: int | None
    stage: str
    is_stopped: bool
    pid: int
    words: str


class HostStatus(NamedTuple):
    """The state of a node's ranks, as its actor reports it.

    Attributes:
        actor: Id of its actor, which changes after a restart.
        generation: Number of times ranks were started before.
        ranks: Each of its ranks.
        begin: Position of the first of ``events`` in the journal of a healing job.
        end: Position after the last of them.
        events: New events of the journal, with their age in ``at_s``, as nodes' clocks differ.
        is_leaving: Whether the node has announced its end.
        address: Its address.
    """

    actor: str
    generation: int
    ranks: Mapping[int, RankStatus]
    begin: int = 0
    end: int = 0
    events: Sequence[dict[str, Any]] = ()
    is_leaving: bool = False
    address: str = ""


class Host:
    """The class of an actor: starts the ranks of a host on its node and reports their state.

    Its methods run in several threads, so that it answers while ranks are being started.

    Args:
        address: Address of the machine; by default the one of the node.
        place: Where the rank of each local device runs.
    """

    def __init__(self, address: str = "", place: Place = HERE) -> None:
        self._id = uuid.uuid4().hex
        self._open = ExitStack()
        self._folder = Path(self._open.enter_context(temporary_folder()))
        self._output = self._folder / "measured.json"
        self._open.enter_context(rank_forks(RANKS_OWN))
        self._running: tuple[int, dict[int, LocalRank]] = -1, {}
        self._lock = threading.Lock()
        self._address = address or str(connect_to_ray()[0].util.get_node_ip_address())
        self._place, self._is_node = place, not address

    def meeting_place(self) -> tuple[str, int]:
        """Address of this node, and a port that is free on it."""
        return self._address, free_port()

    def run(
        self, plan: bytes, request: RunRequest, variables: Mapping[int, Mapping[str, str]]
    ) -> None:
        """Start the ranks of a plan, each with its variables."""
        path, run_file = self._folder / "plan.json", self._folder / "run.json"
        write_atomically(path, plan)
        replace(request, plan=path, output=self._output).write(run_file)
        self._start(0, ["-m", "heterog.runtime.rank", str(run_file)], variables)

    def look(self, generation: int, at: int) -> HostStatus:
        """The state of its ranks; for a healing job also the events of a generation.

        Args:
            generation: Number of times ranks were started before.
            at: Position in its journal up to which events are known.
        """
        return HostStatus(self._id, *self._look(), at, at, address=self._address)

    def measured(self) -> Any:
        """The measurements of rank 0."""
        return read_json(self._output, "measurement")

    def end(self) -> None:
        """End the ranks."""
        with self._lock:
            end_ranks([rank.process for rank in self._running[1].values()])

    def close(self) -> None:
        """End the ranks and remove their files."""
        self.end()
        self._open.close()

    def _start(
        self, generation: int, arguments: Sequence[str], variables: Mapping[int, Mapping[str, str]]
    ) -> None:
        """Start ranks with these arguments of Python."""
        interface = interface_of(self._address)
        # Of this process's own ranks those of ``run_commands``, or they could not share its forks.
        common = {
            "OMP_NUM_THREADS": "1",
            **({"PYTHONPATH": with_package()} if self._is_node else {}),
            **({"GLOO_SOCKET_IFNAME": interface} if interface else {}),
        }
        ranks = {}
        with self._lock:
            for rank, own in variables.items():
                words = self._folder / f"rank{rank}.err"
                # Another thread may still look at the ranks before: no file of theirs goes.
                stage = self._folder / f"rank{rank}.{generation}.stage"
                local = int(own.get("LOCAL_RANK", 0))
                there = self._place.environment(local)
                process = start_rank(
                    self._place.command(local, [sys.executable, *arguments]),
                    {**os.environ, **common, **own, **there, HEARTBEAT: str(stage)},
                    words,
                )
                ranks[rank] = LocalRank(process, words, stage)
            self._running = generation, ranks

    def _look(self) -> tuple[int, dict[int, RankStatus]]:
        generation, ranks = self._running
        now_s, told = time.monotonic(), {}
        for number, rank in ranks.items():
            rank.look(now_s)
            code = rank.poll()
            told[number] = RankStatus(
                code,
                rank.stage,
                rank.stopped_since_s is not None,
                rank.pid,
                rank.last_words() if code else "",
            )
        return generation, told


class NodeHost:
    """The state of a host, which its actor is asked for again and again.

    Args:
        ray: The module.
        actor: The actor.
        hear: Called with new events.

    Attributes:
        told: Its last answer.
        is_here: Whether it answers.
        position: The generation whose events are read, and the known length of its journal.
        silent_s: Seconds for which it has not answered a question.
    """

    def __init__(
        self,
        ray: Any,
        actor: Any,
        hear: Callable[[Sequence[dict[str, Any]]], None] = lambda events: None,
    ) -> None:
        self.actor = actor
        self.told: HostStatus | None = None
        self.is_here = True
        self.position = 0, 0
        self.silent_s = 0.0
        self._ray, self._hear_events = ray, hear
        self._lock = threading.Lock()
        self._asked: Any = None
        self._asked_s = 0.0
        self._again: list[Any] = []
        self._is_known = True

    def look(self) -> None:
        """Read a new answer, if there is one, and ask again; from any thread."""
        with self._lock:
            now_s = time.monotonic()
            if self._asked is None:
                if now_s - self._asked_s < (_OFTEN_S if self._is_known else _AGAIN_S):
                    return
                self._asked, self._asked_s = self.actor.look.remote(*self.position), now_s
            self.silent_s = now_s - self._asked_s
            if not self._ray.wait([self._asked], timeout=0)[0]:
                if self.silent_s >= len(self._again) * _AGAIN_S:  # tests the link with data
                    self._again.append(self.actor.look.remote(*self.position))
                self.is_here = self.is_here and not self._is_lost
                return
            answer, self._asked, self._again = self._asked, None, []
            try:
                told = self._ray.get(answer)
            except self._ray.exceptions.RayTaskError:
                raise  # a bug of heterog, not a lost node
            except self._ray.exceptions.RayError:
                self.is_here = self._is_known = False
                return
            self.is_here = self._is_known = True
            self.silent_s = 0.0
            self.hear(told)

    @property
    def _is_lost(self) -> bool:
        """Whether it counts as lost after so many seconds without an answer."""
        silent_s = self.silent_s
        if self.told is None:  # the actor may still be starting
            return silent_s >= PLACED_S
        return silent_s >= SILENT_S or (silent_s >= CUT_S and self.told.address in cut_off())

    def hear(self, told: HostStatus) -> None:
        """Take over an answer, and pass its events on."""
        self.told = told
        if (told.generation, told.begin) == self.position:
            self.position = told.generation, told.end
            self._hear_events(told.events)


class HostRank(Watched):
    """A rank on a node, by the answers of its host's actor; see ``watching.Watched``."""

    def __init__(self, host: NodeHost, number: int, generation: int = 0) -> None:
        self.stage, self.since_s = "", time.monotonic()
        self.stopped_since_s: float | None = None
        self._host, self._number, self._generation = host, number, generation
        self._actor = host.told.actor if host.told else ""
        self._code: int | None = None

    @property
    def silent_s(self) -> float:
        """Seconds for which its node has not answered."""
        return self._host.silent_s

    @property
    def pid(self) -> int:
        """Id of its process on its node."""
        told = self._told()
        return told.pid if told else 0

    def poll(self) -> int | None:
        """Exit code; ``None`` while it runs."""
        if self._code is None:
            self._host.look()
            told = self._told()
            self._code = told.code if told else None
            if self._code is None and self._is_lost:
                self._code = _GONE
        return self._code

    def look(self, now_s: float) -> None:
        """See ``Watched``."""
        told = self._told()
        if told is not None:
            self.note(told.stage, now_s, is_stopped=told.is_stopped)

    def last_words(self) -> str:
        """Its error line, or the last line that it printed."""
        told = self._told()
        return "its Ray node, or its actor there, is lost." if told is None else told.words

    @property
    def _is_lost(self) -> bool:
        told = self._host.told
        if told is not None and not self._actor:
            self._actor = told.actor
        return not self._host.is_here or (told is not None and told.actor != self._actor)

    def _told(self) -> RankStatus | None:
        told = self._host.told
        if told is None or told.generation != self._generation or self._is_lost:
            return None
        return told.ranks.get(self._number)


@contextmanager
def connected() -> Iterator[Any]:
    """Ray, connected; a cluster that was started for it ends with it."""
    ray, is_mine = connect_to_ray()
    try:
        yield ray
    finally:
        if is_mine:
            ray.shutdown()


def actor_of(
    ray: Any, group: Any, kind: type, number: int, asked: Resources, **options: Any
) -> Any:
    """The actor of a host in its bundle of the placement group."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    needs = dict(asked)
    made = ray.remote(concurrency_groups={ASIDE: _THREADS_ASIDE})(kind).options(
        num_cpus=needs.pop(CPU, 0),
        num_gpus=needs.pop(GPU, 0),
        resources=needs,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=number
        ),
        **{"max_restarts": 0, "max_concurrency": _THREADS, "runtime_env": QUICK_NEWS, **options},
    )
    return made.remote()


def placed(ray: Any, cluster: Cluster, **options: Any) -> Any:
    """A placement group with a node for each host.

    Raises:
        HeterogError: there are no such nodes, or other jobs of the cluster hold them.
    """
    asked = asked_of_nodes(cluster, offers(ray))
    group = ray.util.placement_group(
        asked, strategy="STRICT_SPREAD" if len(asked) > 1 else "STRICT_PACK", **options
    )
    if not group.wait(PLACED_S):
        ray.util.remove_placement_group(group)
        wanted = "; ".join(
            f"{host.name}: {in_words(bundle)}"
            for host, bundle in zip(cluster.hosts, asked, strict=True)
        )
        raise HeterogError(
            f"the Ray cluster has the devices ({wanted}) but did not give them within "
            f"{PLACED_S:g} s: other jobs hold them. See ray status, and run again when they are "
            "done."
        )
    return group
