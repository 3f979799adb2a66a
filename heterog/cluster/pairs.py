"""Pairs of hosts in a cluster file: lines between sites, and measured rates.

    pairs:
      lines:
        - {between: [[A], [B0, B1]], line_rate: 5 Gbit/s, latency: 10 ms}
      matrix:
        unit: MB/s
        bandwidth: [[0, 1200, 900], [1190, 0, 910], [905, 900, 0]]     # from row to column

A line is shared by all transfers from the hosts of one side to those of the other; each direction
has its own. The matrix has a measured rate for every single pair of hosts, to which the file's
efficiency does not apply. The name of a host entry with a count means all of its hosts.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from heterog.cluster.fields import Bandwidth, Seconds, Spec
from heterog.cluster.hardware import PairLimit
from heterog.cluster.topology import Cluster
from heterog.errors import HeterogError
from heterog.records import Name
from heterog.units import parse_bandwidth


class LineSpec(Spec):
    """A line between two sets of hosts, in both directions unless ``one_way`` is set."""

    between: Annotated[
        list[Annotated[list[Name], Field(min_length=1)]], Field(min_length=2, max_length=2)
    ]
    bandwidth: Bandwidth | None = None
    line_rate: Bandwidth | None = None
    latency: Seconds = 0.0
    one_way: bool = Field(default=False, strict=True)

    @model_validator(mode="after")
    def _has_one_rate(self) -> "LineSpec":
        if (self.line_rate is None) == (self.bandwidth is None):
            raise PydanticCustomError(
                "value",
                "a line needs either its line_rate, of which the file's efficiency is usable, or "
                "its bandwidth as measured",
            )
        return self


class MatrixSpec(Spec):
    """Rates from each host (row) to each other one (column); the diagonal is ignored."""

    bandwidth: Annotated[
        list[list[Annotated[float, Field(ge=0, le=1e24, allow_inf_nan=False)]]],
        Field(min_length=2),
    ]
    hosts: list[Name] | None = None
    unit: str = "B/s"
    latency: Seconds = 0.0


class PairsSpec(Spec):
    """All limits between hosts besides their NICs."""

    lines: list[LineSpec] = Field(default_factory=list)
    matrix: MatrixSpec | None = None


class PairsError(ValueError):
    """A field that does not fit the hosts.

    Attributes:
        where: Path to the field inside ``pairs``.
    """

    def __init__(self, where: tuple[int | str, ...], fault: str) -> None:
        super().__init__(fault)
        self.where = where


def pair_limits(
    spec: PairsSpec, hosts: Mapping[str, Sequence[int]], num_hosts: int, efficiency: float
) -> tuple[PairLimit, ...]:
    """Make the limits that a file describes.

    Args:
        spec: Field ``pairs`` of the file.
        hosts: Positions of hosts by name; an entry with a count has several.
        num_hosts: Number of hosts of the cluster.
        efficiency: Usable fraction of line rates.

    Raises:
        PairsError: a host is unknown, or the matrix has another size than its hosts.
    """
    found: list[PairLimit] = []
    for number, line in enumerate(spec.lines):
        sides = []
        for side, names in enumerate(line.between):
            here = ("lines", number, "between", side)
            sides.append(_members(names, hosts, here))
        rate = line.bandwidth or (line.line_rate or 0.0) * efficiency
        ways = [sides] if line.one_way else [sides, sides[::-1]]
        found += [
            PairLimit(
                sources=source, targets=target, bandwidth_bytes_per_s=rate, latency_s=line.latency
            )
            for source, target in ways
        ]
    if spec.matrix is not None:
        found += _of_matrix(spec.matrix, hosts, num_hosts)
    return tuple(found)


def _members(
    names: Sequence[str], hosts: Mapping[str, Sequence[int]], here: tuple[int | str, ...]
) -> tuple[int, ...]:
    """Positions of the named hosts, each once."""
    members: dict[int, None] = {}
    for name in names:
        if name not in hosts:
            raise PairsError(here, f"there is no host '{name}'; the hosts are {_listed(hosts)}.")
        members.update(dict.fromkeys(hosts[name]))
    return tuple(members)


def _listed(hosts: Mapping[str, Sequence[int]]) -> str:
    names = list(hosts)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _of_matrix(
    matrix: MatrixSpec, hosts: Mapping[str, Sequence[int]], num_hosts: int
) -> Iterator[PairLimit]:
    """One limit for every pair of different hosts."""
    try:
        unit = parse_bandwidth(f"1 {matrix.unit}")
    except HeterogError as error:
        raise PairsError(("matrix", "unit"), str(error)) from error
    order = tuple(range(num_hosts))
    if matrix.hosts is not None:
        order = _members(matrix.hosts, hosts, ("matrix", "hosts"))
    for row, rates in enumerate(matrix.bandwidth):
        if len(rates) != len(order) or len(matrix.bandwidth) != len(order):
            raise PairsError(
                ("matrix", "bandwidth", row),
                f"{len(matrix.bandwidth)} rows, this one of {len(rates)} rates, for "
                f"{len(order)} hosts; write a row and a column for each host.",
            )
        for column, rate in enumerate(rates):
            if row == column:
                continue
            if rate <= 0.0:
                raise PairsError(
                    ("matrix", "bandwidth", row),
                    f"the rate to host {column} is {rate:g}; it must be above 0. Hosts that "
                    "cannot reach each other have no place in one cluster.",
                )
            yield PairLimit(
                sources=(order[row],),
                targets=(order[column],),
                bandwidth_bytes_per_s=rate * unit,
                latency_s=matrix.latency,
            )


def pairs_record(cluster: Cluster) -> dict[str, Any]:
    """A record from which ``pair_limits`` reads these limits: a matrix if possible, or lines."""
    pairs, count = cluster.pairs, cluster.num_hosts
    ends = [(limit.sources, limit.targets) for limit in pairs]
    every = [
        ((row,), (column,)) for row in range(count) for column in range(count) if row != column
    ]
    latencies = {limit.latency_s for limit in pairs}
    if len(pairs) > 2 and ends == every and len(latencies) == 1:
        rates = iter(float(limit.bandwidth_bytes_per_s) for limit in pairs)
        rows = [
            [0.0 if row == column else next(rates) for column in range(count)]
            for row in range(count)
        ]
        latency = {"latency": latencies.pop()} if latencies != {0.0} else {}
        return {"matrix": {"bandwidth": rows, **latency}}
    names = [host.name for host in cluster.hosts]
    return {
        "lines": [
            {
                "between": [
                    [names[host] for host in side] for side in (each.sources, each.targets)
                ],
                "bandwidth": float(each.bandwidth_bytes_per_s),
                "latency": float(each.latency_s),
                "one_way": True,
            }
            for each in pairs
        ]
    }
