"""DeepPool on groups: what it asks the dynamic program, and what comes of its places."""

import math
from functools import lru_cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from heterog.cluster import Cluster
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph
from heterog.graph.workload import Workload
from heterog.methods.deeppool.planner import DeepPool, GroupCosts, crossing_bytes, plan_places
from heterog.methods.deeppool.search import Block, Place, layers_of
from heterog.methods.planner import Budget, Problem
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from tests.simulator.builders import by_sheets, cluster_of


class Forked(nn.Module):
    """Wide, then two equal branches that are added, then narrow."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(1024, 1024)
        self.left = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU())
        self.right = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU())
        self.head = nn.Linear(1024, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        out: Tensor = self.head(self.left(x) + self.right(x))
        return out


def captured(model: type[nn.Module], batch: int) -> OpGraph:
    example = (torch.zeros(batch, 1024), torch.zeros(batch, 64))
    return capture(Workload(model, example, functional.mse_loss, torch.optim.SGD))


@lru_cache(maxsize=1)
def costs() -> GroupCosts:
    return GroupCosts(Evaluator(captured(Forked, 512), by_sheets(Cluster.load("paper_8gpu"))))


def test_places_are_prefixes_of_hosts_by_speed() -> None:
    assert costs().order[:2] == (0, 1), "the V100s first"
    assert costs().widths == (1, 2, 4, 6, 8)
    (first, second) = costs().decision((0, 2)).shares
    assert first == second == 256
    wide = costs().decision((0, 8))
    assert sum(wide.shares) == 512
    assert wide.shares[0] > wide.shares[7] > 0


def test_places_behind_the_front_hold_the_devices_behind() -> None:
    assert costs().decision((2, 2)).devices == tuple(sorted(costs().order[2:4]))
    assert costs().decision((2, 2)).shares == (256, 256)


def test_device_time_is_counted_by_speed() -> None:
    assert costs().weight((0, 1)) == 1.0
    assert costs().weight((0, 2)) == pytest.approx(2.0)
    assert 2.0 < costs().weight((0, 4)) < 4.0, "a 1080 Ti is less than a V100"


def test_branches_of_the_model_are_found() -> None:
    (block,) = [item for item in costs().chain if isinstance(item, Block)]
    assert len(block.branches) == 2
    assert sorted(layers_of(costs().chain)) == list(range(costs().num_groups))


def test_transfers_by_hand() -> None:
    graph = captured(Forked, 512)
    two = Evaluator(graph, cluster_of((1.0, ["V100-16GB"]), (1.0, ["V100-16GB"])))
    own = GroupCosts(two)
    source, target = next(
        pair for pair, size in own._crossing.items() if size > 0 and pair[1] == pair[0] + 1
    )
    size = own._crossing[source, target]
    latency = two.cluster.latency_s(0, 1)
    rate = min(
        two.cluster.resources[resource].bandwidth_bytes_per_s
        for resource in two.cluster.route(0, 1)
    )
    # From both to one: half of the samples move.
    expected = 2 * latency + 256 * size / rate
    assert own.transfer(source, (0, 2), target, (0, 1)) == pytest.approx(expected)
    assert own.transfer(source, (0, 2), target, (0, 2)) == 0.0
    expected = 2 * latency + 512 * size / rate
    assert own.transfer(source, (0, 1), target, (1, 1)) == pytest.approx(expected)


def test_transfers_between_uneven_places_sample_by_sample() -> None:
    own = costs()

    def owners(place: Place) -> list[int]:
        decision = own.decision(place)
        pairs = zip(decision.devices, decision.shares, strict=True)
        return [device for device, share in pairs for _ in range(share)]

    places = [(first, width) for first in (0, 2) for width in (1, 2, 4, 6) if first + width <= 8]
    for at in places:
        for to in places:
            busy: dict[int, float] = {}
            for source, target in zip(owners(at), owners(to), strict=True):
                if source != target:
                    number = source * own.evaluator.cluster.num_devices + target
                    for resource, held in own._pricer.seconds(
                        own.evaluator.channels[number]
                    ).held.items():
                        busy[resource] = busy.get(resource, 0.0) + held
            expected = max(busy.values(), default=0.0)
            assert own._seconds_per_sample_byte(at, to) == pytest.approx(expected)


def test_what_crosses_a_step_by_hand() -> None:
    chain = (0, Block(branches=((1,), (2,), ()), join=3), 4)
    links = {(0, 1): 1.0, (0, 2): 2.0, (0, 3): 4.0, (1, 3): 8.0, (2, 3): 16.0, (3, 4): 32.0}
    links[2, 4] = 64.0  # passes over the join
    assert crossing_bytes(chain, links) == {
        (0, 1): 1.0,
        (1, 3): 8.0,
        (0, 2): 2.0,
        (2, 3): 80.0,
        (0, 3): 4.0,
        (3, 4): 96.0,
    }


def test_the_limit_is_kept_and_narrows() -> None:
    free = plan_places(costs(), math.inf)
    tight = plan_places(costs(), 1.3)
    assert tight.time >= free.time
    assert tight.device_time <= free.device_time
    for layer, place in enumerate(tight.places):
        alone = costs().own(layer, (0, 1))
        if place[1] > 1 and alone > costs().negligible:
            assert costs().own(layer, place) * costs().weight(place) <= 1.3 * alone


def test_it_is_not_worse_than_uniform_plans_by_the_referee() -> None:
    evaluator = costs().evaluator
    result = DeepPool().plan(Problem(evaluator=evaluator, budget=Budget(evaluations=500)))
    reached = min(
        evaluator.referee(candidate.strategy, order).step_time_s
        for candidate in result.candidates
        for order in candidate.orders
    )
    uniform = [
        costs().strategy([(0, width)] * costs().num_groups, 0, True) for width in costs().widths
    ]
    assert reached <= min(evaluator.evaluate(each, Order.RANK).step_time_s for each in uniform)
