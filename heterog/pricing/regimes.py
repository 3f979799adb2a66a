"""Regimes of runs: how much less sure a prediction is where stages, teams and many hosts meet.

What was measured to make ``regimes.yaml`` are runs by layout and number of hosts. A prediction's
spread by its devices is widened, in quadrature, by the spread of its regime; one host adds none.
"""

from functools import cache
from importlib import resources

from heterog.cluster.topology import Cluster
from heterog.records import Record
from heterog.strategy.strategy import Strategy
from heterog.yaml_files import read_shipped

ONE_HOST = "one host"
MANY_HOSTS = "many hosts"
_MIXED = "teams and stages on "


def regime_name(num_hosts: int, *, is_mixed: bool) -> str:
    """Name of a regime in ``regimes.yaml``.

    Args:
        num_hosts: Number of hosts that take part.
        is_mixed: Whether some devices are a team, and stages lie on others.

    >>> regime_name(2, is_mixed=True), regime_name(64, is_mixed=False)
    ('teams and stages on several hosts', 'many hosts')
    """
    if num_hosts <= 1:
        return ONE_HOST
    hosts = "several hosts" if num_hosts <= _table().several_hosts else MANY_HOSTS
    return _MIXED + hosts if is_mixed else hosts


def regime_of(strategy: Strategy, cluster: Cluster) -> str:
    """The regime of a strategy on its cluster."""
    stages = {decision.devices for decision in strategy.decisions}
    hosts = {cluster.devices[device].host_index for devices in stages for device in devices}
    return regime_name(len(hosts), is_mixed=bool(strategy.op_rules) and len(stages) > 1)


def regime_spread(regime: str) -> float:
    """Standard deviation that a regime adds to the logarithm of a step's seconds.

    >>> regime_spread("one host")
    0.0
    """
    return 0.0 if regime == ONE_HOST else _table().spreads[regime]


class _Table(Record):
    several_hosts: int
    spreads: dict[str, float]


@cache
def _table() -> _Table:
    return read_shipped(resources.files("heterog.pricing") / "regimes.yaml", _Table)
