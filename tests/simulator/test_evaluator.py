"""Parts of the evaluator that no strategy shows by itself."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from heterog import Workload, capture
from heterog.cluster import Cluster
from heterog.envs.coarse import CoarseEvaluator
from heterog.lowering.sparse_tables import distinct
from heterog.methods.data_parallel import even_shares, uniform_strategy
from heterog.simulator.compile_kernels import smallest_graph
from heterog.simulator.engine import Order, _simulate_kernel
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.referee import _replay_kernel
from heterog.simulator.space import StepSettings
from heterog.simulator.task_seconds import price_kernel
from heterog.strategy.strategy import Decision, Sync
from tests.envs.cases import language_pair


@pytest.mark.parametrize("most", [(3, 5, 2, 4), (2**20, 2**20, 2**20, 2**20)])
def test_distinct_rows_are_those_of_numpy(most: tuple[int, ...]) -> None:
    """As numbers, and as rows where the numbers would be too large."""
    rng = np.random.default_rng(0)
    columns = [rng.integers(0, size, (4, 3, 50)).astype(np.int32) for size in most]
    for column in columns:
        column[:, :, 25:] = column[:, :, :25]
    rows, number = distinct(*columns)
    flat = np.stack(columns, axis=-1).reshape(-1, len(columns))
    expected, of_entry = np.unique(flat, axis=0, return_inverse=True)
    assert rows == [tuple(row) for row in expected.tolist()]
    assert number.tolist() == of_entry.ravel().tolist()


def test_nothing_has_no_rows() -> None:
    rows, number = distinct(np.zeros((0, 2), np.int32), np.zeros((0, 2), np.int32))
    assert rows == []
    assert len(number) == 0


def test_what_an_evaluator_remembers_changes_nothing() -> None:
    """Rows one after another are as each on its own, with and without micro-batches."""
    pair, rng = language_pair(), np.random.default_rng(0)
    evaluator, space = pair.evaluator, pair.space
    for number in range(12):
        row = rng.integers(pair.num_candidates, size=pair.num_blocks).astype(np.int32)
        row[number:] = row[0]
        settings = StepSettings(2**20, micro_batches=space.micro_batches(1 + number % 3))
        choice = space.encode(row, settings, step_barrier=True)
        found = evaluator.evaluate(choice, Order.FIFO)
        fresh = CoarseEvaluator(pair.graph, pair.cluster)
        alone = fresh.space(pair.table).encode(row, settings, step_barrier=True)
        assert fresh.evaluate(alone, Order.FIFO) == found


def test_what_backward_reads_through_a_view_is_kept() -> None:
    """A weight gradient reads the activations as ``flatten`` shows them."""

    class Flattened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(64, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.last(self.first(x).flatten(1))
            return out

    workload = Workload(
        Flattened(), (torch.zeros(6, 4, 8), torch.zeros(6, 2)), nn.functional.mse_loss,
        torch.optim.SGD,
    )  # fmt: skip
    evaluator = Evaluator(capture(workload), Cluster.load("paper_8gpu"))
    # The activations between the layers; the prediction, and the loss's own gradient.
    assert evaluator.group_saved_bytes.tolist() == [4.0 * 6 * 4 * 16, 4.0 * (6 * 2 + 1)]


def test_programs_with_and_without_channels_run_the_same_compiled_kernels() -> None:
    """``warm_up`` runs on one device, where arrays of channels are empty but have types."""
    graph = smallest_graph()
    kernels: list[Any] = [price_kernel, _simulate_kernel, _replay_kernel]
    for preset in ("paper_8gpu", "hap_v100_p100"):
        evaluator = Evaluator(graph, Cluster.load(preset))
        evaluator.warm_up()
        devices = tuple(range(evaluator.cluster.num_devices))
        decision = Decision(devices=devices, shares=even_shares(evaluator), sync=Sync.HIERARCHICAL)
        assert (
            evaluator.referee(uniform_strategy(evaluator, decision), Order.RANK).step_time_s > 0.0
        )
    assert [len(getattr(each, "signatures", [()])) for each in kernels] == [1, 1, 1]
