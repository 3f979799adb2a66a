"""Where a step spends its seconds, beside the timeline that names every task."""

from collections import Counter
from random import Random

import numpy as np
import pytest

from heterog.cluster import Cluster
from heterog.lowering.program import FIRST_LINK_KIND, TaskKind
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.place_facts import DEVICE_FACTS, GROUP_FACTS
from heterog.simulator.timeline import Timeline
from heterog.strategy.strategy import REPLICATED, Decision, Strategy
from tests.simulator.builders import linear_chain, random_case


@pytest.mark.parametrize("seed", range(12))
def test_agrees_with_the_timeline(seed: int) -> None:
    evaluator, choice = random_case(Random(seed))
    program, start, finish = evaluator.timings(choice, Order.RANK)
    evaluator.run(evaluator.lower(choice), Order.RANK, np.inf)
    facts = evaluator.facts()
    assert facts is not None
    timeline = Timeline(program, start, finish, evaluator.cluster, evaluator.graph)
    whole = timeline.seconds
    busy = facts.devices[:, DEVICE_FACTS.index("compute")]
    np.testing.assert_allclose(busy * whole, timeline.busy_s, rtol=1e-9)
    path = timeline.critical_path
    on_links = sum(step.seconds for step in path if program.kind[step.task] >= FIRST_LINK_KIND)
    assert facts.devices[:, 1].sum() * whole == pytest.approx(
        sum(step.seconds for step in path) - on_links
    )
    spent = Counter[TaskKind]()
    for step in path:
        spent[TaskKind(int(program.kind[step.task]))] += step.seconds / whole  # type: ignore[assignment]
    update = facts.groups[:, GROUP_FACTS.index("path_update")].sum()
    assert update == pytest.approx(spent[TaskKind.UPDATE])
    gradients = facts.groups[:, GROUP_FACTS.index("path_gradients")].sum()
    kinds = (
        TaskKind.PUSH, TaskKind.PULL, TaskKind.ALL_REDUCE, TaskKind.REDUCE_SCATTER,
        TaskKind.ALL_GATHER, TaskKind.GATHER_PARAMETERS,
    )  # fmt: skip
    assert gradients == pytest.approx(sum(spent[kind] for kind in kinds))


def test_devices_that_were_folded_away_have_the_facts_of_their_twins() -> None:
    graph = linear_chain("abc", batch_size=256)
    cluster = Cluster.load("mixed_64")
    evaluator = Evaluator(graph, cluster)
    devices = cluster.host_devices[0]
    decision = Decision(devices=devices, shares=(256 // len(devices),) * len(devices))
    strategy = Strategy(
        graph=graph.fingerprint,
        cluster=cluster.fingerprint,
        decisions=(decision,) * evaluator.tables.num_groups,
        homes=(REPLICATED,) * len(graph.updates),
    )
    choice = evaluator.encode(strategy)
    found = []
    for least in (0, 10**9):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("heterog.simulator.runs.LEAST_FOLDED", least)
            folded = evaluator.fold(choice)
        assert (folded is None) == bool(least)
        evaluator.run(folded or evaluator.lower(choice), Order.RANK, np.inf)
        found.append(evaluator.facts())
    first, second = found
    assert first is not None
    assert second is not None
    np.testing.assert_allclose(first.devices[:, [0, 3]], second.devices[:, [0, 3]], atol=1e-12)
    path = first.groups.sum(axis=0), second.groups.sum(axis=0)
    np.testing.assert_allclose(path[0][4:], path[1][4:], atol=1e-12)
