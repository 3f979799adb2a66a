"""Prices of hosts per hour.

    prices:
      currency: USD
      device_hour: {V100-16GB: 2.48, T4: 0.35}     # each device of a type
      host_hour: {B: 1.90}                         # the whole host, whatever is in it

A host is rented whole: it is paid for as soon as a plan uses one of its devices, for as long as
the training takes, idle devices included. A host with a price of its own costs that; any other
costs the sum of its devices. Prices change no step time and no fingerprint, so a plan stays valid
when they change.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from heterog.errors import ClusterError
from heterog.names import name_fault, shown

MAX_PRICE_PER_HOUR = 1e9
"""Far above any machine, far below where sums over steps leave the range of floats."""
_MOST_CURRENCY = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class HourlyPrices:
    """Prices per hour, by the names of device types and hosts.

    Attributes:
        currency: Name of the currency for people, for example ``"USD"``.
        device_hour: Price of each device of a type for an hour, by name of the type.
        host_hour: Price of a whole host for an hour, by name of the host.

    >>> HourlyPrices(currency="USD", device_hour={"T4": 0.35}).of_host("a", ["T4", "T4"])
    0.7
    """

    currency: str
    device_hour: Mapping[str, float] | tuple[tuple[str, float], ...] = ()
    host_hour: Mapping[str, float] | tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        if not self.currency or len(self.currency) > _MOST_CURRENCY:
            raise ClusterError(
                f"prices have the currency {shown(self.currency)}; give 1 to {_MOST_CURRENCY} "
                "characters, USD say."
            )
        if (fault := name_fault(self.currency)) is not None:
            raise ClusterError(f"the currency of prices, {shown(self.currency)}, {fault}.")
        for field in ("device_hour", "host_hour"):
            given = dict(getattr(self, field))
            for name, price in given.items():
                if not (math.isfinite(price) and 0.0 <= price <= MAX_PRICE_PER_HOUR):
                    raise ClusterError(
                        f"the price of '{name}' is {price:g} an hour; it must be a finite number "
                        f"from 0 to {MAX_PRICE_PER_HOUR:g}."
                    )
            prices = tuple(sorted((name, float(price)) for name, price in given.items()))
            object.__setattr__(self, field, prices)

    def of_host(self, host: str, device_types: Collection[str]) -> float | None:
        """Price of a host for an hour; ``None`` if it or one of its devices has no price.

        Args:
            host: Name of the host.
            device_types: Name of the type of each of its devices.
        """
        own = dict(self.host_hour)
        if host in own:
            return own[host]
        by_type = dict(self.device_hour)
        if not all(name in by_type for name in device_types):
            return None
        return math.fsum(by_type[name] for name in device_types)

    def to_dict(self) -> dict[str, object]:
        """Convert to JSON values in the form of a cluster file."""
        return {
            "currency": self.currency,
            "device_hour": dict(self.device_hour),
            "host_hour": dict(self.host_hour),
        }
