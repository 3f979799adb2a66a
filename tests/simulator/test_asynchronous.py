"""Teams and an asynchronous server: closed forms, properties, and the order of events."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from random import Random

import numpy as np
import pytest

from heterog.errors import StrategyError
from heterog.lowering.program import FloatArray
from heterog.modes.asynchronous.method import TeamPace, push_seconds, steady_seconds, ticks_of
from heterog.modes.asynchronous.value import (
    AsynchronousServer,
    PushOrder,
    ServerEvent,
)
from tests.thorough import cases


def staleness_of(server: AsynchronousServer, num_steps: int) -> list[int]:
    """For each push, the number of other pushes since its team pulled the weights.

    Args:
        server: Server, for its order of pushes.
        num_steps: Number of pushes of each team.
    """
    num_pushes, found = 0, []
    pulled_at = [0] * len(server.ticks)
    for event in server.events_of(num_steps):
        if not event.is_push:
            pulled_at[event.team] = num_pushes
            continue
        found.append(num_pushes - pulled_at[event.team])
        num_pushes += 1
    return found


def samples_by(ended: FloatArray, samples: Sequence[int], seconds: float) -> float:
    """Samples whose gradients the server has taken after so many seconds.

    Args:
        ended: Times from ``push_seconds``.  # [num_steps, num_teams]
        samples: Samples of a step of each team.
        seconds: Seconds from the start; must be less than the last push of any team.
    """
    return float((ended <= seconds).sum(0) @ np.asarray(samples, np.float64))


def unbounded_samples_per_s(paces: Sequence[TeamPace], samples: Sequence[int]) -> float:
    """Samples per second of teams without a bound, from a server that is never busy.

    The sum of what each team does alone: no bound on staleness gives more.
    """
    return sum(count / pace.alone_s for count, pace in zip(samples, paces, strict=True))


def server_seconds(paces: Sequence[TeamPace]) -> float:
    """Seconds of work that one step of all teams gives the server's busiest device.

    No step takes less.
    """
    by_team = [
        np.add(pace.pull_busy_s or (pace.pull_s,), pace.push_busy_s or (pace.push_s,))
        for pace in paces
    ]
    return float(np.sum(by_team, axis=0).max())


def paces(*compute_s: float, exchange_s: float = 0.0) -> list[TeamPace]:
    return [TeamPace(exchange_s, each, exchange_s) for each in compute_s]


def server(staleness: int, teams: list[TeamPace]) -> AsynchronousServer:
    return AsynchronousServer(staleness=staleness, devices=(0,), ticks=ticks_of(teams))


@pytest.mark.parametrize("staleness", [0, 1, 3, 10])
@pytest.mark.parametrize("slow_s", [1.0, 1.5, 7.0])
def test_two_teams_follow_the_closed_form(staleness: int, slow_s: float) -> None:
    """pushed_1(n) = max(n c_1, c_1 + (n - 1 - tau) c_2), pushed_2(n) = n c_2."""
    teams = paces(1.0, slow_s)
    ended = push_seconds(teams, server(staleness, teams), 30)
    n = np.arange(1, 31)
    wanted = np.maximum(n * 1.0, 1.0 + (n - 1 - staleness) * slow_s)
    np.testing.assert_allclose(ended[:, 1], n * slow_s)
    # Ticks are whole numbers, so a push may wait for one that is a thousandth of a step later.
    np.testing.assert_allclose(ended[:, 0], wanted, atol=2e-3 * slow_s)


def test_without_a_bound_the_rate_is_the_sum_of_the_teams_own() -> None:
    teams, samples = paces(0.2, 0.5, 1.0), (4, 2, 1)
    ended = push_seconds(teams, server(10_000, teams), 200)
    assert samples_by(ended, samples, 30.01) == 4 * 150 + 2 * 60 + 30
    assert unbounded_samples_per_s(teams, samples) == pytest.approx(4 / 0.2 + 2 / 0.5 + 1)
    assert samples_by(ended, samples, 30.01) / 30.01 == pytest.approx(25.0, rel=1e-3)


def test_with_a_staleness_of_0_every_step_waits_for_the_slowest_team() -> None:
    teams = paces(0.2, 0.5, 1.0)
    ended = push_seconds(teams, server(0, teams), 20)
    assert (ended[:-1].max(1) <= ended[1:].min(1)).all()
    assert steady_seconds(teams, server(0, teams)) == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(cases(30, 6)))
def test_a_larger_staleness_never_trains_fewer_samples(seed: int) -> None:
    """By any time, where exchanges are short: a bound only ever makes teams wait."""
    rng = Random(seed)
    teams = paces(*(rng.uniform(0.1, 1.0) for _ in range(rng.randint(2, 5))))
    samples = [rng.randint(1, 9) for _ in teams]
    bounds = (0, 1, 2, 5, 20, 1000)
    ended = [push_seconds(teams, server(each, teams), 60) for each in bounds]
    for seconds in (2.0, 5.0, 8.3):
        found = [samples_by(each, samples, seconds + 1e-9) for each in ended]
        # The order is that of ticks, which round: a push may come a thousandth too late.
        later = [samples_by(each, samples, seconds * 1.01) for each in ended]
        assert all(a <= b for a, b in zip(found, later[1:], strict=False))
        most = unbounded_samples_per_s(teams, samples) * seconds
        assert max(found) <= most + 1e-6


@pytest.mark.parametrize("seed", range(cases(20, 5)))
def test_a_step_takes_no_less_than_the_slowest_team_and_the_server(seed: int) -> None:
    rng = Random(seed)
    teams = [
        TeamPace(rng.uniform(0, 0.3), rng.uniform(0.1, 1.0), rng.uniform(0, 0.3))
        for _ in range(rng.randint(2, 5))
    ]
    least = max(server_seconds(teams), *(each.alone_s for each in teams))
    for staleness in (0, 1, 4):
        found = steady_seconds(teams, server(staleness, teams))
        assert found >= least * (1 - 1e-9)
        assert found <= sum(each.alone_s for each in teams) * (1 + 1e-9)


def test_a_busy_server_sets_the_pace() -> None:
    """Four teams that exchange for longer than they compute."""
    teams = paces(*[0.1] * 4, exchange_s=1.0)
    assert steady_seconds(teams, server(3, teams)) == pytest.approx(8.0)


def test_without_a_bound_a_busy_server_sets_the_rate() -> None:
    """Three teams that would make 1/1.1 steps a second each; a step holds the server for 1 s."""
    teams = paces(0.1, 0.1, 0.1, exchange_s=0.5)
    ended = push_seconds(teams, server(1000, teams), 60)
    assert samples_by(ended, (1, 1, 1), 50.0) == pytest.approx(50, abs=2)
    assert unbounded_samples_per_s(teams, (1, 1, 1)) * 50 > 136


def test_devices_of_a_server_work_side_by_side() -> None:
    """Three teams that only exchange: each device has half of the work, and so ends sooner."""
    whole = [TeamPace(1.0, 0.0, 1.0)] * 3
    halves = [TeamPace(0.5, 0.0, 0.5, (0.5, 0.5), (0.5, 0.5))] * 3
    wide = [TeamPace(1.0, 0.0, 1.0, (0.25,), (0.25,))] * 3
    one = AsynchronousServer(staleness=2, devices=(0,), ticks=(1, 1, 1))
    two = AsynchronousServer(staleness=2, devices=(0, 1), ticks=(1, 1, 1))
    assert steady_seconds(whole, one) == pytest.approx(6.0)
    assert steady_seconds(halves, two) == pytest.approx(3.0)
    assert server_seconds(halves) == pytest.approx(3.0)
    # A server whose link carries four exchanges at once keeps no team waiting.
    by_arrival = replace(one, order=PushOrder.ARRIVAL)
    assert steady_seconds(wide, by_arrival) == pytest.approx(2.0)
    assert steady_seconds(wide, one) == pytest.approx(2.0)
    uneven = [TeamPace(0.9, 0.0, 0.9, (0.9, 0.1), (0.9, 0.1))] * 3
    assert steady_seconds(uneven, two) == pytest.approx(5.4)


def test_exchanges_hide_behind_the_compute_of_others_unless_the_staleness_is_0() -> None:
    """Two teams, 1 s of compute, 0.25 s each way: 2 s in lock step, 1.5 s alone."""
    teams = paces(1.0, 1.0, exchange_s=0.25)
    assert steady_seconds(teams, server(0, teams)) == pytest.approx(1.75)
    assert steady_seconds(teams, server(2, teams)) == pytest.approx(1.5)


@pytest.mark.parametrize("seed", range(cases(60, 10)))
def test_no_team_begins_a_step_more_than_tau_ahead(seed: int) -> None:
    """And whoever may begin does so: the order never stops."""
    rng = Random(seed)
    num_teams, staleness = rng.randint(2, 6), rng.randint(0, 5)
    asked = AsynchronousServer(
        staleness=staleness,
        devices=(0,),
        ticks=tuple(rng.randint(1, 20) for _ in range(num_teams)),
    )
    done = [0] * num_teams
    for event in islice(asked.events(), 300):
        assert event.step == done[event.team]
        if event.is_push:
            done[event.team] += 1
        else:
            assert event.step - min(done) <= staleness
    assert min(done) > 0
    most = max(staleness_of(asked, 30))
    assert most <= (num_teams - 1) * (2 * staleness + 1)


def test_two_equal_teams_without_waiting_miss_one_push() -> None:
    """Each gradient is one update of the other team's old, but for the first."""
    asked = AsynchronousServer(staleness=5, devices=(0,), ticks=(7, 7))
    assert staleness_of(asked, 6) == [0] + [1] * 11


def test_events_of_some_steps_end_with_the_last_push() -> None:
    asked = AsynchronousServer(staleness=4, devices=(0,), ticks=(1, 5))
    found = list(asked.events_of(3))
    assert sorted(found) == sorted(
        ServerEvent(is_push, team, step)
        for is_push in (False, True)
        for team in (0, 1)
        for step in range(3)
    )
    assert found[-1] == ServerEvent(True, 1, 2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"staleness": -1}, "a staleness of -1 steps"),
        ({"devices": ()}, "devices must be ascending and distinct"),
        ({"devices": (1, 0)}, "devices must be ascending and distinct"),
        ({"ticks": (0, 1)}, "ticks of teams are"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, object], text: str) -> None:
    whole: dict[str, object] = {"staleness": 1, "devices": (0,), "ticks": (1, 1)}
    with pytest.raises(StrategyError, match=text):
        AsynchronousServer(**whole | options)  # type: ignore[arg-type]
