"""Tables of a graph under the op rules of strategies; those used last are kept."""

from math import prod

import numpy as np

from heterog.cluster.topology import Cluster
from heterog.graph.axis_plan import axis_plan
from heterog.graph.op_graph import OpGraph
from heterog.graph.op_rule import OpRules
from heterog.lowering import Choice, make_scratch
from heterog.lowering.channels import ChannelTable
from heterog.lowering.choice import Encoder
from heterog.lowering.program import FloatArray, IntArray
from heterog.lowering.scratch import Scratch
from heterog.lowering.tables import GraphTables, graph_tables
from heterog.pricing.cost_model import CostModel
from heterog.pricing.sparse_work import SparseWork

MAX_RULE_SETS = 16
"""Most rule sets of strategies whose tables are kept."""
_NO_ROWS: IntArray = np.zeros(0, np.int32)
_NO_NUMBERS: IntArray = np.zeros((0, 0, 0), np.int32)
_NO_SECONDS: FloatArray = np.zeros((0, 0))


class RuleSet:
    """Tables of a graph whose ops run by some rules, and seconds of these ops known so far."""

    def __init__(
        self, graph: OpGraph, op_rules: OpRules, blocks: tuple[int, ...], channels: ChannelTable
    ) -> None:
        self.op_rules = op_rules
        self.blocks = blocks
        self.tables = graph_tables(graph, op_rules, blocks)
        self.encoder = Encoder(self.tables, channels)
        self._num_devices = channels.cluster.num_devices
        self._scratch: Scratch | None = None
        ruled = {op for op, _ in op_rules}
        self.has_rule = np.array([int(op) in ruled for op in self.tables.op_id], np.bool_)
        self._plan = axis_plan(graph, op_rules)
        self._graph = graph
        self._sparse = SparseWork(graph, self._plan)
        self.minds_position = len(self._plan.causal_ops) > 0 or self._sparse.by_rows
        self._seconds: dict[tuple[int, ...], FloatArray] = {}

    @property
    def scratch(self) -> Scratch:
        """Working memory for all devices, made when it is first needed."""
        if self._scratch is None:
            self._scratch = make_scratch(self.tables, self._num_devices)
        return self._scratch

    @property
    def tells_rows_apart(self) -> bool:
        """Whether work depends on which rows a device has, not only on its number of units."""
        return self._sparse.by_rows

    def seconds(
        self,
        choice: Choice,
        types: IntArray,
        cluster: Cluster,
        cost_model: CostModel,
        members: int = 0,
    ) -> tuple[IntArray, IntArray, FloatArray]:
        """Seconds of ops with rules at the samples and units of a choice, by its devices' types.

        Args:
            choice: Choice on some devices.
            types: Device type of each of these devices.
            cluster: Cluster that they are of.
            cost_model: Model of the seconds.
            members: Devices of a team if stages lie on several hosts; else 0.

        Returns:
            The row of ``choice.shares`` that each op with a rule looks at, -1 of others; the
            number of what a row says of a device and micro-batch; and by these numbers seconds.
            # [num_compute_ops], [num_rows, num_micro, num_devices], [numbers, num_compute_ops]
        """
        if not self.has_rule.any():
            return _NO_ROWS, _NO_NUMBERS, _NO_SECONDS
        tables, num_divisions = self.tables, len(choice.member)
        row_of = choice.division[tables.op_group] + num_divisions * tables.op_axis
        row_of = np.where(self.has_rule, row_of, -1).astype(np.int32)
        rows = np.unique(row_of[row_of >= 0])
        units = choice.shares[rows]  # [num_used_rows, num_micro, num_devices]
        samples = (
            choice.teams.samples[rows % num_divisions] * (rows >= num_divisions)[:, None, None]
        )
        kinds = np.broadcast_to(types, units.shape)
        begins = np.zeros_like(units)
        if self.minds_position:
            begins += (
                choice.teams.unit_begin[rows][:, None, :] * (rows >= num_divisions)[:, None, None]
            )
        works, number = distinct(kinds, units, samples, begins)
        numbers = np.zeros(choice.shares.shape, np.int32)
        numbers[rows] = number.reshape(units.shape)
        model = cost_model.in_teams(members) if members else cost_model
        seconds = np.stack([self._at((members, *work), cluster, model) for work in works])
        return row_of, numbers, seconds

    def _at(self, key: tuple[int, ...], cluster: Cluster, cost_model: CostModel) -> FloatArray:
        """Seconds of all compute ops by members, type, units, team's samples, first unit."""
        if key not in self._seconds:
            (_, kind, units, samples, begin), batch = key, self._graph.batch_size
            work = self._plan.work(units, samples or batch, batch, begin)
            work = self._sparse.put(work, begin, units, samples or batch)
            row = cost_model.work_seconds(self._graph, cluster.device_types[kind], *work)
            self._seconds[key] = row[self.tables.op_id]
        return self._seconds[key]


class RuleSets:
    """The rule sets of a graph by number, 0 for no rules.

    Args:
        graph: One training step.
        channels: Table in which the channels of strategies are registered.
    """

    def __init__(self, graph: OpGraph, channels: ChannelTable) -> None:
        self._graph, self._channels = graph, channels
        self._numbers: dict[tuple[OpRules, tuple[int, ...]], int] = {((), ()): 0}
        self._by_number: list[tuple[OpRules, tuple[int, ...]]] = [((), ())]
        self._kept: dict[int, RuleSet] = {0: RuleSet(graph, (), (), channels)}

    def number(self, op_rules: OpRules, blocks: tuple[int, ...] = ()) -> int:
        """The number by which a ``Choice`` names op rules and blocks, 0 if there are none."""
        key = op_rules, blocks
        if key not in self._numbers:
            self._numbers[key] = len(self._by_number)
            self._by_number.append(key)
        return self._numbers[key]

    def rules_of(self, number: int) -> OpRules:
        """The op rules of a number."""
        return self._by_number[number][0]

    def of(self, number: int) -> RuleSet:
        """Rule set of a choice; few are kept at once, those used last.

        Raises:
            StrategyError: these rules cannot be followed together.
        """
        found = self._kept.pop(number, None)
        if found is None:
            op_rules, blocks = self._by_number[number]
            found = RuleSet(self._graph, op_rules, blocks, self._channels)
            if len(self._kept) >= MAX_RULE_SETS:
                del self._kept[next(other for other in self._kept if other != 0)]
        self._kept[number] = found
        return found

    def tables_of(self, choice: Choice) -> GraphTables:
        """The graph's tables under the op rules of an encoded strategy."""
        return self.of(choice.rule_set).tables


def distinct(*columns: IntArray) -> tuple[list[tuple[int, ...]], IntArray]:
    """The distinct rows of columns of a shape, in order, and the number of each entry's row.

    Rows become single numbers, which sort many times faster than rows.
    """
    sizes = [int(column.max(initial=0)) + 1 for column in columns]
    if prod(sizes) >= 2**63:  # far beyond any cluster and batch; sorted as rows
        flat = np.stack(columns, axis=-1).reshape(-1, len(columns))
        rows, number = np.unique(flat, axis=0, return_inverse=True)
        return [tuple(row) for row in rows.tolist()], number.astype(np.int32)
    keys = np.zeros(columns[0].shape, np.int64)
    for column, size in zip(columns, sizes, strict=True):
        keys = keys * size + column
    distinct, number = np.unique(keys.ravel(), return_inverse=True)
    places = np.unravel_index(distinct, sizes)
    return list(zip(*(place.tolist() for place in places), strict=True)), number.astype(np.int32)
