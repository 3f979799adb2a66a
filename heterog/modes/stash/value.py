"""Weight stashes: a pipeline whose stages never wait for a step to end.

A batch is m micro-batches (one, if it is not cut). In a pipeline of S stages, the backward passes
of stage s are D_s = K (S - 1 - s) micro-batches behind those of the last stage: while a gradient
travels back, the stage runs the forward passes of the next micro-batches, also of next batches.
Gradients of a batch are added up, and its last backward pass makes the update. All passes of a
batch use the weights that its first forward pass found. The stage keeps these weights until the
update: its *stash*. With w_s(n) the weights of stage s after n updates, and d_s = ceil(D_s / m),
the update with batch t is

    w_s(t + 1) = step(w_s(t), grad_s loss_t(w_0(t - d_0), ..., w_{S-1}(t - d_{S-1})))

where versions before the first one equal the first. For K = m = 1 that is PipeDream's weight
stashing (Narayanan et al. 2019, section 3.3), with whole batches instead of its minibatches. For
K = 1 and m >= S - 1 it is PipeDream-2BW (Narayanan et al. 2021, section 3.1): two versions of
weights, one update apart. Unlike there, the last stage has the newest weights. Larger K leave
messages more time to travel. With K = 0 every stage waits for the gradient of its own micro-batch:
one device's step.

Like an exact step, each step makes one update with the gradient of a whole batch, but with older
weights. So a strategy has a stash only if a user asked for it.

With a stash a stage runs the forward pass of one micro-batch and the backward pass of another. So
this module assigns every task to a pass and a micro-batch (``is_of_backward``,
``micro_batch_of``). A value of the forward pass may go only to later stages, a value of the
backward pass only to earlier stages (``fault``). ``EncodedStash.kept_bytes`` has the memory of a
stash.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from heterog.errors import StrategyError
from heterog.lowering.choice import BoolArray, Choice
from heterog.lowering.program import (
    FIRST_LINK_KIND,
    RECUT_KINDS,
    SLOT_KINDS,
    FloatArray,
    IntArray,
    Program,
    TaskKind,
)
from heterog.lowering.resident import resident_bytes
from heterog.lowering.tables import GraphTables
from heterog.lowering.tape import NUM_BUFFERS, NUM_READS, NUM_TASKS, Tape
from heterog.modes.islands import check_whole
from heterog.modes.mode import EncodedMode, Mode
from heterog.records import Int32
from heterog.strategy.schedules import PipelineSchedule, device_chunks

if TYPE_CHECKING:
    from heterog.cluster.topology import Cluster
    from heterog.graph.op_graph import OpGraph
    from heterog.lowering.channels import ChannelTable
    from heterog.methods.planner import Planner
    from heterog.modes.on_ranks import RankMode, Rehearsal
    from heterog.runtime.deploy import DeployedStep
    from heterog.runtime.measure.rehearsal import Stage
    from heterog.simulator.evaluator import Evaluator
    from heterog.strategy.strategy import Strategy


Stages = tuple[tuple[int, ...], ...]
AnyIntegers = npt.NDArray[np.integer[Any]]

OF_BATCH = (
    *(TaskKind.FLATTEN, TaskKind.ALL_REDUCE, TaskKind.REDUCE_SCATTER, TaskKind.ALL_GATHER),
    *(TaskKind.PUSH, TaskKind.SUM, TaskKind.UPDATE, TaskKind.PULL),
)
"""Tasks that sum a batch's gradients over devices or update with them."""


def is_of_backward(kind: AnyIntegers, subject: IntArray, tables: GraphTables) -> BoolArray:
    """Whether each task belongs to the backward pass of its batch.

    A task that moves a value belongs to the pass that makes the value. A remade value belongs to
    the pass that made it first; updates, sums of gradients and recomputation belong to the
    backward pass.

    Args:
        kind: ``TaskKind`` of each task.  # [num_tasks]
        subject: Subject of each task.  # [num_tasks]
        tables: The graph's tables, which number subjects.

    Returns:
        # [num_tasks]
    """
    found = np.ones(len(kind), np.bool_)
    of_op = np.isin(kind, (TaskKind.COMPUTE, TaskKind.REMAKE))
    found[of_op] = tables.op_is_late[subject[of_op]] > 0
    of_value = np.isin(kind, list(SLOT_KINDS))
    found[of_value] = tables.op_is_late[
        tables.value_op[tables.slot_value[subject[of_value]]]
    ].astype(np.bool_)
    scattered = np.isin(kind, list(RECUT_KINDS))
    found[scattered] = tables.op_is_late[tables.value_op[subject[scattered]]] > 0
    return found


def is_written_last(kind: AnyIntegers, subject: IntArray, tables: GraphTables) -> BoolArray:
    """Whether each task writes a model's buffer, such as a running statistic.

    The forward pass makes the values. A step on its own writes them at its end, but no later task
    waits for that; stages that run different batches write them in the forward pass.

    Args:
        kind: ``TaskKind`` of each task.  # [num_tasks]
        subject: Subject of each task.  # [num_tasks]
        tables: The graph's tables, which number subjects.
    """
    found = kind == TaskKind.COMPUTE
    own = subject[found]
    found[found] = (tables.op_is_backward[own] > 0) & (tables.op_is_late[own] == 0)
    return np.asarray(found, np.bool_)


def micro_batch_of(
    micro: IntArray, num_reads: AnyIntegers, reads: IntArray, maker: IntArray
) -> IntArray:
    """Micro-batch with which a stage runs each task: the last one that the task depends on.

    A sum of gradients or an update belongs to no micro-batch; it runs with the last one whose
    gradients it needs.

    Args:
        micro: Micro-batch of each task from lowering, 0 for tasks without one.  # [num_tasks]
        num_reads: Number of buffers that each task reads.  # [num_tasks]
        reads: Buffers that tasks read, one task after another.  # [num_reads]
        maker: Task that makes each buffer.  # [num_buffers]

    Returns:
        # [num_tasks]
    """
    found = micro.copy()
    if not micro.any():
        return found
    reader, made_by = np.repeat(np.arange(len(micro)), num_reads), maker[reads]
    while True:  # as often as a chain of tasks without micro-batch is long: sum, update, pull
        last = found.copy()
        np.maximum.at(found, reader, last[made_by])
        if (found == last).all():
            return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedStash(EncodedMode):
    """Stage of each device, and the number of micro-batches that it is behind.

    Attributes:
        stage: Stage of each device, -1 for none.  # [num_devices]
        behind: Number D of micro-batches.  # [num_devices]
    """

    folds = False
    keeps_versions = True

    stage: IntArray
    behind: IntArray

    def kept_bytes(self, tape: Tape, tables: GraphTables, choice: Choice) -> FloatArray:
        """Bytes that the stash adds to each device.

        A device that is D micro-batches of m behind keeps ceil(D / m) more versions of its
        weights, and the saved values of D more micro-batches. The newest batch has come when the
        oldest of these D + 1 micro-batches begins its backward pass, so the device keeps its own
        samples of ceil((D + 1) / m) more batches. Messages come before they are needed: gradients
        of one micro-batch, and inputs of one or two micro-batches of a batch.

        Args:
            tape: Tape of one step, whose micro-batches come one after another.
            tables: The graph's tables.
            choice: The choice from which the step was lowered.

        Returns:
            # [num_devices]
        """
        holds = choice.member[choice.division[tables.parameter_group]]
        weights = (tables.parameter_bytes[:, None] * holds).sum(0)
        without = resident_bytes(tables._replace(input_bytes_per_sample=0.0), choice)
        batch = resident_bytes(tables, choice) - without
        tasks = tape.tasks[: int(tape.counts[NUM_TASKS])]
        reads = tape.reads[: tape.counts[NUM_READS]]
        buffers = tape.buffers[: tape.counts[NUM_BUFFERS]]
        is_late = is_of_backward(tasks["kind"], tasks["subject"], tables)
        ends = np.append(tasks["read_start"], tape.counts[NUM_READS])
        is_read_late = np.zeros(len(buffers), np.bool_)
        is_read_late[reads[np.repeat(is_late, np.diff(ends))]] = True
        maker = buffers["maker"]
        is_saved = is_read_late & ~is_late[maker]
        source, target = source_stages(tape, self.stage), _stage(self.stage, tasks["device"])
        is_message = tasks["kind"] >= FIRST_LINK_KIND
        comes = (is_message & (target >= 0) & (source != target))[maker]
        micro, count = tasks["micro"][maker], choice.num_micro
        saved = _by_micro_batch(buffers, micro, is_saved, (count, len(weights)))
        whole, more = np.divmod(self.behind, count)
        kept = whole * saved.sum(0) + more * saved.max(0)
        kept += (whole + (more > 0)) * weights + (whole + 1) * batch
        inputs = _by_micro_batch(buffers, micro, comes & ~is_late[maker], saved.shape)
        gradients = _by_micro_batch(buffers, micro, comes & is_late[maker], saved.shape)
        early = min(count, 2) * inputs.max(0) + gradients.max(0)
        return np.asarray(kept + early, np.float64)


def _by_micro_batch(
    buffers: npt.NDArray[np.void],
    micro: IntArray,
    chosen: BoolArray,
    shape: tuple[int, int],
) -> FloatArray:
    """Bytes of some buffers by micro-batch and device.

    Args:
        buffers: Buffers of a tape.  # [num_buffers]
        micro: Micro-batch of each buffer.  # [num_buffers]
        chosen: Whether each buffer counts.  # [num_buffers]
        shape: Numbers of micro-batches and devices.

    Returns:
        # [num_micro, num_devices]
    """
    here = chosen & (buffers["device"] >= 0)
    key = micro[here] * shape[1] + buffers["device"][here]
    sizes = np.bincount(key, buffers["num_bytes"][here], shape[0] * shape[1])
    return np.asarray(sizes, np.float64).reshape(shape)


def source_stages(tape: Tape, stage: IntArray) -> IntArray:
    """Stage of the device with the first buffer that each task reads, or -1.  # [num_tasks]"""
    count = int(tape.counts[NUM_TASKS])
    starts = np.append(tape.tasks["read_start"][:count], tape.counts[NUM_READS])
    found = np.full(count, -1, np.int32)
    has_reads = np.diff(starts) > 0
    first = tape.reads[starts[:-1][has_reads]]
    found[has_reads] = _stage(stage, tape.buffers["device"][first])
    return found


def _stage(stage: IntArray, device: IntArray) -> IntArray:
    """Stage of each device of an array, -1 for no device."""
    return np.append(stage, np.int32(-1))[device]


MOST_BOUNDARY_STEPS = 1000
"""Most micro-batches that a boundary may add; memory runs out long before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightStash(Mode):
    """Staleness of a pipeline's stages.

    Attributes:
        boundary_steps: Number K of micro-batches by which every boundary delays the backward
            passes of the stages before it.
    """

    key = "stash"
    word = "stash"
    overlaps_steps = True

    boundary_steps: Int32

    def __post_init__(self) -> None:
        if not 0 <= self.boundary_steps <= MOST_BOUNDARY_STEPS:
            raise StrategyError(
                f"a stash with {self.boundary_steps} steps for each boundary of stages; give a "
                f"number from 0 to {MOST_BOUNDARY_STEPS:,} (1 is PipeDream's)."
            )

    def behind(self, stage: int, num_stages: int) -> int:
        """Number D_s of micro-batches that a stage runs forward before its first backward pass.

        The micro-batch of this backward pass is not counted.

        >>> [WeightStash(boundary_steps=2).behind(stage, 3) for stage in range(3)]
        [4, 2, 0]
        """
        return self.boundary_steps * (num_stages - 1 - stage)

    def staleness(self, stage: int, num_stages: int, num_micro: int) -> int:
        """Number d_s of updates between the weights that made a gradient and those it changes.

        >>> [WeightStash(boundary_steps=2).staleness(stage, 3, num_micro=1) for stage in range(3)]
        [4, 2, 0]
        >>> [WeightStash(boundary_steps=2).staleness(stage, 3, num_micro=3) for stage in range(3)]
        [2, 1, 0]
        """
        return -(-self.behind(stage, num_stages) // num_micro)

    @property
    def words(self) -> str:
        """The stash in a sentence that is true for any number of micro-batches.

        >>> WeightStash(boundary_steps=1).words
        'stages that do not wait, with weights up to 1 step older for each later stage'
        """
        steps = "1 step" if self.boundary_steps == 1 else f"{self.boundary_steps} steps"
        return f"stages that do not wait, with weights up to {steps} older for each later stage"

    @classmethod
    def method(cls, text: str) -> "Planner":
        """The method that searches stages for the stash."""
        from heterog.modes.stash.method import parse_stash

        return parse_stash(text)

    def brief_words(self, strategy: "Strategy") -> str:
        """The age of the oldest weights in a few words."""
        age = oldest_weights(strategy)
        return f"weights up to {age} step{'s' * (age != 1)} old"

    def sentence(self, strategy: "Strategy") -> str:
        """The batches and weights of the first stage, which keeps the most."""
        age = oldest_weights(strategy)
        behind = self.behind(0, len(stages_of(strategy)))
        prefix = "micro-" if strategy.num_micro_batches > 1 else ""
        one, many = f"{prefix}batch", f"{prefix}batches"
        if behind == 0:
            return f"Each stage waits for the gradient of its own {one}."
        return (
            f"Stages do not wait: the first one runs {behind} more {one if behind == 1 else many} "
            "forward before a gradient comes back, with weights up to "
            f"{age} step{'s' * (age != 1)} old, of which it keeps {age + 1} versions."
        )

    def check(self, strategy: "Strategy", graph: "OpGraph", cluster: "Cluster") -> None:
        """Refuse a strategy that is no pipeline of stages with replicas of whole parameters.

        ``fault`` checks the values that flow between stages, in the program.
        """
        check_whole(strategy, "a stash", "stages")
        if not strategy.schedule.is_default:
            raise StrategyError(
                "a stash has stages run one backward and one forward pass in turn, but the "
                "strategy has a schedule of micro-batches; plan without a schedule."
            )
        for decision in strategy.decisions:
            if decision.teams:
                raise StrategyError(
                    f"a stash goes with stages of one team, but devices {decision.devices} are in "
                    f"{len(decision.teams)}; plan without teams."
                )
        if len(stages_of(strategy)) < 2:
            raise StrategyError(
                "a stash needs at least two stages that share no device, but the groups' devices "
                f"{sorted({d for each in strategy.decisions for d in each.devices})} belong "
                "together; cut the model into stages."
            )

    def fault(self, program: "Program", strategy: "Strategy", tables: "GraphTables") -> str:
        """Why stages cannot work on different batches at a time; empty if they can."""
        stage = {
            device: number for number, own in enumerate(stages_of(strategy)) for device in own
        }
        is_late = is_of_backward(program.kind, program.subject, tables)
        for task in np.flatnonzero(program.kind >= FIRST_LINK_KIND).tolist():
            devices = program.channels[int(program.channel[task])].devices
            met = [stage.get(device, -1) for device in devices]
            if len(set(met)) == 1:
                continue
            goes_on = met[0] < met[-1] if not is_late[task] else met[0] > met[-1]
            if program.kind[task] != TaskKind.SEND or -1 in met or not goes_on:
                return (
                    f"devices {devices} of several stages exchange a value of the "
                    f"{'backward' if is_late[task] else 'forward'} pass, which with a stash goes "
                    f"from a stage to {'earlier' if is_late[task] else 'later'} ones only; cut "
                    "the model where one value follows from the others, and keep shared "
                    "parameters in one stage"
                )
        maker, reader = program.edges
        # Across micro-batches, forward passes follow backward passes only in a step on its own.
        is_alike = program.micro[maker] == program.micro[reader]
        if (is_late[maker] & ~is_late[reader] & is_alike).any():
            return (
                "an op of the forward pass reads what the backward pass makes, so that with a "
                "stash it would wait for a later batch; plan without the stash"
            )
        return ""

    def schedule(self, strategy: "Strategy", num_devices: int) -> PipelineSchedule:
        """The schedule of a step on its own: a micro-batch begins when the one before has ended.

        It has the times of single passes, from which ``paces`` computes the pace of stages with
        several batches under way, and the memory of stages without older weights.
        """
        chunks = device_chunks([decision.devices for decision in strategy.decisions], num_devices)
        return PipelineSchedule(in_flight=tuple((1,) * len(own) for own in chunks))

    def encode(
        self, strategy: "Strategy", tables: "GraphTables", channels: "ChannelTable"
    ) -> EncodedMode:
        """Stage of each device, and the number of micro-batches that it is behind."""
        stages, num_devices = stages_of(strategy), channels.cluster.num_devices
        stage, behind = np.full(num_devices, -1, np.int32), np.zeros(num_devices, np.int32)
        for number, devices in enumerate(stages):
            stage[list(devices)] = number
            behind[list(devices)] = self.behind(number, len(stages))
        return EncodedStash(stage=stage, behind=behind)

    def priced(
        self, encoded: EncodedMode, evaluator: "Evaluator", strategy: "Strategy", choice: "Choice"
    ) -> EncodedMode:
        """The pace of stages that do not wait, minus a step on its own."""
        from heterog.modes.stash.paces import more_seconds

        return replace(encoded, more_s=more_seconds(self, evaluator, choice))

    def device_sets(self, program: "Program", strategy: "Strategy") -> set[tuple[int, ...]]:
        """The lane of gradients between stages."""
        from heterog.runtime.step.conversions import gradient_lane

        return {gradient_lane(program)}

    def goes_back(self, program: "Program", tables: "GraphTables") -> list[bool]:
        """Whether each task belongs to the backward pass."""
        found: list[bool] = is_of_backward(program.kind, program.subject, tables).tolist()
        return found

    def on_rank(self, step: "DeployedStep") -> "RankMode":
        """The batches under way on a rank."""
        from heterog.modes.stash.ranks import training_of

        return training_of(step)

    def rehearsal(self, stage: "Stage") -> "Rehearsal":
        """Play batches until the pipeline is full and every stage has ended one."""
        from heterog.modes.stash.ranks import RehearsedStash

        return RehearsedStash(stage)


def stages_of(strategy: "Strategy") -> tuple[tuple[int, ...], ...]:
    """Devices of each stage, ascending, in the order of the model's groups.

    All devices of a decision are in one stage.
    """
    stages: list[set[int]] = []
    for decision in dict.fromkeys(strategy.decisions):
        touched = [stage for stage in stages if not stage.isdisjoint(decision.devices)]
        if not touched:
            stages.append(set(decision.devices))
            continue
        touched[0].update(decision.devices, *touched[1:])
        stages = [stage for stage in stages if stage not in touched[1:]]
    return tuple(tuple(sorted(stage)) for stage in stages)


def oldest_weights(strategy: "Strategy") -> int:
    """The largest age of a gradient's weights in updates; 0 without a stash."""
    stash = strategy.mode(WeightStash)
    if stash is None:
        return 0
    return stash.staleness(0, len(stages_of(strategy)), strategy.num_micro_batches)
