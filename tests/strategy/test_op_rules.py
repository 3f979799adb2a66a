"""Rules of single ops: what they mean, by hand and against a slow reference."""

import json
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from heterog.cluster import Cluster
from heterog.errors import StrategyError
from heterog.graph.axis_plan import AxisPlan, axis_plan
from heterog.graph.capture import capture
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.graph.placement import L, OpRules, P, Placement, R, S, Scatter
from heterog.graph.workload import Workload
from heterog.lowering import lower
from heterog.lowering.program import RECUT_KINDS, Program, TaskKind
from heterog.lowering.tables import GraphTables, graph_tables
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.lower_bound import lower_bound_s
from heterog.strategy.division import axis_shares
from heterog.strategy.layouts.layout import parse_layout
from heterog.strategy.layouts.placed import place_layout
from heterog.strategy.serialize import strategy_from_dict, strategy_to_dict
from heterog.strategy.strategy import Decision, OpRule, Strategy, Sync
from heterog.strategy.tensor_parallel import shardings
from tests.runtime.strategies import graph_of
from tests.simulator import reference
from tests.simulator.builders import (
    cluster_of,
    random_cluster,
    random_rules,
    random_strategy,
    strategy_of,
    with_rules,
)
from tests.thorough import cases

THREE = cluster_of((1.0, ["T4"]), (1.0, ["T4"]), (1.0, ["T4"]))
MODELS = ("mlp", "gpt", "moe", "residual")


def sharded_mlp() -> tuple[OpGraph, Strategy]:
    """The first two layers of the MLP (6, 16, 16, 4) by columns and rows, 10, 4 and 2 of 16."""
    graph = graph_of("mlp")
    best = next(
        each
        for each in shardings(graph, range(group_ops(graph).num_groups))
        if graph.tensors[each.parameter].name == "0.weight"
    )
    decision = Decision(devices=(0, 1, 2), shares=(5, 2, 1))
    strategy = strategy_of(graph, THREE, [decision] * group_ops(graph).num_groups)
    return graph, replace(strategy, op_rules=best.op_rules)


def test_columns_then_rows_by_hand() -> None:
    graph, strategy = sharded_mlp()
    program = lower(graph, THREE, strategy)
    tables = graph_tables(graph, strategy.op_rules)

    def tasks(kind: TaskKind) -> list[int]:
        return [int(task) for task in np.flatnonzero(program.kind == kind)]

    # Forward the sum after the second layer, backward its gathered gradient: 8 x 16 floats.
    (reduce,), (gather,) = tasks(TaskKind.REDUCE_VALUE), tasks(TaskKind.GATHER_VALUE)
    assert program.num_bytes[reduce] == 8 * 16 * 4
    assert program.num_bytes[gather] == 3 * 5 * 16 * 4  # padded to the largest share of samples
    # Three parameters live in slices; the others are reduced as ever.
    names = [graph.tensors[parameter].name for _, parameter, _ in graph.updates]
    reduced = {names[program.subject[task]] for task in tasks(TaskKind.ALL_REDUCE)}
    assert reduced == {"2.bias", "4.weight", "4.bias"}
    slices = {
        (names[program.subject[task]], int(program.device[task])): int(program.units[task])
        for task in tasks(TaskKind.UPDATE)
        if program.units[task]
    }
    assert slices == {
        (name, device): share
        for name in ("0.weight", "0.bias", "2.weight")
        for device, share in enumerate((10, 4, 2))
    }
    # SGD with momentum keeps one number beside each weight.
    sharded = 4 * (6 * 16 + 16 + 16 * 16)
    whole = 4 * (16 + 4 * 16 + 4)
    batch = 4 * 8 * (6 + 4)  # the sharded layer reads all samples
    for device, share in enumerate((10, 4, 2)):
        assert program.resident_bytes[device] == 2 * (sharded * share / 16 + whole) + batch
    first = [t for t in tasks(TaskKind.COMPUTE) if tables.op_id[program.subject[t]] == 1]
    assert program.units[first].tolist() == [10, 4, 2]


def scattered(rules: OpRules, place: Placement, units: int) -> OpRules:
    """The rules, with the sums that they leave in parts added up in slices."""
    scatter = Scatter(place=place, units=units)
    return tuple(
        (op, replace(rule, scatter=scatter) if rule.outputs == (P,) else rule)
        for op, rule in rules
    )


def test_a_sum_is_added_up_in_slices_by_hand() -> None:
    """The second layer's 8 x 16 results: 16 columns shared out as 10, 4 and 2."""
    graph, strategy = sharded_mlp()
    strategy = replace(strategy, op_rules=scattered(strategy.op_rules, S(1), 16))
    program = lower(graph, THREE, strategy)
    (scatter,) = np.flatnonzero(program.kind == TaskKind.SCATTER_VALUE)
    assert not (program.kind == TaskKind.REDUCE_VALUE).any()
    assert program.num_bytes[scatter] == 3 * 8 * 10 * 4  # padded to the largest slice
    assert (program.samples[scatter], program.units[scatter]) == (8, 16)
    reads = program.read_buffer[program.read_start[scatter] : program.read_start[scatter + 1]]
    made = slice(program.buffer_start[scatter], program.buffer_start[scatter + 1])
    assert program.buffer_bytes[reads].tolist() == [8 * 16 * 4] * 3  # each has a part of all
    assert program.buffer_bytes[made].tolist() == [8 * 4 * units for units in (10, 4, 2)]
    assert program.buffer_device[made].tolist() == [0, 1, 2]
    # Who reads the whole gathers the slices, and nothing is summed again.
    (first, *_) = np.flatnonzero(program.kind == TaskKind.GATHER_VALUE)
    assert program.num_bytes[first] == 3 * 8 * 10 * 4
    record = json.loads(json.dumps(strategy_to_dict(strategy)))
    assert strategy_from_dict(record) == strategy


@pytest.mark.parametrize(
    ("place", "units", "what"),
    [
        (S(1), 5, "cannot be cut into 5 units"),
        (S(2), 4, "cannot be cut into 4 units"),
        (P, 4, "cannot be cut into 4 units by P"),
        (S(0, 2), 2, "goes across the samples"),
    ],
)
def test_what_cannot_be_added_up_in_slices_is_refused(
    place: Placement, units: int, what: str
) -> None:
    graph, strategy = sharded_mlp()
    strategy = replace(strategy, op_rules=scattered(strategy.op_rules, place, units))
    with pytest.raises(StrategyError, match=what):
        strategy.check(graph, THREE)


def test_a_parameter_that_every_member_keeps_whole_is_not_written_in_slices() -> None:
    """``max_norm`` shortens rows of the table in place, of which a member needs all columns."""

    def make() -> nn.Module:
        table = nn.Embedding(12, 8, max_norm=1.0)
        return nn.Sequential(table, nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))

    batch = (torch.zeros(6, dtype=torch.int64), torch.zeros(6, 4))
    graph = capture(Workload(make, batch, functional.mse_loss, torch.optim.SGD, {"lr": 0.1}))
    given = place_layout(parse_layout("tp=3"), graph, THREE).strategy
    given.check(graph, THREE)
    (write,) = (op for op, each in enumerate(graph.ops) if each.kind == "copy_.default")
    sliced = OpRule(inputs=(S(1), S(1)), outputs=(S(1),), units=8)
    rules = tuple((op, sliced if op == write else rule) for op, rule in given.op_rules)
    assert rules != given.op_rules
    with pytest.raises(StrategyError, match="would write a slice of 0"):
        axis_plan(graph, rules)


def test_columns_that_numbers_of_rows_complete_are_not_cut_again() -> None:
    graph = graph_of("gpt")
    given = place_layout(parse_layout("tp=3"), graph, THREE).strategy
    again = Scatter(place=S(0), units=graph.batch_size)
    rules = tuple(
        (op, replace(rule, scatter=again) if "log_softmax" in graph.ops[op].kind else rule)
        for op, rule in given.op_rules
    )
    assert rules != given.op_rules
    with pytest.raises(StrategyError, match="leave out its scatter"):
        replace(given, op_rules=rules).check(graph, THREE)


@pytest.mark.parametrize(
    ("of", "scatter", "what"),
    [
        ("S", Scatter(place=S(1), units=16), "names the same ones"),
        ("P", Scatter(place=S(0), units=8), "slices of another axis than the batch"),
    ],
)
def test_only_what_lies_in_another_way_is_cut_anew(of: str, scatter: Scatter, what: str) -> None:
    graph, strategy = sharded_mlp()
    rules = tuple(
        (op, replace(rule, scatter=scatter) if rule.outputs[0].kind == of else rule)
        for op, rule in strategy.op_rules
    )
    assert rules != strategy.op_rules
    with pytest.raises(StrategyError, match=what):
        replace(strategy, op_rules=rules).check(graph, THREE)


def test_the_cost_of_a_part_is_that_of_its_columns() -> None:
    graph, strategy = sharded_mlp()
    plan = axis_plan(graph, strategy.op_rules)
    # addmm: (8 x 6) (6 x 16) + 16; each column costs its part, the input is read by all.
    assert plan.flops_fixed[1] == 0
    assert plan.flops_per_unit[1] * 16 == graph.flops[1]
    assert plan.bytes_fixed[1] == 4 * 8 * 6
    assert plan.bytes_per_unit[1] == 4 * (6 + 1 + 8)


def test_strategies_with_rules_come_back_from_json() -> None:
    _, strategy = sharded_mlp()
    record = json.loads(json.dumps(strategy_to_dict(strategy)))
    assert strategy_from_dict(record) == strategy
    assert len(record["rules"]) < len(record["op_rules"])
    for key in ("rules", "op_rules"):  # as written before there were rules
        del record[key]
    assert strategy_from_dict(record) == replace(strategy, op_rules=())
    record = strategy_to_dict(strategy)
    record["rules"][0]["inputs"][0] = "S(1)"
    with pytest.raises(
        StrategyError, match=r"'S\(1\)' is no placement; R, P, L or S\(dim,outer\)"
    ):
        strategy_from_dict(record)


@pytest.mark.parametrize(
    ("op", "inputs", "output", "units", "text"),
    [
        (1, (R, R, S(0)), R, 16, r"op 1 'addmm.default' in module '0' cannot run as R, R, S"),
        (1, (R, R, R), S(0), 16, r"from these inputs it would be R, R, R -> R"),
        (2, (S(1),), S(1), 5, r"along an axis of 5 units"),
        (0, (R,), R, 1, r"op 0 't.default' in module '0' is a view and cannot have a rule"),
        (38, (R, R), R, 1, r"is an update and cannot have a rule"),
        (99, (R,), R, 1, r"ascending order of ops from 0 to 43, each once"),
        (2, (R,), R, 0, r"has 0 units; it must have 1 or more"),
        (2, (L,), L, 8, r"op 2 'relu.default'"),
        (1, (R, R), R, 1, r"the rule of op 1 .* places 2 inputs and 1 outputs; the op has 3 and"),
        (2, (S(0), R), S(0), 16, r"the rule of op 2 .* places 2 inputs and 1 outputs"),
    ],
)  # fmt: skip
def test_rules_that_are_not_legal(
    op: int, inputs: tuple[object, ...], output: object, units: int, text: str
) -> None:
    graph, strategy = sharded_mlp()
    rule = OpRule(inputs=inputs, outputs=(output,), units=units)  # type: ignore[arg-type]
    with pytest.raises(StrategyError, match=text):
        replace(strategy, op_rules=((op, rule),)).check(graph, THREE)


def test_what_cannot_be_combined_with_rules() -> None:
    graph, strategy = sharded_mlp()
    served = Decision(devices=(0, 1, 2), shares=(5, 2, 1), sync=Sync.PARAMETER_SERVER)
    homes = (0,) * len(graph.updates)
    with pytest.raises(StrategyError, match=r"parameter '0.weight' has home 0, but by the rules"):
        replace(strategy, decisions=(served,) * len(strategy.decisions), homes=homes).check(
            graph, THREE
        )


def test_statistics_need_rules_on_both_sides() -> None:
    graph = graph_of("normalised")
    op = next(i for i, op in enumerate(graph.ops) if op.kind.startswith("native_batch_norm."))
    given = graph.ops[op].inputs
    rule = OpRule(inputs=tuple(R for _ in given), outputs=(R, R, R), units=1)
    with pytest.raises(StrategyError, match="the op that makes its statistics must either"):
        axis_plan(graph, ((op, rule),))


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=cases(15, 2), deadline=None)
def test_engine_and_lower_bound(seed: int) -> None:
    rng = Random(seed)
    graph, cluster, strategy = random_case(rng)
    evaluator = Evaluator(graph, cluster)
    choice, order = evaluator.encode(strategy), rng.choice(list(Order))
    program, start, finish = evaluator.timings(choice, order)
    assert program.hash == lower(graph, cluster, strategy, num_steps=choice.num_steps).hash
    tasks = reference.price(program, graph, cluster, evaluator.cost_model)
    slow_start, slow_finish = reference.simulate(tasks, order)
    np.testing.assert_allclose(start, slow_start, rtol=1e-9, atol=0)
    np.testing.assert_allclose(finish, slow_finish, rtol=1e-9, atol=0)
    bound = lower_bound_s(graph, cluster, evaluator.cost_model, with_op_rules=True)
    if strategy.step_barrier:
        assert evaluator.referee(strategy, order).step_time_s >= bound.seconds
    # The ordinary strategy is judged as if there had been no rules before.
    plain = replace(strategy, op_rules=(), homes=random_strategy_homes(graph, strategy))
    assert evaluator.evaluate(plain, order) == Evaluator(graph, cluster).evaluate(plain, order)


def random_case(rng: Random) -> tuple[OpGraph, Cluster, Strategy]:
    """A strategy with rules for some ops of a small model."""
    graph, cluster = graph_of(rng.choice(MODELS)), random_cluster(rng)
    strategy = replace(random_strategy(rng, graph, cluster), micro_batches=())
    return graph, cluster, with_rules(graph, strategy, random_rules(rng, graph))


def random_strategy_homes(graph: OpGraph, strategy: Strategy) -> tuple[int, ...]:
    group = group_ops(graph).group
    decisions = [strategy.decisions[int(group[op])] for op, _, _ in graph.updates]
    return tuple(0 if each.sync == Sync.PARAMETER_SERVER else -1 for each in decisions)


# --- a slow reference of what buffers hold ------------------------------------------------------

Parts = frozenset[int]
"""Units of a split value, devices whose terms are in a sum, or {0} for a whole value."""


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=cases(60, 12), deadline=None)
def test_every_op_finds_what_it_needs(seed: int) -> None:
    rng = Random(seed)
    graph, cluster, strategy = random_case(rng)
    program = lower(graph, cluster, strategy, num_steps=1)
    _Follower(graph, strategy, program).check()


class _Follower:
    """Follows each value through the program, as sets of its parts."""

    def __init__(self, graph: OpGraph, strategy: Strategy, program: Program) -> None:
        self.graph, self.strategy, self.program = graph, strategy, program
        self.plan: AxisPlan = axis_plan(graph, strategy.op_rules)
        self.tables: GraphTables = graph_tables(graph, strategy.op_rules)
        self.value_of = {int(t): value for value, t in enumerate(self.tables.value_tensor)}
        self.held: dict[int, tuple[int, Parts]] = {}
        self.terms: dict[tuple[int, int, int], list[Parts]] = {}

    def units(self, group: int, axis: int, device: int) -> range:
        decision = self.strategy.decisions[group]
        shares = decision.shares
        if axis:
            shares = axis_shares(self.plan.axes[axis], shares)
        if device not in decision.devices:
            return range(0)
        position = decision.devices.index(device)
        return range(sum(shares[:position]), sum(shares[: position + 1]))

    def whole(self, value: int) -> Parts:
        tensor = int(self.tables.value_tensor[value])
        kind = self.plan.placements[tensor].kind
        op = int(self.tables.value_op[value])
        group, axis = int(self.tables.op_group[op]), int(self.tables.value_axis[value])
        if kind == "S":
            return frozenset(range(self.plan.axes[axis]))
        if kind == "P":
            devices = self.strategy.decisions[group].devices
            return frozenset(d for d in devices if len(self.units(group, axis, d)))
        return frozenset({0})

    def check(self) -> None:
        program = self.program
        for task in range(program.num_tasks):
            kind = TaskKind(program.kind[task])
            reads = program.read_buffer[program.read_start[task] : program.read_start[task + 1]]
            made = range(program.buffer_start[task], program.buffer_start[task + 1])
            known = [self.held[int(buffer)] for buffer in reads if int(buffer) in self.held]
            if kind in (TaskKind.COMPUTE, TaskKind.RECOMPUTE):
                self.compute(task, known)
            elif kind in (TaskKind.SPLIT, TaskKind.SEND, TaskKind.CONCAT):
                value = int(self.tables.slot_value[program.subject[task]])
                parts = frozenset().union(*(parts for _, parts in known))
                assert {each for each, _ in known} == {value}
                for buffer in made:
                    self.held[buffer] = value, parts
            elif kind in (TaskKind.REDUCE_VALUE, TaskKind.GATHER_VALUE):
                value = int(self.tables.slot_value[program.subject[task]])
                # A gather in the backward pass also waits for a gradient.
                parts = frozenset().union(*(p for each, p in known if each == value))
                is_early = self.tables.value_is_early[value]
                assert is_early or parts == self.whole(value)
                for buffer in made:
                    self.held[buffer] = value, self.whole(value)
            elif kind in RECUT_KINDS:
                value = int(program.subject[task])
                row = int(self.tables.value_op[value])
                group, axis = int(self.tables.op_group[row]), int(self.tables.op_axis[row])
                makers = {
                    device
                    for device in self.strategy.decisions[group].devices
                    if len(self.units(group, axis, device))
                }
                assert set().union(*(parts for _, parts in known)) == makers
                for buffer in made:
                    device = int(program.buffer_device[buffer])
                    own = self.units(group, int(self.tables.value_axis[value]), device)
                    self.held[buffer] = value, frozenset(own)
        for (op, value, _), terms in self.terms.items():
            together = [term for each in terms for term in each]
            assert sorted(together) == sorted(self.whole(value)), f"a sum at op {op}"

    def compute(self, task: int, known: list[tuple[int, Parts]]) -> None:
        program, plan, graph = self.program, self.plan, self.graph
        row, device = int(program.subject[task]), int(program.device[task])
        op = int(self.tables.op_id[row])
        group, axis = int(self.tables.op_group[row]), int(plan.op_axis[op])
        own = self.units(group, axis, device) if group >= 0 else range(1)
        assert int(program.units[task] or program.samples[task]) == len(own) > 0
        for tensor, needed in zip(graph.ops[op].inputs, plan.needed[op], strict=True):
            storage = int(graph.storage[tensor])
            if storage not in self.value_of:
                continue
            value = self.value_of[storage]
            parts = frozenset().union(*(p for each, p in known if each == value))
            kind = plan.placements[storage].kind
            if self.is_whole(tensor) or plan.is_whole_needed(tensor, needed, axis):
                assert parts == self.whole(value), f"op {op} lacks a whole input"
            elif kind == "S":
                assert parts >= set(own), f"op {op} lacks units"
            elif kind == "P":
                self.terms.setdefault((op, value, int(program.kind[task])), []).append(parts)
            else:
                assert parts == {0}, f"op {op} lacks an input"
        for number in range(self.tables.value_start[row], self.tables.value_start[row + 1]):
            placement = plan.placements[int(self.tables.value_tensor[number])]
            part = {"S": frozenset(own), "P": frozenset({device})}.get(placement.kind)
            buffer = int(program.buffer_start[task]) + number - int(self.tables.value_start[row])
            if self.tables.op_recut[row]:
                is_alone = len(self.strategy.decisions[group].devices) == 1
                part = self.whole(number) if is_alone else frozenset({device})
            self.held[buffer] = number, frozenset({0}) if part is None else part

    def is_whole(self, tensor: int) -> bool:
        """Whether a view below a tensor needs the whole of what it looks at."""
        maker = int(self.graph.producer[tensor])
        if maker < 0 or not self.graph.is_view[maker]:
            return False
        source = self.graph.ops[maker].inputs[0]
        needed, axis = self.plan.needed[maker][0], int(self.plan.op_axis[maker])
        return self.plan.is_whole_needed(source, needed, axis) or self.is_whole(source)
