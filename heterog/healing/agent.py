"""Torchrun's agent on a host of a job that heals, as ``python -m heterog.heal`` starts it.

It is the command torchrun with settings by which lost hosts are missed soon, and it has loaded
what ranks need, which are forked off it.
"""

import logging
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch._dynamo  # noqa: F401 - every optimizer imports it
from torch.distributed import DistError, DistStoreError, run
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend as c10d
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as dynamic
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError
from torch.distributed.run import get_args_parser
from torch.distributed.run import main as torchrun

import heterog.healing.loop  # noqa: F401  (which a script may need)
from heterog.errors import HeterogError
from heterog.healing.choices import Choice, Question
from heterog.healing.elastic import ERROR, LEAVE_S, ROUND, path_of_host, run_script
from heterog.healing.on_torchrun import read_healing
from heterog.healing.planning import Planning
from heterog.healing.rank import capture_for
from heterog.runtime.accelerators import has_accelerator, num_threads
from heterog.runtime.launch import interface_of

_SETTINGS = (
    *("--rdzv-backend", "c10d", "--max-restarts", "100", "--start-method", "fork", "--run-path"),
    *("--rdzv-conf", "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"),
)
_MEET = timedelta(seconds=15)
"""Longest wait for what hosts say at once when they have met; torchrun waits for a minute."""
_LOOK_S = 0.2
"""Seconds between looks at whether hosts have met; torchrun looks once a second."""
_ENDED_S = int(LEAVE_S) + 3
"""Longest wait for ranks that are told to end; torchrun waits for 30 s."""
_TOLD = "error-told"
"""File with an error that was there before ranks were told to end."""
_LOG = logging.getLogger(__name__)
_shutdown = LocalElasticAgent._shutdown
_join = SimpleElasticAgent._rendezvous
_num_waiting = dynamic.DynamicRendezvousHandler.num_nodes_waiting
_delay = dynamic._delay  # type: ignore[attr-defined]
_Holder = dynamic._BackendRendezvousStateHolder
_sanitize = _Holder._sanitize
_is_own_name = c10d._matches_machine_hostname  # type: ignore[attr-defined]


def run_agent(arguments: Sequence[str], rank: str) -> None:
    """Run the agent until the job is over.

    Args:
        arguments: Those of torchrun, of which some have other defaults, and at the end a script,
            or a plan or run file.
        rank: Path of the script that runs a rank of a plan.

    Raises:
        SystemExit: the job is over, or this host leaves it; says why in a line.
    """
    # Agents that share a store would find there what ranks said before a host was lost.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    try:
        given = _told(arguments, rank)
    except HeterogError as error:
        print(f"heterog: {error}", file=sys.stderr)
        sys.exit(2)
    mend_torchrun()
    try:
        torchrun(given)
    except HeterogError as error:
        print(f"heterog: the job has ended: {error}", file=sys.stderr)
        sys.exit(2)
    except RendezvousClosedError:
        # This host came too late for the ranks that have ended it, or for the whole job.
        print("heterog: the job is over; a new one needs another --rdzv-id.", file=sys.stderr)
        sys.exit(0 if path_of_host().exists() else 2)
    except (RendezvousError, DistError) as error:
        said = str(error.__cause__ or error).partition("\n")[0] or repr(error)
        sys.exit(f"heterog: this host does not meet others at --rdzv-endpoint: {said}")
    except SignalException as error:
        sys.exit(f"heterog: {error.sigval.name} ended this host's part of the job.")


def mend_torchrun() -> None:
    """Replace what torchrun's agents do in this process where hosts meet; each says why."""
    SimpleElasticAgent._rendezvous = _join_again  # type: ignore[method-assign]
    LocalElasticAgent._shutdown = _end_ranks  # type: ignore[assignment, method-assign]
    dynamic.DynamicRendezvousHandler.num_nodes_waiting = _num_outside  # type: ignore[assignment]
    dynamic.get_method_name = _nobody  # type: ignore[assignment]
    dynamic._delay = _wait_until_look  # type: ignore[attr-defined]
    _Holder._sanitize = _drop_others  # type: ignore[assignment, method-assign]
    c10d._matches_machine_hostname = _is_own  # type: ignore[attr-defined]
    run.run_script_path = run_script  # type: ignore[assignment]


def _told(arguments: Sequence[str], rank: str) -> list[str]:
    """What torchrun gets, which for a plan is warm by then.

    Raises:
        HeterogError: an option is not torchrun's, or what comes after them is no script or plan.
    """
    parser, given = get_args_parser(), [*_SETTINGS, *arguments]
    parser.error = _refuse  # type: ignore[assignment, method-assign]
    parsed = parser.parse_args(given)
    if parsed.local_addr and (interface := interface_of(parsed.local_addr)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    script = Path(parsed.training_script)
    if script.suffix == ".json":  # a script's argument may be such a file, too
        if parsed.training_script_args:
            _refuse(f"{script} is followed by {shlex.join(parsed.training_script_args)}")
        warm(script)
        given[-1:] = rank, str(script.resolve())
    elif not script.is_file():  # it would be started until no attempt is left
        _refuse(f"there is no script {script}")
    return given


def _refuse(why: str) -> NoReturn:
    raise HeterogError(
        f"{why}; options of torchrun come first, then a script with its arguments, or a plan or "
        "run file alone, which has the settings of the job (docs/healing.md)."
    )


def _end_ranks(agent: Any, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
    """End ranks, by SIGKILL those that are stuck: the other hosts cannot meet before that.

    What a script says when it is told to end, by ``sys.exit(143)`` say, is no error of the job.
    """
    with suppress(FileNotFoundError):
        path_of_host().joinpath(ERROR).rename(path_of_host() / _TOLD)
    _shutdown(agent, death_sig, min(timeout, _ENDED_S))


def _num_outside(handler: Any) -> int:
    """Number of hosts that wait to take part; this one, too, if others have met without it.

    They took it for lost. Torchrun alone does not tell it, and there are two jobs then.
    """
    waiting: int = _num_waiting(handler)
    state = handler._state_holder.state
    return waiting + (state.round != handler.own_round and bool(state.participants))


def _drop_others(holder: Any) -> None:
    """Drop hosts that gave no sign of life for long, but never this one, which looks.

    Torchrun drops it, too, once it is late, and then it never gives a sign again. A sign has the
    time of the host that gave it, whose clock may be wrong, so what counts is when it was seen.
    """
    signs, now = holder._state.last_heartbeats, datetime.now(UTC)
    told, before = dict(signs), getattr(holder, "seen", {})
    holder.seen = {
        node: before[node] if before.get(node, (None,))[0] == sign else (sign, now)
        for node, sign in told.items()
    }
    signs |= {node: now if node == holder.node else at for node, (_, at) in holder.seen.items()}
    _sanitize(holder)
    signs |= {node: told[node] for node in signs}


def _nobody() -> str:
    """Who writes to the store, for records that nobody keeps.

    Torchrun finds it in the stack, for which Python searches all modules: 0.06 s of a core with
    what is loaded here, several times between reading the store and writing it. So hosts that
    meet write over each other's heads, and some are left out until a next meeting.
    """
    return ""


def _wait_until_look(seconds: float | tuple[float, float]) -> None:
    """Wait for the next look at what others say, or as long as torchrun does before the first."""
    _delay(seconds if isinstance(seconds, tuple) else _LOOK_S)


def _is_own(host: str) -> bool:
    """Whether a name or address is this machine's: by torchrun only if its name leads to it."""
    return bool(interface_of(host)) or _is_own_name(host)


def _join_again(agent: SimpleElasticAgent, group: WorkerGroup) -> None:
    """Meet the other hosts, and again if one is lost before it has said where ranks meet.

    Torchrun alone gives up there, and ends the job on all hosts.

    Raises:
        HeterogError: a rank, of this or another host, had an error that ends the job.
    """
    handler: Any = group.spec.rdzv_handler
    store, error_of_job = handler._store, f"{ERROR} of {handler.get_run_id()}"
    with suppress(FileNotFoundError):
        store.set(error_of_job, (path_of_host() / _TOLD).read_text())
    handler._store.set_timeout(_MEET)
    handler._state_holder._cache_duration = _LOOK_S
    handler._state_holder.node = handler._this_node
    while True:
        if store.check([error_of_job]):
            raise HeterogError(store.get(error_of_job).decode())
        try:
            _join(agent, group)
            handler.own_round = handler._state_holder.state.round
            os.environ[ROUND] = str(handler.own_round)
            return
        except RendezvousClosedError:
            if not store.check([error_of_job]):
                raise
        except (DistStoreError, LookupError) as error:  # the latter by etcd
            _LOG.warning("a host was lost while hosts met (%s); they meet again", error)


def warm(path: Path) -> None:
    """Plan once in this process, and capture the step: what that loads takes seconds each time.

    The step is not captured where there is an accelerator, which the model's code might touch.

    Args:
        path: The file that the ranks will be given.

    Raises:
        HeterogError: it cannot be read, or asks for what is not done under torchrun.
    """
    request, options = read_healing(path)
    plan = request.load()
    every = tuple(range(plan.cluster.num_devices))
    running = Choice(path=str(request.plan), method="", devices=every)
    with (
        num_threads(1),  # those of OpenMP would be missing in who is forked
        tempfile.TemporaryDirectory(prefix="heterog-") as folder,
    ):
        asked = Question(
            devices=every[:-1],
            budget=options.first_budget,
            running=running,
            path=str(Path(folder, "left.json")),
        )
        with suppress(HeterogError):
            Planning(request.plan).answer(asked)
        if not has_accelerator():
            with suppress(Exception):  # the ranks meet the same error
                capture_for(path_of_host(), plan, request)
