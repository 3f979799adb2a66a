"""A mode is one class: what it does not state does nothing."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from heterog.errors import HeterogError, StrategyError
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.lowering import Choice
from heterog.lowering.tables import GraphTables
from heterog.modes.built_in import built_in_modes, method_of
from heterog.modes.mode import EncodedMode, Mode
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.strategy import Decision, Strategy
from tests.runtime.strategies import graph_of, strategy_of
from tests.simulator.builders import cluster_of

TWO = Decision(devices=(0, 1), shares=(4, 4))
CLUSTER = cluster_of((1.0, ["T4"]), (1.0, ["T4"]))
COPY_BYTES = 1000.0


class EncodedSkipping(EncodedMode):
    """A copy of all gradients, say."""

    def resident_bytes(self, tables: GraphTables, choice: Choice) -> float:
        return COPY_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipping(Mode):
    """A toy: gradients are summed every n-th step only, which halves what a step waits for."""

    key = "skipping"
    record = int

    every: int

    @property
    def words(self) -> str:
        return f"gradients summed every {self.every} steps"

    def to_json(self) -> object:
        return self.every

    @classmethod
    def from_record(cls, record: Any) -> "Skipping":
        return cls(every=record)

    def check(self, strategy: Strategy, graph: OpGraph, cluster: object) -> None:
        if len(strategy.decisions[0].devices) < 2:
            raise StrategyError("nothing is summed on one device.")

    def encode(self, strategy: Strategy, tables: object, channels: object) -> EncodedMode:
        return EncodedSkipping()

    def priced(
        self, encoded: EncodedMode, evaluator: Evaluator, strategy: Strategy, choice: Choice
    ) -> EncodedMode:
        return replace(encoded, more_s=evaluator.local_s(choice) * (1 / self.every - 1))


def on_two(graph: OpGraph) -> Strategy:
    exact = strategy_of(graph, [TWO] * group_ops(graph).num_groups)
    return replace(exact, cluster=CLUSTER.fingerprint)


def test_a_toy_mode_is_checked_priced_and_written() -> None:
    graph = graph_of("mlp")
    exact = replace(
        strategy_of(graph, [TWO] * group_ops(graph).num_groups), cluster=CLUSTER.fingerprint
    )
    toy, evaluator = exact.with_mode(Skipping(every=2)), Evaluator(graph, CLUSTER)
    plain, found = (evaluator.evaluate(each, Order.FIFO) for each in (exact, toy))
    assert found.step_time_s == pytest.approx(plain.step_time_s / 2)
    more = [b - a for a, b in zip(plain.peak_memory_bytes, found.peak_memory_bytes, strict=True)]
    assert all(COPY_BYTES <= each <= 1.1 * COPY_BYTES for each in more)
    assert toy.modes == (Skipping(every=2),)
    assert toy.with_mode(Skipping(every=4)).modes == (Skipping(every=4),)


def test_keys_are_those_of_files_and_ascending() -> None:
    keys = [mode.key for mode in built_in_modes()]
    assert keys == sorted(set(keys))
    assert {"asynchronous", "averaging", "codecs", "stash"} <= set(keys)


def test_a_mode_twice_is_refused() -> None:
    graph = graph_of("mlp")
    twice = (Skipping(every=2), Skipping(every=2))
    strategy = replace(
        strategy_of(graph, [TWO] * group_ops(graph).num_groups),
        cluster=CLUSTER.fingerprint,
        modes=twice,
    )
    with pytest.raises(StrategyError, match="and gradients summed every 2 steps; keep one"):
        strategy.check(graph, CLUSTER)


def test_an_unknown_mode_is_told_all_of_them() -> None:
    with pytest.raises(
        HeterogError, match=r"'sever'; did you mean 'server'\? Known: .*average, server"
    ):
        method_of("sever=2")
    assert method_of("weights=equal,average=8").name == "average"
