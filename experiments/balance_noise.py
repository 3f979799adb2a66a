"""Do shares swing by noise? Simulated jobs whose ranks' speeds stay, or change once.

    python -m experiments.balance_noise --json
    python -m experiments.balance_noise --json --steps-only

The second one takes for noise what steps inside a window show alone, as the rule once did.

Jobs of two to four ranks exchange the seconds of eight steps at a time, as a balancer does; every
thirteenth batch is half a batch. There are three kinds of ranks: with noise in each step, also
with noise that lasts for five to fifty steps, and with quotas: three ranks that may run half of
every 100 ms, so that one that waits has time left over and looks quicker than it is.

Told are, for jobs in which nothing happens and for those in which a rank's speed changes: how
often shares change from the twentieth step after it on, in which part of the jobs a share goes
back by more than 5 % (a swing), the step time over that of the best shares for these speeds, and
how many steps pass until shares are within 5 % of these (the median and the 90th percentile).
"""

import argparse
import json
import math
from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np

import heterog.balance.speeds
from heterog.balance.following import INTERVAL
from heterog.balance.rebalancing import Rebalancer
from heterog.balance.shares import RankSpeed, best_shares, count_turns, scaled_shares, step_s

KINDS = ("steps", "lasting", "quotas")
FACTORS = {"none": 1.0, "halved": 2.0, "doubled": 0.5, "a fifth slower": 1.2}
"""What happens to the seconds of a unit on one rank."""
SETTLED = 80
AFTER = 220
FOUND = 20
"""Steps after the change from which on shares should stay."""
PERIOD_S = 0.1
"""Time between quotas, as in a cgroup."""
EPOCH = 13


class Ranks:
    """Ranks whose speeds are known here, and only measured with noise by what is tested."""

    def __init__(self, kind: str, random: np.random.Generator) -> None:
        count = 3 if kind == "quotas" else int(random.integers(2, 5))
        self.total = 192 if kind == "quotas" else int(random.choice([96, 192, 256]))
        self.unit_s = random.uniform(0.005, 0.03, count)
        self.fixed = random.uniform(0, 10, count) * (random.random() < 0.5)
        self.quotas = np.ones(count)
        self.noise = random.uniform(0.0, 0.05)
        self.lasting = 0.0 if kind == "steps" else random.uniform(0.0, 0.05)
        if kind == "quotas":
            self.unit_s = np.full(count, random.uniform(0.003, 0.006))
            self.fixed, self.quotas = np.zeros(count), np.full(count, 0.5)
            self.noise, self.lasting = 0.6 * self.noise, 0.6 * self.lasting
        self._stays = random.uniform(0.8, 0.98)  # part of a lasting noise that is left in a step
        self._levels = random.standard_normal(count)
        self._begin_s, self._phases_s = 0.0, random.uniform(0, PERIOD_S, count)
        self._periods, self._used_s = np.full(count, -1.0), np.zeros(count)
        self._random = random

    def slow_down(self, rank: int, factor: float) -> None:
        """Change the speed of a rank."""
        if self.quotas[rank] < 1:
            self.quotas[rank] = min(self.quotas[rank] / factor, 1.0)
        else:
            self.unit_s[rank] *= factor

    def speeds(self) -> list[RankSpeed]:
        """The speeds without noise."""
        each_s = (self.unit_s / self.quotas).tolist()
        return [
            RankSpeed(unit_s=unit_s, fixed_units=fixed)
            for unit_s, fixed in zip(each_s, self.fixed.tolist(), strict=True)
        ]

    def step(self, shares: tuple[int, ...]) -> list[float]:
        """Seconds that each rank computes in a step."""
        count = len(shares)
        fresh = math.sqrt(1 - self._stays**2) * self._random.standard_normal(count)
        self._levels = self._stays * self._levels + fresh
        noise = self.noise * self._random.standard_normal(count) + self.lasting * self._levels
        busy_s = self.unit_s * (self.fixed + np.maximum(shares, 1)) * np.exp(noise)
        told = [self._wall_s(rank, float(busy_s[rank])) for rank in range(count)]
        self._begin_s += max(told)
        return told

    def _wall_s(self, rank: int, busy_s: float) -> float:
        """Seconds from the beginning of the step until a rank has run for so long."""
        if self.quotas[rank] >= 1:
            return busy_s
        now_s, quota_s = self._begin_s, PERIOD_S * self.quotas[rank]
        while True:
            period = math.floor((now_s - self._phases_s[rank]) / PERIOD_S)
            if period != self._periods[rank]:
                self._periods[rank], self._used_s[rank] = period, 0.0
            end_s = (period + 1) * PERIOD_S + self._phases_s[rank]
            runs_s = max(min(quota_s - self._used_s[rank], end_s - now_s), 0.0)
            if busy_s <= runs_s:
                self._used_s[rank] += busy_s
                return float(now_s + busy_s - self._begin_s)
            self._used_s[rank] += runs_s
            busy_s, now_s = busy_s - runs_s, end_s + 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What shares did in a job, or in the mean over jobs.

    Attributes:
        changes: Number of changes from the twentieth step on.
        swings: Whether a share went back; over jobs, the part of them.
        over_best: Step time over that of the best shares for the speeds, in the mean.
        within: Steps until that is below 1.05; the median.
        within_90: The same; the 90th percentile.
    """

    changes: float
    swings: float
    over_best: float
    within: float
    within_90: float


def run(kind: str, factor: float, seed: int) -> Outcome:
    """One job."""
    random = np.random.default_rng(seed)
    ranks = Ranks(kind, random)
    count = len(ranks.unit_s)
    rebalancer, shares = Rebalancer(count), best_shares(ranks.speeds(), ranks.total)
    first, victim = SETTLED + int(random.integers(0, INTERVAL)), int(random.integers(0, count))
    path: list[tuple[int, ...]] = []
    window: list[tuple[tuple[int, ...], list[float]]] = []
    for number in range(first + AFTER):
        if number == first:
            ranks.slow_down(victim, factor)
        is_last = number % EPOCH == EPOCH - 1
        ran = scaled_shares(shares, ranks.total // 2) if is_last else shares
        window.append((ran, ranks.step(ran)))
        path.append(shares)
        if len(window) == INTERVAL:
            units = [[float(sizes[rank]) for sizes, _ in window] for rank in range(count)]
            seconds = [[told[rank] for _, told in window] for rank in range(count)]
            change = rebalancer.update(shares, units, seconds)
            shares, window = change.shares if change is not None else shares, []
    speeds = ranks.speeds()
    best_s = step_s(speeds, best_shares(speeds, ranks.total))
    after = path[first:]
    over = [step_s(speeds, each) / best_s for each in after]
    within = next((number for number, each in enumerate(over) if each < 1.05), AFTER)
    return Outcome(
        changes=sum(one != other for one, other in pairwise(after[FOUND:])),
        swings=float(any(map(count_turns, zip(*after[FOUND:], strict=True)))),
        over_best=float(np.mean(over[FOUND:])),
        within=within,
        within_90=within,
    )


def mean_of(outcomes: list[Outcome]) -> Outcome:
    """What jobs did in the mean."""
    within = [each.within for each in outcomes]
    return Outcome(
        changes=float(np.mean([each.changes for each in outcomes])),
        swings=float(np.mean([each.swings for each in outcomes])),
        over_best=float(np.mean([each.over_best for each in outcomes])),
        within=float(np.median(within)),
        within_90=float(np.percentile(within, 90)),
    )


def main() -> None:
    """Run the jobs and print a line for each kind and change, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps-only", action="store_true", help="as it was before")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.steps_only:
        heterog.balance.speeds.LEAST_DIFFERENCES = 10**9
    rows = []
    for kind in KINDS:
        for name, factor in FACTORS.items():
            seeds = range(arguments.seed, arguments.seed + arguments.jobs)
            found = mean_of([run(kind, factor, seed) for seed in seeds])
            rows.append({"kind": kind, "change": name} | asdict(found))
            if not arguments.json:
                print(
                    f"{kind:8} {name:14} {found.changes:.2f} changes, {found.swings:.0%} swing, "
                    f"{found.over_best:.4f} of the best, within 5 % after {found.within:.0f} "
                    f"({found.within_90:.0f}) steps",
                    flush=True,
                )
    if arguments.json:
        print(json.dumps({"jobs": arguments.jobs, "seed": arguments.seed, "rows": rows}))


if __name__ == "__main__":
    main()
