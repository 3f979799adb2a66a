"""Plans whose hosts have changed places train like one device, on real ranks."""

from dataclasses import replace
from pathlib import Path

import pytest

from heterog.cluster import Cluster, PairLimit
from heterog.methods.host_order import on_hosts
from tests.runtime.cases import MODELS, SGD, assert_same, reference, train, train_sharded
from tests.runtime.ranks import Ranks
from tests.runtime.strategies import graph_of
from tests.search.asking import make_plan
from tests.simulator.builders import cluster_of, plan_by_hand
from tests.thorough import one_in


def four_hosts() -> Cluster:
    """Hosts of one T4 each; the pair in the middle is slow."""
    plain = cluster_of(*[(10.0, ["T4"])] * 4)
    pairs = [
        PairLimit(
            sources=(i,),
            targets=(j,),
            bandwidth_bytes_per_s=1e6 if {i, j} == {1, 2} else 1e9,
        )
        for i in range(4)
        for j in range(4)
        if i != j
    ]
    return replace(plain, pairs=tuple(pairs))


@one_in(4)
@pytest.mark.distributed
@pytest.mark.parametrize("method", ["cp_ar", "pipeline", "poplar", "megatron_grid", "hap"])
@pytest.mark.parametrize("order", [(2, 0, 3, 1), (1, 0, 2, 3)])
def test_any_order_of_hosts_trains_like_one_device(
    four_ranks: Ranks, tmp_path: Path, method: str, order: tuple[int, ...]
) -> None:
    name = list(MODELS)[sum(map(ord, method)) % len(MODELS)]
    graph, cluster = graph_of(name), four_hosts()
    found = make_plan(graph, cluster, methods=[method], budget="20e").strategy
    moved = on_hosts(found, cluster, order)
    path = tmp_path / "plan.json"
    plan_by_hand(graph, cluster, moved).save(path)
    work = train_sharded if moved.op_rules else train
    results = four_ranks.run(work, name, SGD, str(path))
    assert_same(results, reference(name), all_gradients=work is train)


@one_in(2)
@pytest.mark.distributed
@pytest.mark.parametrize("method", ["dedication", "pipette"])
def test_what_the_methods_find_trains_like_one_device(
    four_ranks: Ranks, tmp_path: Path, method: str
) -> None:
    graph = graph_of("mlp")
    plan = make_plan(graph, four_hosts(), methods=[method], budget="40e")
    assert plan.method == method
    path = tmp_path / "plan.json"
    plan.save(path)
    work = train_sharded if plan.strategy.op_rules else train
    results = four_ranks.run(work, "mlp", SGD, str(path))
    assert_same(results, reference("mlp"), all_gradients=work is train)
