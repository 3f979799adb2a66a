"""Uniform plans: one share of the batch per device for the whole model, as stock frameworks do.

Target ``ddp``: a stock DistributedDataParallel script for uniform plans, without heterog.

Target ``deepspeed``: even data parallelism, accumulation and ZeRO, without heterog.

``user.py`` of folders for stock frameworks: the part that a person fills in, if necessary.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from heterog.export.folder import (
    MODEL_FILE,
    RANKS_FILE,
    USER_FILE,
    Export,
    ExportError,
    RankEntry,
    by_host,
    digest,
    fill,
    in_docstring,
    launch_command,
    launch_script,
    ranks_document,
    ranks_of,
    readme,
    workload_code,
)
from heterog.graph.batch_plan import batch_plan, reads_across_samples
from heterog.graph.grouping import group_ops
from heterog.graph.sharding_rules import Special
from heterog.search.plan import Plan
from heterog.strategy.division import micro_shares
from heterog.strategy.strategy import Decision
from heterog.strategy.sync import TRAITS, Aggregation, Sync
from heterog.user_code import trusted_source


def uniform_micro_batches(plan: Plan, target: str) -> dict[int, tuple[int, ...]]:
    """Micro-batches of each device with samples, if every group has the same ones.

    Raises:
        ExportError: names the first group that differs, or the op that needs the whole batch; or
            the plan does not train exactly.
    """
    strategy, graph = plan.strategy, plan.graph
    if strategy.modes:
        raise ExportError(
            f"{target} sums whole gradients in every step, but this plan has "
            f"{strategy.modes[0].words}; export to torchrun, or plan exact training."
        )
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
    by_device = zip(decision.devices, shares.T.tolist(), strict=True)
    return {
        device: tuple(count for count in counts if count)
        for device, counts in by_device
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
    for sync, traits in TRAITS.items():
        if traits.aggregation == Aggregation.RING or sync == expressed:  # as stock ones do
            continue
        groups = [
            name or "(root)"
            for name, decision in zip(names, plan.strategy.decisions, strict=True)
            if decision.sync == sync and len(decision.devices) > 1
        ]
        if groups:
            own = " with the plan's slices" * (sync.takes_slices and not sync.is_sharded)
            remarks.append(
                f"{traits.words[0].upper()}{traits.words[1:]}{own} ({len(groups)} of "
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
    words = [f"{devices[device].name} ({share})" for device, share in samples.items()]
    return ", ".join(words[:8]) + (f" and {len(words) - 8} more" if len(words) > 8 else "")


def _refuse_whole_batch_ops(plan: Plan, target: str) -> None:
    strategy, graph = plan.strategy, plan.graph
    if len(_samples(strategy.decisions[0])) == strategy.num_micro_batches == 1:
        return
    for index, tensor in reads_across_samples(graph):
        if batch_plan(graph).placements[tensor].kind == "S":
            op = graph.ops[index]
            raise ExportError(
                f"op {op.kind} in module '{op.module or '(root)'}' needs the whole batch, but "
                f"{target} runs it on the samples of one rank and micro-batch. Export to "
                "torchrun."
            )


def _global_values(plan: Plan) -> list[str]:
    """Sums over the batch that a part of the step reads, of which each rank has only its own."""
    graph = plan.graph
    batch = batch_plan(graph)
    remarks: dict[str, None] = {}
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
        if op.kind.startswith("nll_loss"):
            remarks[
                f"The mean over counted labels {where}: let loss_weight() in user.py return "
                "their number if some are ignored (-100)."
            ] = None
        else:
            remarks[
                f"A sum over the whole batch that {op.kind} {where} reads: each rank has only "
                "its own. The numbers stay exact only if it is the denominator of the loss, "
                "returned by loss_weight() in user.py."
            ] = None
    return list(remarks)


_FROM_ZOO = """\
    from heterog.zoo import load_workload  # the one thing that heterog is needed for

    return load_workload({source!r}, BATCH_SIZE)"""
_FROM_FILE = """\
    try:
        import heterog  # noqa: F401
    except ImportError:  # the file needs nothing of it but a place for its answer
        stand_in = types.ModuleType("heterog")
        stand_in.Workload = Workload
        sys.modules["heterog"] = stand_in
    from model import {function} as make

    return make(BATCH_SIZE) if inspect.signature(make).parameters else make()"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StockUser:
    """The part of a stock folder that depends on the model.

    Attributes:
        user: Content of ``user.py``.
        to_do: What a person has to fill in, for the README.
        model_file: Copy of the workload's own file; empty if there is none.
        remarks: Sentences about anything that could not be copied.
    """

    user: bytes
    to_do: str
    model_file: bytes = b""
    remarks: tuple[str, ...] = ()

    @property
    def files(self) -> dict[str, bytes]:
        """The copy, if there is one, by its name in the folder."""
        return {MODEL_FILE: self.model_file} if self.model_file else {}


def stock_user(plan: Plan, sources: Sequence[str]) -> StockUser:
    """``user.py`` with the workload's model, loss and optimizer if its source is available.

    Args:
        plan: Plan that is exported.
        sources: Files that the person named; see ``user_code.trusted_source``.

    Raises:
        InputFileError: the plan's model is made by a file that nobody named.
    """
    source = trusted_source(plan.graph.source, sources, "the plan")
    code = workload_code(source)
    words = {
        "model": in_docstring(plan.graph.name),
        "source": in_docstring(plan.graph.source) or "not named in the plan",
        "optimizer": plan.graph.optimizer,
        "batch_size": plan.graph.batch_size,
    }
    _, colon, function = source.rpartition(":")
    if code.model_file:
        body, origin = _FROM_FILE.format(function=function), f"{MODEL_FILE}, a copy of yours"
    elif source and not colon:
        body, origin = _FROM_ZOO.format(source=source), "heterog's zoo"
    else:
        user = fill("ddp_user.py.tmpl", **words)
        return StockUser(user=user, to_do="`build()`: model, optimizer, loss and data")
    return StockUser(
        user=fill("stock_workload.py.tmpl", workload=body, origin=origin, **words),
        to_do=code.to_do.replace("batches()", "build()"),
        model_file=code.model_file,
        remarks=code.remarks,
    )


DDP_TARGET = "ddp"
_DDP = (
    "A stock DistributedDataParallel script (torch only) with the plan's batch size per rank. A "
    "communication hook weighs each rank's gradients by what its loss is a mean over, so that "
    "they are the gradients of the mean over the whole batch."
)


def export_ddp(plan: Plan, sources: Sequence[str] = ()) -> Export:
    """The folder of a uniform plan.

    Raises:
        ExportError: names the first group that is not as the others.
    """
    ranks = ranks_of(plan.cluster, uniform_micro_batches(plan, DDP_TARGET))
    remarks = uniform_remarks(plan, DDP_TARGET)
    user = stock_user(plan, sources)
    remarks += user.remarks
    files = {
        "train.py": fill("ddp_train.py.tmpl"),
        USER_FILE: user.user,
        **user.files,
        RANKS_FILE: ranks_document(plan, DDP_TARGET, ranks, digest(user.user)),
        "launch.sh": launch_script(ranks),
        "README.md": readme(
            plan,
            DDP_TARGET,
            what=_DDP,
            start=launch_command(ranks),
            user=user.to_do,
            num_ranks=len(ranks),
            not_expressed=remarks,
        ),
    }
    return Export(target=DDP_TARGET, files=files, not_expressed=tuple(remarks))


DEEPSPEED_TARGET = "deepspeed"
_DEEPSPEED = (
    "A DeepSpeed script (torch and deepspeed) with the plan's batch size, accumulation steps and "
    "stage of ZeRO (zero_optimization.stage in ds_config.json)."
)


def export_deepspeed(plan: Plan, sources: Sequence[str] = ()) -> Export:
    """The folder of a uniform plan whose shares and micro-batches are all equal.

    Raises:
        ExportError: names the shares that differ.
    """
    ranks = ranks_of(plan.cluster, uniform_micro_batches(plan, DEEPSPEED_TARGET))
    _check_even(ranks)
    sync = _zero(plan)
    remarks = uniform_remarks(plan, DEEPSPEED_TARGET, expressed=sync)
    if sync is not None and any(len(set(each.slices)) > 1 for each in plan.strategy.decisions):
        remarks.append("Uneven slices: deepspeed gives every rank an equal slice.")
    if sync is not None and any(each.slice_groups for each in plan.strategy.decisions):
        remarks.append(
            "Slice groups: deepspeed keeps slices over all ranks (its MiCS has groups)."
        )
    if plan.strategy.bucket_bytes == 0:
        what = "Synchronisation tensor by tensor"
    else:
        what = f"Buckets of {plan.strategy.bucket_bytes} bytes"
    remarks.append(f"{what}: deepspeed has bucket sizes of its own.")
    user = stock_user(plan, sources)
    remarks += user.remarks
    files = {
        "train.py": fill("deepspeed_train.py.tmpl"),
        USER_FILE: user.user,
        **user.files,
        RANKS_FILE: ranks_document(plan, DEEPSPEED_TARGET, ranks, digest(user.user)),
        "ds_config.json": _config(plan, ranks, int(sync.sharded) if sync is not None else 0),
        "hostfile": _hostfile(plan, ranks),
        "launch.sh": fill("launch_deepspeed.sh.tmpl", include=_include(ranks)),
        "README.md": readme(
            plan,
            DEEPSPEED_TARGET,
            what=_DEEPSPEED,
            start="bash launch.sh --steps 100    # on the first host; it starts the others",
            user=user.to_do,
            num_ranks=len(ranks),
            not_expressed=remarks,
        ),
    }
    return Export(target=DEEPSPEED_TARGET, files=files, not_expressed=tuple(remarks))


def _check_even(ranks: Sequence[RankEntry]) -> None:
    sizes = {entry.batch_size for entry in ranks}
    if len(sizes) > 1:
        raise ExportError(
            "deepspeed gives every rank the same batch size, but the plan's shares are "
            f"{_listed({entry.device: entry.batch_size for entry in ranks})}. Export to "
            "ddp, or plan with the method ddp for a batch that the devices divide evenly."
        )
    counts = {count for entry in ranks for count in entry.micro_batches}
    lengths = {len(entry.micro_batches) for entry in ranks}
    if len(counts) > 1 or len(lengths) > 1:
        raise ExportError(
            "deepspeed cuts every batch into equal micro-batches, but the plan's are "
            f"{_listed({entry.device: entry.micro_batches for entry in ranks})}. Export to ddp."
        )
    for entry in ranks:
        if not re.fullmatch(r"[A-Za-z0-9._-]+", entry.host):
            raise ExportError(
                f"deepspeed's hostfile cannot name host '{entry.host}'; rename it in the cluster "
                "file to the name by which ssh knows it."
            )


def _listed(values: Mapping[str, object]) -> str:
    words = [f"{device}: {value}" for device, value in values.items()]
    return ", ".join(words[:8]) + (f" and {len(words) - 8} more" if len(words) > 8 else "")


def _zero(plan: Plan) -> Sync | None:
    """The stage of ZeRO that all groups share; ``None`` if there is none."""
    syncs = {each.sync for each in plan.strategy.decisions if len(each.devices) > 1}
    return (
        next(iter(syncs)) if len(syncs) == 1 and all(sync.is_sharded for sync in syncs) else None
    )


def _config(plan: Plan, ranks: Sequence[RankEntry], stage: int) -> bytes:
    config = {
        "train_batch_size": plan.graph.batch_size,
        "train_micro_batch_size_per_gpu": ranks[0].micro_batches[0],
        "gradient_accumulation_steps": len(ranks[0].micro_batches),
        "zero_optimization": {"stage": stage},
    }
    return (json.dumps(config, indent=2) + "\n").encode()


def _hostfile(plan: Plan, ranks: Sequence[RankEntry]) -> bytes:
    """All devices of the hosts in use; ``--include`` leaves out those without samples."""
    slots = {
        host.name: len(plan.cluster.host_devices(index))
        for index, host in enumerate(plan.cluster.hosts)
    }
    return "".join(f"{host} slots={slots[host]}\n" for host in by_host(ranks)).encode()


def _include(ranks: Sequence[RankEntry]) -> str:
    """The devices to start: ``a:0,1@b:0``."""
    return "@".join(
        f"{host}:{','.join(str(entry.local_device) for entry in entries)}"
        for host, entries in by_host(ranks).items()
    )
