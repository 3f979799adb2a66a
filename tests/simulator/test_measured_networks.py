"""Collectives between hosts on networks where NCCL was measured, by hand."""

from pathlib import Path

import pytest

from heterog.cluster import Cluster
from heterog.cluster.spec import parse_cluster
from heterog.lowering.channels import ChannelTable
from heterog.pricing.device_models.model import DeviceModels
from heterog.pricing.roofline import Roofline

_SLOWED = "collectives: {ring: 2, ring_growth: 0.5, tree: 3, tree_growth: 1}"


def hosts(count: int, nic: str, *, devices: int = 2) -> Cluster:
    """So many hosts of H100."""
    return parse_cluster(
        f"schema_version: 1\nname: hosts\nhosts:\n  - {{name: h, count: {count}, "
        f"devices: [{{type: H100, count: {devices}}}], intra: nvlink4, nic: {nic}}}\n",
        Path("hosts.yaml"),
    )


FOUR = hosts(4, f"{{line_rate: 100 Gbit/s, count: 2, latency: 10 us, {_SLOWED}}}")
RATE = 0.7 * 12.5e9
"""Of one NIC."""


def seconds(cluster: Cluster, kind: str, devices: tuple[int, ...]) -> tuple[float, float]:
    """Latency, and seconds of a byte of payload."""
    table = ChannelTable(cluster)
    number = {
        "all_reduce": lambda: table.all_reduce(devices, hierarchical=False),
        "hierarchical": lambda: table.all_reduce(devices, hierarchical=True),
        "reduce_scatter": lambda: table.reduce_scatter(devices, ()),
        "all_gather": lambda: table.all_gather(devices, ()),
    }[kind]()
    found = DeviceModels().channel_seconds(cluster, table[number])
    return found.latency_s, found.seconds_per_byte


def test_a_ring_goes_through_all_devices_and_a_tree_over_the_hosts() -> None:
    all_of_them, one_of_each = tuple(range(8)), (0, 2, 4, 6)
    for kind in ("reduce_scatter", "all_gather"):
        # Of 8 devices each has 7 eighths to send; 4 hosts slow the ring down 2 x sqrt 4 times.
        assert seconds(FOUR, kind, all_of_them)[1] == pytest.approx(7 / 8 / (2 * RATE) * 4)
        # Half of the NICs, at the rate of all: 4 times slowed down is less than one can send.
        assert seconds(FOUR, kind, one_of_each)[1] == pytest.approx(3 / 4 / (2 * RATE) * 4)
        assert seconds(FOUR, kind, (0, 2))[1] == pytest.approx(1 / 2 / (2 * RATE) * 2 * 2**0.5)
    for kind in ("all_reduce", "hierarchical"):
        # A tree of 4 hosts is slowed down 3 x 2 times, twice a ring 4 times.
        latency, of_a_byte = seconds(FOUR, kind, all_of_them)
        assert of_a_byte == pytest.approx(2 * 7 / 8 / (2 * RATE) * 4)
        hop = FOUR.hosts[0].intra.latency_s
        assert latency == pytest.approx(2 * hop + 4 * 10e-6), "up and down a chain and two levels"


def test_large_trees_are_faster_than_rings() -> None:
    many = hosts(64, f"{{line_rate: 100 Gbit/s, count: 2, latency: 10 us, {_SLOWED}}}")
    one_of_each = tuple(range(0, 128, 2))
    latency, of_a_byte = seconds(many, "all_reduce", one_of_each)
    assert of_a_byte == pytest.approx(2 * 63 / 64 / (2 * RATE) * min(3 * 6, 2 * 8))
    assert latency == pytest.approx(2 * 6 * 10e-6)


@pytest.mark.parametrize(
    ("kind", "count", "bus_gb_per_s"),
    [
        ("reduce_scatter", 2, 181.55),
        ("all_gather", 8, 69.0),
        ("reduce_scatter", 32, 27.94),
        ("all_reduce", 2, 361.75),
        ("all_reduce", 8, 99.56),
        ("all_reduce", 32, 64.93),
    ],
)
def test_efa_is_as_it_was_measured(kind: str, count: int, bus_gb_per_s: float) -> None:
    cluster = hosts(count, "efa_p5", devices=8)
    assert cluster.hosts[0].num_nics == 8
    payload, devices = 256 * 2**20, 8 * count
    latency, of_a_byte = seconds(cluster, kind, tuple(range(devices)))
    sent = (2 if kind == "all_reduce" else 1) * (devices - 1) / devices * payload
    assert sent / (latency + payload * of_a_byte) == pytest.approx(bus_gb_per_s * 1e9, rel=0.05)


def test_other_networks_and_slices_follow_their_links() -> None:
    plain = hosts(4, "{line_rate: 100 Gbit/s, count: 2, latency: 10 us}")
    table = ChannelTable(plain)
    for number in (table.reduce_scatter(tuple(range(8)), ()), table.value_reduce((0, 2, 4))):
        found, by_links = (
            model.channel_seconds(plain, table[number]) for model in (DeviceModels(), Roofline())
        )
        assert found._replace(drag={}) == by_links
    # One that owns all receives what seven eighths of the others send, over one host's NICs.
    table = ChannelTable(FOUR)
    uneven = table[table.reduce_scatter(tuple(range(8)), (1000, *[1] * 7))]
    by_links = Roofline().channel_seconds(FOUR, uneven)
    ring = 7 / 8 / (2 * RATE) * 4
    found = DeviceModels().channel_seconds(FOUR, uneven)
    assert found.seconds_per_byte == pytest.approx(max(ring, by_links.seconds_per_byte))
    assert found.held == by_links.held, "NICs carry their bytes, no longer"


def test_rings_of_exported_plans() -> None:
    """Of 2 hosts of 8, NCCL's rings send 15 sixteenths, heterog's ranks half of the payload."""
    rings = "collectives: {ring: 1, ring_growth: 0, tree: 1, tree_growth: 0}"
    port = 7 / 8 / hosts(2, "infiniband_hdr", devices=8).resources[-1].bandwidth_bytes_per_s
    for own, sent, inside in (("", 1 / 2, port), (f", {rings}", 15 / 16, 0.0)):
        cluster = hosts(2, f"{{line_rate: 100 Gbit/s{own}}}", devices=8)
        for kind in ("reduce_scatter", "all_gather"):
            found = seconds(cluster, kind, tuple(range(16)))[1]
            assert found == pytest.approx(sent / RATE + inside)


def test_all_reduces_between_many_hosts_start_as_a_tree_whether_measured_or_not() -> None:
    many = hosts(64, "{line_rate: 100 Gbit/s, latency: 10 us}", devices=8)
    hop = many.hosts[0].intra.latency_s
    table, everyone = ChannelTable(many), tuple(range(512))
    for number in (table.all_reduce(everyone, hierarchical=way) for way in (False, True)):
        found = DeviceModels().channel_seconds(many, table[number])
        assert found.latency_s == pytest.approx(2 * (7 * hop + 6 * 10e-6))
        by_links = Roofline().channel_seconds(many, table[number])
        assert found.seconds_per_byte == by_links.seconds_per_byte, "a tree sends as many bytes"
    # Two hosts: a ring of four hops is as long as a tree's way up and down, or shorter.
    few = hosts(2, "{line_rate: 100 Gbit/s, latency: 10 us}", devices=1)
    assert seconds(few, "all_reduce", (0, 1))[0] == pytest.approx(2 * 10e-6)


@pytest.mark.parametrize("other", ["efa_p5en", "efa_p4d", "{line_rate: 100 Gbit/s}"])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather"])
def test_a_host_that_was_not_measured_makes_no_collective_faster(kind: str, other: str) -> None:
    measured = hosts(8, "efa_p5", devices=8)
    mixed = parse_cluster(
        "schema_version: 1\nname: mixed\nhosts:\n"
        "  - {name: h, count: 7, devices: [{type: H100, count: 8}], intra: nvlink4, nic: efa_p5}\n"
        "  - {name: o, devices: [{type: H100, count: 8}], intra: nvlink4, nic: " + other + "}\n",
        Path("mixed.yaml"),
    )
    everyone = tuple(range(64))
    assert seconds(mixed, kind, everyone)[1] >= seconds(measured, kind, everyone)[1] * (1 - 1e-9)


def test_measured_networks_are_written_and_read(tmp_path: Path) -> None:
    for cluster in (FOUR, hosts(2, "efa_p5", devices=8)):
        assert Cluster.from_dict(cluster.to_dict()) == cluster
        cluster.save(tmp_path / "again.yaml")
        assert Cluster.load(tmp_path / "again.yaml") == cluster
    plain = hosts(4, "{line_rate: 100 Gbit/s, count: 2, latency: 10 us}")
    assert plain.fingerprint != FOUR.fingerprint
