"""Initial shares: given, in proportion to speeds, from a plan, or equal."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from heterog.balance.shares import BalanceError, RankSpeed, best_shares, check_shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Source of the initial shares; at most one field is set.

    Attributes:
        shares: Units of each rank.
        speeds: Speeds to which shares are proportional, in any unit.
        plan: Path of a data-parallel plan.
    """

    shares: Sequence[int] | None = None
    speeds: Sequence[float] | None = None
    plan: str | Path | None = None


def first_shares(
    total: int,
    num_ranks: int,
    most: Sequence[int | None] | None,
    start: Start,
) -> tuple[int, ...]:
    """Units of each rank in a whole batch.

    Args:
        total: Units of the batch.
        num_ranks: Number of ranks of the job.
        most: Units that each rank can hold; ``None`` is no limit.
        start: Source of the shares.

    Raises:
        BalanceError: more than one source is given, or the shares do not fit.
    """
    shares, speeds, plan = start.shares, start.speeds, start.plan
    given = {
        name: value
        for name, value in (("shares", shares), ("speeds", speeds), ("plan", plan))
        if value is not None
    }
    if len(given) > 1:
        raise BalanceError(f"{' and '.join(given)} are given; one of them says the first shares.")
    if shares is not None:
        return _within(check_shares(shares, num_ranks, total), most)
    weights = [1.0] * num_ranks
    if plan is not None:
        weights = shares_of_plan(plan)
    elif speeds is not None:
        weights = list(speeds)
    if len(weights) != num_ranks:
        raise BalanceError(
            f"{'the plan has' if plan is not None else 'there are speeds of'} {len(weights)} "
            f"ranks; {num_ranks} are running."
        )
    for rank, weight in enumerate(weights):
        if not weight > 0 and plan is None:
            raise BalanceError(f"rank {rank} has a speed of {weight:g}; speeds are positive.")
    limits = [
        0 if weight <= 0 else limit
        for weight, limit in zip(weights, most or [None] * num_ranks, strict=True)
    ]
    speed_of = [RankSpeed(unit_s=1 / weight if weight > 0 else 1.0) for weight in weights]
    return best_shares(speed_of, total, limits)


def shares_of_plan(plan: str | Path) -> list[float]:
    """Samples of each device of a plan that keeps the whole model on every rank.

    Raises:
        ExportError: the plan is not data-parallel.
    """
    # Reading plans takes the simulator's compiled kernels, which most loops never need.
    from heterog.export.uniform import uniform_micro_batches
    from heterog.search.plan import load_plan

    loaded = load_plan(plan)
    samples = uniform_micro_batches(loaded, "a balancer")
    return [float(sum(samples.get(index, ()))) for index in range(loaded.cluster.num_devices)]


def _within(shares: tuple[int, ...], most: Sequence[int | None] | None) -> tuple[int, ...]:
    for rank, (share, limit) in enumerate(zip(shares, most or (), strict=False)):
        if limit is not None and share > limit:
            raise BalanceError(
                f"rank {rank} is given {share} samples and can hold {limit}. Give it fewer, or "
                "set micro_batches=True and loop over balancer.parts(batch)."
            )
    return shares
