import pytest

from heterog.cluster.catalog import intra_link, link_kinds, network_kind, network_kinds
from heterog.errors import UnknownNameError


@pytest.mark.parametrize(
    ("name", "sheet_gb_per_s"),
    [
        ("nvlink_a100", 300),
        ("NVLink-3", 300),
        ("nvlink4", 450),
        ("nvlink_h100", 450),
        ("nvlink5", 900),
        ("pcie3", 15.754),
        ("pcie4", 31.508),
        ("PCIe 5", 63.015),
    ],
)
def test_links_reach_a_part_of_their_sheets(name: str, sheet_gb_per_s: float) -> None:
    link = intra_link(name)
    (kind,) = (each for each in link_kinds() if each.link == link)
    assert kind.sheet_bytes_per_s == pytest.approx(sheet_gb_per_s * 1e9)
    assert 0.5 < link.bandwidth_bytes_per_s / kind.sheet_bytes_per_s < 0.8
    assert len(kind.sheet) > 10
    assert len(kind.share) > 10


@pytest.mark.parametrize(
    ("name", "gbit_per_s"),
    [
        ("infiniband_fdr", 54.54),
        ("EDR", 100),
        ("hdr", 200),
        ("InfiniBand NDR", 400),
        ("xdr", 800),
        ("roce_100g", 100),
        ("25GbE", 25),
        ("efa_p4d", 400),
        ("efa-p5", 3200),
    ],
)
def test_networks_have_their_line_rates(name: str, gbit_per_s: float) -> None:
    assert network_kind(name).line_rate_bytes_per_s * 8e-9 == pytest.approx(gbit_per_s)


def test_no_two_kinds_share_a_name_or_a_link() -> None:
    names = [name for each in link_kinds() for name in (each.name, *each.aliases)]
    names += [name for each in network_kinds() for name in (each.name, *each.aliases)]
    assert len(names) == len(set(names))
    assert len({each.link for each in link_kinds()}) == len(link_kinds()), "files are written back"


def test_unknown_kinds_name_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'nvlink5'"):
        intra_link("nvlink6")
    with pytest.raises(UnknownNameError, match="did you mean 'infiniband_hdr'"):
        network_kind("infiniband_hrd")
