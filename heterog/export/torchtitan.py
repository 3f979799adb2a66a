"""Target ``torchtitan``: the TOML of a plan that is a uniform layout, without heterog.

``layout_of`` finds the layout (in Megatron's and FSDP's words) that gives exactly the plan's
strategy. It reads the degrees off the plan, makes a strategy of each layout with these degrees,
and compares that with the plan's. So the export says all of a plan, or names what differs.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, product

from heterog.errors import HeterogError
from heterog.explain.differences import Difference, differences
from heterog.export.deepspeed import check_even, stage_of
from heterog.export.folder import (
    Export,
    ExportError,
    RankEntry,
    Target,
    fill,
    job_folder,
    launch_command,
    launch_script,
    on_used_devices,
    ranks_of,
)
from heterog.export.uniform import refuse_modes, uniform_micro_batches, uniform_remarks
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.search.plan import Plan
from heterog.strategy.layouts.layout import Dispatch, Layout, Recompute
from heterog.strategy.layouts.pipelines import KEEPS
from heterog.strategy.layouts.placed import Given, place_layout
from heterog.strategy.layouts.stages import NO_LAYER, layer_path, layers_of, stage_of_groups
from heterog.strategy.schedules import SCHEDULES
from heterog.strategy.strategy import Decision

ORDER = "order of passes"
"""The one subject on which a plan may differ from its layout, as results and devices stay."""


def layout_of(plan: Plan, target: str) -> tuple[Given, bool]:
    """The layout of a plan, and whether the order of its passes is the layout's, too.

    Args:
        plan: A plan that trains exactly.
        target: Name of the target, for messages.

    Raises:
        ExportError: no layout gives the plan; says where the nearest one differs.
    """
    nearest: tuple[Difference, ...] | None = None
    reordered = None
    used = sorted({device for each in plan.strategy.decisions for device in each.devices})
    for layout in _candidates(plan):
        try:
            given = place_layout(
                layout,
                plan.graph,
                plan.cluster,
                devices=used,
                step_barrier=plan.strategy.step_barrier,
            )
        except HeterogError:
            continue
        made = replace(
            given.strategy,
            bucket_bytes=plan.strategy.bucket_bytes,
            first_bucket_bytes=plan.strategy.first_bucket_bytes,
        )
        if made == plan.strategy:
            return given, True
        if replace(made, schedule=plan.strategy.schedule) == plan.strategy:
            reordered = reordered or given
        found = differences(made, plan.strategy, plan.graph, plan.cluster)
        if nearest is None or len(found) < len(nearest):
            nearest = found
    if reordered is not None:
        return reordered, False
    if nearest is None:
        raise ExportError(
            f"{target} has equal stages of equal replicas, and the plan has not: its groups are "
            f"on {len({each.devices for each in plan.strategy.decisions})} sets of devices of "
            "unlike sizes. Export to torchrun."
        )
    words = "; ".join(f"{each.what}: {each.ours}, where a layout has {each.given}" for each in
                      nearest[:3])  # fmt: skip
    raise ExportError(
        f"{target} runs uniform layouts, and the plan is none ({words or 'shares or slices'}). "
        "Export to torchrun, or plan with the method megatron_grid."
    )


def _candidates(plan: Plan) -> Iterator[Layout]:
    """Layouts with the plan's degrees, the usual ones first."""
    strategy, graph = plan.strategy, plan.graph
    stages = list(dict.fromkeys(each.devices for each in strategy.decisions))
    width = len(stages[0])
    if len({len(devices) for devices in stages}) > 1:
        return
    sizes = [max(map(len, each.teams), default=1) for each in strategy.decisions]
    team, most = min(sizes), max(sizes)
    dp, rest = divmod(width, team)
    ep, uneven = divmod(most, team)
    micro, odd = divmod(graph.batch_size, dp * strategy.num_micro_batches)
    if rest or uneven or odd or dp % ep:
        return
    usual = Layout(
        pp=len(stages),
        dp=dp,
        ep=ep,
        micro_batch=micro,
        **_slices(strategy.decisions),  # type: ignore[arg-type]
        **_recomputation(plan),  # type: ignore[arg-type]
    )
    schedules = tuple(SCHEDULES) if len(stages) > 1 else ("", "breadth_first")
    counts = _layers_of_stages(plan)
    chunks, is_uneven = -(-max(len(counts), 1) // len(stages)), len(set(counts)) > 1
    for name, teams, along, dispatch in product(
        sorted(schedules, key=lambda each: each not in ("", "1f1b", "interleaved")),
        ({"tp": team}, {"cp": team}) if team > 1 else ({},),
        (True, False) if team > 1 else (False,),
        tuple(Dispatch) if ep > 1 else (Dispatch.ALL_TO_ALL,),
    ):
        if "cp" in teams and along:
            continue
        try:
            yield replace(
                usual,
                **teams,  # type: ignore[arg-type]
                schedule=name,
                chunks=chunks if chunks > 1 else 0,
                layers=tuple(counts) if is_uneven and len(counts) == len(stages) * chunks else (),
                sequence_parallel=along,
                dispatch=dispatch,
            )
        except HeterogError:
            continue


def _slices(decisions: tuple[Decision, ...]) -> dict[str, int]:
    shared = [each for each in decisions if len(each.devices) > 1]
    stages = {int(each.sync.sharded) for each in shared if each.sync.is_sharded}
    copies = {len(each.slice_groups) or 1 for each in shared if each.sync.is_sharded}
    return {"zero": max(stages, default=0), "dp_replicate": max(copies, default=1)}


def _recomputation(plan: Plan) -> dict[str, object]:
    """How layers recompute, and every how many layers one does."""
    in_layer = layers_of(plan.graph).of_group
    layers: dict[int, Decision] = {}
    for layer, decision in zip(in_layer, plan.strategy.decisions, strict=True):
        if layer != NO_LAYER and decision.recompute:
            layers.setdefault(layer, decision)
    if not layers:
        return {"recompute": Recompute.NONE}
    keeps = layers[min(layers)].keeps
    kind = next((kind for kind, kept in KEEPS.items() if kept == keeps), Recompute.NONE)
    every = min(layers) + 1 if kind == Recompute.FULL else 1
    return {"recompute": kind, "recompute_every": every}


def _layers_of_stages(plan: Plan) -> list[int]:
    """Number of layers of each stage, in the order of the model."""
    starts = set(plan.strategy.schedule.chunk_starts)
    run, found = 0, list[tuple[tuple[int, tuple[int, ...]], int]]()
    in_layer = layers_of(plan.graph).of_group
    for group, decision in enumerate(plan.strategy.decisions):
        run += group in starts
        if in_layer[group] != NO_LAYER:
            found.append(((run, decision.devices), in_layer[group]))
    return [len({layer for _, layer in each}) for _, each in groupby(found, lambda pair: pair[0])]


TARGET = "torchtitan"
_CONFIG = "torchtitan.toml"
_WHAT = (
    "A configuration of torchtitan with the plan's batches, degrees of parallelism, slices and "
    f"recomputation. The model is one of torchtitan's own: name it, and the data, in {_CONFIG}."
)
_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "breadth_first": "LoopedBFS",
    "zero_bubble_v": "ZBVZeroBubble",
    "dual_pipe_v": "DualPipeV",
}
"""Names of schedules here, and in ``torch.distributed.pipelining``."""


def export_torchtitan(plan: Plan, sources: Sequence[str] = ()) -> Export:
    """The folder of a plan of even replicas, or of a layout with teams and stages.

    Raises:
        ExportError: shares differ, only some groups recompute or are sliced, or the plan is no
            layout that torchtitan has; says which.
    """
    refuse_modes(plan, TARGET)
    if plan.strategy.op_rules or len({each.devices for each in plan.strategy.decisions}) > 1:
        plan, ranks, layout, remarks = _of_layout(plan)
    else:
        ranks, layout, remarks = _of_replicas(plan)
    degrees = layout.tp * layout.cp * layout.pp * layout.ep
    is_sliced = bool(layout.zero) or (degrees > 1 and layout.dp > 1)
    if is_sliced and not layout.zero:
        remarks.append(
            "Whole copies of what replicas train: beside teams and stages torchtitan has slices; "
            "same numbers, less memory, other messages."
        )
    if layout.zero == 1:
        remarks.append("ZeRO-1: torchtitan also slices gradients; same numbers.")
    replicas = layout.dp_replicate if is_sliced else layout.dp
    is_every = layout.recompute == Recompute.FULL and layout.recompute_every > 1
    config = fill(
        "torchtitan.toml.jinja",
        layout=layout,
        local=layout.micro_batch * (plan.strategy.num_micro_batches if layout.pp > 1 else 1),
        whole=plan.graph.batch_size,
        replicas=replicas,
        shards=layout.dp // replicas,
        reshard="always" if layout.zero == 3 else ("never" if is_sliced else "default"),
        schedule=_SCHEDULES[layout.schedule_name],
        parts=_parts(plan.graph, layout),
        mode="selective" if is_every or layout.recompute == Recompute.OP else layout.recompute,
        option=layout.recompute_every if is_every else "op" * (layout.recompute == Recompute.OP),
    )
    start = launch_command(ranks).replace("--steps", "--training.steps")
    return job_folder(
        plan,
        Target(TARGET, _WHAT, start),
        ranks,
        {
            _CONFIG: config,
            "launch.sh": launch_script(ranks, f"-m torchtitan.train --job.config_file {_CONFIG}"),
        },
        user=f"model and data in {_CONFIG}; there is no user.py",
        not_expressed=remarks,
    )


def _of_replicas(plan: Plan) -> tuple[tuple[RankEntry, ...], Layout, list[str]]:
    """Ranks, layout and remarks of a plan whose devices all have the whole model."""
    ranks = ranks_of(plan.cluster, uniform_micro_batches(plan, TARGET))
    check_even(ranks, TARGET)
    decisions = plan.strategy.decisions
    sync = stage_of(plan)
    stage = 0 if sync is None else int(sync.sharded)
    if len({each.sync.is_sharded for each in decisions}) > 1:
        raise ExportError("torchtitan slices all parameters or none, and the plan some groups'.")
    again = {each.recompute for each in decisions}
    remarks = [
        each
        for each in uniform_remarks(plan, TARGET, expressed=sync)
        if "Recomputation" not in each
    ]
    if plan.strategy.gathers_once:
        remarks.append(
            "Slices gathered and reduced once a step: torchtitan does for every micro-batch; same "
            "numbers, more traffic."
        )
    if len(again) > 1:
        remarks.append("Recomputation of some groups: torchtitan recomputes every layer.")
    groups = {len(each.slice_groups) or 1 for each in decisions} if stage else {1}
    if len(groups) > 1 or len(ranks) % max(groups):
        raise ExportError("torchtitan has one number of replicas, and groups of the plan several.")
    layout = Layout(
        dp=len(ranks),
        micro_batch=ranks[0].micro_batches[0],
        zero=stage,
        dp_replicate=groups.pop(),
        recompute=Recompute.FULL if True in again else Recompute.NONE,
    )
    return ranks, layout, remarks


def _of_layout(plan: Plan) -> tuple[Plan, tuple[RankEntry, ...], Layout, list[str]]:
    """The plan on the devices that it uses, with their ranks, its layout and remarks."""
    plan, unused = on_used_devices(plan)
    given, is_ordered = layout_of(plan, TARGET)
    layout = given.layout
    ranks = ranks_of(plan.cluster)
    if given.sizes.num_devices < len(ranks):
        raise ExportError(
            f"torchtitan starts a rank on every device of a host, and the plan leaves "
            f"{len(ranks) - given.sizes.num_devices} idle beside others of another type."
        )
    for is_wrong, what in (
        (layout.recompute == Recompute.SELECTIVE, "recompute=selective (attention's scores)"),
        (layout.dispatch == Dispatch.ALL_GATHER, "dispatch=allgather"),
    ):
        if is_wrong:
            raise ExportError(f"torchtitan has no {what}. Export to torchrun.")
    remarks = [*unused]
    if not is_ordered:
        remarks.append(
            f"The plan's {ORDER}: torchtitan follows {_SCHEDULES[layout.schedule_name]}; same "
            "numbers, other times and memory."
        )
    if layout.tp > 1 and not layout.sequence_parallel:
        remarks.append(
            "Whole activations between the products of a team: torchtitan splits them along the "
            "sequence; same numbers, less memory."
        )
    if not plan.strategy.step_barrier:
        remarks.append("No step barrier: torchtitan ends all updates before the next step.")
    return plan, ranks, layout, remarks


def _parts(graph: OpGraph, layout: Layout) -> list[str]:
    """The modules of each stage by the plan's names; empty if degrees alone determine them."""
    usual = 1 if layout.schedule_name in ("1f1b", "gpipe") else 2
    if layout.pp == 1 or (not layout.layers and layout.num_chunks == usual):
        return []
    parts: list[dict[str, None]] = [{} for _ in range(layout.num_stages)]
    for name, stage in zip(group_ops(graph).names, stage_of_groups(graph, layout), strict=True):
        if name:
            parts[stage][layer_path(name) or name] = None
    return [json.dumps(list(part)) for part in parts]
