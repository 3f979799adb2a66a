"""DeepPool's dynamic program as published, with its defects; ``heterog.methods.deeppool`` is ours.

Source: ``searchBestSplitsV3`` of seojinpark/DeepPool (MIT), the one behind Park et al., "Efficient
Strong Scaling Through Burst Parallel Training" (MLSys 2022). What differs from ours:

- The amplification limit is checked on the layer *before* the one being placed, so never on the
  last one, and a choice above the limit is taken when its amplification is the least seen so far:
  the result depends on the order of the choices and is not monotone in the limit.
- Branches are placed as if devices were free; only afterwards they are packed onto devices, and
  what then turns out to run one after another is added to the step.
- The device time of a join is counted twice.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from heterog.methods.deeppool.search import LayerCosts
from heterog.methods.deeppool.structure import Block, Chain, last_layer

_NEVER = 99999999999.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginalPlan:
    """A plan in the unit of time of its costs.

    Attributes:
        time: Time of one iteration.
        device_time: Sum over layers of time times devices.
        num_devices: Most devices in use at once.
        widths: Number of devices of each layer.
    """

    time: float
    device_time: float
    num_devices: int
    widths: tuple[int, ...]


def search_as_published(
    costs: LayerCosts, chain: Chain, *, limit: float, num_devices: int, is_baseline: bool = False
) -> OriginalPlan:
    """Devices per layer by the authors' program.

    Args:
        costs: Costs of layers and transfers; its widths in ascending order.
        chain: The layers.
        limit: Amplification limit.
        num_devices: Number of devices that the job may use.
        is_baseline: Whether to report the sum of all layers as iteration time: data parallelism.
    """
    program = _Program(costs, limit, num_devices, is_baseline)
    table = program.chain(chain, None, None)
    width = min(table.last, key=lambda option: table.last[option].total)
    trace = program.trace(chain, table, width, None)
    widths = tuple(trace.width[layer] for layer in sorted(trace.width))
    longest = max(entry.total for entry in trace.entry.values())
    alone = sum(trace.entry[layer].own for layer in sorted(trace.entry))
    return OriginalPlan(
        time=alone if is_baseline else longest + trace.overtime,
        device_time=trace.device_time,
        num_devices=num_devices if is_baseline else trace.num_devices,
        widths=widths,
    )


class _Entry(NamedTuple):
    total: float  # time until the layer is done
    own: float  # time of the layer, with the transfer to it
    before: int | None  # width of the layer before; of the fork for a join
    ends: tuple[int, ...] = ()  # for a join: width of the last layer of each branch


_Options = dict[int, _Entry]  # by width


class _Table(NamedTuple):
    layers: dict[int, _Options]
    last: _Options


@dataclass(slots=True)
class _Trace:
    """The choices found by following them back."""

    width: dict[int, int] = field(default_factory=dict)
    entry: dict[int, _Entry] = field(default_factory=dict)
    device_time: float = 0.0
    num_devices: int = 0
    overtime: float = 0.0
    fork_adjustment: float = 0.0


class _Program:
    def __init__(
        self, costs: LayerCosts, limit: float, num_devices: int, is_baseline: bool
    ) -> None:
        self.costs = costs
        self.limit = limit
        self.shares_devices = is_baseline or num_devices == 1

    def _own(self, layer: int, width: int) -> float:
        return self.costs.own(layer, (0, width))

    def _transfer(self, source: int, from_: int, target: int, to: int, apart: bool) -> float:
        first = from_ if apart else 0
        return self.costs.transfer(source, (0, from_), target, (first, to))

    def _amplification(self, layer: int, width: int, own: float) -> float:
        alone = self.costs.alone(layer)
        if own > 0 and alone > self.costs.negligible:
            return own * width / alone
        return 1.0

    def chain(self, chain: Chain, fork: int | None, start: tuple[int, _Entry] | None) -> _Table:
        """Tables of a chain, either after a fork with a given choice or at the front."""
        layers: dict[int, _Options] = {}
        before = fork
        options: _Options = {}
        for item in chain:
            if isinstance(item, Block):
                assert before is not None
                options = self._block(item, before, options)
                before = item.join
            elif not layers:
                options = self._first(item, fork, start)
                before = item
            else:
                assert before is not None
                options = {
                    width: self._best(before, options, item, width) for width in self.costs.widths
                }
                before = item
            layers[before] = options
        return _Table(layers, options)

    def _first(self, layer: int, fork: int | None, start: tuple[int, _Entry] | None) -> _Options:
        options = {}
        for width in self.costs.widths:
            own = self._own(layer, width)
            if start is None or fork is None:
                options[width] = _Entry(own, own, None)
            else:
                own = self._transfer(fork, start[0], layer, width, False) + own
                options[width] = _Entry(start[1].total + own, own, start[0])
        return options

    def _best(self, before: int, options: _Options, layer: int, width: int) -> _Entry:
        """The predecessor's width with the least time, by the published rule of acceptance."""
        own = self._own(layer, width)
        best = _Entry(_NEVER, 0.0, None)
        least = 999999.0
        for option, entry in options.items():
            moved = self._transfer(before, option, layer, width, False)
            amplification = self._amplification(before, option, entry.own)
            total = entry.total + (moved + own)
            if total < best.total and (amplification < self.limit or amplification < least):
                best = _Entry(total, moved + own, option)
                least = amplification
        return best

    def _block(self, block: Block, fork: int, starts: _Options) -> _Options:
        """For each width of the join, the fork's width that reaches it first."""
        joined: _Options = {}
        for start in starts.items():
            reached = self._branches(block, fork, start, starts)
            for width in self.costs.widths:
                entry = self._join(block, fork, start[0], reached, width)
                if width not in joined or entry.total < joined[width].total:
                    joined[width] = entry
        return joined

    def _branches(
        self, block: Block, fork: int, start: tuple[int, _Entry], starts: _Options
    ) -> list[_Options]:
        # A skip connection is read as if the fork's choice were still open.
        return [
            self.chain(branch, fork, start).last if branch else starts for branch in block.branches
        ]

    def _join(
        self, block: Block, fork: int, start: int, reached: list[_Options], width: int
    ) -> _Entry:
        own = self._own(block.join, width)
        latest, moved, ends = 0.0, 0.0, []
        for branch, options in zip(block.branches, reached, strict=True):
            last = last_layer(branch, fork)
            best = self._best(last, options, block.join, width)
            assert best.before is not None
            latest = max(latest, best.total)
            moved += self._transfer(last, best.before, block.join, width, False)
            ends.append(best.before)
        return _Entry(latest, moved + own, start, tuple(ends))

    def trace(self, chain: Chain, table: _Table, width: int, fork: int | None) -> _Trace:
        """Follow the choices of a chain back from the width of its last layer."""
        trace = _Trace()
        for position in range(len(chain) - 1, -1, -1):
            item = chain[position]
            layer = item.join if isinstance(item, Block) else item
            entry = table.layers[layer][width]
            self._take(trace, layer, width, entry)
            before = entry.before
            if isinstance(item, Block):
                assert before is not None
                source = last_layer(chain[:position], -1)
                self._trace_block(trace, item, source, (before, table.layers[source]), width)
            elif position == 0 and fork is not None:
                assert before is not None
                apart = self._transfer(fork, before, layer, width, True)
                trace.fork_adjustment = apart - self._transfer(fork, before, layer, width, False)
            if before is not None:
                width = before
        return trace

    def _take(self, trace: _Trace, layer: int, width: int, entry: _Entry) -> None:
        trace.width[layer] = width
        trace.entry[layer] = entry
        trace.device_time += entry.own * width
        trace.num_devices = max(trace.num_devices, width)

    def _trace_block(
        self, trace: _Trace, block: Block, fork: int, start: tuple[int, _Options], width: int
    ) -> None:
        chosen = (start[0], start[1][start[0]])
        joined = trace.entry[block.join]
        device_time = 0.0
        branches: list[tuple[float, int, int, float]] = []
        for branch, end in zip(block.branches, joined.ends, strict=True):
            last = last_layer(branch, fork)
            found = _Trace()
            total = start[1][end].total
            if branch:
                table = self.chain(branch, fork, chosen)
                total = table.last[end].total
                found = self.trace(branch, table, end, fork)
            trace.width.update(found.width)
            trace.entry.update(found.entry)
            device_time += found.device_time
            apart = self._transfer(last, end, block.join, width, True)
            apart -= self._transfer(last, end, block.join, width, False)
            branches.append(
                (
                    total - chosen[1].total + found.overtime,
                    found.num_devices,
                    last,
                    found.fork_adjustment + apart,
                )
            )
        more_time, num_devices, overtime = self._pack(branches)
        device_time += more_time
        device_time += joined.own * width  # once more: see the module docstring
        trace.device_time += device_time
        trace.num_devices = max(trace.num_devices, num_devices, width)
        trace.overtime += overtime

    def _pack(self, branches: list[tuple[float, int, int, float]]) -> tuple[float, int, float]:
        """Branches onto devices, longest first: (device time added, devices, overtime)."""
        added, overtime = 0.0, 0.0
        branches = sorted(branches, reverse=True)
        longest = branches[0][0]
        busy: list[float] = []
        for position, (time, needed, _, adjustment) in enumerate(branches):
            if position:
                stretch = (adjustment + time) / time if time > 0 else 1.0
                if self.shares_devices or longest < adjustment or stretch > self.limit:
                    longest += time
                    overtime += time
                else:
                    time += adjustment
                    if time > longest:
                        overtime += time - longest
                        longest = time
                        added += adjustment * needed
            taken = 0
            for device in range(len(busy)):
                if busy[device] + time <= longest:
                    busy[device] += time
                    taken += 1
                if taken >= needed:
                    break
            busy.extend([time] * (needed - taken))
        return added, len(busy), overtime
