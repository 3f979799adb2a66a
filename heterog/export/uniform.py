"""Uniform plans: one share of the batch per device for the whole model, as stock frameworks do."""

from collections.abc import Mapping

from heterog.export.folder import ExportError
from heterog.graph.batch_plan import batch_plan, reads_across_samples
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.graph.placement import P, Placement
from heterog.graph.sharding_rules import Special, propagate
from heterog.names import first_of
from heterog.search.plan import Plan
from heterog.strategy.division import micro_shares
from heterog.strategy.strategy import Decision
from heterog.strategy.sync import Aggregation, Sync


def refuse_modes(plan: Plan, target: str) -> None:
    """Refuse a plan that does not train exactly.

    Raises:
        ExportError: says how it trains.
    """
    if plan.strategy.modes:
        raise ExportError(
            f"{target} sums whole gradients in every step, but this plan has "
            f"{plan.strategy.modes[0].words}; export to torchrun, or plan exact training."
        )


def uniform_micro_batches(plan: Plan, target: str) -> dict[int, tuple[int, ...]]:
    """Micro-batches of each device with samples, if every group has the same ones.

    Raises:
        ExportError: names the first group that differs, or the op that needs the whole batch; or
            the plan does not train exactly.
    """
    refuse_modes(plan, target)
    strategy, graph = plan.strategy, plan.graph
    names = group_ops(graph).names
    first = _samples(strategy.decisions[0])
    for name, decision in zip(names, strategy.decisions, strict=True):
        if (samples := _samples(decision)) != first:
            raise ExportError(
                f"{target} keeps the whole model on every rank with one share of the batch, but "
                f"group '{name or '(root)'}' runs on {_in_words(plan, samples)} and "
                f"'{names[0] or '(root)'}' on {_in_words(plan, first)}. Export to "
                "torchrun, or plan with the method cp_ar."
            )
    _refuse_whole_batch_ops(plan, target)
    decision = strategy.decisions[0]
    shares = micro_shares(decision.division, strategy.micro_batches, strategy.micro_sizes)
    return {
        device: tuple(count for count in counts if count)
        for device, counts in zip(decision.devices, shares.T.tolist(), strict=True)
        if sum(counts)
    }


def uniform_remarks(plan: Plan, target: str, *, expressed: Sync | None = None) -> list[str]:
    """Remarks about parts of a uniform plan that a stock data-parallel framework leaves out.

    Args:
        plan: Uniform plan.
        target: Name of the framework.
        expressed: Synchronisation of all groups that the framework does as planned, if any.
    """
    remarks = []
    names = group_ops(plan.graph).names
    for sync in Sync:
        if sync.aggregation == Aggregation.RING or sync == expressed:  # as stock frameworks do
            continue
        groups = [
            name or "(root)"
            for name, decision in zip(names, plan.strategy.decisions, strict=True)
            if decision.sync == sync and len(decision.devices) > 1
        ]
        if groups:
            own = " with the plan's slices" * (sync.takes_slices and not sync.is_sharded)
            remarks.append(
                f"{sync.words[0].upper()}{sync.words[1:]}{own} ({len(groups)} of "
                f"{len(names)} groups, first '{groups[0]}'): {target} "
                "all-reduces these gradients in its own way; same numbers, other times."
            )
    again = [
        name or "(root)"
        for name, decision in zip(names, plan.strategy.decisions, strict=True)
        if decision.recompute
    ]
    if again:
        remarks.append(
            f"Recomputation ({len(again)} of {len(names)} groups, first '{again[0]}'): {target} "
            "keeps all activations and needs more memory than the plan says; wrap these modules "
            "in torch.utils.checkpoint."
        )
    homes = [home for home in plan.strategy.homes if home >= 0]
    if homes and len(_samples(plan.strategy.decisions[0])) == 1:
        remarks.append(
            f"{len(homes)} parameters are updated on other devices than the one that trains: "
            f"{target} updates them where they are used."
        )
    remarks.append(
        f"The plan's order of tasks ('{plan.order}'): {target} runs backward as torch does and "
        "communicates bucket by bucket as gradients are born."
    )
    if not plan.strategy.step_barrier:
        remarks.append(
            f"No step barrier: {target} finishes all updates before the next step begins, so the "
            "predicted step time is not reached."
        )
    return [*remarks, *_global_values(plan)]


def _samples(decision: Decision) -> dict[int, int]:
    pairs = zip(decision.devices, decision.shares, strict=True)
    return {device: share for device, share in pairs if share}


def _in_words(plan: Plan, samples: Mapping[int, int]) -> str:
    """Shares as ``A:0 (5 samples), B:0 (3)``."""
    devices = plan.cluster.devices
    return first_of([f"{devices[device].name} ({share})" for device, share in samples.items()])


def _refuse_whole_batch_ops(plan: Plan, target: str) -> None:
    strategy, graph = plan.strategy, plan.graph
    if len(_samples(strategy.decisions[0])) == strategy.num_micro_batches == 1:
        return
    batch = batch_plan(graph)
    reads = [
        index
        for index, tensor in reads_across_samples(graph)
        if batch.placements[tensor].kind == "S"
    ]
    reads += [
        index
        for index, special in enumerate(batch.specials)
        if special == Special.OF_WHOLE_BATCH and not _is_sum(graph, index, batch.needed[index])
    ]
    for index in sorted(reads):
        op = graph.ops[index]
        raise ExportError(
            f"op {op.kind} in module '{op.module or '(root)'}' needs the whole batch, but "
            f"{target} runs it on the samples of one rank and micro-batch. Export to "
            "torchrun."
        )


def _is_sum(graph: OpGraph, index: int, given: tuple[Placement, ...]) -> bool:
    result = propagate(graph.calls[index], given, graph.batch_size)
    return result is not None and set(result.outputs) == {P}


def _global_values(plan: Plan) -> list[str]:
    """Remarks about sums over the whole batch: in a stock framework each rank has only its own."""
    graph = plan.graph
    batch = batch_plan(graph)
    remarks = []
    reads = [
        (index, tensor)
        for index, tensor in reads_across_samples(graph)
        if batch.placements[tensor].kind == "P"
    ]
    reads += [
        (reader, tensor)
        for index, special in enumerate(batch.specials)
        if special == Special.OF_WHOLE_BATCH
        for tensor in graph.outputs[index]
        for reader in graph.readers(tensor)
    ]
    for index, _ in sorted(reads):
        op = graph.ops[index]
        where = f"in module '{op.module or '(root)'}'"
        remarks.append(
            f"The mean over counted labels {where}: let loss_weight() in user.py return their "
            "number if some are ignored (-100)."
            if op.kind.startswith("nll_loss")
            else f"A sum over the whole batch that {op.kind} {where} reads: each rank has only "
            "its own. The numbers stay exact only if it is the denominator of the loss, "
            "returned by loss_weight() in user.py."
        )
    return list(dict.fromkeys(remarks))
