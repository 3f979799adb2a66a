"""Regimes of runs: which one a strategy is in, and how much wider its interval is."""

import math

import pytest
from regimes import conformal_spread

from heterog.pricing.intervals import ONE_HOST, interval_around, regime_name, regime_spread


def test_more_hosts_and_stages_beside_teams_are_less_sure() -> None:
    names = [
        regime_name(hosts, is_mixed=is_mixed) for hosts in (1, 2, 64) for is_mixed in (False, True)
    ]
    assert names[:2] == [ONE_HOST, ONE_HOST]
    one, _, few, few_mixed, many, many_mixed = map(regime_spread, names)
    assert one == 0.0
    assert 0.0 <= few <= many <= many_mixed
    assert many > 0.0
    assert few <= few_mixed <= many_mixed


def test_conformal_intervals_hold_four_of_five_of_one_more_run() -> None:
    errors = [0.01 * number for number in range(1, 10)]
    extra = conformal_spread(errors, [0.02] * 9)
    _, high = interval_around(1.0, math.hypot(0.02, extra))
    assert math.log(high) == pytest.approx(0.08)  # ceil(0.8 x 10) = 8 of 9
    assert conformal_spread(errors, [0.2] * 9) == 0.0
    assert conformal_spread([0.5], [0.0]) > conformal_spread([0.1], [0.0])
