"""A plan's score: its time, and its memory.

Memory under Sailor's rules is the bytes on a GPU of each replica, and whether they fit.

Sailor's closed form is that of ``heterog.agents.benchmark.sailor``, with the micro-batches of a
replica as rounds; here it gets the seconds and bytes that Sailor measured.
"""

from dataclasses import dataclass
from itertools import pairwise
from operator import add

from heterog.agents.benchmark.sailor import pipeline_s, sends_of_stages
from heterog.errors import StrategyError
from sailor.inputs import CAPACITY_BYTES, FLOAT_BYTES, Inputs, Plan, Polynomial, Stage, seconds_of

BUCKET_BYTES = 5e8
"""Gradients are reduced in buckets of this size and a rest."""
MOST_SLICES = 4
"""Sailor's simulator divides gradients by the smallest team of a stage, but by this at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of an iteration and of its parts.

    Attributes:
        total_s: of the iteration.
        pipeline_s: without the gradients' rings.
        sync_s: of the slowest stage's ring.
        straggler_s: of the slowest stage's micro-batch, sends included.
        update_s: of the optimizer.
        compute_s: of the slowest replica of each stage, for one micro-batch.
        send_s: of each stage's sends and receives, likewise.
    """

    total_s: float
    pipeline_s: float
    sync_s: float
    straggler_s: float
    update_s: float
    compute_s: tuple[float, ...]
    send_s: tuple[float, ...]


def timing_of(plan: Plan, inputs: Inputs) -> Timing:
    """Seconds of a plan.

    Raises:
        StrategyError: something in the plan was not measured.
    """
    for replica in {replica for stage in plan.stages for replica in stage.replicas}:
        # Their simulator looks this up for every plan: cards without links have no score.
        inputs.link((replica.card, 1), (replica.card, 1))
    measured = [
        [inputs.measured(replica, plan.micro_batch) for replica in dict.fromkeys(stage.replicas)]
        for stage in plan.stages
    ]
    compute = tuple(
        max(each.compute_s[stage.end_layer] - each.compute_s[stage.first_layer] for each in teams)
        for stage, teams in zip(plan.stages, measured, strict=True)
    )
    send = sends_s(plan, inputs)
    sync = tuple(sync_s(stage, inputs) for stage in plan.stages)
    update = max(each.update_s for teams in measured for each in teams)
    pipeline = pipeline_s(compute, send, update, plan.num_micro)
    return Timing(
        total_s=pipeline + max(sync),
        pipeline_s=pipeline,
        sync_s=max(sync),
        straggler_s=max(map(add, compute, send)),
        update_s=update,
        compute_s=compute,
        send_s=send,
    )


def sends_s(plan: Plan, inputs: Inputs) -> tuple[float, ...]:
    """Sends and receives of every stage for one micro-batch."""
    outputs = inputs.sizes[1].outputs
    scale = FLOAT_BYTES * plan.micro_batch
    ahead = [
        _slowest_s(stage, after, outputs[stage.end_layer - 1] * scale, inputs)
        for stage, after in pairwise(plan.stages)
    ]
    back = [
        _slowest_s(stage, before, outputs[stage.first_layer] * scale, inputs)
        for before, stage in pairwise(plan.stages)
    ]
    return tuple(sends_of_stages(ahead, back))


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


STATE_BYTES = 24
"""For each parameter under Adam: 8 of Adam, 4 each of model, gradients, communication and copies
at the start."""
CHECK_BYTES = {False: 2.0e9, True: 3.0e9}
"""Bytes of runtime and fragments in the check of validity, by whether GPUs form teams."""
VALIDATION_BYTES = 4.76e9 + 0.3e9
"""The same where predictions are compared with real runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What one GPU of a replica holds.

    Attributes:
        stage: index of the stage.
        column: index of the replica in its stage.
        card: its type.
        check_bytes: as the validity check counts.
        validation_bytes: as predictions of real runs count.
        capacity_bytes: of the card.
    """

    stage: int
    column: int
    card: str
    check_bytes: float
    validation_bytes: float
    capacity_bytes: int

    @property
    def fits(self) -> bool:
        """By the validity check."""
        return self.check_bytes <= self.capacity_bytes

    @property
    def fits_tightly(self) -> bool:
        """By the prediction for real runs."""
        return self.validation_bytes <= self.capacity_bytes


def memory_of(plan: Plan, inputs: Inputs) -> list[Memory]:
    """Memory of every replica.

    Raises:
        StrategyError: a card or a tensor parallelism of which no sizes are known.
    """
    found = []
    for index, stage in enumerate(plan.stages):
        for column, replica in enumerate(stage.replicas):
            if replica.tensor not in inputs.sizes or replica.card not in CAPACITY_BYTES:
                raise StrategyError(
                    f"no sizes are known of {replica.card} in teams of {replica.tensor}; teams "
                    f"have {', '.join(map(str, sorted(inputs.sizes)))} GPUs."
                )
            held = held_bytes(
                inputs,
                tensor=replica.tensor,
                first_layer=stage.first_layer,
                end_layer=stage.end_layer,
                in_flight=len(plan.stages) - index,
                micro_batch=plan.micro_batch,
            )
            found.append(
                Memory(
                    stage=index,
                    column=column,
                    card=replica.card,
                    check_bytes=held + CHECK_BYTES[replica.tensor > 1],
                    validation_bytes=held + VALIDATION_BYTES,
                    capacity_bytes=CAPACITY_BYTES[replica.card],
                )
            )
    return found


def held_bytes(
    inputs: Inputs,
    *,
    tensor: int,
    first_layer: int,
    end_layer: int,
    in_flight: int,
    micro_batch: int,
) -> float:
    """States and activations of layers on one GPU, without what the runtime takes.

    Args:
        inputs: for the sizes of layers.
        tensor: tensor parallelism.
        first_layer: of the stage.
        end_layer: behind its last one.
        in_flight: micro-batches whose activations are kept: stages from this one to the last.
        micro_batch: samples of each.
    """
    sizes = inputs.sizes[tensor]
    params = sizes.params[end_layer] - sizes.params[first_layer]
    activations = sizes.activations[end_layer] - sizes.activations[first_layer]
    return STATE_BYTES * params + in_flight * micro_batch * FLOAT_BYTES * activations


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What the rules say about a plan.

    Attributes:
        timing: seconds.
        samples: that the plan is charged for: whole rounds of all replicas.
        memory: of every replica.
    """

    timing: Timing
    samples: int
    memory: tuple[Memory, ...]

    @property
    def is_valid(self) -> bool:
        """Whether every GPU has room, by Sailor's check."""
        return all(each.fits for each in self.memory)

    @property
    def fits_tightly(self) -> bool:
        """Whether every GPU has room by the prediction for real runs."""
        return all(each.fits_tightly for each in self.memory)

    @property
    def peak_check_bytes(self) -> float:
        """Of the fullest GPU, as the validity check counts."""
        return max(each.check_bytes for each in self.memory)

    @property
    def peak_validation_bytes(self) -> float:
        """Of the fullest GPU, as predictions of real runs count."""
        return max(each.validation_bytes for each in self.memory)


def score_of(plan: Plan, inputs: Inputs) -> Score:
    """Score a plan.

    Raises:
        StrategyError: the plan cannot be scored; says why.
    """
    last = plan.stages[-1].end_layer
    if last != inputs.num_layers:
        raise StrategyError(
            f"the stages hold {last} layers, the model has {inputs.num_layers}; place all."
        )
    return Score(
        timing=timing_of(plan, inputs),
        samples=plan.num_micro * plan.micro_batch * len(plan.stages[0].replicas),
        memory=tuple(memory_of(plan, inputs)),
    )
