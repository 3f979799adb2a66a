"""A plan's score: its time, its memory, which rules it needs, and what is doubtful about it.

Memory under Sailor's rules: what a GPU of each replica holds, and whether it fits.
"""

from dataclasses import dataclass

from heterog.errors import StrategyError
from sailor.inputs import CAPACITY_BYTES, FLOAT_BYTES, Inputs, Plan
from sailor.timing import Timing, neighbours, num_micro, timing_of

STATE_BYTES = 24
"""For each parameter under Adam: 8 of Adam, 4 each of model, gradients, communication and copies
at the start."""
SHARED_BYTES = 8
"""Of these, what ZeRO-1 cuts into slices."""
CHECK_BYTES = {False: 2.0e9, True: 3.0e9}
"""What runtime and fragments take in the check of validity, by whether GPUs form teams."""
VALIDATION_BYTES = 4.76e9 + 0.3e9
"""The same where predictions are held against real runs."""


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
        """By what real runs were predicted to take."""
        return self.validation_bytes <= self.capacity_bytes


def memory_of(plan: Plan, inputs: Inputs) -> list[Memory]:
    """Memory of every replica.

    Raises:
        StrategyError: a card or a tensor parallelism of which no sizes are known.
    """
    found = []
    for index, stage in enumerate(plan.stages):
        share = 1.0 / len(stage.replicas) if plan.is_zero1 else 1.0
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
                micro_batch=max(plan.sizes_of(column), default=0),
                share=share,
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
    share: float = 1.0,
) -> float:
    """States and activations of layers on one GPU, without what the runtime takes.

    Args:
        inputs: for the sizes of layers.
        tensor: tensor parallelism.
        first_layer: of the stage.
        end_layer: behind its last one.
        in_flight: micro-batches whose activations are kept: stages from this one to the last.
        micro_batch: samples of the largest.
        share: of the optimizer states that this GPU keeps.
    """
    sizes = inputs.sizes[tensor]
    params = sizes.params[end_layer] - sizes.params[first_layer]
    activations = sizes.activations[end_layer] - sizes.activations[first_layer]
    states = STATE_BYTES - SHARED_BYTES * (1.0 - share)
    return states * params + in_flight * micro_batch * FLOAT_BYTES * activations


LISTS, INTERPOLATED = "lists of micro-batches", "interpolated size"
UNLIKE_COUNTS, ZERO1 = "unlike numbers of replicas", "ZeRO-1"
TIGHT = "over the memory of real runs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What the rules say about a plan.

    Attributes:
        timing: seconds.
        cautious_s: the iteration where sizes that were not measured take the time per sample of
            the next smaller one; the same as the total where all were measured.
        samples: that the plan is charged for, the most of any stage.
        memory: of every replica.
        extensions: rules beyond Sailor's that the plan needs; none if Sailor can say it.
        flags: what is doubtful.
    """

    timing: Timing
    cautious_s: float
    samples: int
    memory: tuple[Memory, ...]
    extensions: tuple[str, ...]
    flags: tuple[str, ...]

    @property
    def is_valid(self) -> bool:
        """Whether every GPU has room, by Sailor's check."""
        return all(each.fits for each in self.memory)

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
    timing = timing_of(plan, inputs)
    memory = tuple(memory_of(plan, inputs))
    extensions = _extensions(plan, inputs)
    cautious_s = timing.total_s
    if INTERPOLATED in extensions:
        cautious_s = timing_of(plan, inputs, is_cautious=True).total_s
    flags = [TIGHT] if not all(each.fits_tightly for each in memory) else []
    return Score(
        timing=timing,
        cautious_s=cautious_s,
        samples=samples_of(plan),
        memory=memory,
        extensions=extensions,
        flags=tuple(flags),
    )


def samples_of(plan: Plan) -> int:
    """Samples that a plan is charged for: with lists the batch, else whole rounds of columns."""
    if plan.lists is not None:
        return plan.batch
    return max(
        num_micro(plan, stage) * plan.micro_batch * len(stage.replicas) for stage in plan.stages
    )


def sailors_own_s(plan: Plan, inputs: Inputs) -> float:
    """What Sailor's simulator says where stages have unlike numbers of replicas.

    It takes the number of micro-batches from the first stage, so that stages with fewer replicas
    are given their additional work for free. Only to be shown beside the right number.
    """
    timing = timing_of(plan, inputs)
    steady = (num_micro(plan, plan.stages[0]) - 1) * timing.straggler_s
    rest = sum(timing.compute_s) + sum(timing.send_s) + timing.update_s
    return steady + rest + timing.sync_s


def _extensions(plan: Plan, inputs: Inputs) -> tuple[str, ...]:
    found = []
    if plan.lists is not None and not _is_uniform(plan):
        found.append(LISTS)
    if not plan.has_equal_replicas:
        found.append(UNLIKE_COUNTS)
    if any(_is_interpolated(plan, inputs, column) for column in range(_num_columns(plan))):
        found.append(INTERPOLATED)
    if plan.is_zero1:
        found.append(ZERO1)
    return tuple(found)


def _is_uniform(plan: Plan) -> bool:
    """Whether lists say what one size and one number would."""
    lists = plan.lists or ()
    sizes = {size for column in lists for size in column}
    return len(sizes) == 1 and len({len(column) for column in lists}) == 1


def _num_columns(plan: Plan) -> int:
    return max(len(stage.replicas) for stage in plan.stages)


def _is_interpolated(plan: Plan, inputs: Inputs, column: int) -> bool:
    replicas = [stage.replicas[column] for stage in plan.stages if column < len(stage.replicas)]
    for replica in replicas:
        for size in plan.sizes_of(column):
            lower, upper = neighbours(inputs, replica, size)
            if lower != upper:
                return True
    return False
