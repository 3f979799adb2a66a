"""Clusters over the whole catalogue: 2 to 1,024 devices, 1 to 6 kinds, unlike links.

Hosts of a kind are alike: a device type, 1 to 8 of it, what joins them, and a network card. Some
clusters are two sites with a thin line between them, some have cards of one kind that are slower
than their sheets say.
"""

from typing import Any

import numpy as np

from heterog.cluster.catalog import ListedType, listed_types

_SWITCHED = {
    "V100": "nvlink_v100", "P100": "nvlink_v100", "A100": "nvlink_a100", "A800": "nvlink_a100",
    "H": "nvlink4", "G": "nvlink5", "B": "nvlink5", "MI3": "xgmi_mi300x",
}  # fmt: skip
"""Links between modules, by the first letters of a type's name."""
_LINE_RATES = (1, 10, 25, 40, 50, 100, 200, 400, 800)
_THIN = (1, 2, 5, 10, 25)
"""Rates between sites; both in Gbit/s."""


def _types() -> list[ListedType]:
    """Types that a cluster may have: all but the CPU."""
    return [each for each in listed_types() if each.vendor]


def drawn_cluster(name: str, seed: int, least: int, most: int) -> dict[str, Any]:
    """The document of a cluster file.

    Args:
        name: Name of the cluster.
        seed: Seed of every draw.
        least: Least number of devices.
        most: Most devices.
    """
    rng = np.random.default_rng([seed, 11])
    total = int(np.exp(rng.uniform(np.log(least), np.log(most + 1))))
    num_kinds = min(int(rng.integers(1, 7)), total)
    parts = rng.dirichlet(np.ones(num_kinds)) * (total - num_kinds)
    counts = [1 + int(part) for part in parts]
    counts[0] += total - sum(counts)
    # A cluster has neighbours in speed: a fast card beside one of a hundredth is left idle.
    types = sorted(_types(), key=lambda each: each.type.peak_flops_per_s["float32"])
    middle = int(rng.integers(len(types)))
    near = types[max(middle - 25, 0) : middle + 26]
    hosts = [
        host
        for number, count in enumerate(counts)
        for host in _hosts(rng, f"k{number}", near[int(rng.integers(len(near)))], count, total)
    ]
    document: dict[str, Any] = {"schema_version": 1, "name": name, "efficiency": 0.7}
    document["hosts"] = hosts
    if len(hosts) > 1 and rng.random() < 0.2:
        cut = int(rng.integers(1, len(hosts)))
        names = [host["name"] for host in hosts]
        line = {"between": [names[:cut], names[cut:]], "line_rate": f"{rng.choice(_THIN)} Gbit/s"}
        document["pairs"] = {"lines": [line]}
    return document


def _hosts(
    rng: np.random.Generator, name: str, listed: ListedType, count: int, total: int
) -> list[dict[str, Any]]:
    """Hosts of one kind: as many of one size as there can be, and one with the rest."""
    size = min(int(rng.choice([1, 2, 4, 8] if total < 64 else [4, 8])), count)
    rates = [rate for rate in _LINE_RATES if total < 64 or rate >= 25]
    line_rate = f"{int(rng.choice(rates))} Gbit/s"
    link = _link(rng, listed)
    factor = float(np.round(rng.uniform(0.5, 1.0), 2)) if rng.random() < 0.25 else 1.0
    device: dict[str, Any] = {"type": listed.type.name}
    if factor < 1.0:
        device |= {"type_name": f"{listed.type.name}-{name}"}
        device |= {"compute_efficiency": round(0.6 * factor, 3)}

    def host(suffix: str, many: int, each: int) -> dict[str, Any]:
        return {
            "name": name + suffix,
            "count": many,
            "devices": [device | {"count": each}],
            "intra": link,
            "nic": {"line_rate": line_rate, "latency": "20 us"},
        }

    whole, rest = divmod(count, size)
    return [host("a", whole, size)] + ([host("b", 1, rest)] if rest else [])


def _link(rng: np.random.Generator, listed: ListedType) -> str:
    """What joins the devices of a host."""
    if listed.form == "sxm" or listed.vendor == "AMD":
        for begin, link in _SWITCHED.items():
            if listed.type.name.startswith(begin):
                return link
    return str(rng.choice(["pcie3", "pcie4", "pcie5"]))
