"""Points of the local search on three equal devices, to start random walks from."""

from dataclasses import replace
from itertools import chain

import numpy as np

from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.methods.local_search.group_rules import (
    GroupRules,
)
from heterog.methods.local_search.neighbours import Neighbours, State
from heterog.methods.planner import Budget, Problem
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.layer_shardings import layer_shardings
from heterog.strategy.strategy import Decision, Strategy, Sync
from tests.runtime.strategies import ALL, cluster, strategy_of
from tests.strategy.merging import merge_rules


def moves_of(graph: OpGraph, seed: int = 0) -> Neighbours:
    evaluator = Evaluator(graph, cluster())
    space = evaluator.space()
    problem = Problem(evaluator=evaluator, budget=Budget(evaluations=1))
    moves = Neighbours(problem, space, GroupRules(evaluator), np.random.default_rng(seed))
    moves.may_shard = True
    return moves


def everywhere(graph: OpGraph, sync: Sync = Sync.RING) -> Strategy:
    decision = Decision(devices=ALL, shares=(4, 2, 2), sync=sync)
    return strategy_of(graph, [decision] * group_ops(graph).num_groups)


def all_sharded(graph: OpGraph) -> Strategy:
    rules = merge_rules(*chain(*layer_shardings(graph)))
    return replace(everywhere(graph), op_rules=rules)


def start(moves: Neighbours, strategy: Strategy) -> State:
    return State(
        moves.space.row_of(strategy),
        strategy.bucket_bytes,
        Order.RANK,
        strategy.micro_batches,
        moves.rules.row_of(strategy.op_rules),
        strategy.schedule,
        strategy.blocks,
        strategy.first_bucket_bytes,
    )


def decoded(moves: Neighbours, state: State) -> Strategy:
    return moves.space.decode(state.row, moves.settings(state), step_barrier=True)
