"""Seconds of an iteration under Sailor's rules, and rules for plans that Sailor cannot say.

Sailor's simulator has one closed form for a pipeline of stages ``i`` with ``n`` micro-batches of
one size each, of which no send overlaps any computation::

    T = (n - 1) max (c[i] + p[i]) + sum p[i] + sum c[i] + u + sync

with the compute time ``c[i]`` of the slowest replica, the sends ``p[i]``, one update ``u`` and the
slowest stage's ring of gradients. What is added reduces to this where a plan is one of Sailor's:

- **Lists of micro-batches**, one for each column of replicas, whose samples are exactly the batch.
  One stage: ``max sum c[j](b[j, k])`` over columns ``j``, replicas meet at the gradients only.
  More: the steady part is, over stages and columns, the largest sum over all micro-batches of a
  column but its largest one.
- **Sizes between two measured ones**: by straight lines; never outside of what was measured.
- **Unlike numbers of replicas**: every stage runs the whole batch, ``n[i] = ceil(G / (b d[i]))``.
- **ZeRO-1**: a replica updates its slice; traffic is the same.
"""

from collections.abc import Callable
from dataclasses import dataclass

from heterog.errors import StrategyError
from sailor.inputs import FLOAT_BYTES, Inputs, Plan, Polynomial, Replica, Stage, seconds_of

BUCKET_BYTES = 5e8
"""Gradients are reduced in buckets of this size and a rest."""
MOST_SLICES = 4
"""Sailor's simulator divides gradients by the smallest team of a stage, but never by more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of an iteration and of its parts.

    Attributes:
        total_s: of the iteration.
        pipeline_s: without the gradients' rings.
        sync_s: of the slowest stage's ring.
        straggler_s: of the slowest stage's micro-batch, sends included; of the largest
            micro-batches where there are lists.
        update_s: of the optimizer.
        compute_s: of the slowest replica of each stage, likewise.
        send_s: of each stage's sends and receives, likewise.
        stage_sync_s: of each stage's ring.
    """

    total_s: float
    pipeline_s: float
    sync_s: float
    straggler_s: float
    update_s: float
    compute_s: tuple[float, ...]
    send_s: tuple[float, ...]
    stage_sync_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Looks up seconds.

    Attributes:
        inputs: what was measured.
        is_cautious: sizes between two measured ones take the time per sample of the smaller one
            instead of a point on the line between both.
    """

    inputs: Inputs
    is_cautious: bool = False

    def compute_s(self, replica: Replica, stage: Stage, micro_batch: int) -> float:
        """Forward and backward of a stage's layers for one micro-batch.

        Raises:
            StrategyError: this size was not measured and does not lie between measured ones.
        """
        first, end = stage.first_layer, stage.end_layer
        return self._between(
            replica,
            micro_batch,
            lambda micro: self._span(replica, micro, first, end),
            is_by_sample=True,
        )

    def update_s(self, replica: Replica, micro_batch: int) -> float:
        """The optimizer's step."""
        times = self.inputs.times[replica.card]
        return self._between(
            replica,
            micro_batch,
            lambda micro: times[micro][replica.tensor].update_s,
            is_by_sample=False,
        )

    def _span(self, replica: Replica, micro: int, first: int, end: int) -> float:
        sums = self.inputs.times[replica.card][micro][replica.tensor].compute_s
        return sums[end] - sums[first]

    def _between(
        self,
        replica: Replica,
        micro_batch: int,
        seconds: Callable[[int], float],
        *,
        is_by_sample: bool,
    ) -> float:
        """Seconds at a size, measured or on the line between its neighbours."""
        lower, upper = neighbours(self.inputs, replica, micro_batch)
        if lower == upper:
            return seconds(lower)
        if self.is_cautious:
            return seconds(lower) * (micro_batch / lower if is_by_sample else 1.0)
        part = (micro_batch - lower) / (upper - lower)
        return seconds(lower) * (1.0 - part) + seconds(upper) * part


def neighbours(inputs: Inputs, replica: Replica, micro_batch: int) -> tuple[int, int]:
    """The largest measured size that is not larger, and the smallest that is not smaller.

    Sailor's simulator counts zero seconds for some sizes that it does not have; here they are
    refused.

    Raises:
        StrategyError: one of them does not exist.
    """
    measured = inputs.profiled(replica.card, replica.tensor)
    lower = [size for size in measured if size <= micro_batch]
    upper = [size for size in measured if size >= micro_batch]
    if not lower or not upper:
        have = f"sizes {measured[0]} to {measured[-1]}" if measured else "no size at all"
        raise StrategyError(
            f"micro-batches of {micro_batch} were not measured on {replica.card} in teams of "
            f"{replica.tensor} ({have}); choose a size in between."
        )
    return lower[-1], upper[0]


def timing_of(plan: Plan, inputs: Inputs, *, is_cautious: bool = False) -> Timing:
    """Seconds of a plan.

    Args:
        plan: Sailor's or not.
        inputs: what was measured.
        is_cautious: how sizes are priced that were not measured, see ``Clock``.

    Raises:
        StrategyError: something in the plan was not measured.
    """
    clock = Clock(inputs=inputs, is_cautious=is_cautious)
    for replica in {replica for stage in plan.stages for replica in stage.replicas}:
        # Their simulator looks this up for every plan: cards without links have no score.
        inputs.link((replica.card, 1), (replica.card, 1))
    largest = max((size for sizes in _lists(plan) for size in sizes), default=0)
    compute = tuple(_compute_s(plan, index, clock) for index in range(len(plan.stages)))
    send = sends_s(plan, largest, inputs)
    sync = tuple(sync_s(stage, inputs) for stage in plan.stages)
    update = max(
        clock.update_s(replica, size) * (1.0 / len(stage.replicas) if plan.is_zero1 else 1.0)
        for stage in plan.stages
        for column, replica in enumerate(stage.replicas)
        for size in plan.sizes_of(column)
    )
    if len(plan.stages) == 1 and plan.lists is not None:
        filled = _replicas_alone_s(plan, clock)
    else:
        filled = _steady_s(plan, clock) + sum(send) + sum(compute)
    return Timing(
        total_s=filled + update + max(sync),
        pipeline_s=filled + update,
        sync_s=max(sync),
        straggler_s=max(c + p for c, p in zip(compute, send, strict=True)),
        update_s=update,
        compute_s=compute,
        send_s=send,
        stage_sync_s=sync,
    )


def num_micro(plan: Plan, stage: Stage) -> int:
    """Micro-batches of a stage's replica in a plan without lists: enough to cover the batch."""
    return -(-plan.batch // (plan.micro_batch * len(stage.replicas)))


def _lists(plan: Plan) -> tuple[tuple[int, ...], ...]:
    return ((plan.micro_batch,),) if plan.lists is None else plan.lists


def _compute_s(plan: Plan, index: int, clock: Clock) -> float:
    """The slowest replica of a stage, each at its largest micro-batch."""
    stage = plan.stages[index]
    return max(
        clock.compute_s(replica, stage, size)
        for column, replica in enumerate(stage.replicas)
        for size in plan.sizes_of(column)
    )


def _replicas_alone_s(plan: Plan, clock: Clock) -> float:
    """One stage: no replica waits for another before the gradients."""
    (stage,) = plan.stages
    return max(
        sum(clock.compute_s(replica, stage, size) for size in sizes)
        for replica, sizes in zip(stage.replicas, _lists(plan), strict=True)
    )


def _steady_s(plan: Plan, clock: Clock) -> float:
    """The slowest stage's time for all micro-batches but one."""
    if plan.lists is None:
        send = sends_s(plan, plan.micro_batch, clock.inputs)
        return max(
            (num_micro(plan, stage) - 1) * (_compute_s(plan, index, clock) + send[index])
            for index, stage in enumerate(plan.stages)
        )
    sizes = {size for column in plan.lists for size in column}
    send_of = {size: sends_s(plan, size, clock.inputs) for size in sizes}
    return max(
        sum(
            clock.compute_s(stage.replicas[column], stage, size) + send_of[size][index]
            for size in sorted(sizes_of)[:-1]
        )
        for index, stage in enumerate(plan.stages)
        for column, sizes_of in enumerate(plan.lists)
    )


def sends_s(plan: Plan, micro_batch: int, inputs: Inputs) -> tuple[float, ...]:
    """Sends and receives of every stage for one micro-batch of a size.

    The asymmetries are those of Sailor's simulator: the last stage pays its gradients twice, the
    first one its activations twice where there are four stages or more.
    """
    count = len(plan.stages)
    if count == 1:
        return (0.0,)
    outputs = inputs.sizes[1].outputs
    scale = FLOAT_BYTES * micro_batch
    ahead = [
        _slowest_s(stage, after, outputs[stage.end_layer - 1] * scale, inputs)
        for stage, after in zip(plan.stages, plan.stages[1:], strict=False)
    ]
    back = [
        _slowest_s(stage, before, outputs[stage.first_layer] * scale, inputs)
        for stage, before in zip(plan.stages[1:], plan.stages, strict=False)
    ]
    first = ahead[0] if count <= 3 else 2 * ahead[0]
    middle = [ahead[index] + back[index - 1] for index in range(1, count - 1)]
    return (first, *middle, 2 * back[-1])


def _slowest_s(sender: Stage, receiver: Stage, num_bytes: float, inputs: Inputs) -> float:
    """The slowest of a stage's replicas, each of which sends to one of its neighbour's."""
    columns = len(receiver.replicas)
    pairs = {
        (replica, receiver.replicas[column % columns])
        for column, replica in enumerate(sender.replicas)
    }
    return max(
        seconds_of(inputs.link((one.card, one.tensor), (other.card, other.tensor)), num_bytes)
        for one, other in pairs
    )


def sync_s(stage: Stage, inputs: Inputs) -> float:
    """A ring over the replicas of a stage, at the rate of the slowest pair of neighbours.

    There is no edge from the last replica to the first one, and every pair has the rate of one
    GPU each, also where teams are larger.
    """
    count = len(stage.replicas)
    if count < 2:
        return 0.0
    params = inputs.sizes[1].params
    smallest = min(replica.tensor for replica in stage.replicas)
    num_bytes = (
        (params[stage.end_layer] - params[stage.first_layer])
        * FLOAT_BYTES
        / min(MOST_SLICES, smallest)
    )
    pairs = {
        (one.card, other.card)
        for one, other in zip(stage.replicas, stage.replicas[1:], strict=False)
    }
    return max(ring_s(inputs.link((one, 1), (other, 1)), num_bytes, count) for one, other in pairs)


def ring_s(link: Polynomial, num_bytes: float, num_members: int) -> float:
    """Reduce-scatter and all-gather of buckets in a ring: ``2 (D - 1) time(bucket / D)`` each."""
    full, rest = divmod(num_bytes, BUCKET_BYTES)
    steps = 2 * (num_members - 1)
    seconds = full * seconds_of(link, BUCKET_BYTES / num_members)
    return steps * (seconds + seconds_of(link, rest / num_members))
