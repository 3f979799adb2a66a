"""FLOPs and bytes of sparse products on a part of their rows or features.

The work of a row is its number of entries: a device with a tenth of the nodes of a skewed graph
may have half of the edges. All other costs follow from the number of units alone.
"""

from heterog.graph.axis_plan import BATCH_AXIS, AxisPlan
from heterog.graph.op_costs import SPARSE_PRODUCT
from heterog.graph.op_graph import FloatArray, OpGraph
from heterog.graph.sharding_rules.sparse import pattern_key


class SparseWork:
    """Work of the sparse products of a graph that have a rule.

    Args:
        graph: One training step.
        plan: Placements of its tensors.
    """

    def __init__(self, graph: OpGraph, plan: AxisPlan) -> None:
        self._graph = graph
        self._plan = plan
        by_key = {pattern.key: pattern for pattern in graph.patterns}
        self._ops = [
            (index, by_key[pattern_key(op.args)])
            for index, op in enumerate(graph.ops)
            if op.kind == SPARSE_PRODUCT
            and plan.op_axis[index] != BATCH_AXIS
            and pattern_key(op.args) in by_key
        ]

    @property
    def by_rows(self) -> bool:
        """Whether rows are cut, so that work depends on which rows a device has."""
        return any(self._plan.needed[op][0].pattern for op, _ in self._ops)

    def put(
        self, work: tuple[FloatArray, FloatArray], first_unit: int, units: int, samples: int
    ) -> tuple[FloatArray, FloatArray]:
        """Replace the work of sparse products, which units alone do not determine.

        Args:
            work: FLOPs and bytes moved of every op; changed in place.
            first_unit: First unit of the device.
            units: Number of units of the device.
            samples: Number of samples of its team.

        Returns:
            The changed work.
        """
        flops, moved = work
        graph = self._graph
        for index, pattern in self._ops:
            op, all_units = graph.ops[index], max(self._plan.units(index), 1)
            needed = self._plan.needed[index][0]
            begin, end = min(first_unit, all_units), min(first_unit + units, all_units)
            part = (end - begin) / all_units if needed.is_split else 1.0
            entries = part
            if needed.pattern:
                inner = pattern.num_rows // all_units
                count = pattern.num_entries_of(begin * inner, end * inner)
                entries = count / max(pattern.num_entries, 1)
            of_matrix = float(sum(graph.tensor_bytes[tensor] for tensor in op.inputs[1:]))
            along = samples / graph.batch_size
            flops[index] = op.flops * entries * along
            moved[index] = (
                (op.bytes_read - of_matrix) * entries * along
                + of_matrix * (entries if needed.pattern else 1.0)
                + op.bytes_written * part * along
            )
        return flops, moved
