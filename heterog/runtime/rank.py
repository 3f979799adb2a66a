"""The work of one rank of a job: join the others, deploy the plan, train, report.

``heterog.run`` describes how torchrun starts a rank. Its number and address come from the
environment, as torchrun and ``heterog run`` set it; under torchrun a rank takes the number of its
device in the plan.
"""

import json
import math
import multiprocessing
import os
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from heterog.cluster import Cluster
from heterog.errors import HeterogError
from heterog.files import wait_for_file, write_atomically, write_json
from heterog.graph.capture import CapturedStep
from heterog.graph.python_state import seed_all
from heterog.graph.workload import Workload
from heterog.lowering.program import FloatArray
from heterog.runtime.accelerators import (
    CPU_BACKEND,
    backends,
    is_on_cpus,
    own_device,
    stream_of_priority,
)
from heterog.runtime.deploy import DeployedStep
from heterog.runtime.launch import HEARTBEAT, PORT_FILE
from heterog.runtime.ranks.background import Governor, LowPriorityThread, Trainer, has_own_process
from heterog.runtime.ranks.host_places import rank_in_plan
from heterog.runtime.ranks.watching import COMPILING
from heterog.runtime.request import RunRequest, read_request
from heterog.runtime.step.collectives import gather_texts
from heterog.runtime.step.compiled import Compiler
from heterog.search.plan import Plan, load_plan
from heterog.user_code import trusted_source
from heterog.zoo import load_workload

WARM_UP_STEPS = 1  # they train, but are not measured
_POLL_S = 0.02
_CONNECT_S = 5.0


def join(
    timeout_s: float,
    *,
    backend: str = "",
    cluster: Cluster | None = None,
    agreed: tuple[Any, int] | None = None,
) -> None:
    """Join the job that the environment describes, as one of its ranks.

    Args:
        timeout_s: Seconds after which a rank gives up on the others, here and in every step.
        backend: Backend of ``init_process_group``; by default that of the accelerators, if every
            rank of this machine can have one, and gloo for everything else.
        cluster: The plan's cluster: under torchrun, ranks take the numbers of its devices; without
            it, torchrun's numbers.
        agreed: The store of ``meet``, and the number of this rank, if they have agreed on them.

    Raises:
        HeterogError: a variable is missing, the port is in use, or a machine is no host of the
            cluster.
    """
    chosen = backend or _backend()
    world_size = _number("WORLD_SIZE")
    store, rank = agreed or (meet(timeout_s), _number("RANK"))
    if cluster is not None and "TORCHELASTIC_RUN_ID" in os.environ and PORT_FILE not in os.environ:
        rank = rank_in_plan(cluster, store, timeout_s)
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group(chosen, store=store, rank=rank, world_size=world_size, timeout=limit)


def meet(timeout_s: float) -> Any:
    """The store through which the ranks of one start meet.

    It listens on the address ``MASTER_ADDR`` only, not on every interface as PyTorch's own store
    does. Under torchrun it may be the store of torchrun's agents.

    Raises:
        HeterogError: a variable is missing, or the port is in use.
    """
    limit = timedelta(seconds=timeout_s)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _agent_store(limit)
    world_size, address = _number("WORLD_SIZE"), _variable("MASTER_ADDR")
    publish = os.environ.get(PORT_FILE, "")
    if _number("RANK") == 0:
        listening = _listen(address, 0 if publish else _number("MASTER_PORT"))
        port = int(listening.getsockname()[1])
        store = TCPStore(
            address,
            port,
            world_size,
            is_master=True,
            timeout=limit,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        if publish:
            write_atomically(publish, str(port).encode())
        return store
    port = _published_port(Path(publish), timeout_s) if publish else _number("MASTER_PORT")
    _wait_for_store(address, port, timeout_s)
    return TCPStore(address, port, world_size, is_master=False, timeout=limit)


def draw_alike() -> None:
    """Seed all random generators, because all ranks have to draw the same batch."""
    seed_all(0)


def tell(stage: str) -> None:
    """Report the stage of this rank to the launcher, if there is one.

    A stage that begins with ``step`` must change within the launcher's limit for steps.
    """
    path = os.environ.get(HEARTBEAT)
    if path:
        # Written whole, so that the last stage is known even if the rank is killed meanwhile.
        draft = Path(f"{path}.new")
        with suppress(OSError):  # a full disk is no reason to end; the next stage may be told
            draft.write_text(stage)
            draft.replace(path)


def workload_of(plan: Plan, request: RunRequest) -> Workload:
    """The workload that trains with a plan.

    Raises:
        HeterogError: nothing names the model, or it cannot be made.
    """
    source = request.source_of(plan)
    if not source:
        raise HeterogError("the plan does not name its model; give it as `model`.")
    draw_alike()
    return load_workload(source, None if request.model else plan.graph.batch_size, must_take=False)


def set_up(
    plan: Plan, request: RunRequest, captured: CapturedStep | None = None
) -> tuple[DeployedStep, Workload]:
    """Join the others, unless that is done, and deploy the plan with its workload.

    Args:
        plan: Plan to run; device ``i`` of its cluster is rank ``i``.
        request: Has the source of the workload, and how long to wait for the others.
        captured: The workload's step, if it is captured already.

    Raises:
        HeterogError: plan and model do not fit, or nothing names the model.
    """
    workload = workload_of(plan, request)
    if not dist.is_initialized():
        tell("joining the others")
        join(
            request.limits.timeout_s,
            backend=CPU_BACKEND if is_on_cpus(plan.cluster) else "",
            cluster=plan.cluster,
        )
    tell("capturing the model")
    step = DeployedStep(workload, plan, captured=captured)
    if step.compiler is not None:
        step.compiler.tell = lambda part: tell(f"{COMPILING}, {part}")
    draw_alike()  # until here, ranks may have drawn different numbers
    return step, workload


def check_loss(loss: float, number: int, request: RunRequest) -> None:
    """Refuse to go on after a step with an infinite loss or nan.

    Raises:
        HeterogError: the loss is not finite, and the request does not allow that.
    """
    if not math.isfinite(loss) and not request.allow_nonfinite:
        raise HeterogError(
            f"the loss of step {number} is {loss}: look for it in the batch, or lower the "
            "learning rate. `allow_nonfinite` goes on."
        )


class Training:
    """Trains for some steps on the workload's example batch and measures them.

    Args:
        plan: Plan to run.
        request: The request of the run.
    """

    def __init__(self, plan: Plan, request: RunRequest) -> None:
        self._plan, self._request = plan, request
        self._step, workload = set_up(plan, request)
        if request.resume is not None:
            tell("reading the checkpoint")
            from heterog.runtime.checkpoint.steps import (
                load_checkpoint,  # half a second on every rank
            )

            load_checkpoint(self._step, request.resume)
        self._steps_before = self._step.num_steps
        self._first = self._steps_before + 1
        self._batch = workload.make_batch()
        self._beside = _beside(plan, request.sources)
        self._losses: list[float] = []
        self._seconds: list[float] = []
        self._tasks: dict[str, list[float | None]] = {}
        self._since = 0
        """Calls since the last settling."""

    def run(self) -> dict[str, Any]:
        """Train, save, and return the measurements, which are the same on every rank.

        Raises:
            HeterogError: checkpoint or batch do not fit, or the loss is not finite.
        """
        step, request = self._step, self._request
        measured_from = time.perf_counter()
        last = self._steps_before + WARM_UP_STEPS + request.num_steps
        for number in range(self._first, last + 1):
            tell(f"step {number} of {last}")
            if number == self._first + WARM_UP_STEPS:
                self._catch_up()
                dist.barrier()
                measured_from = time.perf_counter()
            elif not step.is_free_running:
                dist.barrier()
            self._do_step(number, is_recorded=request.record and number == last)
        step.settle()  # teams that train apart end with one model after any number of steps
        self._catch_up()
        together_s = (time.perf_counter() - measured_from) / request.num_steps
        if request.save is not None:
            tell("saving the checkpoint")
            from heterog.runtime.checkpoint.steps import save_checkpoint

            save_checkpoint(step, request.save)
        step.flush()  # without a step barrier the last updates may still be open
        tell("leaving")
        return self._measured(together_s)

    def _catch_up(self) -> None:
        """Let all ranks make as many steps, and take the losses that no call has returned."""
        if self._step.is_free_running:
            self._step.settle()
        self._losses += self._step.take_late_losses()
        self._since = 0

    def _do_step(self, number: int, *, is_recorded: bool) -> None:
        """Do and measure one step."""
        step, is_measured = self._step, number >= self._first + WARM_UP_STEPS
        begin = time.perf_counter()
        with stream_of_priority(own_device(), high=True) if self._beside else nullcontext():
            if is_recorded:
                self._catch_up()
                loss_tensor, start, finish = step.record(self._batch)
                self._tasks = {"start_s": _jsonable(start), "finish_s": _jsonable(finish)}
                loss = float(loss_tensor)
            else:
                loss = float(step(self._batch))
                self._since += 1
        if not step.is_free_running:
            dist.barrier()  # a step ends when all ranks have done it
        elapsed_s = time.perf_counter() - begin
        if self._beside and is_measured:
            self._beside.governor.observe(elapsed_s)
        late = max((mode.loss_delay for mode in step.modes), default=0)
        has_loss = not 0 < self._since <= late
        # The loss is the same on all ranks, so all of them stop here. With an asynchronous server
        # the others would wait for a rank that stops, and a rank without a team has no loss.
        if has_loss and not any(mode.is_idle for mode in step.modes):
            check_loss(loss, number, self._request)
        if self._request.save is not None and number == self._first:
            # Checked now, before more training would be lost.
            from heterog.runtime.checkpoint.state import check_can_save

            check_can_save(step)
        self._losses += [loss] * has_loss
        if is_measured:
            self._seconds.append(elapsed_s)

    def _measured(self, together_s: float) -> dict[str, Any]:
        """The measurements.

        Args:
            together_s: Seconds of all measured steps together, by their number.
        """
        plan, seconds = self._plan, self._seconds
        background_steps = [0] * dist.get_world_size()
        if plan.background is not None:
            # As texts, because objects would be pickled.
            own = self._beside.stop() if self._beside else 0
            background_steps = list(map(int, gather_texts(str(own))))
        # If islands average, one step in many takes longer, and the plan predicts the mean.
        differ = any(mode.steps_differ for mode in plan.strategy.modes)
        step_s = statistics.mean(seconds) if differ else statistics.median(seconds)
        if any(mode.ends_late for mode in self._step.modes):  # a rank that ran ahead waits
            step_s = together_s
        return {
            "model": plan.graph.name,
            "cluster": plan.cluster.name,
            "method": plan.method,
            "num_ranks": dist.get_world_size(),
            "num_steps_before": self._steps_before,
            "step_time_s": step_s,
            "step_time_min_s": min(seconds),
            "step_time_max_s": max(seconds),
            "step_times_s": seconds,
            "predicted_step_time_s": plan.step_time_s,
            # JSON has no NaN.
            "losses": [loss if math.isfinite(loss) else None for loss in self._losses],
            "throughput_samples_per_s": plan.graph.batch_size / step_s,
            "tasks": self._tasks,
            "background_steps": background_steps,
            **_compiling(self._step.compiler),
        }


def _compiling(compiler: Compiler | None) -> dict[str, Any]:
    """Compile seconds of the slowest rank, and what the first rank with a refusal left out."""
    if compiler is None:
        return {"compile_s": 0.0, "not_compiled": ""}
    seconds, why = gather_texts(str(compiler.seconds)), gather_texts(compiler.refused)
    return {"compile_s": max(map(float, seconds)), "not_compiled": next(filter(None, why), "")}


def _beside(plan: Plan, sources: Sequence[str]) -> LowPriorityThread | None:
    """The plan's background job, not started, if it has to share this process."""
    background = plan.background
    if background is None or has_own_process(plan.cluster):
        return None
    if dist.get_rank() not in background.devices:
        return None
    source = trusted_source(background.source, sources, "the plan")
    workload = load_workload(source, background.batch_size, must_take=False)
    thread = LowPriorityThread(
        Trainer(workload, own_device()), own_device(), Governor(background.limit)
    )
    thread.start()
    return thread


def main() -> None:
    """Run as one rank; errors are one line on stderr and exit code 2."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with as_rank(int(os.environ.get("RANK", "0"))):
        if len(sys.argv) != 2:
            raise HeterogError(
                f"a rank takes one file and was given {len(sys.argv) - 1}: a plan, or a run file "
                'such as {"plan": "plan.json", "num_steps": 20}.'
            )
        request = read_request(Path(sys.argv[1]))
        measured = Training(load_plan(request.plan), request).run()
    if dist.get_rank() == 0:
        if request.output is not None:
            write_json(request.output, measured)
        else:
            print(json.dumps(measured, indent=2), flush=True)
    end_together()


@contextmanager
def as_rank(rank: int) -> Iterator[None]:
    """End the process with one line on stderr and exit code 2 if the body fails."""
    try:
        yield
    except HeterogError as error:
        _leave(rank, str(error))
    except RuntimeError as error:
        first = str(error).strip().partition("\n")[0]
        lost = is_of_another(error)
        _leave(rank, f"lost the connection to another rank: {first}" if lost else first)
    except (Exception, SystemExit) as error:  # whatever the user's model does, it ends this rank
        traceback.print_exc()
        _leave(rank, f"{type(error).__name__}: {error}")


def is_of_another(error: BaseException) -> bool:
    """Whether an error, by gloo's words, is of another rank that died, ended or is frozen."""
    words = ("onnection", "imed out", "imeout", "roken pipe")
    is_told = isinstance(error, RuntimeError) and any(each in str(error) for each in words)
    return is_told or isinstance(error, dist.DistError)


def end_together() -> None:
    """Wait for the other ranks and end this process, with exit code 0.

    An ordinary exit may hang: Python holds the GIL while it joins gloo's threads, and a thread
    that frees tensors of a collective at that moment waits for the GIL. A rank that torchrun has
    forked returns instead, because its agent waits for the result and then ends the rank.
    """
    dist.barrier()  # a rank that leaves early would abort others that still communicate
    sys.stdout.flush()
    sys.stderr.flush()
    if multiprocessing.parent_process() is None:
        os._exit(0)


def _jsonable(seconds: FloatArray) -> list[float | None]:
    """Seconds as JSON values, which cannot be NaN: ``None`` instead."""
    return [None if math.isnan(value) else value for value in seconds.tolist()]


def _leave(rank: int, why: str) -> NoReturn:
    """Print the reason in one line and end with exit code 2."""
    print(f"heterog: rank {rank}: {why}", file=sys.stderr, flush=True)
    # Leaving the process group in an orderly way would need the other ranks.
    os._exit(2)


def _backend() -> str:
    """Backends of this machine's ranks; selects the rank's accelerator if each can have one."""
    local = _number("LOCAL_RANK", "RANK")
    found = backends(_number("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    if found != CPU_BACKEND:
        torch.accelerator.set_device_index(local)
    return found


def _agent_store(limit: timedelta) -> Any:
    """The store of torchrun's agent, with keys of this generation of ranks only."""
    address, port = _variable("MASTER_ADDR"), _number("MASTER_PORT")
    store = TCPStore(address, port, is_master=False, timeout=limit)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"heterog/{attempt}", store)


def _listen(address: str, port: int) -> socket.socket:
    """A socket that listens on one address only; port 0 picks a free one."""
    family, kind, protocol, _, place = socket.getaddrinfo(
        address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listening = socket.socket(family, kind, protocol)
    try:
        # As usual for servers: connections of the last job may still be in TIME_WAIT.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(place)
        listening.listen()
    except OSError as error:
        listening.close()
        raise HeterogError(
            f"rank 0 cannot listen on port {port} of {address}: {error.strerror or error}; choose "
            "another `port`, or none to get a free one."
        ) from error
    return listening


def _published_port(path: Path, timeout_s: float) -> int:
    """The port that rank 0 chose."""
    wait_for_file(path, timeout_s, f"rank 0 did not say where to meet within {timeout_s:g} s.")
    return int(path.read_text())


def _wait_for_store(address: str, port: int, timeout_s: float) -> None:
    """Wait until rank 0 listens, as ``TCPStore`` would sleep 0.25 to 0.75 s after each refusal."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        with suppress(OSError), socket.create_connection((address, port), _CONNECT_S):
            return
        if time.monotonic() > deadline_s:
            raise HeterogError(
                f"rank 0 did not listen on port {port} of {address} within {timeout_s:g} s."
            )
        time.sleep(_POLL_S)


def _variable(name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise HeterogError(
            f"the environment variable {name} is not set; start ranks with torchrun or "
            "'heterog run'."
        )
    return value


def _number(*names: str) -> int:
    """The number in the first of these variables that is set."""
    name = next((each for each in names if each in os.environ), names[-1])
    value = _variable(name)
    if not value.isdecimal():
        raise HeterogError(f"the environment variable {name} is {value!r}, not a number.")
    return int(value)


if __name__ == "__main__":
    main()
