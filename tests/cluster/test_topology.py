import dataclasses
import json
import math
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterog.cluster import Cluster, Device, DeviceType, Host, Link, device_type
from heterog.cluster.topology import Sends
from heterog.errors import ClusterError

GB = 10**9
SLOW = DeviceType(
    name="slow",
    peak_flops_per_s={"float32": 1e12},
    memory_bandwidth_bytes_per_s=1e11,
    memory_bytes=8 * GB,
    source="test",
)
FAST = dataclasses.replace(SLOW, name="fast", peak_flops_per_s={"float32": 4e12})
PORTS = Link(kind="nvlink", bandwidth_bytes_per_s=16e9)
BUS = Link(kind="pcie3", bandwidth_bytes_per_s=9e9, latency_s=7e-6, shared=True)
HOST_A = Host(name="A", nic_line_rate_bytes_per_s=10e9, intra=PORTS)
HOST_B = Host(name="B", nic_line_rate_bytes_per_s=5e9, nic_latency_s=50e-6, intra=BUS)


def device(
    name: str,
    device_type: DeviceType = SLOW,
    host_index: int = 0,
    usable_memory_bytes: int = 7 * GB,
) -> Device:
    return Device(
        name=name, type=device_type, host_index=host_index, usable_memory_bytes=usable_memory_bytes
    )


TWO_HOSTS = Cluster(
    name="two",
    hosts=(HOST_A, HOST_B),
    devices=(
        device("A:0", FAST),
        device("A:1", FAST),
        device("B:0", SLOW, 1),
        device("B:1", FAST, 1),
    ),
    efficiency=0.5,
)


def two_hosts(**changes: Any) -> Cluster:
    return dataclasses.replace(TWO_HOSTS, **changes)


def test_derived_facts_of_two_hosts() -> None:
    cluster = two_hosts()
    assert (cluster.num_devices, cluster.num_hosts) == (4, 2)
    assert cluster.device_types == (FAST, SLOW)
    assert cluster.type_index == (0, 0, 1, 0)
    assert cluster.host_of == (0, 0, 1, 1)
    assert cluster.host_devices[1] == (2, 3)
    assert cluster.device_index("B:0") == 2
    assert cluster.nic_bandwidth_bytes_per_s[0] == 5e9


def test_resources_and_their_rates() -> None:
    resources = two_hosts().resources
    assert [(r.name, r.bandwidth_bytes_per_s, r.host_index) for r in resources] == [
        ("A nic out", 5e9, 0),
        ("A nic in", 5e9, 0),
        ("B nic out", 2.5e9, 1),
        ("B nic in", 2.5e9, 1),
        ("A:0 port out", 16e9, 0),
        ("A:0 port in", 16e9, 0),
        ("A:1 port out", 16e9, 0),
        ("A:1 port in", 16e9, 0),
        ("B bus", 9e9, 1),
    ]


@pytest.mark.parametrize(
    ("src", "dst", "names", "rate", "latency_s"),
    [
        (0, 0, [], math.inf, 0.0),
        (0, 1, ["A:0 port out", "A:1 port in"], 16e9, 5e-6),
        (1, 0, ["A:1 port out", "A:0 port in"], 16e9, 5e-6),
        (2, 3, ["B bus"], 9e9, 7e-6),
        (3, 2, ["B bus"], 9e9, 7e-6),
        (0, 3, ["A nic out", "B nic in"], 2.5e9, 50e-6),
        (2, 1, ["B nic out", "A nic in"], 2.5e9, 50e-6),
    ],
)
def test_routes_by_hand(
    src: int, dst: int, names: list[str], rate: float, latency_s: float
) -> None:
    cluster = two_hosts()
    assert [cluster.resources[r].name for r in cluster.route(src, dst)] == names
    assert cluster.bottleneck_bytes_per_s(src, dst) == rate
    assert cluster.latency_s(src, dst) == latency_s


def test_devices_have_the_nic_next_to_them() -> None:
    host = Host(name="A", nic_line_rate_bytes_per_s=1e9, num_nics=2, intra=PORTS)
    other = dataclasses.replace(host, name="B")
    devices = [device(f"{name}:{i}", SLOW, h) for h, name in enumerate("AB") for i in range(3)]
    cluster = Cluster(name="two", hosts=(host, other), devices=tuple(devices), efficiency=0.5)
    names = [link.name for link in cluster.resources]
    assert names[:4] == ["A nic0 out", "A nic0 in", "A nic1 out", "A nic1 in"]
    assert [cluster.is_nic(link) for link in range(len(names))] == [True] * 8 + [False] * 12
    assert [cluster.nics([each], 0) for each in range(3)] == [(0,), (0,), (2,)]
    assert cluster.route(1, 5) == (0, 7)  # out of the first NIC of A, into the second one of B
    assert cluster.nic_bandwidth_bytes_per_s[0] == 1e9
    assert cluster.bottleneck_bytes_per_s(1, 5) == 0.5e9
    one = dataclasses.replace(cluster, hosts=(dataclasses.replace(host, num_nics=1), other))
    assert cluster.fingerprint != one.fingerprint
    with pytest.raises(ClusterError, match="host 'A' has 0 NICs; it needs one"):
        dataclasses.replace(host, num_nics=0)


def test_default_latencies() -> None:
    assert HOST_A.nic_latency_s == 20e-6
    assert PORTS.latency_s == 5e-6


def test_one_device_and_one_host() -> None:
    alone = Cluster(name="alone", hosts=(HOST_A,), devices=(device("A:0"),))
    assert alone.route(0, 0) == ()
    assert alone.bottleneck_bytes_per_s(0, 0) == math.inf
    one_host = Cluster(name="one", hosts=(HOST_A,), devices=(device("A:0"), device("A:1")))
    assert {one_host.resources[r].name for r in one_host.route(0, 1)} == {
        "A:0 port out",
        "A:1 port in",
    }


def test_types_with_equal_values_are_one() -> None:
    twin = DeviceType(**{f.name: getattr(SLOW, f.name) for f in dataclasses.fields(SLOW)})
    cluster = Cluster(
        name="twins", hosts=(HOST_A,), devices=(device("A:0"), device("A:1", device_type=twin))
    )
    assert twin is not SLOW
    assert cluster.device_types == (SLOW,)


def test_values_are_frozen_hashable_and_picklable() -> None:
    cluster = two_hosts()
    assert pickle.loads(pickle.dumps(cluster)) == cluster
    assert hash(two_hosts()) == hash(cluster)
    assert dataclasses.replace(cluster, efficiency=1.0).resources[0].bandwidth_bytes_per_s == 10e9
    with pytest.raises(dataclasses.FrozenInstanceError):
        cluster.efficiency = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError, match="item assignment"):
        SLOW.peak_flops_per_s["float32"] = 1.0  # type: ignore[index]
    peaks = {"float32": 1e12, "float16": 2e12}
    kind = dataclasses.replace(SLOW, peak_flops_per_s=peaks)
    peaks["float32"] = 0.0
    assert kind.peak_flops_per_s["float32"] == 1e12
    assert (
        repr(kind.peak_flops_per_s) == "{'float16': 2000000000000.0, 'float32': 1000000000000.0}"
    )


NOT_POSITIVE = [0.0, -1.0, math.nan, math.inf]


@pytest.mark.parametrize("value", NOT_POSITIVE)
def test_rates_and_sizes_must_be_positive(value: float) -> None:
    rest = f"is {value:g}; it must be a finite number above 0."
    cases: list[tuple[Any, str, str]] = [
        (PORTS, "bandwidth_bytes_per_s", "bandwidth of link 'nvlink'"),
        (HOST_A, "nic_line_rate_bytes_per_s", "NIC line rate of host 'A'"),
        (SLOW, "memory_bandwidth_bytes_per_s", "memory bandwidth of device type 'slow'"),
        (SLOW, "memory_bytes", "memory size of device type 'slow'"),
        (device("A:0"), "usable_memory_bytes", "usable memory of device 'A:0'"),
    ]
    for thing, field, what in cases:
        with pytest.raises(ClusterError) as caught:
            dataclasses.replace(thing, **{field: value})
        assert str(caught.value) == f"{what} {rest}"
    with pytest.raises(ClusterError) as caught:
        dataclasses.replace(SLOW, peak_flops_per_s={"float32": value})
    assert str(caught.value) == f"peak FLOP/s (float32) of device type 'slow' {rest}"


@pytest.mark.parametrize("value", [-1e-6, math.nan, math.inf])
def test_latencies_must_not_be_negative(value: float) -> None:
    rest = f"is {value:g}; it must be a finite number, 0 or above."
    cases: list[tuple[Any, str, str]] = [
        (PORTS, "latency_s", "latency of link 'nvlink'"),
        (HOST_A, "nic_latency_s", "NIC latency of host 'A'"),
        (SLOW, "launch_overhead_s", "launch overhead of device type 'slow'"),
    ]
    for thing, field, what in cases:
        with pytest.raises(ClusterError) as caught:
            dataclasses.replace(thing, **{field: value})
        assert str(caught.value) == f"{what} {rest}"


@pytest.mark.parametrize("value", [0.0, -0.5, 1.01, math.nan, math.inf])
def test_shares_must_be_above_zero_and_at_most_one(value: float) -> None:
    rest = f"is {value:g}; it must be above 0 and at most 1."
    cases: list[tuple[Any, str, str]] = [
        (two_hosts(), "efficiency", "NIC efficiency of cluster 'two'"),
        (HOST_A, "cpu_quota", "CPU quota of host 'A'"),
        (SLOW, "compute_efficiency", "compute efficiency of device type 'slow'"),
        (SLOW, "memory_efficiency", "memory efficiency of device type 'slow'"),
    ]
    for thing, field, what in cases:
        with pytest.raises(ClusterError) as caught:
            dataclasses.replace(thing, **{field: value})
        assert str(caught.value) == f"{what} {rest}"


@pytest.mark.parametrize(
    ("thing", "changes", "text"),
    [
        (SLOW, {"name": ""}, "a device type has an empty name; give it one."),
        (device("A:0"), {"name": ""}, "a device has an empty name; give it one."),
        (HOST_A, {"name": ""}, "a host has an empty name; give it one."),
        (
            SLOW,
            {"peak_flops_per_s": {"float16": 1e12}},
            "device type 'slow' has no peak FLOP/s for float32; every type needs one.",
        ),
        (
            SLOW,
            {"peak_flops_per_s": {"float32": 1e12, "tf32": 1e12}},
            "device type 'slow' has a peak for unknown dtype 'tf32'; known: float64, float32, "
            "float16, bfloat16.",
        ),
        (
            SLOW,
            {"peak_flops_per_s": {"float32": 1e12, "\n": 1e12}},
            "device type 'slow' has a peak for unknown dtype '\\n'; known: float64, float32, "
            "float16, bfloat16.",
        ),
        (
            device("A:0"),
            {"usable_memory_bytes": 16 * 2**30},
            "device 'A:0' has 16.0 GiB of usable memory but its type 'slow' has only 7.5 GiB; "
            "lower usable_memory.",
        ),
        (
            two_hosts(),
            {"devices": ()},
            "cluster 'two' has no device; it needs at least one.",
        ),
        (
            two_hosts(),
            {"hosts": (HOST_A, dataclasses.replace(HOST_B, name="A"))},
            "cluster 'two' has 2 hosts named 'A'; give each its own name.",
        ),
        (
            two_hosts(),
            {"devices": (device("A:0"), device("A:0"), device("A:0", host_index=1))},
            "cluster 'two' has 3 devices named 'A:0'; give each its own name.",
        ),
        (
            two_hosts(),
            {"devices": (device("A:0"), device("C:0", host_index=2))},
            "device 'C:0' is on host number 2 but cluster 'two' has hosts 0 to 1.",
        ),
        (
            two_hosts(),
            {"devices": (device("A:0"), device("B:0", host_index=1), device("A:1"))},
            "device 'A:1' of host 'A' comes after devices of host 'B'; list devices host by host, "
            "in the order of the hosts.",
        ),
        (
            two_hosts(),
            {"devices": (device("A:0"),)},
            "host 'B' has no device; add one or remove the host.",
        ),
        (
            two_hosts(),
            {
                "devices": (
                    device("A:0"),
                    device("B:0", dataclasses.replace(FAST, name="slow"), 1),
                )
            },
            "device 'B:0' has a type named 'slow' with other numbers than an earlier one of that "
            "name; give it another name.",
        ),
    ],
)
def test_impossible_descriptions_are_refused(
    thing: Any, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(ClusterError) as caught:
        dataclasses.replace(thing, **changes)
    assert str(caught.value) == text


def test_unknown_device_name() -> None:
    with pytest.raises(ClusterError) as caught:
        two_hosts().device_index("C:0")
    assert str(caught.value) == ("cluster 'two' has no device 'C:0'; it has A:0, A:1, B:0, B:1.")


def test_fingerprint_covers_what_a_planner_sees_and_no_more() -> None:
    cluster = two_hosts()
    fingerprint = cluster.fingerprint
    assert len(fingerprint) == 16
    assert int(fingerprint, 16) >= 0
    unseen: list[dict[str, Any]] = [
        {"name": "renamed"},
        {"calibration": "/elsewhere.json"},
        {"sends": Sends.BLOCKING},
    ]
    for changes in unseen:
        assert two_hosts(**changes).fingerprint == fingerprint
    whole_numbers = dataclasses.replace(HOST_A, nic_line_rate_bytes_per_s=10 * GB)
    assert two_hosts(hosts=(whole_numbers, HOST_B)).fingerprint == fingerprint
    assert two_hosts(efficiency=0.6).fingerprint != fingerprint


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"name": "renamed"}, None),
        ({"efficiency": 0.6}, "NIC efficiency is 0.5, not 0.6"),
        (
            {"hosts": (dataclasses.replace(HOST_A, nic_latency_s=1e-3), HOST_B)},
            "host 'A': nic latency s is 2e-05, not 0.001",
        ),
        (
            {"hosts": (HOST_A, dataclasses.replace(HOST_B, intra=PORTS))},
            "host 'B': intra kind is pcie3, not nvlink",
        ),
        (
            {"hosts": (HOST_A, dataclasses.replace(HOST_B, name="C"))},
            "host 'B' is in the place of host 'C'",
        ),
        (
            {"devices": (device("A:0", FAST), device("B:0", FAST, 1))},
            "device 'A:1' is in the place of device 'B:0'",
        ),
        (
            {"devices": (*two_hosts().devices[:3], device("B:1", SLOW, 1))},
            "device 'B:1': type is fast, not slow",
        ),
        (
            {
                "devices": (
                    *two_hosts().devices[:2],
                    device("B:0", dataclasses.replace(SLOW, memory_efficiency=0.5), 1),
                    two_hosts().devices[3],
                )
            },
            "device 'B:0': type memory efficiency is 0.75, not 0.5",
        ),
        (
            {"devices": two_hosts().devices[:3]},
            "4 devices, not 3: device 'B:1' is only in this cluster",
        ),
        (
            {"devices": (*two_hosts().devices, device("B:2", SLOW, 1))},
            "4 devices, not 5: device 'B:2' is only in the other cluster",
        ),
        (
            {"hosts": (HOST_A,), "devices": two_hosts().devices[:2]},
            "2 hosts, not 1: host 'B' is only in this cluster",
        ),
    ],
)
def test_describe_difference_names_the_first(changes: dict[str, Any], text: str | None) -> None:
    assert two_hosts().describe_difference(two_hosts(**changes)) == text


@pytest.mark.parametrize("break_", ["version", "missing", "extra", "index", "kind"])
def test_from_dict_refuses_what_to_dict_does_not_write(break_: str) -> None:
    record = two_hosts().to_dict()
    if break_ == "version":
        record["schema_version"] = 2
        text = "cluster record has schema_version 2; this heterog reads 1."
    elif break_ == "missing":
        del record["hosts"]
        text = "cluster record: field 'hosts' is missing."
    elif break_ == "extra":
        record["hosts"][0]["colour"] = "red"
        text = "cluster record: unknown field 'hosts.0.colour'."
    elif break_ == "index":
        record["devices"][0]["type_index"] = 9
        text = "field 'devices.0.type_index' is 9, but there are 2 types."
    else:
        record["efficiency"] = "high"
        text = "field 'efficiency' should be a valid number, got 'high'."
    with pytest.raises(ClusterError) as caught:
        Cluster.from_dict(record)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


rates = st.floats(min_value=1.0, max_value=1e15)
links = st.builds(
    Link,
    kind=st.sampled_from(["nvlink", "pcie3", "own"]),
    bandwidth_bytes_per_s=rates,
    latency_s=st.floats(min_value=0.0, max_value=1.0),
    shared=st.booleans(),
)
throttled = dataclasses.replace(device_type("CPU"), name="cpu-throttled", launch_overhead_s=1 / 3)
types = st.sampled_from([SLOW, FAST, device_type("T4"), device_type("CPU"), throttled])


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    hosts, devices = [], []
    for index in range(draw(st.integers(1, 4))):
        num_devices = draw(st.integers(1, 4))
        hosts.append(
            Host(
                name=f"h{index}",
                nic_line_rate_bytes_per_s=draw(rates),
                num_nics=draw(st.integers(1, num_devices)),
                nic_latency_s=draw(st.floats(min_value=0.0, max_value=1.0)),
                intra=draw(links),
                cpu_quota=draw(st.none() | st.floats(min_value=0.01, max_value=1.0)),
            )
        )
        separator = draw(st.sampled_from([":", "/gpu"]))
        devices += [
            device(
                f"h{index}{separator}{i}",
                draw(types),
                index,
                usable_memory_bytes=draw(st.integers(1, 4 * GB)),
            )
            for i in range(num_devices)
        ]
    efficiency = draw(st.floats(min_value=0.01, max_value=1.0))
    return Cluster(name="drawn", hosts=tuple(hosts), devices=tuple(devices), efficiency=efficiency)


@given(cluster=clusters())
@settings(max_examples=50, deadline=None)
def test_to_dict_is_json_and_exact(cluster: Cluster) -> None:
    again = Cluster.from_dict(json.loads(json.dumps(cluster.to_dict())))
    assert again == cluster
    assert again.fingerprint == cluster.fingerprint
    assert again.describe_difference(cluster) is None


@given(cluster=clusters())
@settings(max_examples=50, deadline=None)
def test_save_and_load_are_exact(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "drawn.yaml"
    cluster.save(path)
    again = Cluster.load(path)
    assert again == cluster
    assert again.fingerprint == cluster.fingerprint


@given(cluster=clusters(), other=clusters())
@settings(max_examples=50, deadline=None)
def test_a_difference_is_described_exactly_where_fingerprints_differ(
    cluster: Cluster, other: Cluster
) -> None:
    same = cluster.fingerprint == other.fingerprint
    assert (cluster.describe_difference(other) is None) == same


@given(cluster=clusters())
@settings(max_examples=50, deadline=None)
def test_routes_use_their_own_hosts_and_the_nic_only_between_hosts(cluster: Cluster) -> None:
    for src in range(cluster.num_devices):
        for dst in range(cluster.num_devices):
            used = [cluster.resources[r] for r in cluster.route(src, dst)]
            ends = {cluster.host_of[src], cluster.host_of[dst]}
            assert {r.host_index for r in used} == (ends if src != dst else set())
            assert all((" nic" in r.name) == (len(ends) == 2) for r in used)
            rates_used = [r.bandwidth_bytes_per_s for r in used]
            assert cluster.bottleneck_bytes_per_s(src, dst) == min(rates_used, default=math.inf)
            assert cluster.bottleneck_bytes_per_s(src, dst) == cluster.bottleneck_bytes_per_s(
                dst, src
            )
            assert cluster.latency_s(src, dst) == cluster.latency_s(dst, src)
