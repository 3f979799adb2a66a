"""A pool of real gloo processes that stays alive across tests."""

import gc
import json
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from heterog.graph.op_graph import OpGraph
from heterog.graph.serialize import graph_from_dict
from heterog.runtime.step.collectives import Communicator
from tests.runtime.cases import capture_cases_once

Job = tuple[Callable[..., Any], tuple[Any, ...]]

# Ranks are forked off one process that has imported these, which takes each of them four seconds.
FORKS = multiprocessing.get_context("forkserver")
_IMPORTED = ["heterog.runtime.deploy", "torch._dynamo", "hypothesis", "tests.runtime.cases"]
FORKS.set_forkserver_preload(_IMPORTED)


MANY_TESTS = 300
"""With so many tests, most models are trained on most groups of ranks."""


def capture_before_forks(session: pytest.Session) -> None:
    """Have ranks of a long session know the models of ``cases``; before the first of them."""
    if len(session.items) >= MANY_TESTS:
        FORKS.set_forkserver_preload([*_IMPORTED, "tests.runtime.captured_before"])


def _serve(rank: int, num_ranks: int, store: str, pipe: Connection) -> None:
    """Run jobs until the parent closes the pipe."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=60),
    )
    capture_cases_once()
    _read_graphs_once()
    made = _remember_communicators()
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            break
        while made:  # hundreds of groups would take a core, and all ranks are through with these
            made.pop().close()
        try:
            pipe.send((True, function(rank, *arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()
    gc.freeze()  # nothing imported need be collected: Python would take a second for it


def _read_graphs_once() -> None:
    """Have this process read each graph of a plan once: hundreds of plans are for few graphs."""
    known: dict[str, OpGraph] = {}

    def read_once(record: object, where: str) -> OpGraph:
        text = json.dumps(record)
        if text not in known:
            known[text] = graph_from_dict(record, where)
        return known[text]

    mock.patch("heterog.search.plan.graph_from_dict", read_once).start()


def _remember_communicators() -> list[Communicator]:
    """All that are made from here on."""
    made: list[Communicator] = []
    initialize = Communicator.__init__

    def initialize_and_remember(
        self: Communicator, rank: int, device_sets: Iterable[tuple[int, ...]]
    ) -> None:
        initialize(self, rank, device_sets)
        made.append(self)

    Communicator.__init__ = initialize_and_remember  # type: ignore[method-assign]
    return made


class Ranks:
    """Processes that form one process group; new ones after a failure."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._start()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(self._num_ranks):
            here, there = FORKS.Pipe()
            process = FORKS.Process(
                target=_serve, args=(rank, self._num_ranks, store, there), daemon=True
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call ``function(rank, *arguments)`` on every rank; results by rank."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, arguments))
        results = [pipe.recv() for pipe in self._pipes]
        failures = [text for ok, text in results if not ok]
        if failures:
            self.close()  # they may be left in the middle of a collective
            self._start()
        assert not failures, failures[0]
        return [value for _, value in results]

    def close(self) -> list[int | None]:
        """End the processes, until ``run`` starts new ones; returns their exit codes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.terminate()
        self._folder.cleanup()
        codes = [process.exitcode for process in self._processes]
        self._pipes, self._processes = [], []
        return codes
