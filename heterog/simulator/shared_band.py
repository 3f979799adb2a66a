"""Closed forms for workers that share one band: loads of parameters and shares of the band.

Worker k keeps L_k of the parameters up to date and has the share b_k of the band. In a round it
moves its parameters down and up and computes on them, so that its round takes

    T_k = L_k (a_k / b_k + c_k)

with a_k the seconds to move one parameter with the whole band, and c_k the seconds to compute on
it. A round is over with its slowest worker. Partitioned edge learning (arXiv 2003.04544) shares
out the air like this. The forms below are solved anew from that model: where loads and shares may
both be chosen, all workers that take part end together, the rates b_k / (a_k + c_k b_k) are
concave in b, and their multiplier 1 / s^2 gives

    b_k = (sqrt(a_k) s - a_k) / c_k    for workers with sqrt(a_k) < s, and 0 for the others.

So a worker is left out for its channel alone, however fast it computes.

A wire, a switch or a bus can also serve one worker after the other, and that is never slower:
whoever computes longest on its part gets it first, and has it by the time it had it before, as the
band never idles (earliest deadlines first). ``loads_in_turn`` has the best loads for that.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from heterog.errors import ClusterError
from heterog.strategy.division import split_in_proportion

_CLOSE = 1e-15
"""Relative width at which a bisection ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BandShares:
    """The division of a round among workers.

    Attributes:
        round_s: Seconds of a round.
        loads: Parameters of each worker (of each group, where they work in groups).
        bands: Fraction of the band of each worker, group by group; the sum is at most 1.
    """

    round_s: float
    loads: tuple[float, ...]
    bands: tuple[float, ...]

    def whole_loads(self) -> tuple[int, ...]:
        """Loads rounded to whole parameters, by largest remainder."""
        return split_in_proportion(round(sum(self.loads)), self.loads)


def round_seconds(
    move_s: Sequence[float], compute_s: Sequence[float], loads: Sequence[float],
    bands: Sequence[float],
) -> float:  # fmt: skip
    """Seconds of a round: those of its slowest worker.

    Args:
        move_s: a_k, seconds to move one parameter down and up with the whole band.
        compute_s: c_k, seconds to compute on one parameter.
        loads: Parameters of each worker.
        bands: Fraction of the band of each worker.

    Returns:
        Seconds; infinity if a worker with parameters has no share of the band.
    """
    return max(
        0.0 if load == 0.0 else load * (math.inf if band == 0.0 else move / band + compute)
        for move, compute, load, band in zip(move_s, compute_s, loads, bands, strict=True)
    )


def loads_for_bands(
    move_s: Sequence[float], compute_s: Sequence[float], bands: Sequence[float], load: float = 1.0
) -> BandShares:
    """The best loads for given shares of the band: in proportion to 1 / (a_k / b_k + c_k).

    >>> round(loads_for_bands((1, 2, 4), (2, 1, 0.5), (1 / 3, 1 / 3, 1 / 3)).round_s, 5)
    2.36486

    Args:
        move_s: a_k, seconds to move one parameter down and up with the whole band.
        compute_s: c_k, seconds to compute on one parameter.
        bands: Fraction of the band of each worker; 0 leaves it out.
        load: Number of all parameters.
    """
    _check(move_s, compute_s)
    rates = [
        band / (move + compute * band)
        for move, compute, band in zip(move_s, compute_s, bands, strict=True)
    ]
    round_s = load / sum(rates)
    return BandShares(
        round_s=round_s, loads=tuple(rate * round_s for rate in rates), bands=tuple(bands)
    )


def bands_for_loads(
    move_s: Sequence[float], compute_s: Sequence[float], loads: Sequence[float]
) -> BandShares:
    """The best shares of the band for given loads, by bisection of the round.

    All workers end together: sum_k a_k L_k / (T - c_k L_k) = 1.

    >>> round(bands_for_loads((1, 2, 4), (2, 1, 0.5), (1 / 3, 1 / 3, 1 / 3)).round_s, 5)
    2.63307

    Args:
        move_s: a_k, seconds to move one parameter down and up with the whole band.
        compute_s: c_k, seconds to compute on one parameter.
        loads: Parameters of each worker.
    """
    _check(move_s, compute_s)
    moves = [move * load for move, load in zip(move_s, loads, strict=True)]
    computes = [compute * load for compute, load in zip(compute_s, loads, strict=True)]
    # Compute alone is too short; with it and all bytes one after another there is time left.
    low, high = max(computes), max(computes) + sum(moves)
    while high - low > _CLOSE * high and low < (round_s := (low + high) / 2.0) < high:
        if sum(move / (round_s - own) for move, own in zip(moves, computes, strict=True)) > 1.0:
            low = round_s
        else:
            high = round_s
    bands = (move / (high - own) for move, own in zip(moves, computes, strict=True))
    return BandShares(round_s=high, loads=tuple(loads), bands=tuple(bands))


def joint_shares(
    move_s: Sequence[float], compute_s: Sequence[float], load: float = 1.0
) -> BandShares:
    """The best loads and shares of the band together, without search.

    >>> best = joint_shares((1, 2, 4), (2, 1, 0.5))
    >>> round(best.round_s, 5), [round(band, 5) for band in best.bands]
    (2.20711, [0.41421, 0.58579, 0.0])

    Args:
        move_s: a_k, seconds to move one parameter down and up with the whole band.
        compute_s: c_k, seconds to compute on one parameter; 0 is a worker that takes no time.
        load: Number of all parameters.
    """
    _check(move_s, compute_s)
    sharpness = _sharpness(move_s, compute_s)
    bands = [
        max(math.sqrt(move) * sharpness - move, 0.0) / compute if compute > 0.0 else 0.0
        for move, compute in zip(move_s, compute_s, strict=True)
    ]
    at_once = [worker for worker, compute in enumerate(compute_s) if compute == 0.0]
    if at_once:  # gains the same from every further share of the band, so it gets the rest
        nearest = min(at_once, key=lambda worker: move_s[worker])
        bands[nearest] = max(1.0 - sum(bands), 0.0)
    return loads_for_bands(move_s, compute_s, bands, load)


def _sharpness(move_s: Sequence[float], compute_s: Sequence[float]) -> float:
    """Compute s: a worker takes part if its sqrt(a_k) is below it."""
    over, under = 1.0, 0.0
    sharpness = math.inf
    for move, compute in sorted(zip(move_s, compute_s, strict=True)):
        if math.sqrt(move) >= sharpness:
            break
        if compute == 0.0:
            return min(sharpness, math.sqrt(move))
        over += move / compute
        under += math.sqrt(move) / compute
        sharpness = over / under
    return sharpness


def loads_in_turn(
    move_s: Sequence[float], compute_s: Sequence[float], load: float = 1.0
) -> BandShares:
    """The best loads where one worker after the other has the whole band.

    Workers go in the order of their channels, the best first. With r_k the time left when worker
    k's turn comes, L_k = r_k / (a_k + c_k), and r_k c_k / (a_k + c_k) is left to the next.

    >>> round(loads_in_turn((1, 1, 1), (2, 1, 0.5)).round_s, 5)
    1.125
    >>> round(joint_shares((1, 1, 1), (2, 1, 0.5)).round_s, 5)
    1.28571

    Args:
        move_s: a_k, seconds to move one parameter with the whole band.
        compute_s: c_k, seconds to compute on one parameter.
        load: Number of all parameters.

    Returns:
        Loads, and as bands the fraction of the round for which each worker has the whole band.
    """
    _check(move_s, compute_s)
    left, loads = 1.0, [0.0] * len(move_s)
    for worker in sorted(range(len(move_s)), key=lambda worker: move_s[worker]):
        both = move_s[worker] + compute_s[worker]
        loads[worker] = left / both
        left *= compute_s[worker] / both
    round_s = load / sum(loads)
    return BandShares(
        round_s=round_s,
        loads=tuple(part * round_s for part in loads),
        bands=tuple(part * move for part, move in zip(loads, move_s, strict=True)),
    )


def joint_shares_of_groups(
    move_s: Sequence[Sequence[float]], compute_s: Sequence[Sequence[float]], load: float = 1.0
) -> BandShares:
    """The best loads and shares where several workers train the same parameters on own data.

    A group g takes as long as its slowest worker, so its workers end together as well: with
    rho_g = L_g / T, worker k of it needs b_k = a_k rho_g / (1 - c_k rho_g). The sum of rho_g is
    the largest where lam sum_{k in g} a_k / (1 - c_k rho_g)^2 = 1 for every group that takes part,
    one multiplier lam for all: a bisection of lam around one of each rho_g.

    Args:
        move_s: a_k of the workers of each group.
        compute_s: c_k of the workers of each group.
        load: Number of all parameters.
    """
    groups = list(zip(move_s, compute_s, strict=True))
    for moves, computes in groups:
        _check(moves, computes)
        if min(computes) == 0.0:
            raise ClusterError("a worker of a group computes in no time; it must take some.")

    def bands_at(multiplier: float) -> tuple[list[float], list[list[float]]]:
        rates = [_group_rate(moves, computes, multiplier) for moves, computes in groups]
        bands = [
            [a * rate / (1.0 - c * rate) for a, c in zip(moves, computes, strict=True)]
            for (moves, computes), rate in zip(groups, rates, strict=True)
        ]
        return rates, bands

    # At `high` no group takes part, and the band is empty.
    low, high = 0.0, 1.0 / min(sum(moves) for moves, _ in groups)
    while low < (middle := (low + high) / 2.0) < high and high - low > _CLOSE * high:
        if sum(map(sum, bands_at(middle)[1])) > 1.0:
            low = middle
        else:
            high = middle
    rates, bands = bands_at(high)
    round_s = load / sum(rates)
    return BandShares(
        round_s=round_s,
        loads=tuple(rate * round_s for rate in rates),
        bands=tuple(band for group in bands for band in group),
    )


def _group_rate(moves: Sequence[float], computes: Sequence[float], multiplier: float) -> float:
    """L_g / T of a group at a multiplier; 0 if it does not take part."""
    if multiplier * sum(moves) >= 1.0:
        return 0.0
    low, high = 0.0, 1.0 / max(computes)
    while low < (rate := (low + high) / 2.0) < high and high - low > _CLOSE * high:
        slope = sum(a / (1.0 - c * rate) ** 2 for a, c in zip(moves, computes, strict=True))
        if multiplier * slope < 1.0:
            low = rate
        else:
            high = rate
    return low


def _check(move_s: Sequence[float], compute_s: Sequence[float]) -> None:
    if not move_s or len(move_s) != len(compute_s):
        raise ClusterError(
            f"there are seconds to move a parameter for {len(move_s)} workers and seconds to "
            f"compute for {len(compute_s)}; both are needed for one worker or more."
        )
    if not all(0.0 < each < math.inf for each in move_s):
        raise ClusterError(f"seconds to move a parameter are {list(move_s)}; all must be above 0.")
    if not all(0.0 <= each < math.inf for each in compute_s):
        raise ClusterError(f"seconds to compute are {list(compute_s)}; none may be below 0.")
