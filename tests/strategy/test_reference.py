"""The lowering kernel against the slow reference, on random strategies of every kind."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Hashable
from dataclasses import replace
from functools import cache
from random import Random
from typing import NamedTuple

import numpy as np
import pytest

from heterog.cluster import Cluster
from heterog.errors import StrategyError
from heterog.graph.capture import capture
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.graph.placement import OpRules, Window
from heterog.lowering import lower, lower_resized
from heterog.lowering.program import (
    FIRST_FREE_KIND,
    FIRST_LINK_KIND,
    LAST_OP_KIND,
    RECUT_KINDS,
    Program,
    TaskKind,
)
from heterog.lowering.sparse_tables import matrix_of
from heterog.lowering.tables import GraphTables, graph_tables
from heterog.strategy import keeping
from heterog.strategy.division import micro_shares
from heterog.strategy.layouts.experts import expert_rules
from heterog.strategy.layouts.layout import parse_layout
from heterog.strategy.layouts.placed import place_layout
from heterog.strategy.layouts.tensor import team_rules
from heterog.strategy.schedules import Pass, Turn, device_chunks
from heterog.strategy.spatial_split import feature_splits, row_splits, spatial_splits
from heterog.strategy.strategy import REPLICATED, Keeps, Strategy
from heterog.zoo.language import VOCABULARY, Transformer, token_workload
from tests.runtime import graphs
from tests.runtime.grids import grid_cluster
from tests.runtime.padded import padded_workload
from tests.runtime.strategies import graph_of
from tests.runtime.volumes import workload_of
from tests.simulator.builders import (
    random_cluster,
    random_graph,
    random_rules,
    random_strategy,
    with_random_blocks,
    with_random_slice_groups,
    with_random_teams,
    with_rules,
    within_samples,
)
from tests.strategy.reading import Need
from tests.strategy.reference import Buffer, Meaning, Route, Subject, Task, meaning
from tests.thorough import THOROUGH, one_in

SEED = int(os.environ.get("HETEROG_SEED", "7"))
NUM_RANDOM = int(os.environ.get("HETEROG_RANDOM_STRATEGIES", "32"))
"""Random strategies that are lowered both ways; a thousand take half a minute."""


# --- a kernel's program in the reference's objects ----------------------------------------------


def in_objects(program: Program, graph: OpGraph) -> list[Task]:
    """The tasks of a program, with subjects that do not depend on the kernel's tables."""
    tables = graph_tables(graph, program.op_rules, program.blocks)
    tasks: list[Task] = []
    buffers: list[Buffer] = []
    for number in range(program.num_tasks):
        channel = int(program.channel[number])
        kind = TaskKind(int(program.kind[number]))
        task = Task(
            kind=kind,
            subject=subject_of(tables, kind, int(program.subject[number])),
            device=int(program.device[number]),
            micro=int(program.micro[number]),
            samples=int(program.samples[number]),
            units=int(program.units[number]),
            num_bytes=float(program.num_bytes[number]),
            route=route_of(program, channel) if channel >= 0 else None,
            turn=int(program.turn[number]) if kind < FIRST_LINK_KIND else 0,
        )
        reads = program.read_buffer[program.read_start[number] : program.read_start[number + 1]]
        task.reads = [buffers[buffer] for buffer in reads]
        for buffer in range(program.buffer_start[number], program.buffer_start[number + 1]):
            device, num_bytes = program.buffer_device[buffer], program.buffer_bytes[buffer]
            buffers.append(task.make(int(device), float(num_bytes)))
        tasks.append(task)
    return tasks


def subject_of(tables: GraphTables, kind: TaskKind, subject: int) -> Subject:
    """What a task is about: a graph op, a parameter or a need."""
    if kind <= LAST_OP_KIND:
        return int(tables.op_id[subject])
    if kind in RECUT_KINDS:
        return int(tables.value_tensor[subject])
    about_slots = {
        TaskKind.SPLIT,
        TaskKind.CONCAT,
        TaskKind.SEND,
        TaskKind.REDUCE_VALUE,
        TaskKind.GATHER_VALUE,
    }
    if kind not in about_slots:
        return subject
    return Need(
        value=int(tables.value_tensor[tables.slot_value[subject]]),
        group=int(tables.slot_group[subject]),
        whole=int(tables.slot_whole[subject]),
        axis=int(tables.slot_axis[subject]),
        readers=int(tables.slot_pass[subject]),
        window=window_of(tables, subject),
    )


def window_of(tables: GraphTables, slot: int) -> Window | str | None:
    """The rows that a slot brings, if it brings any that others own."""
    step, before, after, rows = map(int, tables.slot_window[slot])
    if step < 0:  # those that the entries of a sparse matrix name
        return matrix_of(tables.sparse, -1 - step).key
    return Window(step, before, after) if rows else None


def route_of(program: Program, channel: int) -> Route:
    """What a link task goes over."""
    used = program.channels[channel]
    return Route(used.kind, used.devices, used.slices)


# --- equal but for the order in which independent tasks are written -----------------------------


class Named:
    """Equal tasks have equal names: they say the same and read what equal tasks make.

    Args:
        tasks: each after those whose buffers it reads.
        known: names given so far; the same for programs that are compared.
    """

    def __init__(self, tasks: list[Task], known: dict[Hashable, int]) -> None:
        self.tasks = tasks
        self.names: list[int] = []
        buffer_name: dict[Buffer, Hashable] = {}
        for task in tasks:
            reads = frozenset(buffer_name[buffer] for buffer in task.reads)
            made = Counter((each.device, rounded(each.num_bytes)) for each in task.makes)
            says = (
                task.kind, task.subject, task.device, task.micro, task.samples, task.units,
                task.turn, rounded(task.num_bytes), rounded_route(task.route),
                frozenset(made.items()),
            )  # fmt: skip
            name = known.setdefault((says, reads), len(known))
            self.names.append(name)
            seen: Counter[Hashable] = Counter()
            for each in task.makes:
                what = each.device, rounded(each.num_bytes)
                buffer_name[each] = (name, what, seen[what])
                seen[what] += 1

    def streams(self) -> dict[int, list[int]]:
        """On each device the tasks that keep program order."""
        found: dict[int, list[int]] = {}
        for task, name in zip(self.tasks, self.names, strict=True):
            if task.kind < FIRST_FREE_KIND:
                found.setdefault(task.device, []).append(name)
        return found


def rounded(num_bytes: float) -> float:
    """Bytes without the last digits, which depend on the order of products."""
    return float(f"{num_bytes:.9g}")


def rounded_route(route: Route | None) -> Hashable:
    return route and (route.kind, route.devices, tuple(map(rounded, route.slices)))


def assert_same(program: Program, graph: OpGraph, expected: Meaning) -> None:
    """Tasks, what they wait for, buffers, buckets, resident bytes."""
    known: dict[Hashable, int] = {}
    slow = Named(expected.tasks, known)
    fast = Named(in_objects(program, graph), known)
    missing, extra = Counter(slow.names), Counter(fast.names)
    missing, extra = missing - extra, extra - missing
    for what, tasks in (("lacks", slow), ("has", fast)):
        for task, name in zip(tasks.tasks, tasks.names, strict=True):
            if name in (missing if what == "lacks" else extra):
                print(f"the kernel {what}: {in_words(task)}")
                break
    assert not missing
    assert not extra
    assert fast.streams() == slow.streams(), "the same tasks in another order on some device"
    bucket = {row: int(first) for row, first in enumerate(program.bucket) if first >= 0}
    assert bucket == expected.bucket
    np.testing.assert_allclose(program.resident_bytes, expected.resident_bytes, rtol=1e-12)
    assert program.is_in_turn == expected.is_in_turn


def in_words(task: Task) -> str:
    """A task with what it reads and makes."""
    reads = "".join(f"\n    reads {said(b)} of {short(b.maker)}" for b in task.reads)
    makes = "".join(f"\n    makes {said(b)}" for b in task.makes)
    return short(task) + reads + makes


def said(buffer: Buffer) -> str:
    return f"{buffer.num_bytes:g} bytes on {buffer.device}"


def short(task: Task) -> str:
    return (
        f"{task.kind.name} {task.subject} on {task.device}, micro-batch {task.micro}, turn "
        f"{task.turn}, {task.samples} samples, {task.num_bytes:g} bytes, {task.route}"
    )


# --- random strategies --------------------------------------------------------------------------


class Case(NamedTuple):
    graph: OpGraph
    cluster: Cluster
    strategy: Strategy
    num_steps: int


@cache
def model_of(name: str) -> OpGraph:
    """A captured model: of those that ranks run in tests, or an encoder and a decoder."""
    if name != "encoder and decoder":
        return graph_of(name)
    tokens = dict.fromkeys(("input_ids", "decoder_input_ids", "labels"), 32)
    return capture(token_workload(name, lambda: Transformer(1), 8, VOCABULARY, tokens))


MODELS = ("mlp", "normalised", "gpt", "moe", "encoder and decoder")


def random_strategy_of(
    rng: Random, graph: OpGraph, rules: OpRules = (), *, in_teams: bool = False
) -> Case:
    """Any strategy of a graph, on some cluster; with turns at random where it has some."""
    cluster = random_cluster(rng)
    plain = random_strategy(rng, graph, cluster)
    if in_teams:
        plain = with_random_teams(rng, plain)
    if plain.num_micro_batches > 1 or in_teams:
        rules = within_samples(graph, rules)
    strategy = with_rules(graph, plain, rules, keeps_slices=True)
    try:
        strategy.check(graph, cluster)
    except StrategyError:  # teams that are cut unlike each other have no ZeRO
        strategy = with_rules(graph, plain, rules)
    if rng.random() < 0.3:
        strategy = with_random_blocks(rng, strategy)
    if rng.random() < 0.3:
        once = replace(strategy.schedule, gathers_once=True)
        strategy = replace(strategy, schedule=once)
    if strategy.num_micro_batches > 1 and rng.random() < 0.3:
        strategy = with_random_turns(rng, strategy, cluster.num_devices)
    return Case(graph, cluster, strategy, 1 if strategy.step_barrier else rng.randint(2, 3))


def with_random_turns(rng: Random, strategy: Strategy, num_devices: int) -> Strategy:
    """Each device's turns in any order: most cannot be run, but all have a meaning."""
    schedule = strategy.schedule
    devices = [decision.devices for decision in strategy.decisions]
    chunks = device_chunks(devices, num_devices, schedule.chunk_starts)
    passes = list(Pass) if schedule.splits_backward else [Pass.FORWARD, Pass.BACKWARD]
    samples = [set[int]() for _ in chunks]
    for decision in set(strategy.decisions):
        table, sizes = strategy.micro_batches, strategy.micro_sizes
        rows = micro_shares(decision.division, table, sizes).T
        for device, counts in zip(decision.devices, rows, strict=True):
            # Ops with rules run on all samples of their team.
            team = next((t for t in decision.teams if device in t), decision.devices)
            members = [rows[decision.devices.index(member)] for member in team]
            own = sum(members) if strategy.op_rules else counts
            samples[device].update(map(int, own.nonzero()[0]))
    turns = [
        [
            Turn(micro, chunk, work)
            for micro in sorted(own)
            for chunk in range(len(chunks[device]))
            for work in passes
        ]
        for device, own in enumerate(samples)
    ]
    for stated in turns:
        rng.shuffle(stated)
    return replace(strategy, schedule=replace(schedule, turns=tuple(map(tuple, turns))))


def assert_lowered_alike(case: Case) -> None:
    graph, cluster, strategy, num_steps = case
    program = lower(graph, cluster, strategy, num_steps=num_steps)
    assert_same(program, graph, meaning(graph, cluster, strategy, num_steps=num_steps))


@pytest.mark.parametrize("number", range(NUM_RANDOM))
def test_the_kernel_writes_what_a_strategy_means(number: int) -> None:
    rng = Random(f"{SEED} graph {number}")
    assert_lowered_alike(random_strategy_of(rng, random_graph(rng)))


@pytest.mark.parametrize("number", range(NUM_RANDOM // 4))
def test_on_models(number: int) -> None:
    rng = Random(f"{SEED} model {number}")
    assert_lowered_alike(random_strategy_of(rng, model_of(MODELS[number % len(MODELS)])))


@pytest.mark.parametrize("number", range(NUM_RANDOM // 2))
def test_in_slice_groups(number: int) -> None:
    """Copies in slices: reduce-scatters inside groups, slices added up between them."""
    rng = Random(f"{SEED} copies {number}")
    graph = random_graph(rng)
    while True:
        case = random_strategy_of(rng, graph, in_teams=number % 2 == 1)
        strategy = with_random_slice_groups(rng, replace(case.strategy, blocks=()))
        homes = tuple(
            REPLICATED if strategy.decisions[int(group)].slice_groups else home
            for home, group in zip(
                strategy.homes,
                group_ops(graph).group[[op for op, _, _ in graph.updates]],
                strict=True,
            )
        )
        strategy = replace(strategy, homes=homes)
        try:
            strategy.check(graph, case.cluster)
        except StrategyError:  # teams that are cut unlike each other have no ZeRO
            continue
        if any(each.slice_groups for each in strategy.decisions):
            break
    assert_lowered_alike(case._replace(strategy=strategy))


def random_case_of(kind: str, rng: Random, number: int) -> Case:
    """Any strategy in teams, with rules, or both."""
    graph = model_of(MODELS[number % len(MODELS)])
    rules = random_rules(rng, graph) if kind != "teams" else ()
    return random_strategy_of(rng, graph, rules, in_teams=kind != "rules")


@pytest.mark.parametrize("number", range(NUM_RANDOM // 4))
@pytest.mark.parametrize("kind", ["rules", "teams", "rules in teams"])
def test_under_rules_and_in_teams(kind: str, number: int) -> None:
    rng = Random(f"{SEED} {kind} {number}")
    assert_lowered_alike(random_case_of(kind, rng, number))


@cache
def written_out() -> OpGraph:
    """Language models whose attention keeps its scores, with dropout and a mask of the batch."""
    return capture(padded_workload())


@one_in(2)
@pytest.mark.parametrize("number", range(NUM_RANDOM // 2))
def test_what_is_kept_and_what_is_made_where_it_is_read(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Single ops run again; masks of any size are made on every stage."""
    rng = Random(f"{SEED} kept {number}")
    monkeypatch.setattr(keeping, "BYTES_PER_LAUNCH", 0.0)
    graph = replace(written_out())  # tables are remembered by graph
    rules = random_rules(rng, graph) if number % 4 == 3 else ()
    if number % 4 == 2:
        rules = team_rules(graph, tuple(range(group_ops(graph).num_groups))).op_rules
    case = random_strategy_of(rng, graph, rules, in_teams=number % 4 > 1)
    assert_lowered_alike(case._replace(strategy=with_random_keeps(rng, case.strategy)))


@pytest.mark.parametrize(
    "text",
    [
        "pp=2,micro_batch=1,recompute=selective",
        "pp=2,micro_batch=2,recompute=op,schedule=gpipe",
        "tp=2,pp=2,micro_batch=2,recompute=op",
        "tp=2,pp=2,zero=3,micro_batch=1,sp=true,recompute=selective",
    ],
)
def test_masks_of_stages(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "BYTES_PER_LAUNCH", 0.0)
    graph, cluster = replace(written_out()), grid_cluster(4)
    strategy = place_layout(parse_layout(text), graph, cluster).strategy
    kinds = lower(graph, cluster, strategy).kind
    assert (kinds == TaskKind.REMAKE).any()
    assert (kinds == TaskKind.RECOMPUTE).any()
    assert_lowered_alike(Case(graph, cluster, strategy, 1))


def with_random_keeps(rng: Random, strategy: Strategy) -> Strategy:
    """Nearly all groups recompute, and keep something."""
    kept = {
        each: replace(each, recompute=True, keeps=rng.choice(list(Keeps)))
        for each in dict.fromkeys(strategy.decisions)
        if rng.random() < 0.9
    }
    return replace(strategy, decisions=tuple(kept.get(each, each) for each in strategy.decisions))


@pytest.mark.parametrize("number", range(NUM_RANDOM // 4))
def test_along_positions(number: int) -> None:
    """Sums in slices, which each pass gathers for itself, also where it recomputes."""
    rng = Random(f"{SEED} positions {number}")
    graph = model_of(("gpt", "encoder and decoder")[number % 2])
    groups = tuple(range(group_ops(graph).num_groups))
    rules = team_rules(graph, groups, sequence_parallel=True).op_rules
    assert_lowered_alike(random_strategy_of(rng, graph, rules, in_teams=number % 3 > 0))


def test_two_forms_of_a_value_are_gathered_again() -> None:
    """One of two needs of a value is gathered for a rerun, and the other takes what that brought.

    It read the first pass's gather, which would have been held until then.
    """
    graph = model_of("encoder and decoder")
    groups = tuple(range(group_ops(graph).num_groups))
    rules = team_rules(graph, groups, sequence_parallel=True).op_rules
    rng = Random("11 positions 49")
    assert_lowered_alike(random_strategy_of(rng, graph, rules, in_teams=True))


@pytest.mark.parametrize("number", range(NUM_RANDOM // 4))
def test_tokens_are_exchanged(number: int) -> None:
    """An all-to-all to the experts and one back, forward and backward."""
    rng = Random(f"{SEED} experts {number}")
    graph = model_of("moe")
    rules = expert_rules(graph, tuple(range(group_ops(graph).num_groups)), 2).op_rules
    case = random_strategy_of(rng, graph, rules, in_teams=number % 3 > 0)
    assert_lowered_alike(case)


@cache
def volume_of(name: str) -> OpGraph:
    """A network whose samples are cut along space."""
    return capture(workload_of(name, 4))


@one_in(2)
@pytest.mark.parametrize("number", range(NUM_RANDOM // 4))
def test_along_space(number: int) -> None:
    """Rows that neighbours own, also on other devices than where they were made."""
    rng = Random(f"{SEED} space {number}")
    graph = volume_of(("waves", "picture", "unet of parts", "unet")[number % 4])
    rules = rng.choice(spatial_splits(graph)).op_rules
    assert_lowered_alike(random_strategy_of(rng, graph, rules, in_teams=number % 3 > 0))


@pytest.mark.parametrize("number", range(3))
def test_along_the_nodes_or_features_of_a_graph(number: int) -> None:
    """Rows that the entries of a sparse matrix name."""
    rng = Random(f"{SEED} nodes {number}")
    graph = graphs.graph_of(("gcn", "sage", "mixed")[number])
    rules = rng.choice((*row_splits(graph), *feature_splits(graph)[:1])).op_rules
    assert_lowered_alike(random_strategy_of(rng, graph, rules, in_teams=number > 0))


@pytest.mark.parametrize("number", range(NUM_RANDOM // 2))
def test_on_a_batch_of_another_size(number: int) -> None:
    seed = f"{SEED} resized {number}"
    rng = Random(seed)
    planned = random_graph(rng)
    case = random_strategy_of(rng, planned, in_teams=number % 2 == 1)
    given = replace(random_graph(Random(seed), batch_size=rng.randint(1, 9)), grouped_like=planned)
    strategy = case.strategy.resized(given)
    program = lower_resized(given, case.cluster, strategy)
    assert_same(program, given, meaning(given, case.cluster, strategy))


@THOROUGH
def test_the_kernel_runs_uncompiled() -> None:
    """As in a debugger, with the bounds of arrays checked: the same programs."""
    few = {"NUMBA_DISABLE_JIT": "1", "HETEROG_RANDOM_STRATEGIES": "6"}
    tests = [sys.executable, "-m", "pytest", "-n", "0", __file__, "-k", "means or size or teams-0"]
    done = subprocess.run(
        tests, env=os.environ | few, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout
