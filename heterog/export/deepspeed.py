"""Target ``deepspeed``: even data parallelism, accumulation and ZeRO, without heterog."""

import json
import re
from collections.abc import Mapping, Sequence

from heterog.export.folder import Export, ExportError, RankEntry, Target, by_host, fill, ranks_of
from heterog.export.stock import stock_folder
from heterog.export.uniform import uniform_micro_batches, uniform_remarks
from heterog.names import first_of
from heterog.search.plan import Plan
from heterog.strategy.strategy import Sync

TARGET = "deepspeed"
_WHAT = (
    "A DeepSpeed script (torch and deepspeed) with the plan's batch size, accumulation steps and "
    "stage of ZeRO (zero_optimization.stage in ds_config.json)."
)


def export_deepspeed(plan: Plan, sources: Sequence[str] = ()) -> Export:
    """The folder of a uniform plan whose shares and micro-batches are all equal.

    Raises:
        ExportError: names the shares that differ.
    """
    ranks = ranks_of(plan.cluster, uniform_micro_batches(plan, TARGET))
    check_even(ranks, TARGET)
    _check_hosts(ranks)
    sync = stage_of(plan)
    remarks = uniform_remarks(plan, TARGET, expressed=sync)
    if sync is not None and any(len(set(each.slices)) > 1 for each in plan.strategy.decisions):
        remarks.append("Uneven slices: deepspeed gives every rank an equal slice.")
    if sync is not None and any(each.slice_groups for each in plan.strategy.decisions):
        remarks.append(
            "Slice groups: deepspeed keeps slices over all ranks (its MiCS has groups)."
        )
    num_bytes = plan.strategy.bucket_bytes
    what = f"Buckets of {num_bytes} bytes" if num_bytes else "Synchronisation tensor by tensor"
    remarks.append(f"{what}: deepspeed has bucket sizes of its own.")
    return stock_folder(
        plan,
        Target(
            TARGET,
            _WHAT,
            "bash launch.sh --steps 100    # on the first host; it starts the others",
        ),
        sources,
        ranks,
        remarks=remarks,
        files={
            "ds_config.json": _config(plan, ranks, int(sync.sharded) if sync is not None else 0),
            "hostfile": _hostfile(plan, ranks),
            "launch.sh": fill("launch_deepspeed.sh.jinja", include=_include(ranks)),
        },
    )


def check_even(ranks: Sequence[RankEntry], target: str) -> None:
    """Refuse shares or micro-batches that are not all equal.

    Raises:
        ExportError: names them.
    """
    if len({entry.batch_size for entry in ranks}) > 1:
        raise ExportError(
            f"{target} gives every rank the same batch size, but the plan's shares are "
            f"{_listed({entry.device: entry.batch_size for entry in ranks})}. Export to "
            "ddp, or plan with the method ddp for a batch that the devices divide evenly."
        )
    counts = {count for entry in ranks for count in entry.micro_batches}
    lengths = {len(entry.micro_batches) for entry in ranks}
    if len(counts) > 1 or len(lengths) > 1:
        raise ExportError(
            f"{target} cuts every batch into equal micro-batches, but the plan's are "
            f"{_listed({entry.device: entry.micro_batches for entry in ranks})}. Export to ddp."
        )


def _check_hosts(ranks: Sequence[RankEntry]) -> None:
    for entry in ranks:
        if not re.fullmatch(r"[A-Za-z0-9._-]+", entry.host):
            raise ExportError(
                f"deepspeed's hostfile cannot name host '{entry.host}'; rename it in the cluster "
                "file to the name by which ssh knows it."
            )


def _listed(values: Mapping[str, object]) -> str:
    return first_of([f"{device}: {value}" for device, value in values.items()])


def stage_of(plan: Plan) -> Sync | None:
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
        host.name: len(devices)
        for host, devices in zip(plan.cluster.hosts, plan.cluster.host_devices, strict=True)
    }
    return "".join(f"{host} slots={slots[host]}\n" for host in by_host(ranks)).encode()


def _include(ranks: Sequence[RankEntry]) -> str:
    """The devices to start: ``a:0,1@b:0``."""
    return "@".join(
        f"{host}:{','.join(str(entry.local_device) for entry in entries)}"
        for host, entries in by_host(ranks).items()
    )
