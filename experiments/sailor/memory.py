"""Memory under Sailor's rules: what a GPU of each replica holds, and whether it fits."""

from dataclasses import dataclass

from heterog.errors import StrategyError
from sailor.inputs import CAPACITY_BYTES, FLOAT_BYTES, Inputs
from sailor.plan import Plan

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
