"""The layout that a plan is: what of it Megatron's and FSDP's words say, found by making it again.

Degrees are read off the plan; where several layouts have them, each is made into a strategy, and
the plan is the one whose strategy is its own. So a target that speaks in layouts says all of a
plan, or names what differs.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby, product

from heterog.errors import HeterogError
from heterog.explain.differences import Difference, differences
from heterog.export.folder import ExportError
from heterog.search.plan import Plan
from heterog.strategy.layouts.layout import Dispatch, Layout, Recompute
from heterog.strategy.layouts.pipelines import KEEPS
from heterog.strategy.layouts.placed import Given, place_layout
from heterog.strategy.layouts.stages import NO_LAYER, layers_of
from heterog.strategy.schedules import SCHEDULES
from heterog.strategy.strategy import Decision

ORDER = "order of passes"
"""The subject on which a plan may differ from its layout: numbers and devices stay."""


def layout_of(plan: Plan, target: str) -> tuple[Given, bool]:
    """The layout of a plan, and whether the order of its passes is the layout's, too.

    Args:
        plan: A plan that trains exactly.
        target: Name of the target, for messages.

    Raises:
        ExportError: no layout is the plan; says on what the nearest one differs.
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
    """Layouts with the plan's degrees, those that are most often meant first."""
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
    chunks = -(-_num_stages(plan) // len(stages))
    counts = _layers_of_stages(plan)
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
                layers=counts if len(counts) == len(stages) * chunks else (),
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
    """How layers recompute, and of how many one does."""
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


def _runs(plan: Plan) -> list[list[int]]:
    """Layers of each stage, in the order of the model."""
    starts = set(plan.strategy.schedule.chunk_starts)
    run, found = 0, list[tuple[tuple[int, tuple[int, ...]], int]]()
    in_layer = layers_of(plan.graph).of_group
    for group, decision in enumerate(plan.strategy.decisions):
        run += group in starts
        if in_layer[group] != NO_LAYER:
            found.append(((run, decision.devices), in_layer[group]))
    return [
        sorted({layer for _, layer in each}) for _, each in groupby(found, lambda pair: pair[0])
    ]


def _num_stages(plan: Plan) -> int:
    return max(len(_runs(plan)), 1)


def _layers_of_stages(plan: Plan) -> tuple[int, ...]:
    """Layers of each stage; empty where all have equally many."""
    counts = tuple(map(len, _runs(plan)))
    return counts if len(set(counts)) > 1 else ()
