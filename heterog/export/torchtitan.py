"""Target ``torchtitan``: the TOML of a plan of even replicas, plain or sliced, without heterog."""

from collections.abc import Sequence

from heterog.export.deepspeed import check_even, stage_of
from heterog.export.folder import RANKS_FILE, Export, ExportError, digest, fill
from heterog.export.ranks import launch_script, ranks_document, ranks_of
from heterog.export.readme import launch_command, readme
from heterog.export.uniform import uniform_micro_batches, uniform_remarks
from heterog.search.plan import Plan
from heterog.strategy.layouts.layout import Recompute

TARGET = "torchtitan"
_CONFIG = "torchtitan.toml"
_WHAT = (
    "A configuration of torchtitan with the plan's batches, replicas, slices and recomputation. "
    f"The model is one of torchtitan's own: name it, and the data, in {_CONFIG}."
)


def export_torchtitan(plan: Plan, sources: Sequence[str] = ()) -> Export:
    """The folder of a uniform plan whose shares and micro-batches are all equal.

    Raises:
        ExportError: shares differ, or some groups recompute or are sliced and others not.
    """
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
    if len(again) > 1:
        remarks.append("Recomputation of some groups: torchtitan recomputes every layer.")
    if stage == 1:
        remarks.append("ZeRO-1: torchtitan also slices gradients; same numbers.")
    groups = {len(each.slice_groups) or 1 for each in decisions} if stage else {len(ranks)}
    replicas = groups.pop()
    if groups or len(ranks) % replicas:
        raise ExportError("torchtitan has one number of replicas, and groups of the plan several.")
    config = fill(
        "torchtitan.toml.tmpl",
        local=ranks[0].micro_batches[0],
        whole=plan.graph.batch_size,
        replicas=replicas,
        shards=len(ranks) // replicas,
        reshard="default" if stage in (0, 3) else "never",
        recompute=Recompute.FULL if True in again else Recompute.NONE,
    )
    files = {
        _CONFIG: config,
        RANKS_FILE: ranks_document(plan, TARGET, ranks, digest(b"")),
        "launch.sh": launch_script(ranks, f"-m torchtitan.train --job.config_file {_CONFIG}"),
        "README.md": readme(
            plan,
            TARGET,
            what=_WHAT,
            start=launch_command(ranks).replace("--steps", "--training.steps"),
            user=f"model and data in {_CONFIG}; there is no user.py",
            num_ranks=len(ranks),
            not_expressed=remarks,
        ),
    }
    return Export(target=TARGET, files=files, not_expressed=tuple(remarks))
