"""Scaling of the loss, so that gradients in float16 do not vanish.

Cards without bfloat16 (V100, T4, RTX 20) train in float16, whose smallest normal number is 6e-5:
smaller gradients lose digits and then everything. So the backward pass begins with the scale
instead of 1, and gradients are divided by it before they are clipped and used (Micikevicius et
al., "Mixed Precision Training", ICLR 2018, section 3.2). The scale follows the rules of
``torch.amp.GradScaler``.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from heterog.errors import HeterogError
from heterog.graph.op_graph import OpGraph


@dataclass(slots=True, kw_only=True)
class LossScale:
    """A scale that grows while gradients are finite and shrinks where they are not.

    A step whose gradients are not finite changes no parameter and no state of the optimizer. Every
    rank has a ``LossScale`` of its own, and all of them change alike.

    Attributes:
        scale: Factor of the loss in the next step; the default is torch's.
        growth_factor: Factor of the scale after ``growth_interval`` good steps in a row.
        backoff_factor: Factor of the scale after a step whose gradients are not finite.
        growth_interval: Number of good steps in a row after which the scale grows.
        good_steps: Good steps in a row since the scale has changed.
        num_skipped: Steps so far that changed nothing.
    """

    scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    good_steps: int = 0
    num_skipped: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.scale <= 2.0**100:
            raise HeterogError(f"a loss scale of {self.scale}; it must be above 0.")
        if self.growth_factor <= 1.0 or not 0.0 < self.backoff_factor < 1.0:
            raise HeterogError(
                f"a loss scale with growth_factor {self.growth_factor} and backoff_factor "
                f"{self.backoff_factor}; the first must be above 1, the second between 0 and 1."
            )
        if self.growth_interval < 1:
            raise HeterogError(f"growth_interval is {self.growth_interval}; it must be 1 or more.")

    def update(self, *, is_finite: bool) -> None:
        """Take in whether all gradients of a step were finite."""
        if not is_finite:
            self.scale *= self.backoff_factor
            self.good_steps = 0
            self.num_skipped += 1
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale *= self.growth_factor
            self.good_steps = 0

    def state_dict(self) -> dict[str, float]:
        """Numbers to keep in a checkpoint, as its ``extra``."""
        return {
            "scale": self.scale,
            "good_steps": self.good_steps,
            "num_skipped": self.num_skipped,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from numbers that ``state_dict`` gave."""
        self.scale = float(state["scale"])
        self.good_steps = int(state["good_steps"])
        self.num_skipped = int(state["num_skipped"])


def op_that_begins_backward(graph: OpGraph) -> int | None:
    """The op that makes the gradient of the loss by itself, a 1; ``None`` if there is none."""
    loss = int(graph.storage[graph.loss])
    return next(
        (
            index
            for index, op in enumerate(graph.ops)
            if op.kind == "ones_like.default" and int(graph.storage[op.inputs[0]]) == loss
        ),
        None,
    )
