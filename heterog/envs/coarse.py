"""A coarse evaluator: fast enough to train on, close enough to rank strategies.

It runs the real lowering, engine and memory kernels on tables that ``merging`` has shortened to
about a tenth; a merged op takes the sum of its ops' seconds, at every share. It ignores overlap
inside a block, so its results are never reported.
"""

import numpy as np

from heterog.cluster.topology import Cluster
from heterog.envs.merging import CoarseTables, merge_tables, sums
from heterog.graph.op_graph import OpGraph
from heterog.lowering.choice import Choice, Encoder
from heterog.lowering.program import FloatArray
from heterog.lowering.tables import GraphTables
from heterog.lowering.tape import make_tape
from heterog.pricing.cost_model import CostModel
from heterog.pricing.price_table import PriceTable
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.memory import NOTHING_COMPILED, Kept


class CoarseEvaluator(Evaluator):
    """Scores rows of a ``StrategySpace`` built on ``tables``, one candidate per block.

    Args:
        graph: Graph of one training step.
        cluster: Devices and links.
        cost_model: Cost model, as for ``Evaluator``.
        beside: As for ``Evaluator``.
    """

    def __init__(
        self,
        graph: OpGraph,
        cluster: Cluster,
        cost_model: CostModel | None = None,
        beside: Evaluator | None = None,
    ) -> None:
        super().__init__(graph, cluster, cost_model, beside)
        merged = merge_tables(graph)
        self.fine_op = self.tables.op_id
        self.tables = merged.tables
        self.block_of = merged.block_of
        self.fine_block = merged.tables.op_group[merged.run_of]
        plain = self.rules.of(0)
        plain.tables = self.tables
        plain.encoder = Encoder(self.tables, self.channels)
        plain.has_rule = np.zeros(len(self.tables.op_id), np.bool_)
        self.prices = _CoarsePrices(self, merged)
        self._tape = make_tape(4096, len(self.tables.parameter_bytes), cluster.num_devices)

    def kept_values(self, tables: GraphTables, choice: Choice) -> Kept:
        """Merged values have memory of their own, if steps are compiled, too."""
        return NOTHING_COMPILED


class _CoarsePrices(PriceTable):
    """Prices of coarse ops: a merged op takes the sum of its ops' seconds."""

    def __init__(self, evaluator: CoarseEvaluator, merged: CoarseTables) -> None:
        self._run_of, self._fine_op = merged.run_of, evaluator.fine_op
        super().__init__(
            evaluator.graph,
            evaluator.cluster,
            evaluator.cost_model,
            evaluator.channels,
            evaluator.tables,
            evaluator.prices,
        )
        num_parameters = len(self._tables.parameter_bytes)
        self._update_seconds = np.array(
            [sums(merged.parameter_of, row, num_parameters) for row in self._update_seconds]
        )

    def op_seconds(self, kind: int, samples: int) -> FloatArray:
        """Seconds of every coarse op by one of ``models`` at a share.  # [num_coarse_ops]"""
        device_type, model = self.models[kind]
        row = model.op_seconds(self._graph, device_type, samples)
        return sums(self._run_of, row[self._fine_op], len(self._tables.op_id))
