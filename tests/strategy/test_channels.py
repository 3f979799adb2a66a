"""Traffic of collectives by hand, mostly on the cluster of the HeteroG paper."""

from dataclasses import replace

import pytest

from heterog.cluster import Cluster, Host
from heterog.lowering.channels import (
    Channel,
    ChannelKind,
    ChannelTable,
    balanced_slices,
    proportional_slices,
)
from heterog.pricing.cost_model import alpha_beta
from heterog.strategy.strategy import Decision, Sync
from tests.simulator.builders import GBIT_PER_S, cluster_of

ALL = tuple(range(8))
PAPER = Cluster.load("paper_8gpu")  # host A with 100 Gbit/s, B to D with 50; two devices each
NIC_A = 0.7 * 100 * GBIT_PER_S
NIC_B = 0.7 * 50 * GBIT_PER_S


def nic_traffic(*channels: Channel) -> tuple[list[float], list[float]]:
    """(sent, received) payloads of each host's NIC."""
    total: dict[int, float] = {}
    for channel in channels:
        for resource, multiple in channel.traffic().items():
            total[resource] = total.get(resource, 0.0) + multiple
    hosts = range(PAPER.num_hosts)
    return [total.get(2 * h, 0.0) for h in hosts], [total.get(2 * h + 1, 0.0) for h in hosts]


def slices_traffic(slices: tuple[int, ...]) -> tuple[list[float], list[float]]:
    """NIC traffic of a reduce-scatter and all-gather with the given slices."""
    table = ChannelTable(PAPER)
    scatter, gather = table.reduce_scatter(ALL, slices), table.all_gather(ALL, slices)
    return nic_traffic(table[scatter], table[gather])


def test_point_to_point_channels_come_first() -> None:
    table = ChannelTable(PAPER)
    channel = table[0 * 8 + 2]
    assert channel.kind == ChannelKind.POINT_TO_POINT
    assert channel.devices == (0, 2)
    assert channel.traffic() == {0: 1.0, 3: 1.0}  # out of A, into B
    inside = table[2 * 8 + 3].traffic()
    assert not set(inside) & set(range(8))  # no NIC
    assert table[9].traffic() == {}  # a device and itself


def test_tables_side_by_side_make_a_collective_once() -> None:
    table = ChannelTable(PAPER)
    beside = ChannelTable(PAPER, table)
    asked = (ChannelKind.ALL_GATHER, ALL, (3, 1, 1, 1, 1, 1, 1, 1))
    beside.all_reduce(ALL, hierarchical=False)  # numbers are each table's own
    made = table[table.collective(*asked)]
    assert beside[beside.collective(*asked)] is made
    assert len(beside) == len(table) + 1
    alone = ChannelTable(PAPER)
    assert alone[alone.collective(*asked)] == made


def test_all_to_all() -> None:
    """Of 8 devices each sends a 64th of the payload to each other."""
    table = ChannelTable(PAPER)
    channel = table[table.collective(ChannelKind.ALL_TO_ALL, ALL)]
    sent, received = nic_traffic(channel)
    assert sent == received == pytest.approx([2 * 6 / 64] * 4)  # two senders, six receivers
    assert channel.latency_s == pytest.approx(sum(PAPER.latency_s(0, d) for d in range(1, 8)))
    inside = table[table.collective(ChannelKind.ALL_TO_ALL, (0, 1))].traffic()
    assert set(inside.values()) == {1 / 4}
    assert not set(inside) & set(range(8))  # no NIC
    assert table[table.collective(ChannelKind.ALL_TO_ALL, ALL)] is channel


def test_ring() -> None:
    table = ChannelTable(PAPER)
    ring = table[table.all_reduce(ALL, hierarchical=False)]
    sent, received = nic_traffic(ring)
    assert sent == received == pytest.approx([1.75] * 4)
    assert ring.latency_s == pytest.approx(14 * 20e-6)
    seconds = alpha_beta(PAPER, ring)
    assert seconds.seconds_per_byte == pytest.approx(1.75 / NIC_B)
    assert seconds.held[0] == pytest.approx(1.75 / NIC_A)


def test_ring_visits_each_host_once() -> None:
    table = ChannelTable(PAPER)
    ring = table[table.all_reduce((0, 1, 4, 5), hierarchical=False)]
    sent, received = nic_traffic(ring)
    assert sent == received == pytest.approx([1.5, 0.0, 1.5, 0.0])


def test_hierarchical() -> None:
    table = ChannelTable(PAPER)
    channel = table[table.all_reduce(ALL, hierarchical=True)]
    sent, received = nic_traffic(channel)
    assert sent == received == pytest.approx([1.5] * 4)
    port = PAPER.route(0, 1)[0]
    assert channel.traffic()[port] == pytest.approx(1.0)  # half a payload, there and back
    slow_port_s = max(
        0.5 / PAPER.resources[r].bandwidth_bytes_per_s
        for host in range(4)
        for r in PAPER.route(*PAPER.host_devices[host])
    )
    seconds = alpha_beta(PAPER, channel)
    assert max(seconds.held[r] for r in PAPER.route(2, 3)) == pytest.approx(2 * slow_port_s)
    # Chunks are in all phases at the same time: the slowest link decides.
    assert 1.5 / NIC_B > 2 * slow_port_s
    assert seconds.seconds_per_byte == pytest.approx(1.5 / NIC_B)


def test_phases_of_slices_follow_each_other() -> None:
    table = ChannelTable(PAPER)
    slowest_port = max(
        0.5 / PAPER.resources[link].bandwidth_bytes_per_s
        for host in range(4)
        for link in PAPER.route(*PAPER.host_devices[host])
    )
    for number in (table.reduce_scatter(ALL, ()), table.all_gather(ALL, ())):
        seconds = alpha_beta(PAPER, table[number])
        assert seconds.seconds_per_byte == pytest.approx(slowest_port + 0.75 / NIC_B)
        assert seconds.held[2] == pytest.approx(0.75 / NIC_B)


def test_even_slices_are_an_all_reduce() -> None:
    sent, received = slices_traffic(())
    assert sent == received == pytest.approx([1.5] * 4)


def test_balanced_slices_load_every_nic_for_the_same_time() -> None:
    sent, received = slices_traffic(balanced_slices(PAPER, ALL))
    assert sent == pytest.approx([2.4, 1.2, 1.2, 1.2], rel=1e-3)
    assert received == pytest.approx([2.4, 1.2, 1.2, 1.2], rel=1e-3)


def test_proportional_slices() -> None:
    sent, received = slices_traffic(proportional_slices(PAPER, ALL))
    assert sent == pytest.approx([1.8, 1.4, 1.4, 1.4], rel=1e-3)
    assert received == pytest.approx([1.8, 1.4, 1.4, 1.4], rel=1e-3)


def test_a_host_that_is_too_slow_gets_no_slice() -> None:
    cluster = cluster_of((100.0, ["T4"]), (100.0, ["T4"]), (100.0, ["T4"]), (1.0, ["T4"]))
    # T = (H - 2 + 3) / 300, w = (T 100 - 1) / 2 = 1/3 for each of the fast ones.
    assert balanced_slices(cluster, (0, 1, 2, 3)) == (1333, 1333, 1333, 0)


def test_two_hosts_have_even_slices() -> None:
    cluster = cluster_of((100.0, ["T4"]), (1.0, ["T4"]))
    first, second = balanced_slices(cluster, (0, 1))
    assert first == second > 0


def test_reduce_scatter_and_all_gather_are_mirror_images() -> None:
    table = ChannelTable(PAPER)
    slices = (4, 0, 1, 1, 1, 1, 0, 0)  # A owns half, B and C a quarter each, D nothing
    scatter = table[table.reduce_scatter(ALL, slices)]
    gather = table[table.all_gather(ALL, slices)]
    sent, received = nic_traffic(scatter)
    assert sent == pytest.approx([0.5, 0.75, 0.75, 1.0])
    assert received == pytest.approx([1.5, 0.75, 0.75, 0.0])
    gathered_sent, gathered_received = nic_traffic(gather)
    assert gathered_sent == pytest.approx(received)
    assert gathered_received == pytest.approx(sent)
    assert scatter.slices == pytest.approx([0.5, 0, 0.125, 0.125, 0.125, 0.125, 0, 0])


def test_inside_one_host() -> None:
    table = ChannelTable(PAPER)
    for hierarchical in (False, True):
        channel = table[table.all_reduce((0, 1), hierarchical=hierarchical)]
        port = PAPER.route(0, 1)[0]
        assert channel.traffic()[port] == pytest.approx(1.0)
        assert nic_traffic(channel) == ([0.0] * 4, [0.0] * 4)


def test_numbers_are_given_once() -> None:
    table = ChannelTable(PAPER)
    first = table.all_reduce(ALL, hierarchical=False)
    assert first == 64
    assert table.all_reduce((0, 1), hierarchical=False) == 65
    assert table.all_reduce(ALL, hierarchical=False) == first
    assert len(table) == 66


def test_channels_of_decisions() -> None:
    table = ChannelTable(PAPER)

    def kinds(sync: Sync, devices: tuple[int, ...] = (0, 2)) -> list[ChannelKind]:
        shares = (1,) * len(devices)
        found = table.for_decision(Decision(devices=devices, shares=shares, sync=sync))
        return [table[n].kind for n in found]

    assert kinds(Sync.RING) == [ChannelKind.ALL_REDUCE_RING]
    assert kinds(Sync.HIERARCHICAL) == [ChannelKind.ALL_REDUCE_HIERARCHICAL]
    assert kinds(Sync.REDUCE_SCATTER_ALL_GATHER) == [
        ChannelKind.REDUCE_SCATTER,
        ChannelKind.ALL_GATHER,
    ]
    assert kinds(Sync.PARAMETER_SERVER) == []
    assert kinds(Sync.RING, (3,)) == []


def test_collectives_use_the_nics_of_all_their_members() -> None:
    hosts = tuple(
        Host(name=name, nic_line_rate_bytes_per_s=10e9, num_nics=4, intra=PAPER.hosts[0].intra)
        for name in "AB"
    )
    devices = tuple(
        replace(PAPER.devices[0], name=f"{host.name}:{number}", host_index=index)
        for index, host in enumerate(hosts)
        for number in range(4)
    )
    cluster = Cluster(name="rails", hosts=hosts, devices=devices, efficiency=1.0)
    table = ChannelTable(cluster)

    def nics(channel: int) -> dict[int, float]:
        traffic = table[channel].traffic()
        return {link: part for link, part in traffic.items() if cluster.is_nic(link)}

    assert nics(0 * 8 + 5) == {0: 1.0, 11: 1.0}  # first NIC of A, second one of B
    ring = nics(table.all_reduce(ALL, hierarchical=False))
    assert ring == pytest.approx(dict.fromkeys(range(16), 1.75 / 4))
    by_hosts = nics(table.all_reduce(ALL, hierarchical=True))
    assert by_hosts == pytest.approx(dict.fromkeys(range(16), 1.0 / 4))
    # A ring of one device of each host has their NICs alone.
    rail = nics(table.all_reduce((1, 5), hierarchical=False))
    assert rail == pytest.approx(dict.fromkeys((2, 3, 10, 11), 1.0))
    scattered = nics(table.reduce_scatter((0, 1, 4), ()))
    assert scattered == pytest.approx({0: 1 / 6, 1: 1 / 3, 2: 1 / 6, 3: 1 / 3, 8: 2 / 3, 9: 1 / 3})
