"""Target ``ddp``: a stock DistributedDataParallel script for uniform plans, without heterog."""

from collections.abc import Sequence

from heterog.export.folder import Export, Target, launch_command, launch_script, ranks_of
from heterog.export.stock import stock_folder
from heterog.export.uniform import uniform_micro_batches, uniform_remarks
from heterog.search.plan import Plan
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES, FIRST_BUCKET_BYTES, Strategy

TARGET = "ddp"
_WHAT = (
    "A stock DistributedDataParallel script (torch only) with the plan's batch size per rank. A "
    "communication hook weighs each rank's gradients by what its loss is a mean over, so that "
    "they are the gradients of the mean over the whole batch."
)


def export_ddp(plan: Plan, sources: Sequence[str] = ()) -> Export:
    """The folder of a uniform plan.

    Raises:
        ExportError: names the first group that is not as the others.
    """
    ranks = ranks_of(plan.cluster, uniform_micro_batches(plan, TARGET))
    return stock_folder(
        plan,
        Target(TARGET, _WHAT, launch_command(ranks)),
        sources,
        ranks,
        remarks=uniform_remarks(plan, TARGET) + _bucket_remarks(plan.strategy),
        files={"launch.sh": launch_script(ranks)},
    )


def _bucket_remarks(strategy: Strategy) -> list[str]:
    others, first = strategy.bucket_bytes, strategy.first_bucket_bytes
    if not first or (others, first) == (DEFAULT_BUCKET_BYTES, FIRST_BUCKET_BYTES):
        return []
    return [
        f"Buckets of {others} bytes after a first one of {first}: with a smaller first one "
        f"{TARGET} has buckets of {DEFAULT_BUCKET_BYTES} bytes after one of {FIRST_BUCKET_BYTES}."
    ]
