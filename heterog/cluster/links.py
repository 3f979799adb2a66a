"""Kinds of links with the rates of their data sheets, by the names that cluster files use.

``intra`` of a host names a link between its devices. The simulated rate is the one that large
transfers reach: a measured fraction of the sheet's rate or, where it was not measured here, the
fraction of the generation before. ``nic`` of a host names a network: its line rate is the
sheet's, and ``efficiency`` of the cluster is the fraction of it that transfers reach.
"""

import re
from dataclasses import dataclass

from heterog.cluster.topology import Link
from heterog.errors import UnknownNameError

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
    """

    name: str
    line_rate_bytes_per_s: float
    sheet: str
    aliases: tuple[str, ...] = ()


def _link(
    name: str,
    kind: str,
    effective: float,
    sheet_rate: float,
    sheet: str,
    share: str,
    *aliases: str,
) -> LinkKind:
    """Make a link from rates in GB/s."""
    return LinkKind(
        name=name,
        link=Link(kind=kind, bandwidth_bytes_per_s=effective * _GIGA),
        sheet_bytes_per_s=sheet_rate * _GIGA,
        sheet=sheet,
        share=share,
        aliases=aliases,
    )


_AS_PCIE4 = "the share of PCIe 4"
_MEASURED = (
    "collectives of NCCL on 4 and 8 GPUs (public measurements of the aiconfigurator project)"
)

_LINKS = (
    _link(
        "nvlink_v100",
        "nvlink",
        16,
        150,
        "NVIDIA Tesla V100 data sheet (300 GB/s both ways)",
        "measured on the servers of the HeteroG paper (CoNEXT 2020), where pairs have few of the "
        "six links; a DGX-2 reaches more",
    ),
    _link(
        "nvlink_a100",
        "nvswitch",
        200,
        300,
        "NVIDIA A100 data sheet, NVLink 3 (600 GB/s both ways)",
        f"{_MEASURED}: 190 to 215 GB/s",
        "nvlink3",
    ),
    _link(
        "nvlink4",
        "nvswitch",
        320,
        450,
        "NVIDIA H100 data sheet, NVLink 4 (900 GB/s both ways)",
        f"{_MEASURED}: 300 to 350 GB/s",
        "nvlink_h100",
        "nvlink_h200",
    ),
    _link(
        "nvlink5",
        "nvswitch",
        640,
        900,
        "NVIDIA HGX B200 data sheet, NVLink 5 (1.8 TB/s both ways)",
        "the share of NVLink 4",
        "nvlink_b200",
        "nvlink_gb200",
    ),
    _link(
        "xgmi_mi300x",
        "xgmi",
        318,
        448,
        "AMD Instinct MI300X platform data sheet: seven links of 128 GB/s both ways",
        "the share of NVLink 4; a single pair of devices has one of the seven links",
    ),
    _link("pcie3", "pcie3", 9, 15.754, "PCI Express 3.0, x16 (8 GT/s, 128b/130b)",
          "chosen: what copies through a host reach", "pcie3_x16"),
    _link("pcie4", "pcie4", 20, 31.508, "PCI Express 4.0, x16 (16 GT/s, 128b/130b)",
          "chosen; the same measurements give 19 to 22 GB/s between two L40S", "pcie4_x16"),
    _link("pcie5", "pcie5", 40, 63.015, "PCI Express 5.0, x16 (32 GT/s, 128b/130b)", _AS_PCIE4,
          "pcie5_x16"),
)  # fmt: skip


def _network(name: str, gbit_per_s: float, sheet: str, *aliases: str) -> NetworkKind:
    return NetworkKind(
        name=name, line_rate_bytes_per_s=gbit_per_s * _GBIT, sheet=sheet, aliases=aliases
    )


_IBTA = "IBTA roadmap, 4x port"
_ETHERNET = "IEEE 802.3, also under RoCE"
_AWS = "Amazon EC2"

_NETWORKS = (
    *(
        _network(f"ethernet_{rate}g", rate, _ETHERNET, f"roce_{rate}g", f"{rate}gbe")
        for rate in (1, 10, 25, 40, 50, 100, 200, 400, 800)
    ),
    _network("infiniband_qdr", 32, f"{_IBTA}: 40 Gbit/s with 8b/10b", "qdr"),
    _network("infiniband_fdr", 54.54, f"{_IBTA}: 56 Gbit/s with 64b/66b", "fdr"),
    _network("infiniband_edr", 100, _IBTA, "edr"),
    _network("infiniband_hdr100", 100, f"{_IBTA.replace('4x', '2x')}", "hdr100"),
    _network("infiniband_hdr", 200, _IBTA, "hdr", "infiniband_hdr200", "hdr200"),
    _network("infiniband_ndr200", 200, f"{_IBTA.replace('4x', '2x')}", "ndr200"),
    _network("infiniband_ndr", 400, _IBTA, "ndr", "infiniband_ndr400", "ndr400"),
    _network("infiniband_xdr", 800, _IBTA, "xdr", "infiniband_xdr800", "xdr800"),
    _network("efa_p3dn", 100, f"{_AWS}, p3dn.24xlarge"),
    _network("efa_p4d", 400, f"{_AWS}, p4d.24xlarge and p4de.24xlarge", "efa_p4de"),
    _network("efa_p5", 3200, f"{_AWS}, p5.48xlarge and p5e.48xlarge", "efa_p5e"),
    _network("efa_p5en", 3200, f"{_AWS}, p5en.48xlarge"),
    _network("efa_p6_b200", 3200, f"{_AWS}, p6-b200.48xlarge"),
)


def link_kinds() -> tuple[LinkKind, ...]:
    """Links between the devices of a host."""
    return _LINKS


def network_kinds() -> tuple[NetworkKind, ...]:
    """Networks between hosts."""
    return _NETWORKS


def _key(name: str) -> str:
    return re.sub(r"[\W_]+", "", name.lower())


_LINK_BY_KEY = {_key(name): each for each in _LINKS for name in (each.name, *each.aliases)}
_NETWORK_BY_KEY = {_key(name): each for each in _NETWORKS for name in (each.name, *each.aliases)}
INTRA_LINKS = {each.name: each.link for each in _LINKS}
"""Links between devices, by the name with which files are written."""


def intra_link(name: str) -> Link:
    """Find a link by its name or an alias; case and hyphens do not matter.

    Raises:
        UnknownNameError: no link has this name.

    >>> intra_link("NVLink-4").bandwidth_bytes_per_s
    320000000000.0
    """
    found = _LINK_BY_KEY.get(_key(name))
    if found is None:
        raise UnknownNameError("link", name, INTRA_LINKS)
    return found.link


def network_kind(name: str) -> NetworkKind:
    """Find a network by its name or an alias; case and hyphens do not matter.

    Raises:
        UnknownNameError: no network has this name.

    >>> network_kind("HDR").line_rate_bytes_per_s
    25000000000.0
    """
    found = _NETWORK_BY_KEY.get(_key(name))
    if found is None:
        raise UnknownNameError("network", name, [each.name for each in _NETWORKS])
    return found
