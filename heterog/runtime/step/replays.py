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

from heterog.runtime.accelerators import graph_pool, is_accelerated, recorded_graph, same_memory

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
        self.made: set[int] = set()  # addresses of the storages that graphs write
        self.pool = graph_pool()
        self._records_in = -1  # number of the step that records
        self._is_closed = False

    def records(self, number: int) -> bool:
        """Whether the step of some number, in which a part is called, records graphs.

        It is the second step with calls, as the first loads and tunes kernels; a later one, if
        nothing was recorded in it (its batch had another shape, say). Graphs that are recorded in
        other steps would take memory of values that are only borrowed from the pool.
        """
        if not self.num_recorded and not 0 <= self._records_in >= number:
            self._records_in = number + 1
        elif self.num_recorded and number != self._records_in:
            self._is_closed = True
        return number == self._records_in and not self._is_closed


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
        self._cannot_be_recorded = False

    def run(self, given: list[Tensor], number: int) -> Sequence[Tensor]:
        """The outputs of the part in a step of some number."""
        may_record = self._replays.records(number) and not self._cannot_be_recorded
        if may_record and self._graph is None and all(map(is_accelerated, given)):
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
        replays, kept = self._replays, list(given)
        given.clear()
        try:
            inputs = [self._input(place, value) for place, value in enumerate(kept)]
            self._graph, outputs = recorded_graph(replays.pool, lambda: self._kernels(inputs))
        except RuntimeError as error:  # something in it waits for the device
            _LOG.warning("a part of the step is called and not replayed: %s", error)
            self._cannot_be_recorded = True
            self._copied.clear()
            replays.pool = graph_pool()  # that one may still be recording
            return self._kernels(kept)
        replays.num_recorded += 1
        replays.made |= {each.untyped_storage().data_ptr() for each in outputs}
        self._outputs = [same_memory(each) for each in outputs]
        self._graph.replay()
        return self._handed_out(outputs)

    def _input(self, place: int, value: Tensor) -> Tensor:
        """An input of the graph: a value that stays, or a copy with the same strides."""
        if self._stays[place] or value.untyped_storage().data_ptr() in self._replays.made:
            self._fixed.append((place, value.data_ptr()))
            return value
        own = value.new_empty_strided(value.shape, value.stride()).copy_(value)
        self._copied.append((place, own))
        return own

    def _handed_out(self, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        return [
            value.clone() if sent else value
            for value, sent in zip(outputs, self._is_sent, strict=True)
        ]
