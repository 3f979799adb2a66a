"""A plan's score: its time, and its memory.

Memory under Sailor's rules: what a GPU of each replica holds, and whether it fits.
"""

from dataclasses import dataclass

from heterog.errors import StrategyError
from sailor.inputs import CAPACITY_BYTES, FLOAT_BYTES, Inputs, Plan
from sailor.timing import Timing, timing_of

STATE_BYTES = 24
"""For each parameter under Adam: 8 of Adam, 4 each of model, gradients, communication and copies
at the start."""
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
        """Whether every GPU has room for what real runs were predicted to take."""
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
