"""The effect on a schedule when devices and links are not quite as fast as predicted.

A plan is made for predicted speeds and runs unchanged on real ones. So the *order* of the nominal
run is kept, while every device and every link gets a factor of its own, and the referee replays.
Devices of a type share most of their factor, because predictions err by type. The same draws are
used for every strategy of a comparison, so that differences come from the strategies, not from
the draws.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from heterog.cluster.topology import Cluster
from heterog.lowering.program import FIRST_LINK_KIND, FloatArray
from heterog.lowering.tape import NUM_TASKS, Tape
from heterog.pricing.cost_model import ChannelPrices, Prices
from heterog.pricing.intervals import MANY_HOSTS, regime_name, regime_spread

SPREAD = 0.10
"""Standard deviation of the logarithm of a link's speed, inside a host or between few."""
_WITHIN_TYPE = 0.03
"""The same for devices of one type."""


@dataclass(frozen=True, slots=True, eq=False)
class Noise:
    """Random factors of seconds: 1.1 is a tenth slower than predicted.

    Attributes:
        device: Factor of each device.  # [num_draws, num_devices]
        resource: Factor of each link resource.  # [num_draws, num_resources]
    """

    device: FloatArray
    resource: FloatArray

    @property
    def num_draws(self) -> int:
        """Number of draws."""
        return len(self.device)


def draw_noise(
    cluster: Cluster, num_draws: int, of_types: Sequence[float], seed: int = 0
) -> Noise:
    """Draw log-normal factors for every device and link, with median 1.

    Links are less sure on more hosts than were measured; see ``intervals``.

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

    A channel's cost beyond its most loaded link grows with that link.
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
    # Indices of the other kind are -1: they read a value that is then not taken.
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
