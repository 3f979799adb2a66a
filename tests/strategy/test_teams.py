"""Teams: tensor parallelism inside, data parallelism between, counted by hand."""

from dataclasses import replace

import numpy as np
import pytest

from heterog.errors import StrategyError
from heterog.graph.grouping import CONSTANT_GROUP, group_ops
from heterog.graph.op_graph import OpGraph, Phase
from heterog.graph.placement import OpRule, R
from heterog.lowering import lower
from heterog.lowering.program import Program, TaskKind
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.division import Division, cut_division, gradient_rings, micro_shares
from heterog.strategy.serialize import strategy_from_dict, strategy_to_dict
from heterog.strategy.strategy import Decision, Strategy, Sync
from tests.simulator.builders import cluster_of, strategy_of
from tests.strategy.test_op_rules import sharded_mlp

FOUR = cluster_of(*[(1.0, ["T4"])] * 4)
PAIRS = Decision(devices=(0, 1, 2, 3), shares=(2, 2, 2, 2), teams=((0, 1), (2, 3)))


def grid(decision: Decision, **changes: object) -> tuple[OpGraph, Strategy]:
    """The MLP (6, 16, 16, 4), its first two layers by columns and rows inside teams."""
    graph, known = sharded_mlp()
    strategy = strategy_of(graph, FOUR, [decision] * len(known.decisions))
    return graph, replace(strategy, op_rules=known.op_rules, **changes)  # type: ignore[arg-type]


def collectives(program: Program, kind: TaskKind) -> list[tuple[tuple[int, ...], float]]:
    """(devices, payload bytes) of all collectives of a kind."""
    return [
        (program.channels[program.channel[task]].devices, float(program.num_bytes[task]))
        for task in np.flatnonzero(program.kind == kind)
    ]


def givers(program: Program, kind: TaskKind) -> list[list[int]]:
    """Devices whose buffers each collective of a kind reads."""
    return [
        program.buffer_device[
            program.read_buffer[program.read_start[task] : program.read_start[task + 1]]
        ].tolist()
        for task in np.flatnonzero(program.kind == kind)
    ]


def test_a_grid_of_two_by_two() -> None:
    graph, strategy = grid(PAIRS)
    program = lower(graph, FOUR, strategy)
    # Forward one sum inside each team over its 4 samples x 16 floats, backward one gather.
    inside = [((0, 1), 4 * 16 * 4.0), ((2, 3), 4 * 16 * 4.0)]
    assert collectives(program, TaskKind.REDUCE_VALUE) == inside
    assert collectives(program, TaskKind.GATHER_VALUE) == inside
    # Every member of a team gives its part, and in uneven teams whoever has units.
    assert givers(program, TaskKind.REDUCE_VALUE) == [[0, 1], [2, 3]]
    assert givers(program, TaskKind.GATHER_VALUE) == [[0, 1], [2, 3]]
    of_three = replace(PAIRS, teams=((3, 0, 1), (2,)), parts=(1, 0, 2, 2))
    uneven = lower(graph, FOUR, grid(of_three)[1])
    assert givers(uneven, TaskKind.REDUCE_VALUE) == [[0, 3]]
    # Half of each sharded parameter is added up between the members at the same position.
    names = [graph.tensors[parameter].name for _, parameter, _ in graph.updates]
    reduced: dict[str, list[tuple[tuple[int, ...], float]]] = {}
    for task in np.flatnonzero(program.kind == TaskKind.ALL_REDUCE):
        where = program.channels[program.channel[task]].devices, float(program.num_bytes[task])
        reduced.setdefault(names[program.subject[task]], []).append(where)
    for name, size in (("0.weight", 6 * 16), ("0.bias", 16), ("2.weight", 16 * 16)):
        assert reduced[name] == [((0, 2), size * 4 / 2), ((1, 3), size * 4 / 2)]
    for name, size in (("2.bias", 16), ("4.weight", 16 * 4), ("4.bias", 4)):
        assert reduced[name] == [((0, 1, 2, 3), size * 4)]
    # Each device keeps half of what is sharded, and reads the batch of its team.
    sharded, whole = 4 * (6 * 16 + 16 + 16 * 16), 4 * (16 + 4 * 16 + 4)
    batch = 4 * 4 * (6 + 4)
    assert program.resident_bytes.tolist() == [2 * (sharded / 2 + whole) + batch] * 4


def test_zero_and_micro_batches_inside_a_grid() -> None:
    micro = ((2, 2), (0, 0), (2, 2), (0, 0))
    decision = replace(PAIRS, shares=(4, 0, 4, 0), parts=(1, 1, 1, 1), sync=Sync.ZERO1)
    graph, strategy = grid(decision, micro_batches=micro)
    program = lower(graph, FOUR, strategy)
    scatters = collectives(program, TaskKind.REDUCE_SCATTER)
    for size in (6 * 16, 16, 16 * 16):
        assert scatters.count(((0, 2), size * 2.0)) == 1
        assert scatters.count(((1, 3), size * 2.0)) == 1
    # A quarter of the optimizer's state of what is sharded over two and sliced over two.
    sharded, whole = 4 * (6 * 16 + 16 + 16 * 16), 4 * (16 + 4 * 16 + 4)
    batch = 4 * 4 * (6 + 4)
    expected = sharded * (1 / 2 + 1 / 4) + whole * (1 + 1 / 4) + batch
    assert program.resident_bytes.tolist() == [expected] * 4
    ops = program.kind == TaskKind.COMPUTE
    ruled = ops & (program.units > 0)
    assert set(program.samples[ruled].tolist()) == {2}  # of the team, in each micro-batch
    # An op that follows the batch runs on the first member alone, which has all the samples.
    assert set(program.device[ops & (program.units == 0)].tolist()) == {0, 2}


def test_unlike_teams_add_up_the_intervals_between_all_cuts() -> None:
    layout = Division((0, 1, 2, 3, 4), (3, 3, 2, 2, 2), ((0, 1), (2, 3, 4)))
    _, peers, inside, slices = gradient_rings(layout, (12,))
    # 0 to 6, 6 to 12 meet 0 to 4, 4 to 8, 8 to 12.
    assert [(r.devices, r.begin, r.end) for r in slices] == [
        ((0, 2), 0, 4),
        ((0, 3), 4, 6),
        ((1, 3), 6, 8),
        ((1, 4), 8, 12),
    ]
    assert [r.whole for r in slices] == [(2,), (), (), (4,)]
    assert sum(r.part for r in slices) == 1
    # Teams of different sizes: the first member of each speaks for it.
    assert [(r.devices, r.is_once) for r in peers] == [((0, 1, 2, 3, 4), True)]
    assert [r.devices for r in inside] == [(0, 1), (2, 3, 4)]


def test_a_member_without_units_gets_the_gradient_of_its_team() -> None:
    """Ops that each member of a team does whole; one member has no weight and does nothing.

    Without its team's gradient the ring of its position would add up one team alone.
    """
    graph, strategy = grid(replace(PAIRS, parts=(1, 0, 1, 1)))
    group = group_ops(graph).group
    rules = tuple(
        (op, OpRule(inputs=(R,) * len(each.inputs), outputs=(R,) * each.num_outputs, units=1))
        for op, each in enumerate(graph.ops)
        if not graph.is_view[op] and each.phase != Phase.UPDATE and group[op] != CONSTANT_GROUP
    )
    program = lower(graph, FOUR, replace(strategy, op_rules=rules))
    pushes = np.flatnonzero(program.kind == TaskKind.PUSH)
    routes = [program.channels[program.channel[task]].devices for task in pushes]
    assert routes == [(0, 1)] * len(graph.updates)
    for task in np.flatnonzero(program.kind == TaskKind.ALL_REDUCE):
        waits = program.dependencies(int(task))
        if program.channels[program.channel[task]].devices == (1, 3):
            assert set(pushes) & set(waits)
        assert len(waits) == 2  # one part of each team


def test_unlike_replicas_have_columns_of_their_own() -> None:
    """Three micro-batches of 4 and 2 samples, then two of 4 alone, through both stages."""
    table = ((4, 4, 4, 4, 4), (2, 2, 2, 0, 0), (4, 4, 4, 4, 4), (2, 2, 2, 0, 0))
    sizes = (6, 6, 6, 4, 4)
    for devices in ((0, 1), (2, 3)):
        layout = Division(devices, (20, 6), tuple((device,) for device in devices))
        assert micro_shares(layout, table, sizes).T.tolist() == [[4] * 5, [2, 2, 2, 0, 0]]
    decisions = [
        Decision(devices=devices, shares=(20, 6), teams=tuple((d,) for d in devices))
        for devices in ((0, 1), (2, 3))
    ]
    strategy = Strategy(
        graph="g", cluster="c", decisions=tuple(decisions), homes=(), micro_batches=table
    )
    assert strategy.micro_sizes == sizes


def test_a_team_takes_its_micro_batches_together() -> None:
    """One sample for each team in each micro-batch: not both for the members of the first."""
    layout = Division((0, 1, 2, 3), (2, 2, 2, 2), ((0, 2), (1, 3)))
    cut = cut_division(layout, 4, ((2,) * 4, (0,) * 4, (0,) * 4, (0,) * 4), (2,) * 4)
    assert (cut.team_samples == 1).all()
    assert cut.team_begin.tolist() == [[0, 1, 0, 1]] * 4
    assert cut.own.sum(axis=0).tolist() == [2, 2, 2, 2]


def test_teams_are_kept_in_files_and_evaluated() -> None:
    graph, strategy = grid(PAIRS)
    assert strategy_from_dict(strategy_to_dict(strategy)) == strategy
    old = strategy_to_dict(replace(strategy, decisions=(replace(PAIRS, teams=()),) * 3))
    for decision in old["decisions"]:
        del decision["teams"], decision["parts"]
    assert strategy_from_dict(old).decisions[0].teams == ()
    assert Evaluator(graph, FOUR).evaluate(strategy).is_ok


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"teams": ((0, 1), (2,))}, r"must hold each of the devices \(0, 1, 2, 3\) once"),
        ({"teams": ((0, 1), (1, 2, 3))}, "once"),
        ({"teams": ((0, 1, 2, 3), ())}, "once"),
        ({"parts": (1, 1)}, "one weight of at least 0 for each"),
        ({"parts": (0, 0, 1, 1)}, r"team \(0, 1\) has 4 samples, but no member has a part"),
    ],
)
def test_teams_that_are_none(change: dict[str, object], text: str) -> None:
    with pytest.raises(StrategyError, match=text):
        replace(PAIRS, **change)  # type: ignore[arg-type]


def test_slices_of_unlike_teams_are_refused_under_zero() -> None:
    unlike = replace(PAIRS, teams=((0,), (1, 2, 3)), sync=Sync.ZERO1)
    graph, strategy = grid(unlike)
    with pytest.raises(StrategyError, match="cut parameters unlike each other"):
        strategy.check(graph, FOUR)
