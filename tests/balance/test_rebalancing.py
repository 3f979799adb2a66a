"""Shares follow speeds that change and stay where speeds do: simulated ranks with noise."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterog.balance.rebalancing import Rebalancer
from heterog.balance.shares import RankSpeed, best_shares, step_s
from heterog.balance.speeds import LEAST_DIFFERENCES, SpeedEstimate

INTERVAL = 8
STAYS = 0.9  # part of a lasting noise that is left after a step


@dataclass
class Job:
    """Ranks whose speeds are known here, and only measured with noise by what is tested."""

    speeds: list[RankSpeed]
    shares: tuple[int, ...]
    noise: float
    seed: int
    quotas: tuple[float, ...] = ()
    lasting: float = 0.0
    """Noise that a rank has for about ten steps: something else runs on its machine."""
    changes: list[int] = field(default_factory=list)
    step: int = 0

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.rebalancer = Rebalancer(len(self.speeds))
        self.seconds: list[list[float]] = [[] for _ in self.speeds]
        self.levels = self.random.standard_normal(len(self.speeds))
        self.path = [self.shares]

    def run(self, num_steps: int) -> None:
        """Steps in windows, as a balancer exchanges them; also a slow step now and then."""
        for _ in range(num_steps):
            self.step += 1
            step_s = max(s.seconds(n) for s, n in zip(self.speeds, self.shares, strict=True))
            for rank, speed in enumerate(self.speeds):
                own_s = speed.seconds(self.shares[rank])
                if self.quotas:
                    # It runs at full speed while its quota lasts, which it saves while it waits.
                    busy_s = own_s * self.quotas[rank]
                    own_s = busy_s if busy_s < 0.9 * self.quotas[rank] * step_s else own_s
                factor = self.random.lognormal(0, self.noise)
                if self.lasting:
                    new = np.sqrt(1 - STAYS**2) * self.random.standard_normal()
                    self.levels[rank] = STAYS * self.levels[rank] + new
                    factor *= np.exp(self.lasting * self.levels[rank])
                hiccup = 5 if self.random.random() < 0.02 else 1
                self.seconds[rank].append(own_s * factor * hiccup)
            if self.step % INTERVAL == 0:
                units = [[float(n)] * INTERVAL for n in self.shares]
                change = self.rebalancer.update(self.shares, units, self.seconds)
                self.seconds = [[] for _ in self.speeds]
                if change is not None:
                    self.shares = change.shares
                    self.changes.append(self.step)
                    self.path.append(self.shares)

    def over_best(self) -> float:
        best = best_shares(self.speeds, sum(self.shares))
        return step_s(self.speeds, self.shares) / step_s(self.speeds, best)


def count_turns(path: Sequence[int], band: float = 0.05) -> int:
    """How often a rank's share goes back by more than a part of it; so often it swings."""
    count, way, end = 0, 0, path[0]
    for share in path[1:]:
        if way * (share - end) > 0:
            end = share
        elif abs(share - end) > max(band * end, 1):
            count += way != 0
            way, end = (1 if share > end else -1), share
    return count


SPEEDS = st.lists(
    st.builds(RankSpeed, unit_s=st.floats(0.005, 0.05), fixed_units=st.floats(0, 10)),
    min_size=2,
    max_size=5,
)


@settings(max_examples=60)
@given(speeds=SPEEDS, noise=st.floats(0, 0.05), seed=st.integers(0, 2**30))
def test_shares_are_found_and_then_stay(speeds: list[RankSpeed], noise: float, seed: int) -> None:
    even = best_shares([RankSpeed(unit_s=1.0)] * len(speeds), 256)
    job = Job(speeds=speeds, shares=even, noise=noise, seed=seed)
    job.run(10 * INTERVAL)
    assert job.over_best() < 1.08 + 2 * noise
    settled = len(job.changes)
    job.run(200)
    assert len(job.changes) - settled <= 2, "shares swing"
    assert job.over_best() < 1.08 + 2 * noise


@pytest.mark.parametrize("is_halved", [False, True])
def test_noise_that_lasts_for_a_window_does_not_make_shares_go_back_and_forth(
    is_halved: bool,
) -> None:
    """Steps of a window tell of too little noise; what windows differ by tells of all."""
    swings, later = 0, 0
    for seed in range(20):
        random = np.random.default_rng(seed)
        units = random.uniform(0.005, 0.03, 3)
        speeds = [RankSpeed(unit_s=each) for each in units]
        job = Job(
            speeds=speeds,
            shares=best_shares(speeds, 256),
            noise=0.01,
            lasting=random.uniform(0.0, 0.05),
            seed=seed,
        )
        job.run(80)
        if is_halved:
            job.speeds = [RankSpeed(unit_s=2 * units[0]), *speeds[1:]]
        job.run(24)
        assert job.over_best() < 1.05
        settled = len(job.changes)
        job.path = [job.shares]
        job.run(200)
        later += len(job.changes) - settled
        swings += max(map(count_turns, zip(*job.path, strict=True))) > 0
    assert swings == 0
    assert later <= 8


def test_windows_that_differ_are_noise_until_a_speed_changes() -> None:
    estimate = SpeedEstimate()
    levels = [1.0, 1.04, 1.0, 1.04, 1.0]
    for number, level in enumerate(levels):
        assert not estimate.add([50.0] * 8, [level] * 8)
        if number < LEAST_DIFFERENCES:
            assert estimate.relative_error == pytest.approx(0.0, abs=0.02)
    assert estimate.relative_error == pytest.approx(1.4826 * np.log(1.04) / np.sqrt(2))
    again = SpeedEstimate()
    again.load_state_dict(estimate.state_dict())
    assert again.relative_error == estimate.relative_error
    # Windows of other sizes say nothing, and one jump is no noise.
    before = estimate.relative_error
    estimate.add([60.0] * 8, [2.0] * 8)
    assert estimate.relative_error >= before
    estimate.forget_noise()
    assert estimate.relative_error < before


@settings(max_examples=60)
@given(
    units=st.lists(st.floats(0.005, 0.05), min_size=2, max_size=5),
    noise=st.floats(0, 0.03),
    rank=st.integers(0, 4),
    before=st.integers(0, INTERVAL - 1),
    seed=st.integers(0, 2**30),
)
def test_a_rank_that_halves_is_taken_in_within_20_steps(
    units: list[float], noise: float, rank: int, before: int, seed: int
) -> None:
    speeds = [RankSpeed(unit_s=each) for each in units]
    job = Job(speeds=speeds, shares=best_shares(speeds, 256), noise=noise, seed=seed)
    job.run(4 * INTERVAL + before)
    slow = rank % len(speeds)
    job.speeds = [
        RankSpeed(unit_s=each * (2 if number == slow else 1)) for number, each in enumerate(units)
    ]
    job.run(20)
    assert job.over_best() < 1.05 + 2 * noise
    settled = len(job.changes)
    for _ in range(200 // INTERVAL):
        job.run(INTERVAL)
        assert job.over_best() < 1.05 + 2 * noise
    assert len(job.changes) - settled <= 3, "shares swing"


def test_a_fixed_part_is_told_apart() -> None:
    speeds = [RankSpeed(unit_s=0.01, fixed_units=20), RankSpeed(unit_s=0.02, fixed_units=5)]
    job = Job(speeds=speeds, shares=(50, 50), noise=0.0, seed=0)
    job.run(12 * INTERVAL)
    assert job.over_best() < 1.03
    assert len(job.changes) <= 3


@settings(max_examples=60)
@given(
    quotas=st.lists(st.floats(0.2, 1.0), min_size=2, max_size=4),
    noise=st.floats(0, 0.05),
    seed=st.integers(0, 2**30),
)
def test_ranks_that_look_quick_while_they_wait_do_not_make_shares_swing(
    quotas: list[float], noise: float, seed: int
) -> None:
    speeds = [RankSpeed(unit_s=0.01 / quota) for quota in quotas]
    even = best_shares([RankSpeed(unit_s=1.0)] * len(speeds), 96)
    job = Job(speeds=speeds, shares=even, noise=noise, seed=seed, quotas=tuple(quotas))
    job.run(16 * INTERVAL)
    settled = len(job.changes)
    job.run(200)
    assert job.over_best() < 1.35 + 2 * noise
    assert len(job.changes) - settled <= 8, "shares swing"


def test_changes_that_do_not_pay_are_taken_back() -> None:
    """Rank 0 takes as long as it likes, whatever it has."""
    rebalancer = Rebalancer(2)
    change = rebalancer.update((50, 50), [[50.0] * 4] * 2, [[2.0] * 4, [1.0] * 4])
    assert change is not None
    assert change.shares == (33, 67)
    back = rebalancer.update((33, 67), [[33.0] * 4, [67.0] * 4], [[2.0] * 4, [1.3] * 4])
    assert back is not None
    assert back.shares == (50, 50)
    assert back.text == "steps are not quicker with 33/67 samples: back to 50/50"


def test_one_line_says_who() -> None:
    rebalancer = Rebalancer(3)
    window = [[31.0] * 4, [31.0] * 4, [31.0] * 4]
    change = rebalancer.update((31, 31, 31), window, [[0.31] * 4, [0.31] * 4, [0.366] * 4])
    assert change is not None
    assert change.text.startswith("rank 2 is 18 % slower than planned: 31 -> 27 samples (all ran")
    change = Rebalancer(3).update((31, 31, 31), window, [[0.1] * 4, [0.31] * 4, [0.31] * 4])
    assert change is not None
    assert change.text.startswith("rank 0 is 210 % faster than planned: 31 -> ")


def test_a_rank_without_samples_is_not_the_one_that_is_told_of() -> None:
    window = [[10.0] * 4, [10.0] * 4, [2.0] * 4, [0.0] * 4]
    seconds = [[0.1] * 4, [0.1] * 4, [0.15] * 4, [0.1] * 4]
    change = Rebalancer(4).update((10, 10, 2, 0), window, seconds)
    assert change is not None
    assert change.text.startswith("rank 2 is 50 % slower than planned: 2 -> "), change.text


def test_a_dead_band_and_memory_hold() -> None:
    window = [[50.0] * 4] * 2
    assert Rebalancer(2).update((50, 50), window, [[0.50] * 4, [0.52] * 4]) is None
    assert Rebalancer(2, dead_band=0.0).update((50, 50), window, [[0.50] * 4, [0.54] * 4])
    change = Rebalancer(2, most=[55, None]).update((50, 50), window, [[0.1] * 4, [0.5] * 4])
    assert change is not None
    assert change.shares == (55, 45)


def test_without_measurements_nothing_changes() -> None:
    rebalancer = Rebalancer(2)
    nothing = [float("nan")] * 2
    assert rebalancer.update((8, 8), [[8.0] * 2] * 2, [nothing, [0.1, 0.1]]) is None
    assert rebalancer.estimates[0].speed is None
    speed = rebalancer.estimates[1].speed
    assert speed is not None
    assert speed.seconds(8) == pytest.approx(0.1)
