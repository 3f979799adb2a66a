"""Target ``accelerate``: a script of Accelerate with a balancer, for uniform plans."""

from collections.abc import Sequence
from dataclasses import replace

from heterog.export.folder import (
    Export,
    ExportError,
    Target,
    by_host,
    fill,
    launch_command,
    on_used_devices,
    ranks_of,
)
from heterog.export.torchrun import runtime_folder
from heterog.export.uniform import uniform_micro_batches, uniform_remarks
from heterog.search.plan import Plan

TARGET = "accelerate"
_WHAT = (
    "A script of Hugging Face Accelerate (accelerate, torch, heterog), whose balancer deals each "
    "global batch in the plan's shares and weighs the losses. Put your own Accelerate loop there."
)


def export_accelerate(plan: Plan, sources: Sequence[str] = ()) -> Export:
    """The folder of a uniform plan.

    Raises:
        ExportError: the plan is not uniform, or trains on CPUs and GPUs together.
    """
    micro_batches = uniform_micro_batches(plan, TARGET)
    remarks = uniform_remarks(plan, TARGET)
    plan, unused = on_used_devices(plan)
    ranks = ranks_of(plan.cluster)
    if len({entry.kind for entry in ranks}) > 1:
        raise ExportError("accelerate trains on GPUs or on CPUs, and the plan on both: ddp does.")
    folder = runtime_folder(
        plan,
        Target(TARGET, _WHAT, launch_command(ranks)),
        sources,
        ranks,
        remarks=(*unused, *remarks),
        templates="accelerate",
        fits=max(max(counts) for counts in micro_batches.values()),
    )
    hosts = by_host(ranks)
    if len({len(entries) for entries in hosts.values()}) > 1:
        return folder
    has_gpus = ranks[0].has_gpu
    config = fill(
        "accelerate.yaml.jinja",
        kind="MULTI_GPU" if has_gpus else "MULTI_CPU",
        num_hosts=len(hosts),
        num_ranks=len(ranks),
        use_cpu=str(not has_gpus).lower(),
    )
    return replace(folder, files={**folder.files, "accelerate.yaml": config})
