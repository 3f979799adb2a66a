"""What an optimizer looks at when it updates one element: which parts a device may step alone."""

from enum import StrEnum

ELEMENTWISE_OPTIMIZERS = frozenset(
    {
        "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop",
        "Rprop", "SGD",
    }
)  # fmt: skip
"""Optimizers of torch that treat each element on its own. Not so those that look at a parameter's
shape or norm (Muon, Adafactor, LARS, LAMB) or at all parameters together (LBFGS)."""


class UpdateScope(StrEnum):
    """What the update of an element depends on, besides the options of its group.

    ``graph.optimizer_probe`` finds it out by stepping the optimizer.
    """

    ELEMENT = "element"
    """The element alone: slices may be updated, each in a call of its own."""
    PARAMETER = "parameter"
    """Its whole parameter, or how often the optimizer was called: parameters are updated whole, in
    one call in a step."""
    MODEL = "model"
    """All parameters: a device that updates any of them updates all, in one call in a step."""

    @property
    def words(self) -> str:
        """What the optimizer does, after its name."""
        return {
            UpdateScope.ELEMENT: "treats every element on its own",
            UpdateScope.PARAMETER: "looks at whole parameters",
            UpdateScope.MODEL: "looks at all parameters together",
        }[self]

    def allows(self, wider: "UpdateScope") -> bool:
        """Whether an optimizer of this scope trains right where ``wider`` is kept to."""
        order = list(UpdateScope)
        return order.index(self) <= order.index(wider)


def scope_by_name(optimizer: str) -> UpdateScope:
    """Scope of an optimizer of which only the name is known, as in a graph of another tool."""
    known = optimizer in ELEMENTWISE_OPTIMIZERS
    return UpdateScope.ELEMENT if known else UpdateScope.PARAMETER
