"""The ops that a group reruns to recompute its activations, and the op before which it does.

Recomputation (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016) trades seconds
for bytes: what a group's forward ops make is not kept for its backward ops, but made again from
what the group read from others. What is kept of a group is thus what *other* groups read of it:
for neighbours that all recompute, the values at the borders between them.

Unlike the paper, only the ops run again whose results some backward op of the group reads, or that
these ops need; and what arrived from other devices is kept, so no communication happens twice.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple


class Recomputation(NamedTuple):
    """The ops that a group reruns.

    Attributes:
        reader: Op before which they run: the first backward op of the group, or the first that
            makes one of its gradients, so that no update comes in between; -1 if there is none.
        ops: Ops that run again, in program order.
    """

    reader: int
    ops: tuple[int, ...]


def recomputations(
    group: Sequence[int],
    is_backward: Sequence[bool],
    own_reads: Sequence[Sequence[int]],
    gradient_makers: Sequence[int],
    num_groups: int,
    kept: Collection[int] = (),
) -> list[Recomputation]:
    """Find the recomputation of every group, over compute ops by row.

    Args:
        group: Group of each op, negative for constants.
        is_backward: Whether each op belongs to the backward pass.
        own_reads: For each op, the makers of inputs that it reads without conversion: ops of its
            own group, or constants.
        gradient_makers: Ops that make the gradients of parameters.
        num_groups: Number of groups.
        kept: Ops whose results are kept.
    """
    readers = [-1] * num_groups
    makes_gradient = set(gradient_makers)
    for op, of in enumerate(group):
        if of >= 0 and readers[of] < 0 and (is_backward[op] or op in makes_gradient):
            readers[of] = op
    again: list[set[int]] = [set() for _ in range(num_groups)]
    # From last to first: who reads an op's result is known before the op is looked at.
    for op in range(len(group) - 1, -1, -1):
        of = group[op]
        if of >= 0 and (is_backward[op] or op in again[of]):
            again[of].update(
                maker
                for maker in own_reads[op]
                if group[maker] == of
                and not is_backward[maker]
                and maker < readers[of]
                and maker not in kept
            )
    return [
        Recomputation(reader, tuple(sorted(ops)))
        for reader, ops in zip(readers, again, strict=True)
    ]
