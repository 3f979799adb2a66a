"""Averaging on real ranks: islands' parameters come together after every H steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from heterog.errors import StrategyError
from heterog.graph.op_graph import OpGraph
from heterog.runtime.collectives import Communicator, Pending
from heterog.runtime.masters import Masters
from heterog.strategy.averaged_buckets import AveragedBucket, averaged_buckets
from heterog.strategy.averaging import Averaging, island_samples, islands
from heterog.strategy.strategy import Strategy


def gradient_scale(graph: OpGraph, strategy: Strategy, rank: int) -> float:
    """What a rank's gradients are multiplied by, so that they are means over its own island.

    A step's loss is a mean over the whole batch, of which an island has made its part. Where
    labels are masked it is the island's part of the batch that counts, not of the labels: with
    H = 1 the average is then the step of one device whatever is masked.

    Raises:
        StrategyError: a batch of this size leaves an island without samples.
    """
    if strategy.averaging is None:
        return 1.0
    samples = island_samples(strategy, graph.batch_size)
    if not all(samples):
        raise StrategyError(
            f"of a batch of {graph.batch_size} the islands get {list(samples)} samples; with "
            "averaging each of them needs at least one: leave a smaller last batch out."
        )
    own = next(n for n, members in enumerate(islands(strategy)) if rank in members)
    return graph.batch_size / samples[own]


@dataclass(slots=True)
class OuterState:
    """What the outer optimizer keeps of one parameter.

    Attributes:
        anchor: the parameter after the averaging before.
        momentum: m of ``Averaging``.
    """

    anchor: Tensor
    momentum: Tensor


@dataclass(slots=True)
class _UnderWay:
    """A bucket whose sum is on its way."""

    bucket: AveragedBucket
    total: Pending = field()


class Averager:
    """Averages this rank's parameters with those of the other islands.

    Args:
        graph: of the step.
        strategy: with an averaging.
        rank: this rank.
        parameters: of this rank, by tensor id.
        masters: the optimizer's copies, which are averaged where there are any.
        communicator: talks to the other ranks; gets a process group for each set of devices.

    Attributes:
        averaging: of the strategy.
        outer: what the outer optimizer keeps, by row of ``graph.updates``; empty without one.
    """

    def __init__(
        self,
        graph: OpGraph,
        strategy: Strategy,
        rank: int,
        parameters: Mapping[int, nn.Parameter],
        masters: Masters,
        communicator: Communicator,
    ) -> None:
        assert strategy.averaging is not None
        self.averaging: Averaging = strategy.averaging
        every = averaged_buckets(graph, strategy)
        communicator.open({bucket.devices for bucket in every})
        self._rank = rank
        self._buckets = [bucket for bucket in every if rank in bucket.devices]
        self._communicator = communicator
        self._masters = masters
        self._values = {
            row: parameters[graph.updates[row][1]] for each in self._buckets for row in each.rows
        }
        self.outer: dict[int, OuterState] = {}
        self.begin(0)

    def begin(self, num_steps: int) -> None:
        """Start from the parameters as they are now, which are alike on all islands.

        Args:
            num_steps: since the start of training.
        """
        self._alike_after = num_steps
        if self.averaging.has_outer:
            for row in self._values:
                now = self._stepped(row).detach()
                self.outer[row] = OuterState(now.clone(), torch.zeros_like(now))

    def steps_to_go(self, num_steps: int) -> int:
        """Steps from a number of steps to the next averaging; 0 where islands are alike."""
        return 0 if num_steps == self._alike_after else self._left(num_steps)

    def _left(self, num_steps: int) -> int:
        return -num_steps % self.averaging.every

    def after_step(self, num_steps: int) -> None:
        """Average if this many steps since the start of training complete a window."""
        if self._left(num_steps) == 0:
            with torch.no_grad():
                self._average()
            self._alike_after = num_steps

    def _average(self) -> None:
        under_way = [_UnderWay(bucket, self._send(bucket)) for bucket in self._buckets]
        while under_way:
            each = under_way.pop(0)  # and let its copy go when it has been read
            self._take_over(each.bucket.rows, each.total.wait())
        self._masters.write_back(self._values.values())

    def _send(self, bucket: AveragedBucket) -> Pending:
        """Issue the weighted sum of a bucket."""
        weight = bucket.weights[bucket.devices.index(self._rank)]
        flat = torch.cat([self._stepped(row).detach().reshape(-1) for row in bucket.rows])
        return self._communicator.all_reduce(flat.mul_(weight), bucket.devices)

    def _take_over(self, rows: Sequence[int], average: Tensor) -> None:
        """Write an average back, or let the outer optimizer step towards it."""
        values = [self._stepped(row) for row in rows]
        parts = torch.split(average, [value.numel() for value in values])
        for row, value, part in zip(rows, values, parts, strict=True):
            new = part.view(value.shape)
            if self.averaging.has_outer:
                new = outer_step(self.outer[row], new, self.averaging)
            value.copy_(new)

    def _stepped(self, row: int) -> nn.Parameter:
        return self._masters.of(self._values[row])


def outer_step(state: OuterState, average: Tensor, averaging: Averaging) -> Tensor:
    """One step of the outer optimizer; returns the new parameter and updates the state in place.

    With d = anchor - average: m = momentum * m + d, anchor -= rate * (d + momentum * m), the
    Nesterov SGD of ``torch.optim.SGD`` without dampening.
    """
    difference = state.anchor - average
    state.momentum.mul_(averaging.outer_momentum).add_(difference)
    direction = difference.add(state.momentum, alpha=averaging.outer_momentum)
    return state.anchor.sub_(direction, alpha=averaging.outer_rate)
