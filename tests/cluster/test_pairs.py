"""Lines between hosts and measured pairs: read, written, and what they carry."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from heterog.cluster import Cluster, PairLimit
from heterog.cluster.spec import parse_cluster
from heterog.errors import ClusterError, InputFileError
from heterog.lowering.channels import Channel, ChannelTable
from heterog.pricing.cost_model import alpha_beta

HOSTS = """schema_version: 1
name: sites
efficiency: 0.5
hosts:
  - name: A
    count: 2
    devices: [{type: A100-40GB, count: 2}]
    intra: nvlink_a100
    nic: {line_rate: 100 Gbit/s}
  - name: B
    devices: [{type: A100-40GB, count: 2}]
    intra: nvlink_a100
    nic: {line_rate: 100 Gbit/s}
"""
LINE = "pairs:\n  lines:\n    - {between: [[A], [B]], line_rate: 8 Gbit/s, latency: 3 ms}\n"
NIC = 0.5 * 12.5e9


def cluster_of(text: str) -> Cluster:
    return parse_cluster(HOSTS + text, Path("sites.yaml"))


def carried(cluster: Cluster, channel: Channel) -> dict[tuple[int, int], float]:
    """Payloads through each limit between hosts, by the first host of its sides."""
    first = len(cluster.resources) - len(cluster.pairs)
    return {
        (limit.sources[0], limit.targets[0]): channel.traffic().get(first + number, 0.0)
        for number, limit in enumerate(cluster.pairs)
    }


def matrix(rates: Sequence[Sequence[float]]) -> str:
    return f"pairs:\n  matrix: {{unit: GB/s, bandwidth: {[list(row) for row in rates]}}}\n"


def test_a_line_is_in_the_way_between_sites_alone() -> None:
    cluster = cluster_of(LINE)
    assert [(limit.sources, limit.targets) for limit in cluster.pairs] == [
        ((0, 1), (2,)),
        ((2,), (0, 1)),
    ]
    inside, between = cluster.bottleneck_bytes_per_s(0, 2), cluster.bottleneck_bytes_per_s(0, 4)
    assert (inside, between) == (NIC, 0.5e9)  # 8 Gbit/s, of which half is usable
    assert (cluster.latency_s(0, 2), cluster.latency_s(0, 4)) == (20e-6, 3e-3)
    assert [cluster.resources[r].name for r in cluster.route(0, 4)] == [
        "A0 nic out",
        "A0 and 1 more to B limit 0",
        "B nic in",
    ]
    assert cluster.route(0, 4)[1] == cluster.route(3, 5)[1] != cluster.route(4, 0)[1]
    assert cluster.host_kind == (0, 0, 1)


def test_sides_of_a_line_are_kinds_of_hosts() -> None:
    alike = HOSTS.replace("- name: B", "- name: C")
    text = "pairs:\n  lines:\n    - {between: [[A0], [A1, C]], bandwidth: 1 GB/s}\n"
    assert parse_cluster(alike, Path("x.yaml")).host_kind == (0, 0, 0)
    assert parse_cluster(alike + text, Path("x.yaml")).host_kind == (0, 1, 1)
    # A measured pair makes no kinds: every host would be one.
    rates = [[0, 9, 8], [7, 0, 6], [5, 4, 0]]
    assert parse_cluster(alike + matrix(rates), Path("x.yaml")).host_kind == (0, 0, 0)


def test_a_ring_crosses_a_line_once_each_way() -> None:
    cluster = cluster_of(LINE)
    table = ChannelTable(cluster)
    ring = table[table.all_reduce(tuple(range(6)), hierarchical=False)]
    assert carried(cluster, ring) == pytest.approx({(0, 2): 10 / 6, (2, 0): 10 / 6})
    assert alpha_beta(cluster, ring).seconds_per_byte == pytest.approx(10 / 6 / 0.5e9)
    assert ring.latency_s == pytest.approx(10 * 3e-3)
    by_hosts = table[table.all_reduce(tuple(range(6)), hierarchical=True)]
    assert carried(cluster, by_hosts) == pytest.approx({(0, 2): 4 / 3, (2, 0): 4 / 3})
    inside = table[table.all_reduce((0, 1, 2, 3), hierarchical=False)]
    assert set(carried(cluster, inside).values()) == {0.0}


def test_slices_cross_a_line_from_each_host_to_each() -> None:
    cluster = cluster_of(LINE)
    table = ChannelTable(cluster)
    slices = (1, 1, 2, 2, 3, 3)  # hosts own 1/6, 1/3, 1/2
    scatter = table[table.reduce_scatter(tuple(range(6)), slices)]
    # Both hosts of A send B its half; B sends each of them its own.
    assert carried(cluster, scatter) == pytest.approx({(0, 2): 1.0, (2, 0): 0.5})
    gather = table[table.all_gather(tuple(range(6)), slices)]
    assert carried(cluster, gather) == pytest.approx({(0, 2): 0.5, (2, 0): 1.0})


def test_a_matrix_has_a_rate_for_each_pair() -> None:
    cluster = cluster_of(matrix([[99, 3, 2], [4, 99, 1], [2.5, 1.5, 0]]))
    rates = {(a, b): cluster.bottleneck_bytes_per_s(2 * a, 2 * b) for a, b in ((0, 1), (2, 1))}
    assert rates == {(0, 1): 3e9, (2, 1): 1.5e9}  # measured: efficiency does not count
    assert cluster.bottleneck_bytes_per_s(0, 1) == 200e9  # the diagonal says nothing
    table = ChannelTable(cluster)
    ring = table[table.all_reduce((0, 2, 4), hierarchical=False)]
    loaded = {pair for pair, multiple in carried(cluster, ring).items() if multiple}
    assert loaded == {(0, 1), (1, 2), (2, 0)}
    assert alpha_beta(cluster, ring).seconds_per_byte == pytest.approx(4 / 3 / 1e9)


@pytest.mark.parametrize(
    "text",
    [LINE, matrix([[0, 3, 2], [4, 0, 1], [2.5, 1.5, 0]]), LINE.rstrip("}\n") + ", one_way: true}"],
)
def test_saved_and_read_again(text: str, tmp_path: Path) -> None:
    cluster = cluster_of(text)
    cluster.save(tmp_path / "c.yaml")
    again = Cluster.load(tmp_path / "c.yaml")
    assert again == cluster
    assert again.fingerprint == cluster.fingerprint != cluster_of("").fingerprint
    assert Cluster.from_dict(cluster.to_dict()) == cluster
    assert "pairs" in (again.describe_difference(cluster_of("")) or "")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "pairs:\n  lines:\n    - {between: [[A], [D]], bandwidth: 1 GB/s}\n",
            "line 16, pairs.lines[0].between[1]: there is no host 'D'; the hosts are A0, A1, B",
        ),
        (
            "pairs:\n  lines:\n    - {between: [[A], [B]]}\n",
            "needs either its line_rate",
        ),
        (
            "pairs:\n  lines:\n    - {between: [[A], [A1, B]], bandwidth: 1 GB/s}\n",
            "has host 'A1' on both sides",
        ),
        (
            matrix([[0, 1], [1, 0]]),
            "2 rows, this one of 2 rates, for 3 hosts; write a row and a column for each host.",
        ),
        (matrix([[0, 1, 0], [1, 0, 1], [1, 1, 0]]), "the rate to host 2 is 0; it must be above 0"),
        (
            "pairs:\n  matrix: {unit: apples, bandwidth: [[0, 1, 1], [1, 0, 1], [1, 1, 0]]}\n",
            "apples",
        ),
        ("pairs:\n  trunks: []\n", "unknown field. Known: lines, matrix."),
    ],
)
def test_faults_are_said_in_one_line(text: str, fault: str) -> None:
    with pytest.raises(InputFileError) as caught:
        cluster_of(text)
    assert fault in str(caught.value)
    assert "\n" not in str(caught.value)


def test_limits_of_clusters_in_code_are_checked() -> None:
    cluster = cluster_of("")

    def limited(sources: tuple[int, ...], targets: tuple[int, ...], rate: float = 1e9) -> Cluster:
        pair = PairLimit(sources=sources, targets=targets, bandwidth_bytes_per_s=rate)
        return replace(cluster, pairs=(pair,))

    for sources, targets, fault in (
        ((), (1,), "names no host, or one twice"),
        ((0, 0), (1,), "names no host, or one twice"),
        ((0,), (3,), "names a host that there is not; they are 0 to 2"),
    ):
        with pytest.raises(ClusterError, match=fault):
            limited(sources, targets)
    with pytest.raises(ClusterError, match="it must be a finite number above 0"):
        limited((0,), (1,), 0.0)
    assert limited((0,), (1,)).num_hosts == 3
