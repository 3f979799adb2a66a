"""Lowering: the only place that knows what a strategy means.

``lower(graph, cluster, strategy)`` makes every split, copy, gather, reduction, parameter push and
pull an explicit task. It makes no choice and knows no seconds. A kernel over flat arrays does the
work; planners call it through the evaluator on buffers that are allocated once.

What the kernel does, in program order, for each micro-batch (``walk``):

1. If an op reads a value that lies on other devices (another group with other shares) or in parts,
   the conversion comes first (``convert``): S to S moves the overlapping ranges, S to R gathers,
   P to R reduces, R to R copies. Values that follow from the batch may be made again instead
   (``sends``). Samples are numbered, and a group's teams own consecutive ranges of them
   (``division``), so neighbouring groups with similar shares move little.
2. One compute task on each device with samples, or with units of the axis that the op's rule
   names. Before the first backward op of a group that recomputes, its forward ops run once more.
3. After the op that completes a gradient (in the last micro-batch): synchronisation and update,
   tensor by tensor or when its bucket is full (``reduce``), in rings of the devices that hold
   parts of one sum. Every replica holds a full-size gradient, for any share (``gradients``),
   except under ZeRO (``slices``).

``choice`` is a strategy in the kernel's flat arrays, ``tape`` is the kernel's working memory, its
output and the order of a device's tasks, ``resident`` counts the bytes that stay on a device for
the whole step, and those that its optimizer makes. Modes rewrite the tape at the end. Each file
calls only files further down in this list: ``resident``, ``walk``, ``reduce``, ``slices``,
``gradients``, ``convert``, ``value_collectives``, ``sends``, ``tape``, ``choice``.

A ``program`` is made on the graph's ``tables`` (``value_reads``; ``sparse_tables`` also counts the
rows that sparse products read of neighbours, ``group_edges`` the bytes that leave a group) and the
traffic of ``channels``; ``folding`` finds devices that do the same. ``kernels`` compiles.
"""

import numpy as np

from heterog.cluster.topology import Cluster
from heterog.graph.op_graph import OpGraph
from heterog.graph.placement import OpRules
from heterog.lowering.channels import ChannelTable
from heterog.lowering.choice import Choice, DistinctDecisions, Encoder, encode
from heterog.lowering.program import LAST_OP_KIND, FloatArray, IntArray, Program
from heterog.lowering.resident import Held, held_bytes, resident_bytes, stepping_bytes
from heterog.lowering.tables import GraphTables, graph_tables
from heterog.lowering.tape import (
    AS_STATED,
    IN_TURN,
    OVERFLOW,
    Scratch,
    Tape,
    make_scratch,
    make_tape,
    with_lanes,
)
from heterog.lowering.walk import lower_kernel
from heterog.strategy.strategy import Strategy

__all__ = [
    "Choice",
    "DistinctDecisions",
    "Encoder",
    "GraphTables",
    "Held",
    "Program",
    "Scratch",
    "Tape",
    "encode",
    "graph_tables",
    "held_bytes",
    "kept_bytes",
    "lower",
    "lower_kernel",
    "lower_resized",
    "lower_to_tape",
    "make_scratch",
    "make_tape",
    "program_from_tape",
    "resident_bytes",
    "stepping_bytes",
    "steps_to_unroll",
    "used_channels",
    "value_of_buffers",
]

UNROLLED_STEPS = 8
"""Steps unrolled to measure a step without barrier: T_8 / 8 (a difference of two unrolled times
can be gamed by a search; the mean cannot)."""
GROWTH = 4
"""Factor by which a tape that was too short grows: memory that is not written costs nothing."""


def lower(
    graph: OpGraph, cluster: Cluster, strategy: Strategy, *, num_steps: int | None = None
) -> Program:
    """Lower a strategy to its program.

    Args:
        graph: One training step.
        cluster: Devices and links.
        strategy: A strategy for this graph and cluster.
        num_steps: Number of training steps to unroll; by default 1 with a step barrier, 8 without.

    Raises:
        StrategyError: the strategy is illegal or was made for something else.
    """
    strategy.check(graph, cluster)
    num_steps = num_steps or steps_to_unroll(strategy.step_barrier)
    return _lower(graph, cluster, strategy, num_steps)


def steps_to_unroll(step_barrier: bool) -> int:
    """Number of steps that are simulated: one with a step barrier, 8 without."""
    return 1 if step_barrier else UNROLLED_STEPS


def lower_resized(graph: OpGraph, cluster: Cluster, strategy: Strategy) -> Program:
    """Lower one step on another batch than the strategy was made for.

    Samples are distributed in proportion to the strategy's shares. Everything that does not depend
    on the batch stays: slices of parameters, homes, buckets. Different decisions stay different,
    even if they have equal shares on this batch.

    Args:
        graph: The step on the other batch, ``grouped_like`` the graph of the strategy.
        cluster: Devices and links.
        strategy: A strategy from ``Strategy.resized``.

    Raises:
        StrategyError: rules of the strategy do not apply to this batch.
    """
    return _lower(graph, cluster, strategy, 1)


def _lower(graph: OpGraph, cluster: Cluster, strategy: Strategy, steps: int) -> Program:
    tables = graph_tables(graph, strategy.op_rules, strategy.blocks)
    channels = ChannelTable(cluster)
    choice = encode(strategy, tables, channels, num_steps=steps)
    scratch = make_scratch(tables, cluster.num_devices)
    tape = make_tape(4096, len(tables.parameter_bytes), cluster.num_devices)
    tape = lower_to_tape(tables, choice, scratch, tape)
    return program_from_tape(
        tape,
        tables,
        choice,
        channels,
        op_rules=strategy.op_rules,
        blocks=strategy.blocks,
    )


def lower_to_tape(tables: GraphTables, choice: Choice, scratch: Scratch, tape: Tape) -> Tape:
    """Run the kernel, on a larger tape if the given one is too short; returns the used tape."""
    num_devices, num_chunks = choice.turns.cap.shape
    if num_devices:  # the number of tokens depends on the choice
        scratch = scratch._replace(
            token=np.empty((num_devices, num_chunks, choice.num_micro, 2), np.int32),
            entered=np.empty((num_devices, num_chunks), np.int32),
            begun=np.empty((num_devices, num_chunks), np.int32),
        )
    if choice.turns.rule == AS_STATED:
        scratch = with_lanes(scratch, choice.turns.turn.shape[2], choice.member.shape[1])
    modes = choice.modes
    if modes:
        choice = choice._replace(modes=())
    while not lower_kernel(tables, choice, scratch, tape):
        tape = make_tape(GROWTH * len(tape.tasks), len(tape.bucket), len(tape.turn))
    for mode in modes:
        tape = mode.rewritten(tape, tables, choice)
    return tape


def kept_bytes(tape: Tape, tables: GraphTables, choice: Choice, held: Held) -> FloatArray:
    """Bytes that stay on each device for the whole step, including those of modes.

    Args:
        tape: Tape of the choice.
        tables: The graph's tables.
        choice: The choice.
        held: What the choice holds on each device.

    Returns:
        # [num_devices]
    """
    kept = held.resident
    for mode in choice.modes:
        kept = kept + mode.kept_bytes(tape, tables, choice)
    return kept


def used_channels(channel: IntArray, num_channels: int) -> tuple[IntArray, IntArray]:
    """Find the channels that some tasks use, and each task's index among them.

    Args:
        channel: Channel of each task, -1 for none.  # [num_tasks]
        num_channels: Number of channels in all.
    """
    is_used = np.zeros(num_channels + 1, np.bool_)
    is_used[channel] = True  # -1 is the last place
    is_used[-1] = False
    place = (np.cumsum(is_used) - 1).astype(np.int32)
    place[-1] = -1
    return np.flatnonzero(is_used).astype(np.int32), place[channel]


def program_from_tape(
    tape: Tape,
    tables: GraphTables,
    choice: Choice,
    channels: ChannelTable,
    *,
    op_rules: OpRules = (),
    blocks: tuple[int, ...] = (),
) -> Program:
    """Copy the content of a tape into a program, with only the channels that tasks use."""
    num_tasks, num_buffers, num_reads = (int(count) for count in tape.counts[:OVERFLOW])
    tasks = tape.tasks[:num_tasks]
    buffers = tape.buffers[:num_buffers]
    used, channel = used_channels(tasks["channel"], len(channels))
    rules = tuple(rule for mode in choice.modes for rule in mode.rules)
    return Program(
        host_of=channels.cluster.host_of,
        num_steps=choice.num_steps,
        kind=tasks["kind"].astype(np.uint8),
        subject=tasks["subject"].copy(),
        device=tasks["device"].copy(),
        micro=tasks["micro"].copy(),
        turn=tasks["turn"].copy(),
        is_in_turn=bool(tape.counts[IN_TURN]),
        samples=tasks["samples"].copy(),
        units=tasks["units"].copy(),
        channel=channel,
        num_bytes=tasks["num_bytes"].copy(),
        read_start=tape.tasks["read_start"][: num_tasks + 1].copy(),
        read_buffer=tape.reads[:num_reads].copy(),
        buffer_start=tape.tasks["buffer_start"][: num_tasks + 1].copy(),
        buffer_device=buffers["device"].copy(),
        buffer_bytes=buffers["num_bytes"].copy(),
        bucket=tape.bucket.copy(),
        resident_bytes=kept_bytes(tape, tables, choice, held_bytes(tables, choice)),
        # At least one channel, so that indexing with -1 (no channel) finds an entry, too.
        channels=tuple(channels[number] for number in used.tolist() or [0]),
        op_rules=op_rules,
        blocks=blocks,
        codec=tasks["codec"].astype(np.int32) if rules else np.zeros(0, np.int32),
        codecs=rules,
    )


def value_of_buffers(program: Program, tables: GraphTables) -> IntArray:
    """The value in each buffer that an op has made; -1 for other buffers.  # [num_buffers]"""
    maker = program.buffer_maker
    found = np.full(len(maker), -1, np.int32)
    by_op = np.flatnonzero(program.kind[maker] <= LAST_OP_KIND)
    task = maker[by_op]
    op = program.subject[task]
    value = tables.value_start[op] + (by_op - program.buffer_start[task])
    # A token of no bytes may follow the values.
    found[by_op] = np.where(value < tables.value_start[op + 1], value, -1)
    return found
