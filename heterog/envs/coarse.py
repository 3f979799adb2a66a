"""A coarse evaluator: fast enough to train on, close enough to rank strategies.

It runs the real lowering, engine and memory kernels on tables that ``merging`` has made about a
tenth as long; a merged op takes the sum of its ops' seconds, at every share. It misses the
overlap inside a block, so its results are never reported.
"""

import numpy as np

from heterog.cluster.topology import Cluster
from heterog.envs.merging import merge_tables, sums
from heterog.graph.op_graph import OpGraph
from heterog.simulator.cost_model import CostModel
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.program import FloatArray


class CoarseEvaluator(Evaluator):
    """Scores rows of a ``StrategySpace`` built on ``tables``, one candidate per block.

    Args:
        graph: Graph of one training step.
        cluster: Devices and links.
        cost_model: Cost model, as for ``Evaluator``.
    """

    def __init__(
        self, graph: OpGraph, cluster: Cluster, cost_model: CostModel | None = None
    ) -> None:
        super().__init__(graph, cluster, cost_model)
        merged = merge_tables(graph)
        self.fine_op = self.tables.op_id
        self._run_of = merged.run_of
        self.tables = merged.tables
        self.block_of = merged.block_of
        self.fine_block = merged.tables.op_group[merged.run_of]
        num_parameters = len(self.tables.parameter_bytes)
        plain = self._rule_sets[0]
        plain.tables = self.tables
        plain.has_rule = np.zeros(len(self.tables.op_id), np.bool_)
        self._make_rows()
        self._update_seconds = np.array(
            [sums(merged.parameter_of, row, num_parameters) for row in self._update_seconds]
        )

    def op_seconds(self, kind: int, samples: int) -> FloatArray:
        """Seconds of every coarse op on a device type at a share.  # [num_coarse_ops]"""
        row = self.cost_model.op_seconds(self.graph, self.cluster.device_types[kind], samples)
        return sums(self._run_of, row[self.fine_op], len(self.tables.op_id))
