"""Products with a constant sparse matrix: samples and features split, or rows with neighbours.

The matrix is whole on every device. Along features nothing is sent at all; along rows a device
reads the rows that its own entries name (``neighbours``), which others may own.
"""

from collections.abc import Mapping

from heterog.graph.op_costs import SPARSE_PRODUCT
from heterog.graph.placement import Arg, OpCall, Placement, R, S, neighbours
from heterog.graph.sharding_rules.table import Axis, RuleResult, choose, rule


@rule(SPARSE_PRODUCT)
def _product(call: OpCall, placements: tuple[Placement, ...], axis_size: int) -> RuleResult:
    rank = len(call.outputs[0].shape)
    others = (R,) * (len(call.inputs) - 1)
    axes = [Axis((dim, *others), (dim,)) for dim in range(rank) if dim != rank - 2]
    return choose(call, placements, axis_size, axes, [(0,)])


def product_of_rows(call: OpCall, dim: int, units: int) -> RuleResult | None:
    """The rule of a sparse product whose rows are cut; ``None`` along other dimensions.

    Args:
        call: The op.
        dim: Dimension that is cut, of the features and of the result.
        units: Number of units of the axis.
    """
    if dim != len(call.outputs[0].shape) - 2:
        return None
    others = (R,) * (len(call.inputs) - 1)
    return RuleResult((neighbours(dim, pattern_key(call.args)), *others), (S(dim),))


def pattern_key(args: Mapping[str, Arg]) -> str:
    """Key of the entries that a sparse product multiplies with; empty for other ops."""
    key = args.get("pattern")
    return key if isinstance(key, str) else ""
