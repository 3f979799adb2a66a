"""A strategy: every decision about how one step runs on one cluster, as a value.

It is fully resolved: integer samples per device, named algorithms, named servers. It says nothing
about what the decisions *mean*; that is ``lowering`` alone. Also here are checks that the
optimizer trains exactly if each device steps the parameters that a strategy gives it.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Annotated, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from heterog.cluster.topology import Cluster
from heterog.errors import StrategyError
from heterog.graph.axis_plan import AxisPlan, axis_plan
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import ELEMENTWISE_OPTIMIZERS, IntArray, OpGraph, UpdateScope
from heterog.graph.placement import OpRule as OpRule
from heterog.graph.placement import OpRules
from heterog.graph.rule_checks import resized_rules
from heterog.modes.mode import Mode
from heterog.records import VALUE, Flag, Int32, Series, member_of
from heterog.strategy.division import (
    Division,
    Ring,
    cut_division,
    gradient_rings,
    is_cut_alike,
    micro_batch_table,
    micro_sizes,
    slice_rings,
    split_in_proportion,
)
from heterog.strategy.keeping import Keeps as Keeps
from heterog.strategy.schedules import AS_IT_COMES, PipelineSchedule, device_chunks
from heterog.strategy.sync import Sync as Sync

_Mode = TypeVar("_Mode", bound=Mode)

REPLICATED = -1
"""Home of a parameter that every replica keeps and updates."""
DEFAULT_BUCKET_BYTES = 25 * 1024 * 1024
"""Bucket size of PyTorch's DistributedDataParallel."""
FIRST_BUCKET_BYTES = 1024 * 1024
"""Size of the first bucket there by default: it is sent while most gradients are computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The decision about one group of ops.

    Attributes:
        devices: Indices of the devices that hold the group's parameters, ascending.
        shares: Number of samples of the global batch for each of ``devices``; 0 is allowed. One
            device with the whole batch is model parallelism.
        sync: Way in which gradients are summed; unused on a single device.
        slices: For ``REDUCE_SCATTER_ALL_GATHER`` and ZeRO, relative slice of each of ``devices``;
            empty means equal slices. Under ZeRO it is the device's part of the optimizer's state
            (2, 3: and of the gradients; 3: and of the parameters), 0 is allowed.
        slice_groups: For ZeRO, a partition of ``devices`` into groups of equal size, each of which
            keeps one copy in slices (FSDP's hybrid sharding): gradients are scattered inside a
            group, the slices are summed between groups, and parameters are gathered inside a
            group. ``slices`` are equal in all groups. Empty means one group of all devices.
        recompute: Whether activations of the group's forward ops are dropped after the forward
            pass and recomputed, just before its backward ops, from the values of other groups.
        keeps: Which of these activations are kept nevertheless.
        teams: A partition of ``devices``; see ``division``. Empty means one team of all devices.
        parts: Weight of each of ``devices`` when its team splits the units of a rule's axis;
            empty means in proportion to the shares.
        division: The division of samples and units among the devices.
    """

    __pydantic_config__: ClassVar = VALUE

    devices: Series[Int32]
    shares: Series[Int32]
    sync: Annotated[Sync, member_of(Sync)] = Sync.RING
    slices: Series[Int32] = ()
    slice_groups: Series[Series[Int32]] = ()
    recompute: Flag = False
    keeps: Annotated[Keeps, member_of(Keeps)] = Keeps.NOTHING
    teams: Series[Series[Int32]] = ()
    parts: Series[Int32] = ()
    division: Division = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.devices or list(self.devices) != sorted(set(self.devices)):
            raise StrategyError(
                f"a decision's devices must be ascending and distinct, got {self.devices}."
            )
        if len(self.shares) != len(self.devices) or min(self.shares) < 0:
            raise StrategyError(
                f"a decision needs one share of at least 0 per device, got {self.shares} for "
                f"devices {self.devices}."
            )
        if self.slices and (
            len(self.slices) != len(self.devices)
            or min(self.slices) < 0
            or sum(self.slices) == 0
            or not self.sync.takes_slices
        ):
            raise StrategyError(
                f"slices {self.slices} need one weight of at least 0 per device, not all 0, and "
                "the synchronisation reduce_scatter_all_gather, zero1, zero2 or zero3."
            )
        if self.keeps and not self.recompute:
            raise StrategyError(
                f"a decision that recomputes nothing keeps everything, it has no use for "
                f"{self.keeps.name.lower()}; let it recompute, or leave that out."
            )
        self._check_slice_groups()
        self._check_teams()
        division = Division(self.devices, self.shares, self.teams, self.parts)
        object.__setattr__(self, "division", division)

    def _check_slice_groups(self) -> None:
        if not self.slice_groups:
            return
        if not self.sync.is_sharded:
            raise StrategyError(
                f"slice groups {self.slice_groups} need the synchronisation zero1, zero2 or "
                f"zero3, not {self.sync.name.lower()}."
            )
        members = sorted(device for group in self.slice_groups for device in group)
        sizes = {len(group) for group in self.slice_groups}
        if members != list(self.devices) or len(sizes) > 1:
            raise StrategyError(
                f"slice groups {self.slice_groups} must hold each of the devices {self.devices} "
                "once and be as large as each other."
            )

    def _check_teams(self) -> None:
        if self.teams:
            members = sorted(device for team in self.teams for device in team)
            if members != list(self.devices) or not all(self.teams):
                raise StrategyError(
                    f"teams {self.teams} must hold each of the devices {self.devices} once."
                )
        if not self.parts:
            return
        if len(self.parts) != len(self.devices) or min(self.parts) < 0:
            raise StrategyError(
                f"parts {self.parts} need one weight of at least 0 for each of the devices "
                f"{self.devices}."
            )
        weight = dict(zip(self.devices, zip(self.parts, self.shares, strict=True), strict=True))
        for team in self.teams or (self.devices,):
            parts, shares = zip(*(weight[device] for device in team), strict=True)
            if sum(shares) and not sum(parts):
                raise StrategyError(
                    f"team {team} has {sum(shares)} samples, but no member has a part of what "
                    "rules split; give at least one of them a part."
                )

    def slice_rings(self, ring: Ring) -> tuple[Ring, ...]:
        """Cut one of its rings into parts that each keep one copy in slices."""
        slice_of = dict(zip(self.devices, self.slices, strict=True)) if self.slices else {}
        return slice_rings(ring, self.slice_groups, slice_of)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """Decisions for every group, homes for every parameter, and settings of the whole step.

    Attributes:
        graph: Fingerprint of the graph it was made for.
        cluster: Fingerprint of the cluster it was made for.
        decisions: One decision per group of the graph.
        homes: Device that updates each parameter (in the order of ``OpGraph.updates``), or
            ``REPLICATED``. A group that synchronises by parameter server needs homes. If a group
            on a single device has a home on another one, gradients are pushed and parameters
            pulled.
        micro_batches: samples per micro-batch for each device of the cluster, all tuples of one
            length; empty means the step runs in one go. A group whose shares are not the sums of
            these tuples splits its own shares in the same proportions. Unequal replicas have
            columns of their own, padded with zeros.
        bucket_bytes: gradients are synchronised in buckets of up to this size; 0 means tensor by
            tensor. Buckets of ZeRO-3, which are also gathered, end with a layer of the model.
        first_bucket_bytes: size of the first bucket of gradients that are summed in the same way,
            which may be sent earlier if it is smaller; 0 means as large as the others. ZeRO's
            buckets are all of one size.
        step_barrier: whether a step is done when every update is done; otherwise the next step's
            forward ops start as soon as their own parameters have arrived.
        op_rules: (graph op index, rule) of the ops that do not follow the batch, ascending; see
            ``OpRule``.
        schedule: in what order devices work through the micro-batches.
        blocks: first group of each block, a run of groups that recompute together: values that
            pass between groups of a block are made again too, and only values that other blocks
            read are kept. The groups of a block have one decision. Ascending from 0; empty means
            each group is a block of its own.
        modes: ways in which training differs from that of one device, by ascending key; empty for
            exact training. See ``modes.mode``.
    """

    graph: str
    cluster: str
    decisions: tuple[Decision, ...]
    homes: tuple[int, ...]
    micro_batches: tuple[tuple[int, ...], ...] = ()
    bucket_bytes: int = 0
    first_bucket_bytes: int = 0
    step_barrier: bool = True
    op_rules: OpRules = ()
    schedule: PipelineSchedule = AS_IT_COMES
    blocks: tuple[int, ...] = ()
    modes: tuple[Mode, ...] = ()

    def with_decisions(self, decisions: tuple[Decision, ...]) -> "Strategy":
        """Replace the decisions; a new block begins where neighbours no longer agree."""
        blocks = cut_at_changes(self.blocks, decisions) if self.blocks else ()
        return replace(self, decisions=decisions, blocks=blocks)

    def mode(self, kind: type[_Mode]) -> _Mode | None:
        """The strategy's mode of a kind; ``None`` if it has none."""
        return next((mode for mode in self.modes if isinstance(mode, kind)), None)

    def own_mode(self, kind: type[_Mode]) -> _Mode:
        """The strategy's mode of a kind, which it must have."""
        found = self.mode(kind)
        assert found is not None
        return found

    def with_mode(self, mode: Mode) -> "Strategy":
        """The same strategy with a mode, which replaces another one of that kind."""
        others = (each for each in self.modes if each.key != mode.key)
        return replace(self, modes=tuple(sorted((*others, mode), key=lambda each: each.key)))

    @property
    def trains_apart(self) -> bool:
        """Whether gradients are summed inside teams only."""
        return any(mode.trains_apart for mode in self.modes)

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of the step."""
        return len(self.micro_batches[0]) if self.micro_batches else 1

    @property
    def _distinct_decisions(self) -> Collection[Decision]:
        """Decisions, each object once: many groups share one."""
        return {id(decision): decision for decision in self.decisions}.values()

    @property
    def gathers_once(self) -> bool:
        """Whether sliced parameters and gradients travel once for all micro-batches of a pass."""
        return self.schedule.gathers_once and self.num_micro_batches > 1

    @property
    def micro_sizes(self) -> tuple[int, ...]:
        """Number of samples of each micro-batch; empty if the step runs in one go."""
        divisions = (decision.division for decision in self._distinct_decisions)
        return micro_sizes(self.micro_batches, divisions, sum(self.decisions[0].shares))

    def resized(self, graph: OpGraph) -> "Strategy":
        """Keep the decisions for the same step on another batch; see ``lower_resized``.

        The new micro-batches have the same proportions, but none is empty. Shares stay unchanged,
        because they are used as proportions. Rules of ops are adapted to the other shapes.

        Args:
            graph: The step on the other batch, ``grouped_like`` the graph of this strategy.
        """
        sizes = self.micro_sizes
        counts = split_in_proportion(graph.batch_size, sizes) if sizes else ()
        counts = tuple(count for count in counts if count)
        micro = micro_batch_table(counts, len(self.micro_batches))
        schedule = self.schedule
        if len(micro) != len(self.micro_batches) or len(counts) != self.num_micro_batches:
            schedule = replace(schedule, turns=())  # they name micro-batches that no longer exist
        rules, planned = self.op_rules, graph.grouped_like
        return replace(
            self,
            graph=graph.fingerprint,
            micro_batches=micro,
            schedule=schedule,
            op_rules=resized_rules(rules, planned, graph) if planned is not None else rules,
        )

    def check(self, graph: OpGraph, cluster: Cluster) -> None:
        """Refuse a graph or cluster that the strategy was not made for, or an illegal strategy.

        Raises:
            StrategyError: something does not fit; says what.
        """
        if self.graph != graph.fingerprint:
            raise StrategyError(
                f"the strategy was made for graph {self.graph}, not for '{graph.name}' "
                f"({graph.fingerprint}); capture the same model, batch size and optimizer."
            )
        if self.cluster != cluster.fingerprint:
            raise StrategyError(
                f"the strategy was made for cluster {self.cluster}, not for '{cluster.name}' "
                f"({cluster.fingerprint})."
            )
        grouping = group_ops(graph)
        if len(self.decisions) != grouping.num_groups or len(self.homes) != len(graph.updates):
            raise StrategyError(
                f"the strategy has {len(self.decisions)} decisions and {len(self.homes)} homes; "
                f"the graph has {grouping.num_groups} groups and {len(graph.updates)} parameters."
            )
        # Many groups share a decision, which is checked only once.
        distinct: dict[int, tuple[str, Decision]] = {}
        for name, decision in zip(grouping.names, self.decisions, strict=True):
            distinct.setdefault(id(decision), (name, decision))
        for name, decision in distinct.values():
            _check_decision(name, decision, graph.batch_size, cluster.num_devices)
        plan = axis_plan(graph, self.op_rules)
        self._check_slices(graph, plan, list(distinct.values()))
        self._check_rules(graph, plan)
        self._check_homes(graph, cluster, plan)
        self._check_micro_batches(graph, cluster)
        self._check_schedule(cluster)
        self._check_blocks(grouping.names)
        self._check_modes(graph, cluster)
        if self.bucket_bytes < 0:
            raise StrategyError(f"bucket_bytes is {self.bucket_bytes}; it must be 0 or more.")
        if not 0 <= self.first_bucket_bytes <= self.bucket_bytes:
            raise StrategyError(
                f"first_bucket_bytes is {self.first_bucket_bytes}; it must be 0, or at most "
                f"bucket_bytes, which is {self.bucket_bytes}."
            )

    def _check_slices(
        self, graph: OpGraph, plan: AxisPlan, named: list[tuple[str, Decision]]
    ) -> None:
        axes = plan.axes[1:]
        for name, decision in named:
            if decision.sync.is_sharded and (decision.teams or decision.slice_groups):
                _check_rings(name, decision, axes)
            if (
                decision.sync.is_sharded
                and len(decision.devices) > 1
                and not graph.updates_elementwise
            ):
                known = ", ".join(sorted(ELEMENTWISE_OPTIMIZERS))
                other = f", or train with one that does not, as torch's {known} do"
                raise StrategyError(
                    f"group '{name}' is synchronised by {decision.sync.name.lower()}, which "
                    f"updates slices of parameters, but {needs_whole(graph)}. Plan without "
                    f"ZeRO{'' if graph.written else other}."
                )

    def _check_rules(self, graph: OpGraph, plan: AxisPlan) -> None:
        parted = self.num_micro_batches > 1 or any(each.teams for each in self.decisions)
        crossing = plan.crossing if self.op_rules and parted else None
        if crossing is not None:
            op = graph.ops[crossing]
            raise StrategyError(
                f"the rule of op {crossing} '{op.kind}' in module '{op.module}' cuts across "
                "samples, so that it has no meaning on a part of the batch; plan without "
                "micro-batches and teams, or without that rule."
            )

    def _check_homes(self, graph: OpGraph, cluster: Cluster, plan: AxisPlan) -> None:
        group = group_ops(graph).group
        for (op, parameter, _), home in zip(graph.updates, self.homes, strict=True):
            name = graph.tensors[parameter].name
            if home != REPLICATED and not 0 <= home < cluster.num_devices:
                raise StrategyError(
                    f"parameter '{name}' has home {home}, but the cluster has devices 0 to "
                    f"{cluster.num_devices - 1}."
                )
            if parameter in plan.sharded:
                if home != REPLICATED:
                    raise StrategyError(
                        f"parameter '{name}' has home {home}, but by the rules of its ops each "
                        "device keeps and updates its own slice; leave it without a home."
                    )
                continue
            decision = self.decisions[int(group[op])]
            by_server = decision.sync.is_served
            if by_server and home == REPLICATED and len(decision.devices) > 1:
                raise StrategyError(f"parameter '{name}' is served, but has no home device.")
            if not by_server and home != REPLICATED and len(decision.devices) > 1:
                raise StrategyError(
                    f"parameter '{name}' has home {home}, but its group is synchronised by "
                    f"{decision.sync.name.lower()}; only a parameter server has a home."
                )

    def _check_blocks(self, names: tuple[str, ...]) -> None:
        if not self.blocks:
            return
        starts = list(self.blocks)
        if starts != sorted(set(starts)) or starts[0] != 0 or starts[-1] >= len(names):
            raise StrategyError(
                f"blocks {starts} must be groups from 0 to {len(names) - 1}, ascending, the first "
                "of them 0."
            )
        for first, end in zip(starts, [*starts[1:], len(names)], strict=True):
            for group in range(first + 1, end):
                if self.decisions[group] != self.decisions[first]:
                    raise StrategyError(
                        f"groups '{names[first]}' and '{names[group]}' are in one block but have "
                        "different decisions; begin a block at the second one."
                    )

    def _check_modes(self, graph: OpGraph, cluster: Cluster) -> None:
        for mode, other in combinations(self.modes, 2):
            if other.key not in mode.goes_with or mode.key >= other.key:
                raise StrategyError(
                    f"the strategy has {mode.words}, and {other.words}; keep one of the two."
                )
        for mode in self.modes:
            mode.check(self, graph, cluster)

    def _check_schedule(self, cluster: Cluster) -> None:
        if self.schedule.is_default:
            return
        devices = [decision.devices for decision in self.decisions]
        chunks = device_chunks(devices, cluster.num_devices, self.schedule.chunk_starts)
        samples = [[0] * self.num_micro_batches for _ in chunks]
        for decision in self._distinct_decisions if self.schedule.turns else ():
            cut = cut_division(
                decision.division, cluster.num_devices, self.micro_batches, self.micro_sizes
            )
            # Ops with rules run on all samples of their team.
            counts = cut.team_samples if self.op_rules else cut.own
            for device in decision.devices:
                samples[device] = list(map(max, samples[device], counts[:, device].tolist()))
        self.schedule.check(chunks, samples)

    def _check_micro_batches(self, graph: OpGraph, cluster: Cluster) -> None:
        if not self.micro_batches:
            return
        lengths = {len(counts) for counts in self.micro_batches}
        if (
            len(self.micro_batches) != cluster.num_devices
            or len(lengths) != 1
            or 0 in lengths
            or not is_cut_alike(
                self.micro_batches,
                dict.fromkeys(decision.division for decision in self._distinct_decisions),
                graph.batch_size,
            )
        ):
            raise StrategyError(
                f"micro-batches {self.micro_batches} must be {cluster.num_devices} tuples of one "
                f"length, without negative counts, that sum to the batch of {graph.batch_size} on "
                "all devices, or alike on those of each group, with at least one sample in each."
            )


def cut_at_changes(blocks: Iterable[int], decisions: Sequence[Decision]) -> tuple[int, ...]:
    """First groups of blocks, so that each block has one decision: some, and all that differ."""
    cuts = {
        group for group in range(1, len(decisions)) if decisions[group] != decisions[group - 1]
    }
    return tuple(sorted({*blocks, *cuts}))


def _check_rings(name: str, decision: Decision, axes: tuple[int, ...]) -> None:
    for rings in gradient_rings(decision.division, axes):
        members = [device for ring in rings for device in ring.devices]
        if len(members) != len(set(members)):
            raise StrategyError(
                f"group '{name}' is synchronised by {decision.sync.name.lower()} in teams "
                f"{decision.teams} that cut parameters unlike each other; a slice of the "
                "optimizer's state would belong to several rings. Choose teams of one size with "
                "the same parts, or another synchronisation."
            )
        for ring in rings if len(decision.slice_groups) > 1 else ():
            _check_slice_rings(name, decision, ring)


def _check_slice_rings(name: str, decision: Decision, ring: Ring) -> None:
    """Refuse slice groups whose copies are cut differently."""
    cuts = {(len(each.devices), each.slices) for each in decision.slice_rings(ring)}
    if len(cuts) > 1 or min(cuts)[0] < 2:
        raise StrategyError(
            f"group '{name}' has slice groups {decision.slice_groups}, but of the devices "
            f"{ring.devices}, which add up gradients, they do not have as many each, at least 2, "
            f"with slices as large as the others' ({decision.slices or 'equal ones'}). Let every "
            "group have as many whole teams and the same slices."
        )


def _check_decision(name: str, decision: Decision, batch_size: int, num_devices: int) -> None:
    if decision.devices[-1] >= num_devices or decision.devices[0] < 0:
        raise StrategyError(
            f"group '{name}' names device {decision.devices[-1]}, but the cluster has devices 0 "
            f"to {num_devices - 1}."
        )
    if sum(decision.shares) != batch_size:
        raise StrategyError(
            f"group '{name}' has shares {decision.shares}, {sum(decision.shares)} samples in all; "
            f"the batch has {batch_size}."
        )


def scope_fault(graph: OpGraph, strategy: "Strategy", scope: UpdateScope) -> str:
    """Why an optimizer of a scope would not train exactly under a strategy; empty if it does.

    Args:
        graph: Graph that the strategy was made for, perhaps for an optimizer of another scope.
        strategy: Strategy in question.
        scope: Update scope of the optimizer.
    """
    groups = [int(group_ops(graph).group[op]) for op, _, _ in graph.updates]
    decisions = [strategy.decisions[group] for group in groups]
    in_slices = any(each.sync.is_sharded and len(each.devices) > 1 for each in decisions)
    if scope != UpdateScope.ELEMENT and (in_slices or axis_plan(graph, strategy.op_rules).sharded):
        return f"it updates slices of parameters, but {needs_whole(graph, scope)}"
    if scope != UpdateScope.MODEL or not groups:
        return ""
    num_devices = 1 + max(max(each.devices) for each in strategy.decisions)
    num_devices = max(num_devices, 1 + max(strategy.homes))
    members = np.zeros((len(groups), num_devices), np.bool_)
    for row, decision in enumerate(decisions):
        members[row, list(decision.devices)] = True
    return apart_fault(graph, np.array(strategy.homes, np.int32), members)


def needs_whole(graph: OpGraph, scope: UpdateScope | None = None) -> str:
    """Why parameters have to be whole where they are updated.

    Args:
        graph: The graph.
        scope: Update scope of the optimizer; by default ``graph.scope``.
    """
    if graph.written:
        name = graph.tensors[min(graph.written)].name
        return f"the step itself writes to '{name}', which has to be whole"
    return f"{graph.optimizer} {(scope or graph.scope).words}"


def apart_fault(graph: OpGraph, homes: IntArray, members: npt.NDArray[np.bool_]) -> str:
    """Why an optimizer that looks at all parameters would see only some; empty if it sees all.

    Args:
        graph: The graph.
        homes: Device that updates each parameter, negative if all members do.
            # [num_parameters]
        members: Devices that hold each parameter.  # [num_parameters, num_devices]
    """
    steps = members.copy()
    served = np.flatnonzero(homes >= 0)
    steps[served] = False
    steps[served, homes[served]] = True
    if (steps == steps[:1]).all():
        return ""
    counts = steps.sum(axis=0)
    device = int(np.where(counts > 0, counts, len(steps) + 1).argmin())
    return (
        f"{graph.optimizer} {UpdateScope.MODEL.words}, but device {device} would step "
        f"{counts[device]} of {len(steps)}: each device that steps any has to step all of them, "
        "as in data parallelism, or one server does"
    )
