"""Errors of predictions: intervals of seconds and of memory peaks, and noise on a schedule.

An *interval* holds four of five measurements.

A *regime* is a layout on a number of hosts; predictions are less sure where stages, teams and many
hosts meet. The spread of a prediction by its devices is widened, in quadrature, by the spread of
its regime (``regimes.yaml``, from measured runs). One host adds none.

The spread of *memory peaks* follows from the few peaks that were measured. Let e = log(measured /
predicted) of the largest peak of a device in a run. Over n runs, to which one number was fitted
(the bytes that devices reserve beside tensors),

    spread^2 = sum(e^2) / (n - 1)

The e of one more run, divided by spread x sqrt(1 + 1 / n), follows Student's t distribution with
n - 1 degrees of freedom: the prediction interval for one further value of a normal variable (Hahn
and Meeker, Statistical Intervals, 1991, chapter 4). For few runs this interval is wider than a
normal one of the same spread, because the spread itself is not well known: by 1.43 for n = 4 at
80 %. Errors of the memory model are taken to be common to all devices of a plan. So a plan fits as
often as the device whose predicted peak is the largest share of its memory.

*Noise* is the difference between predicted and real speeds. A plan is made for predicted speeds
and runs unchanged on real ones. So the referee replays the *order* of the nominal run, with a
random factor for every device and every link. Devices of a type share most of their factor,
because predictions err by type. All strategies of a comparison get the same draws, so that
differences come from the strategies.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from statistics import NormalDist
from typing import Annotated, ClassVar, NamedTuple

import numpy as np

from heterog.cluster.topology import Cluster
from heterog.lowering.program import FIRST_LINK_KIND, FloatArray
from heterog.lowering.tape import NUM_TASKS, Tape
from heterog.pricing.cost_model import ChannelPrices, Prices
from heterog.records import VALUE, Name, Record, finite, within
from heterog.strategy.strategy import Strategy
from heterog.yaml_files import read_shipped

COVERAGE = 0.8
"""Share of measurements that lie in an interval."""
MEDIAN_OF_NORMAL = NormalDist().inv_cdf(0.75)
"""Median of the absolute value of a normal variable, in standard deviations."""
_DEVIATIONS = NormalDist().inv_cdf(0.5 + 0.5 * COVERAGE)

_MOST_SPREAD = 20.0
"""Spread at which an interval says nothing: it spans 11 orders of magnitude to each side."""


class Interval(NamedTuple):
    """Ends of an interval, in the unit of the prediction."""

    low: float
    high: float


def interval_around(predicted: float, spread: float) -> Interval:
    """The interval of a prediction whose logarithm is off by a normal error.

    Args:
        predicted: Predicted value, in the middle of the interval by ratios.
        spread: Standard deviation of the logarithm of measured / predicted, cut at 20:
            measurements that contradict each other may give values whose exponential overflows.

    >>> [round(end, 3) for end in interval_around(1.0, 0.1)]
    [0.88, 1.137]
    """
    factor = math.exp(_DEVIATIONS * min(spread, _MOST_SPREAD))
    return Interval(predicted / factor, predicted * factor)


ONE_HOST = "one host"
MANY_HOSTS = "many hosts"
_MIXED = "teams and stages on "


def regime_name(num_hosts: int, *, is_mixed: bool) -> str:
    """Name of a regime in ``regimes.yaml``.

    Args:
        num_hosts: Number of hosts that take part.
        is_mixed: Whether the layout has both teams and several stages.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakErrors:
    """Errors of predicted memory peaks.

    Attributes:
        spread: Spread of log(measured / predicted); see the module.
        num_runs: Number of runs that it was found from, at least two.
        measured_on: GPU type of these runs.
    """

    __pydantic_config__: ClassVar = VALUE

    spread: Annotated[float, finite(1e-9, 1.0)]
    num_runs: Annotated[int, within(2, 1000)]
    measured_on: Name

    @property
    def _scale(self) -> float:
        """Divisor by which the error of one more run follows Student's distribution."""
        return self.spread * math.sqrt(1.0 + 1.0 / self.num_runs)

    def interval(self, peak_bytes: float) -> Interval:
        """Interval in which four of five measured peaks are expected, in bytes.

        Args:
            peak_bytes: Predicted peak, without what the device reserves.

        >>> errors = PeakErrors(spread=0.05, num_runs=4, measured_on="GH200")
        >>> [round(end, 1) for end in errors.interval(100.0)]
        [91.3, 109.6]
        """
        factor = math.exp(_quantile(0.5 + 0.5 * COVERAGE, self.num_runs - 1) * self._scale)
        return Interval(peak_bytes / factor, peak_bytes * factor)

    def fit_probability(self, peaks: Iterable[tuple[float, float]]) -> float:
        """Chance that a plan with these peaks fits, from 0 to 1.

        Args:
            peaks: Pairs (predicted, usable) bytes of each device, usable more than 0.

        >>> errors = PeakErrors(spread=0.05, num_runs=4, measured_on="GH200")
        >>> round(errors.fit_probability([(90.0, 100.0), (1.0, 100.0)]), 2)
        0.92
        """
        fullest = max((predicted / usable for predicted, usable in peaks), default=0.0)
        if fullest == 0.0:
            return 1.0
        return _probability(-math.log(fullest) / self._scale, self.num_runs - 1)


def _probability(t: float, freedom: int) -> float:
    """P(T <= t) of Student's distribution with whole degrees of freedom.

    It is a finite sum (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4). It needs no import, which
    matters because ranks check intervals whenever they load a plan.

    >>> round(_probability(1.6377, 3), 4), round(_probability(-1.0, 1), 4)
    (0.9, 0.25)
    """
    angle = math.atan(t / math.sqrt(freedom))
    square = math.cos(angle) ** 2
    is_odd = freedom % 2 == 1
    term = math.cos(angle) if is_odd else 1.0
    total = 0.0
    for number in range(2 + is_odd, freedom + 1, 2):
        total += term
        term *= square * (number - 1) / number
    inside = math.sin(angle) * total
    return 0.5 + (angle + inside) / math.pi if is_odd else 0.5 + 0.5 * inside


@lru_cache(maxsize=16)
def _quantile(probability: float, freedom: int) -> float:
    """The t at which ``_probability`` reaches a probability of 0.5 or more."""
    low, high = 0.0, 1.0
    while _probability(high, freedom) < probability:
        high *= 2.0
    while high - low > 1e-12 * high:
        middle = 0.5 * (low + high)
        if _probability(middle, freedom) < probability:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


SPREAD = 0.10
"""Standard deviation of the logarithm of a link's speed, inside a host or between few hosts."""
_WITHIN_TYPE = 0.03
"""Standard deviation of the logarithm of a device's speed, among devices of one type."""


@dataclass(frozen=True, slots=True, eq=False)
class Noise:
    """Random factors on seconds: 1.1 is a tenth slower than predicted.

    Attributes:
        device: Factor of each device.  # [num_draws, num_devices]
        resource: Factor of each link resource.  # [num_draws, num_resources]
    """

    device: FloatArray
    resource: FloatArray


def draw_noise(
    cluster: Cluster, num_draws: int, of_types: Sequence[float], seed: int = 0
) -> Noise:
    """Draw log-normal factors for every device and link, with median 1.

    Factors of links spread more on clusters of many hosts; see ``regime_name``.

    Args:
        cluster: The cluster with the devices and links.
        num_draws: Number of draws.
        of_types: Standard deviation of log seconds of each device type; ``CostModel.spread``.
        seed: Seed of the draws.
    """
    rng = np.random.default_rng(seed)
    is_measured = regime_name(cluster.num_hosts, is_mixed=False) != MANY_HOSTS
    of_links = SPREAD if is_measured else math.hypot(SPREAD, regime_spread(MANY_HOSTS))
    scales = np.abs(of_types)  # a file may say -0.0, which numpy takes for less than 0
    of_type = rng.normal(0.0, scales, (num_draws, len(cluster.device_types)))
    own = rng.normal(0.0, _WITHIN_TYPE, (num_draws, cluster.num_devices))
    return Noise(
        device=np.exp(of_type[:, list(cluster.type_index)] + own),
        resource=np.exp(rng.normal(0.0, of_links, (num_draws, len(cluster.resources)))),
    )


def noisy_prices(prices: Prices, resource_factor: FloatArray) -> Prices:
    """Prices of channels over links that are slower or faster by a factor.

    The seconds per byte of a channel grow in proportion to those of its most loaded link.
    """
    channels = prices.channels
    held = channels.resource_s_per_byte * resource_factor[channels.resource]
    before = _most_loaded(channels, channels.resource_s_per_byte)
    after = _most_loaded(channels, held)
    factor = np.divide(after, before, out=np.ones_like(after), where=before > 0.0)
    s_per_byte = channels.s_per_byte * factor
    noisy = channels._replace(resource_s_per_byte=held, s_per_byte=s_per_byte)
    return prices._replace(channels=noisy)


def noisy_seconds(
    tape: Tape, prices: Prices, noisy: Prices, seconds: FloatArray, device_factor: FloatArray
) -> FloatArray:
    """Seconds of every task on the tape under noise.

    Args:
        tape: The program.
        prices: The nominal prices.
        noisy: The prices under noise.
        seconds: Nominal seconds of each task.
        device_factor: Factor of each device.  # [num_devices]
    """
    tasks = tape.tasks[: int(tape.counts[NUM_TASKS])]
    nominal = seconds[: len(tasks)]
    is_link = tasks["kind"] >= FIRST_LINK_KIND
    slower = noisy.channels.s_per_byte - prices.channels.s_per_byte
    # Compute tasks have channel -1 and links device -1: ``where`` drops what these indices read.
    return np.where(
        is_link,
        nominal + tasks["num_bytes"] * slower[tasks["channel"]] if len(slower) else nominal,
        nominal * device_factor[tasks["device"]],
    )


def _most_loaded(channels: ChannelPrices, held: FloatArray) -> FloatArray:
    """Seconds per byte on the most loaded link of each channel; 0 where there is none."""
    most = np.zeros(len(channels.s_per_byte))
    channel = np.repeat(np.arange(len(most)), np.diff(channels.resource_start))
    np.maximum.at(most, channel, held)
    return most
