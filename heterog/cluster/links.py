"""Kinds of links, by the names that cluster files use; ``data/links.yaml`` has their rates.

``intra`` of a host names a link between its devices. The simulated rate is the one that large
transfers reach: a measured fraction of the sheet's rate or, where it was not measured here, the
fraction of the generation before. ``nic`` of a host names a network: its line rate is the
sheet's, and ``efficiency`` of the cluster is the fraction of it that transfers reach.
"""

import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal, TypeVar

from pydantic import Field

from heterog.cluster.hardware import Link, SlowedCollectives
from heterog.errors import UnknownNameError
from heterog.records import Record, Text
from heterog.yaml_files import read_shipped

_FILE = resources.files("heterog.cluster") / "data" / "links.yaml"
_GIGA = 1e9
_GBIT = 1e9 / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkKind:
    """A link between the devices of one host.

    Attributes:
        name: Name for ``intra`` in cluster files.
        link: The link as it is simulated, with the effective rate of one direction.
        sheet_bytes_per_s: Rate of one direction in the data sheet, per device.
        sheet: Name of the data sheet.
        share: Source of the effective rate.
        aliases: Further names.
    """

    name: str
    link: Link
    sheet_bytes_per_s: float
    sheet: str
    share: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkKind:
    """A network adapter, as one port or as all of an instance.

    Attributes:
        name: Name for ``nic`` in cluster files.
        line_rate_bytes_per_s: Line rate of one direction, data bits only; EFA's is per instance.
        sheet: Source of the line rate.
        aliases: Further names.
        rails: NICs that share the line rate.
        collectives: What collectives between hosts were measured to reach, if they were.
    """

    name: str
    line_rate_bytes_per_s: float
    sheet: str
    aliases: tuple[str, ...] = ()
    rails: int = 1
    collectives: SlowedCollectives | None = None


class _LinkSheet(Record):
    """A link of ``links.yaml``."""

    name: str
    kind: str
    aliases: list[str] = Field(default_factory=list)
    effective_gb_per_s: float
    share: Text
    sheet_gb_per_s: float
    sheet: Text


class _CollectivesSheet(Record):
    """Measured collectives of a network."""

    ring: float
    ring_growth: float
    tree: float
    tree_growth: float
    source: Text


class _NetworkSheet(Record):
    """A network of ``links.yaml``."""

    name: str
    gbit_per_s: float
    aliases: list[str] = Field(default_factory=list)
    sheet: Text
    rails: int = 1
    collectives: _CollectivesSheet | None = None


class _Sheets(Record):
    schema_version: Literal[1]
    links: list[_LinkSheet]
    networks: list[_NetworkSheet]


@cache
def _sheets() -> _Sheets:
    """The file, read when it is first asked for."""
    return read_shipped(_FILE, _Sheets)


@cache
def link_kinds() -> tuple[LinkKind, ...]:
    """Links between the devices of a host."""
    return tuple(
        LinkKind(
            name=each.name,
            link=Link(kind=each.kind, bandwidth_bytes_per_s=each.effective_gb_per_s * _GIGA),
            sheet_bytes_per_s=each.sheet_gb_per_s * _GIGA,
            sheet=each.sheet,
            share=each.share,
            aliases=tuple(each.aliases),
        )
        for each in _sheets().links
    )


@cache
def network_kinds() -> tuple[NetworkKind, ...]:
    """Networks between hosts."""
    return tuple(
        NetworkKind(
            name=each.name,
            line_rate_bytes_per_s=each.gbit_per_s * _GBIT,
            sheet=each.sheet,
            aliases=tuple(each.aliases),
            rails=each.rails,
            collectives=None
            if each.collectives is None
            else SlowedCollectives(**each.collectives.model_dump(exclude={"source"})),
        )
        for each in _sheets().networks
    )


def _key(name: str) -> str:
    return re.sub(r"[\W_]+", "", name.lower())


_Kind = TypeVar("_Kind", bound=LinkKind | NetworkKind)


def _called(name: str, kinds: tuple[_Kind, ...]) -> _Kind | None:
    """The kind with this name or alias; case and punctuation do not matter."""
    by_key = {_key(own): kind for kind in kinds for own in (kind.name, *kind.aliases)}
    return by_key.get(_key(name))


def intra_link(name: str) -> Link:
    """Find a link by its name or an alias; case and hyphens do not matter.

    Raises:
        UnknownNameError: no link has this name.

    >>> intra_link("NVLink-4").bandwidth_bytes_per_s
    320000000000.0
    """
    found = _called(name, link_kinds())
    if found is None:
        raise UnknownNameError("link", name, [each.name for each in link_kinds()])
    return found.link


def network_kind(name: str) -> NetworkKind:
    """Find a network by its name or an alias; case and hyphens do not matter.

    Raises:
        UnknownNameError: no network has this name.

    >>> network_kind("HDR").line_rate_bytes_per_s
    25000000000.0
    """
    found = _called(name, network_kinds())
    if found is None:
        raise UnknownNameError("network", name, [each.name for each in network_kinds()])
    return found
