"""Pools of real gloo processes that stay alive across tests.

Ranks are forked off one process, which captures what several of them train: each model is
captured once, and not by the test and then by each rank of each pool.
"""

import atexit
import gc
import json
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Hashable, Iterable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import reduce_tensor

from heterog.graph.op_graph import OpGraph
from heterog.graph.serialize import graph_from_dict, graph_to_dict
from heterog.graph.workload import Workload
from heterog.lowering.tables import graph_tables
from heterog.runtime.step.collectives import Communicator
from tests.runtime.cases import (
    capture_case,
    capture_cases_once,
    captured_now,
    num_captured,
)

Job = tuple[Callable[..., Any], tuple[Any, ...]]

BACKEND = os.environ.get("HETEROG_RANKS_BACKEND", "gloo")
"""Of the ranks' process group: with ``cpu:gloo,cuda:gloo`` all of them compute on one GPU."""

# Ranks are forked off one process that has imported these, which takes each of them four seconds.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        *("heterog.runtime.deploy", "torch._dynamo", "hypothesis", "tests.runtime.cases"),
        "tests.runtime.before_forks",
    ]
)


def _pickled(tensor: Tensor) -> tuple[Any, ...]:
    """Plain bytes, for which torch would pass a file descriptor through a socket of its own."""
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        return tuple(reduce_tensor(tensor))  # type: ignore[no-untyped-call]
    data = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    known = bytearray(data.view(torch.uint8).numpy()) if len(data) else bytearray()
    return _unpickled, (known, tensor.dtype, tensor.shape, tensor.requires_grad)


def _unpickled(data: bytearray, dtype: torch.dtype, shape: torch.Size, learns: bool) -> Tensor:
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.view(shape).requires_grad_(learns)


class Pickler(ForkingPickler):
    """That of multiprocessing, with tensors by value: a rank returns a hundred small ones."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.dispatch_table |= {Tensor: _pickled, nn.Parameter: _pickled}


def _send(pipe: Connection, value: Any) -> None:
    pipe.send_bytes(Pickler.dumps(value))


class ParentOfRanks:
    """The process that ranks are forked off, started when it is first asked for something."""

    def __init__(self) -> None:
        self._pipe: Connection | None = None
        self._graphs: dict[Hashable, OpGraph] = {}
        self.num_captured = 0
        """Models that were captured in it: ranks which were forked before do not know the last."""

    @property
    def is_running(self) -> bool:
        return self._pipe is not None

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function returns there."""
        # Autograd has threads of its own where there is an accelerator, and no fork of them works.
        if torch.accelerator.is_available() and function not in (_fork, _end):
            return function(*arguments)
        if self._pipe is None:
            self._pipe, there = FORKS.Pipe()
            FORKS.Process(target=_be_parent, args=(there,)).start()
            there.close()
            atexit.register(self._pipe.close)  # or this process would wait for that one
        _send(self._pipe, (function, arguments))
        is_done, value, self.num_captured = self._pipe.recv()
        assert is_done, value
        return value

    def capture(self, key: Hashable, make: Callable[..., Workload], *arguments: Any) -> OpGraph:
        """The graph of a workload, which ranks that say ``captured_once(key)`` have captured then.

        Args:
            key: tells workloads apart; ``None`` for a case, which all ranks capture once.
            make: function of a module.
            arguments: for ``make``.
        """
        what = key, make, repr(arguments)
        if what not in self._graphs:
            self._graphs[what] = self.call(_capture, key, make, arguments)
        return self._graphs[what]


PARENT = ParentOfRanks()


def _be_parent(pipe: Connection) -> NoReturn:
    """Do what is asked, until the test process closes the pipe."""
    torch.set_num_threads(1)
    mock.patch("heterog.search.plan.graph_from_dict", _read_once).start()
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            if function is _fork:
                arguments = (*arguments, pipe)
            done = True, function(*arguments)
        except BaseException:
            done = False, traceback.format_exc()
        _send(pipe, (*done, num_captured()))


def _capture(key: Hashable, make: Callable[..., Workload], arguments: tuple[Any, ...]) -> OpGraph:
    workload = make(*arguments)
    captured = capture_case(workload) if key is None else captured_now(key, workload)
    for graph in (
        captured.graph,
        _read_once(json.loads(json.dumps(graph_to_dict(captured.graph)))),
    ):
        assert graph.fingerprint
        assert graph_tables(graph)  # both of which are kept
    return captured.graph


_started: dict[int, BaseProcess] = {}


def _fork(
    rank: int, num_ranks: int, store: str, pipe: Connection, of_parent: Connection
) -> int | None:
    # A process that has looked at its GPU cannot be forked.
    way = "fork" if BACKEND == "gloo" else "spawn"
    process = multiprocessing.get_context(way).Process(  # type: ignore[attr-defined]
        target=_serve, args=(rank, num_ranks, store, pipe, of_parent), daemon=True
    )
    process.start()
    pipe.close()
    number: int | None = process.pid
    assert number is not None
    _started[number] = process
    return number


def _end(pids: list[int]) -> list[int | None]:
    """Exit codes of ranks whose pipes were closed."""
    processes = [_started.pop(pid) for pid in pids]
    for process in processes:
        process.join(100)
        if process.is_alive():
            process.terminate()
    return [process.exitcode for process in processes]


def _serve(rank: int, num_ranks: int, store: str, pipe: Connection, of_parent: Connection) -> None:
    """Run jobs until the test process closes the pipe."""
    of_parent.close()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        BACKEND,
        init_method=f"file://{store}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(minutes=10),  # on a busy machine a rank may be late
    )
    capture_cases_once()
    made = _remember_communicators()
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            break
        while made:  # hundreds of groups would take a core, and all ranks are through with these
            made.pop().close()
        try:
            _send(pipe, (True, function(rank, *arguments)))
        except BaseException:
            _send(pipe, (False, traceback.format_exc()))
    dist.destroy_process_group()
    gc.freeze()  # nothing imported need be collected: Python would take a second for it


_known: dict[str, OpGraph] = {}


def _read_once(record: object, where: str = "") -> OpGraph:
    """Read each graph of a plan once: hundreds of plans are for few graphs."""
    text = json.dumps(record)
    if text not in _known:
        _known[text] = graph_from_dict(record, where)
    return _known[text]


def _remember_communicators() -> list[Communicator]:
    """All that are made from here on."""
    made: list[Communicator] = []
    initialize = Communicator.__init__

    def initialize_and_remember(
        self: Communicator,
        rank: int,
        device_sets: Iterable[tuple[int, ...]],
        host_of: Sequence[int] = (),
    ) -> None:
        initialize(self, rank, device_sets, host_of)
        made.append(self)

    Communicator.__init__ = initialize_and_remember  # type: ignore[method-assign]
    return made


class Ranks:
    """Processes that form one process group; new ones after a failure or a new model."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._start()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        self._num_captured = PARENT.num_captured
        self._pipes: list[Connection] = []
        self._pids: list[int] = []
        for rank in range(self._num_ranks):
            here, there = FORKS.Pipe()
            self._pids.append(PARENT.call(_fork, rank, self._num_ranks, store, there))
            there.close()
            self._pipes.append(here)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call ``function(rank, *arguments)`` on every rank; results by rank."""
        if self._num_captured != PARENT.num_captured:
            self.close()
        if not self._pids:
            self._start()
        for pipe in self._pipes:
            _send(pipe, (function, arguments))
        results = [pipe.recv() for pipe in self._pipes]
        failures = [text for ok, text in results if not ok]
        if failures:
            self.close()  # they may be left in the middle of a collective
            self._start()
        assert not failures, failures[0]
        return [value for _, value in results]

    def close(self) -> list[int | None]:
        """End the processes, until ``run`` starts new ones; returns their exit codes."""
        if not self._pids:
            return []
        for pipe in self._pipes:
            pipe.close()
        codes: list[int | None] = PARENT.call(_end, self._pids)
        self._folder.cleanup()
        self._pipes, self._pids = [], []
        return codes
