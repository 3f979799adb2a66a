"""Converts a layout to a strategy: which device has which samples of which groups, and when."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from heterog.cluster.topology import Cluster
from heterog.graph.batch_plan import micro_batches_refused
from heterog.graph.op_graph import OpGraph
from heterog.strategy.keeping import attention_scores
from heterog.strategy.layouts.layout import Layout, LayoutError, Recompute
from heterog.strategy.layouts.pipelines import (
    Pipeline,
    each_once,
    rules_of_teams,
    strategy_of_pipelines,
    teams_of_groups,
)
from heterog.strategy.layouts.stages import (
    layer_blocks,
    shared_across_stages,
    stage_of_group,
    stage_of_groups,
)
from heterog.strategy.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A layout converted to a strategy.

    Attributes:
        layout: The given layout.
        sizes: The same with all numbers that follow from the cluster and the batch.
        strategy: The strategy.
        remarks: Sentences about parts of the layout that could not be expressed as meant.
    """

    layout: Layout
    sizes: Layout
    strategy: Strategy
    remarks: tuple[str, ...] = ()


def sizes_of(layout: Layout, *, batch_size: int, num_devices: int) -> Layout:
    """Resolve the numbers of a layout for a batch and a number of devices, but for copies.

    Raises:
        LayoutError: the numbers do not divide.
    """
    tp, pp = layout.members, layout.pp
    team = "cp" if layout.cp > 1 else "tp"
    if tp * pp > num_devices or (layout.dp and tp * pp * layout.dp > num_devices):
        product = f"{team} {tp} x pp {pp}" + (f" x dp {layout.dp}" if layout.dp else "")
        raise LayoutError(
            f"{product} takes {tp * pp * max(layout.dp, 1)} devices, but the cluster has "
            f"{num_devices}."
        )
    if not layout.dp and num_devices % (tp * pp):
        raise LayoutError(
            f"{team} {tp} x pp {pp} = {tp * pp} devices a replica do not divide the {num_devices} "
            f"of the cluster; give dp={num_devices // (tp * pp)} to leave "
            f"{num_devices % (tp * pp)} of them idle."
        )
    dp = layout.dp or num_devices // (tp * pp)
    if dp % layout.ep:
        raise LayoutError(
            f"ep={layout.ep} does not divide the {dp} replicas (dp), of which so many share "
            "experts."
        )
    share, rest = divmod(batch_size, dp)
    if rest or not share:
        batches = " or ".join(str(dp * each) for each in (share, share + 1) if each)
        raise LayoutError(
            f"a batch of {batch_size} does not divide among {dp} replicas; take a batch of "
            f"{batches}, or another dp."
        )
    own = f"the {share} samples of a replica (batch {batch_size}, dp {dp})"
    if layout.num_micro and share % layout.num_micro:
        raise LayoutError(f"{layout.num_micro} micro-batches do not divide {own}.")
    counted = share // layout.num_micro if layout.num_micro else 0
    micro = layout.micro_batch or counted or (share if pp == 1 else 1)
    if share % micro:
        raise LayoutError(f"micro_batch {micro} does not divide {own}.")
    if counted and micro != counted:
        raise LayoutError(
            f"micro_batch {micro} and {layout.num_micro} micro-batches contradict each other: "
            f"{own} would be {layout.num_micro} micro-batches of {counted}."
        )
    return replace(layout, dp=dp, micro_batch=micro, num_micro=share // micro, dp_replicate=1)


def _check(sizes: Layout, graph: OpGraph) -> None:
    """Refuse slices and micro-batches that the model does not allow."""
    if sizes.zero and sizes.dp > 1 and not graph.updates_elementwise:
        raise LayoutError(
            f"zero={sizes.zero} updates slices of parameters, but {graph.optimizer} "
            f"{graph.scope.words}; take zero=0."
        )
    if refused := micro_batches_refused(graph, sizes.num_micro):
        raise LayoutError(refused)


def place_layout(
    layout: Layout,
    graph: OpGraph,
    cluster: Cluster,
    *,
    devices: Sequence[int] = (),
    step_barrier: bool = True,
) -> Given:
    """Convert a layout to a strategy for a graph on a cluster.

    Args:
        layout: The layout.
        graph: One training step.
        cluster: Devices and links.
        devices: Devices that act as the ranks, in this order; empty for all of the cluster.
        step_barrier: Whether a step ends with all updates.

    Raises:
        LayoutError: the layout does not fit the model, its batch, its optimizer or the cluster.
        StrategyError: its schedule does not exist for these numbers.
    """
    ranks = tuple(devices) or tuple(range(cluster.num_devices))
    sizes = sizes_of(layout, batch_size=graph.batch_size, num_devices=len(ranks))
    _check(sizes, graph)
    sizes = _with_copies(layout, sizes, [cluster.host_of[device] for device in ranks])
    asked = layout
    if layout.zero and sizes.dp_replicate == sizes.dp > 1:  # every replica keeps a whole copy
        layout = replace(layout, zero=0, dp_replicate=1)
    stages = stage_of_groups(graph, layout)
    by_layer = layout.schedule == "breadth_first" and layout.pp == 1
    chunks = stage_of_group(layer_blocks(graph), len(stages)) if by_layer else stages
    shared = shared_across_stages(graph, chunks)
    teams_of_ranks = tuple(
        tuple(tuple(ranks[each] for each in sizes.team(rank, n)) for n in range(sizes.dp))
        for rank in range(sizes.pp)
    )
    pipeline = Pipeline(
        stages=stages,
        teams=teams_of_ranks,
        micro_batches=(sizes.micro_batch * sizes.dp,) * sizes.num_micro,
        num_copies=sizes.dp_replicate if layout.zero else 1,
    )
    # Within a turn a device would wait for later stages if they share a weight, or for replicas if
    # gradients are sliced: then only the schedule's caps are used.
    waits = bool(shared) or (layout.schedule_name == "1f1b" and layout.zero >= 2)
    rules = rules_of_teams(graph, (pipeline,), layout)
    of_groups = teams_of_groups(graph, (pipeline,), layout)
    teams = dict.fromkeys(team for of_group in each_once(of_groups) for team in of_group)
    strategy = strategy_of_pipelines(
        graph, cluster, (pipeline,), layout, keeps_turns=not waits, step_barrier=step_barrier
    )
    remarks = (
        *_remarks(asked, sizes, graph, cluster, shared),
        *(rules.remarks if rules is not None else ()),
        *_across_hosts(list(teams), cluster),
    )
    return Given(layout=asked, sizes=sizes, strategy=strategy, remarks=remarks)


def _with_copies(layout: Layout, sizes: Layout, hosts: Sequence[int]) -> Layout:
    """Resolve the number of copies of the state that replicas keep in slices.

    Args:
        layout: The layout.
        sizes: Its other numbers.
        hosts: Host of each rank.

    Raises:
        LayoutError: the replicas do not divide into so many copies.
    """
    if layout.dp_replicate == 1 or sizes.dp == 1:
        return sizes
    copies, teams = layout.dp_replicate, sizes.dp // sizes.ep  # replicas that share experts: one
    if not copies:
        first = [
            [hosts[sizes.team(k, r * sizes.ep)[0]] for r in range(teams)] for k in range(sizes.pp)
        ]
        copies = len(set(first[0]))
        size = teams // copies
        if any(of[r] != of[r - r % size] for of in first for r in range(size * copies)) or (
            size * copies != teams
        ):
            raise LayoutError(
                f"dp_replicate=hosts: the {sizes.dp} replicas do not lie on hosts in runs of "
                "equal length; say how many copies there are, such as dp_replicate=2."
            )
    if teams % copies:
        shared = f" of which {sizes.ep} each share experts" * (sizes.ep > 1)
        raise LayoutError(
            f"{sizes.dp} replicas{shared} do not divide into {copies} copies (dp_replicate); give "
            f"one of {', '.join(str(n) for n in range(1, max(teams, 2)) if teams % n == 0)}."
        )
    if sizes.ep > 1 and teams == copies:
        raise LayoutError(
            f"ep={sizes.ep} leaves each of the {copies} copies (dp_replicate) one device for each "
            "expert, which has nothing to slice; give fewer copies, or a smaller ep."
        )
    return replace(sizes, dp_replicate=copies)


def _remarks(
    layout: Layout, sizes: Layout, graph: OpGraph, cluster: Cluster, shared: Sequence[str]
) -> list[str]:
    """Sentences about parts of the layout that could not be expressed as meant."""
    remarks = []
    if shared:
        remarks.append(
            f"{', '.join(shared)} shares a weight with a later stage: both parts run where the "
            "first one is (Megatron keeps a copy on each and sums their gradients)."
        )
        if sizes.num_micro > 1:
            remarks.append(
                f"Inside a turn that would wait for later stages, so {layout.schedule_name} has "
                "up to two more micro-batches in flight here, but not its order of turns."
            )
    if layout.zero and sizes.dp_replicate == sizes.dp > 1:
        remarks.append(
            f"{sizes.dp} replicas in {sizes.dp_replicate} copies leave nothing to slice: each "
            "keeps everything whole (zero=0)."
        )
    if layout.schedule and sizes.num_micro == 1:
        remarks.append(
            f"schedule {layout.schedule} has nothing to order: each replica has one micro-batch."
        )
    if sizes.num_devices < cluster.num_devices:
        idle = cluster.num_devices - sizes.num_devices
        remarks.append(f"{idle} of {cluster.num_devices} devices have no work.")
    if layout.recompute == Recompute.SELECTIVE and not attention_scores(graph):
        remarks.append(
            "recompute=selective repeats nothing: no attention of this model keeps its scores."
        )
    return remarks


def _across_hosts(teams: Sequence[Sequence[int]], cluster: Cluster) -> list[str]:
    """A sentence about teams whose members are on several hosts."""
    across = sum(len({cluster.host_of[device] for device in team}) > 1 for team in teams)
    if not across:
        return []
    return [f"{across} of {len(teams)} teams reach over several hosts: their sums cross the NICs."]
