"""Regimes of runs: which one a strategy is in, and how much wider its interval is."""

from heterog.pricing.intervals import ONE_HOST, regime_name, regime_spread


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
