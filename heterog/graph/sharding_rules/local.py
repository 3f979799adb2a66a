"""The arguments of an op on a device that holds only its share of an axis."""

from heterog.graph.placement import Arg, OpCall, Placement, kinds
from heterog.graph.sharding_rules.table import RuleResult, dimension, integers, positions
from heterog.graph.sharding_rules.view import slice_start

_SIZE_ARGS = ("size", "shape", "sizes", "input_sizes", "input_size")
"""Arguments that state the shape of the output (``shape`` in ``reshape``)."""
AFFINE_GRIDS = kinds("affine_grid_generator affine_grid_generator_backward")
"""Ops whose ``size`` is that of the images for which a grid is, samples first."""


def local_shape(
    shape: tuple[int, ...], placement: Placement, share: int, axis_size: int
) -> tuple[int, ...]:
    """Shape of the part that a device with ``share`` of ``axis_size`` units holds.

    >>> from heterog.graph.placement import S
    >>> local_shape((6, 4), S(0), share=2, axis_size=3)
    (4, 4)
    """
    if placement.kind != "S":
        return shape
    dim = placement.dim
    return (*shape[:dim], shape[dim] // axis_size * share, *shape[dim + 1 :])


def local_args(call: OpCall, result: RuleResult, share: int, axis_size: int) -> dict[str, Arg]:
    """Make the op's arguments for a device that owns ``share`` of ``axis_size`` units.

    Only counts and sizes change, and only where ``result`` splits the counted dimension: sizes of
    the output, bounds of a slice and sizes of the pieces along the split dimension, groups of a
    convolution, the counts of group norm.

    Not every op accepts a share of 0. Torch runs batches of size 0, but it refuses images without
    channels, cuts an empty dimension into one piece in ``split.Tensor``, and kills the process
    (SIGFPE on CPUs) on attention without heads, on BatchNorm's backward without a batch and on
    weight norm without slices. A device without a share then skips the op: S outputs are empty, P
    outputs are zeros, and an R output (the bias gradient of a convolution split by input channels)
    must come from another device.

    Args:
        call: The op with its global arguments.
        result: The rule it runs under.
        share: Number of units that this device owns.
        axis_size: Number of units of the axis.
    """
    args = dict(call.args)
    if not result.outputs:  # only checks
        return args
    output, target = result.outputs[0], call.outputs[0].shape
    if output.kind == "S":
        for name in _SIZE_ARGS:
            given = args.get(name)
            if isinstance(given, tuple):
                whole = integers(call, name) if call.kind in AFFINE_GRIDS else target
                args[name] = local_shape(whole, output, share, axis_size)
    args.update(_along_split(call, result, share, axis_size))
    args.update(_counts(call, result, share, axis_size))
    return args


def _along_split(call: OpCall, result: RuleResult, share: int, axis_size: int) -> dict[str, Arg]:
    """Bounds and piece sizes of an op that cuts along the split dimension."""
    if "dim" not in call.args or len(result.inputs) != 1 or result.inputs[0].kind != "S":
        return {}
    placement, shape = result.inputs[0], call.inputs[0].shape
    if placement.dim != dimension(call, "dim", len(shape)):
        return {}
    if call.kind in ("slice.Tensor", "slice_backward.default"):
        narrow = (call.outputs if call.kind == "slice.Tensor" else call.inputs)[0].shape
        start = slice_start(call) // axis_size * share
        return {"start": start, "end": start + narrow[placement.dim] // axis_size * share}
    for name in ("split_size", "split_sizes"):
        given = call.args.get(name)
        if isinstance(given, int):
            return {name: given // axis_size * share}
        if isinstance(given, tuple):
            sizes = (meta.shape[placement.dim] for meta in call.outputs)
            return {name: tuple(size // axis_size * share for size in sizes)}
    return {}


def _counts(call: OpCall, result: RuleResult, share: int, axis_size: int) -> dict[str, Arg]:
    """Counts that convolution and group norm take in addition to their tensors' shapes."""

    def part(name: str, argument: str, dim: int) -> dict[str, Arg]:
        """Scale the count ``name`` if ``argument`` is split in ``dim``."""
        count, where = call.args.get(name), positions(call, argument)
        if not where or result.inputs[where[0]][:2] != ("S", dim):
            return {}
        if isinstance(count, tuple):
            sizes = (size for size in count if isinstance(size, int))
            return {name: tuple(size // axis_size * share for size in sizes)}
        return {name: count // axis_size * share} if isinstance(count, int) else {}

    if call.kind.startswith("native_group_norm"):
        return part("N", "input", 0) | part("C", "input", 1) | part("group", "input", 1)
    if call.kind.startswith("convolution"):
        # With one group the input channels are contracted, and the group stays one.
        groups = part("groups", "input", 1) if call.args["groups"] != 1 else {}
        return groups | part("bias_sizes", "grad_output", 1)
    return {}
