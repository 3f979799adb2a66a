"""Replays compiled parts of a step as CUDA graphs: one call of the host for all their kernels.

A graph is recorded once and then reads and writes the memory that it was recorded with:

- Parameters, buffers of the model and what other graphs make stay where they are. If one has moved
  (its ``data`` was replaced, say), the part runs as it is, kernel by kernel.
- Other inputs are copied to memory of the graph before a replay.
- Outputs are overwritten by the next step's replay. All graphs of a rank share one pool of memory:
  what dies before a graph is recorded makes room for it. So a step must keep and drop values in
  the same order every time, and a value that is sent, which may take longer than the step waits,
  is handed out as a copy.

All graphs are recorded in the same step. While one is recorded no kernel runs, so it is replayed
at once. A part that reads numbers from the host's memory is not recorded: they would stay as they
were.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from heterog.runtime.accelerators import (
    graph_pool,
    is_accelerated,
    recorded_graph,
    same_memory,
)

_LOG = logging.getLogger(__name__)

Kernels = Callable[[list[Tensor]], Sequence[Tensor]]
"""Takes its inputs out of a list, so that it may drop them, and returns its outputs."""


class Replays:
    """The graphs of one rank.

    Attributes:
        num_recorded: Number of graphs.
    """

    def __init__(self) -> None:
        self.num_recorded = 0
        self.records_in: int | None = None  # number of the step that records
        self.made: set[int] = set()  # addresses of the storages that graphs write
        self.pool = graph_pool()


class Replay:
    """One part of a step, called once a step.

    Args:
        kernels: The compiled part.
        replays: The rank's graphs.
        stays: Whether each input is a parameter or a buffer of the model.
        is_sent: Whether each output is sent.
    """

    def __init__(
        self, kernels: Kernels, replays: Replays, stays: Sequence[bool], is_sent: Sequence[bool]
    ) -> None:
        self._kernels, self._replays = kernels, replays
        self._stays, self._is_sent = stays, is_sent
        self._graph: Any = None
        self._fixed: list[tuple[int, int]] = []  # inputs that stay, with their addresses
        self._copied: list[tuple[int, Tensor]] = []  # others, with the graph's own memory
        self._outputs: list[Tensor] = []  # which own no memory

    def run(self, given: list[Tensor], number: int) -> Sequence[Tensor]:
        """The outputs of the part in a step of some number."""
        replays = self._replays
        if replays.records_in is None:
            replays.records_in = number + 1  # this step tunes and loads what is compiled
        if (
            number == replays.records_in
            and self._graph is None
            and all(map(is_accelerated, given))
        ):
            return self._record(given)
        if self._graph is None or any(
            given[place].data_ptr() != address for place, address in self._fixed
        ):
            return self._kernels(given)
        for place, own in self._copied:
            own.copy_(given[place])
        given.clear()
        self._graph.replay()
        return self._handed_out(self._outputs)

    def _record(self, given: list[Tensor]) -> Sequence[Tensor]:
        replays, inputs = self._replays, list(given)
        for place, value in enumerate(given):
            address = value.untyped_storage().data_ptr()
            if self._stays[place] or address in replays.made:
                self._fixed.append((place, value.data_ptr()))
            else:
                inputs[place] = value.clone()
                self._copied.append((place, inputs[place]))
        given.clear()
        kept = list(inputs)
        try:
            self._graph, outputs = recorded_graph(replays.pool, lambda: self._kernels(inputs))
        except RuntimeError as error:  # something in it waits for the device
            _LOG.warning("a part of the step is called and not replayed: %s", error)
            return self._kernels(kept)
        replays.num_recorded += 1
        replays.made |= {each.untyped_storage().data_ptr() for each in outputs}
        self._outputs = [same_memory(each) for each in outputs]
        self._graph.replay()
        return self._handed_out(outputs)

    def _handed_out(self, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        return [
            value.clone() if sent else value
            for value, sent in zip(outputs, self._is_sent, strict=True)
        ]
