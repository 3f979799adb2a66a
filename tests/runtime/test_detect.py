"""Cluster files of machines: of those that are described by hand, and of this one."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from heterog.cluster import Cluster, DeviceType, device_type
from heterog.cluster.hardware import Link
from heterog.cluster.spec import parse_cluster
from heterog.errors import HeterogError
from heterog.runtime.measure.detect import (
    FoundDevice,
    FoundMachine,
    catalogue_name,
    cluster_yaml,
    default_interface,
    detect,
    line_rate_bytes_per_s,
    local_type_name,
)
from heterog.runtime.measure.detect_hosts import (
    as_text,
    from_text,
    in_slurm,
    named_devices,
    told_apart,
    with_rates,
)
from heterog.units import GIB


def listed(name: str, count: int) -> tuple[FoundDevice, ...]:
    of_type = device_type(name)
    usable = of_type.memory_bytes - GIB - 12345
    found = FoundDevice(
        label=f"NVIDIA {name}", type=of_type, is_listed=True, usable_memory_bytes=usable
    )
    return (found,) * count


UNKNOWN = FoundDevice(
    label="NVIDIA Something: new #1",
    type=DeviceType(
        name="NVIDIA-Something:-new-#1",
        peak_flops_per_s={"float32": 12.3456e12, "bfloat16": 99e12},
        memory_bandwidth_bytes_per_s=777.7e9,
        memory_bytes=20 * GIB + 5,
        source="measured on a: b",
        compute_efficiency=1.0,
        memory_efficiency=1.0,
    ),
    is_listed=False,
    usable_memory_bytes=19 * GIB,
)


def machine(
    *devices: FoundDevice, link: Link | None = None, nic: float | None = 3.125e9
) -> FoundMachine:
    return FoundMachine(
        host="host-1", devices=devices, link=link, interface="eth7", nic_bytes_per_s=nic
    )


def loaded(found: FoundMachine, folder: Path) -> Cluster:
    """The cluster of a file, which survives being saved again."""
    path = folder / "cluster.yaml"
    path.write_text(cluster_yaml(found))
    cluster = Cluster.load(path)
    cluster.save(folder / "again.yaml")
    assert Cluster.load(folder / "again.yaml") == cluster
    return cluster


def test_cards_of_the_catalogue_keep_the_numbers_of_their_sheets(tmp_path: Path) -> None:
    link = Link(kind="nvlink", bandwidth_bytes_per_s=201.234e9)
    cluster = loaded(machine(*listed("A100-40GB", 2), *listed("T4", 1), link=link), tmp_path)
    assert [each.type for each in cluster.devices] == [
        device_type("A100-40GB"),
        device_type("A100-40GB"),
        device_type("T4"),
    ]
    below = cluster.devices[0].type.memory_bytes - GIB - 12345
    assert below - 0.01 * GIB <= cluster.devices[0].usable_memory_bytes <= below
    host = cluster.hosts[0]
    assert (host.name, host.intra.kind) == ("host-1", "nvlink")
    assert host.intra.bandwidth_bytes_per_s == pytest.approx(201.2e9)
    assert host.nic_line_rate_bytes_per_s == 3.125e9


def test_unknown_cards_are_written_out_in_full(tmp_path: Path) -> None:
    link = Link(kind="pcie", bandwidth_bytes_per_s=11e9)
    found = machine(UNKNOWN, UNKNOWN, link=link)
    cluster = loaded(found, tmp_path)
    kind = cluster.devices[1].type
    assert kind.name == "NVIDIA-Something:-new-#1"
    assert kind.peak_flops_per_s["float32"] == pytest.approx(12.35e12, rel=1e-3)
    assert kind.memory_bandwidth_bytes_per_s == pytest.approx(777.7e9)
    assert (kind.compute_efficiency, kind.memory_efficiency) == (1.0, 1.0)
    assert kind.source == "measured on a: b"
    assert "check: measured rates" in cluster_yaml(found)


def test_a_machine_is_told_to_other_ranks_as_text() -> None:
    link = Link(kind="pcie", bandwidth_bytes_per_s=11e9)
    found = machine(*listed("A100-40GB", 2), UNKNOWN, link=link, nic=None)
    assert from_text(as_text(found)) == found


def test_machines_of_one_name_and_what_was_measured_there_are_told_apart(tmp_path: Path) -> None:
    """A file for two machines that both are host-1, with processors of unlike speed."""
    faster = replace(UNKNOWN.type, memory_bandwidth_bytes_per_s=999e9)
    cpu = replace(UNKNOWN, type=replace(UNKNOWN.type, name="CPU"))
    slow = replace(UNKNOWN, type=replace(faster, name="CPU"))
    found = [machine(UNKNOWN), machine(replace(UNKNOWN, type=faster)), machine(cpu), machine(slow)]
    path = tmp_path / "cluster.yaml"
    path.write_text(cluster_yaml(*told_apart(found)))
    cluster = Cluster.load(path)
    assert [each.name for each in cluster.hosts] == [f"host-1-{number}" for number in range(4)]
    gpus, cpus = cluster.devices[:2], cluster.devices[2:]
    assert gpus[0].type == gpus[1].type
    assert [each.type.name for each in cpus] == ["CPU@host-1-2", "CPU@host-1-3"]
    assert [each.type.memory_bandwidth_bytes_per_s for each in cpus] == [777.7e9, 999e9]
    assert told_apart(found[:1]) == found[:1]


def test_a_rate_that_nobody_tells_is_marked_as_a_guess(tmp_path: Path) -> None:
    found = machine(*listed("T4", 1), nic=None)
    assert loaded(found, tmp_path).hosts[0].nic_line_rate_bytes_per_s == 1e9 / 8
    line = next(line for line in cluster_yaml(found).splitlines() if "nic:" in line)
    assert "a guess, the system does not tell the rate of eth7" in line
    known = next(line for line in cluster_yaml(machine(UNKNOWN)).splitlines() if "nic:" in line)
    assert "guess" not in known


def test_nodes_of_ray_are_what_their_resources_name() -> None:
    def named(**has: float) -> list[tuple[str, int]]:
        found = [each.type.name for each in named_devices({"CPU": 8.0, **has})]
        return [(name, found.count(name)) for name in dict.fromkeys(found)]

    assert named() == named(GPU=2.0) == []
    assert named(T4=2.0, P100=1.0) == [("T4", 2), ("P100-12GB", 1)]
    by_driver = {"GPU": 4.0, "accelerator_type:V100": 1.0}
    assert named(**by_driver) == [("V100-16GB", 4)]
    assert named(**by_driver, **{"V100-32GB": 4.0}) == [("V100-32GB", 4)]


def test_a_slow_neighbour_does_not_slow_the_others(tmp_path: Path) -> None:
    """In the ring a, b, c the NIC of c lets 1 GB/s through, and those of a and b 10."""
    three = [replace(machine(*listed("T4", 2)), host=name) for name in "abc"]
    found = with_rates(three, [10e9, 1e9, 1e9], "measured")
    assert [each.nic_bytes_per_s for each in found] == [10e9, 10e9, 1e9]
    path = tmp_path / "cluster.yaml"
    path.write_text(cluster_yaml(*found))
    cluster = Cluster.load(path)
    rates = [cluster.nic_bandwidth_bytes_per_s[host] for host in range(3)]
    assert rates == pytest.approx([10e9, 10e9, 1e9])
    assert [len(cluster.host_devices[host]) for host in range(3)] == [2, 2, 2]


def test_slurm_says_which_nodes_a_job_has() -> None:
    found = in_slurm(
        {
            "SLURM_HET_SIZE": "2",
            "SLURM_JOB_NODELIST_HET_GROUP_0": "a[1-2]",
            "SLURM_GPUS_PER_NODE_HET_GROUP_0": "v100:2",
            "SLURM_JOB_NODELIST_HET_GROUP_1": "b",
            "SLURM_GPUS_PER_NODE_HET_GROUP_1": "t4:4",
        }
    )
    assert [(each.host, each.devices[0].type.name, len(each.devices)) for each in found] == [
        ("a1", "V100-16GB", 2),
        ("a2", "V100-16GB", 2),
        ("b", "T4", 4),
    ]
    with pytest.raises(HeterogError, match="run this within a Slurm job"):
        in_slurm({})


@pytest.mark.parametrize(
    ("label", "gib", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", 79.3, "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", 79.1, "H100"),
        ("NVIDIA H200", 139.8, "H200"),
        ("NVIDIA GH200 480GB", 94.5, "GH200"),
        ("NVIDIA GeForce GTX 1080 Ti", 10.9, "GTX-1080-Ti"),
        ("NVIDIA TITAN RTX", 23.6, "Titan-RTX"),
        ("NVIDIA A10", 22.1, "A10"),
        ("Tesla T4", 14.6, "T4"),
        ("Tesla P100-PCIE-12GB", 11.9, "P100-12GB"),
        ("Tesla V100S-PCIE-32GB", 31.7, "V100S-32GB"),
        ("NVIDIA A10G", 22.1, "A10G"),
        ("NVIDIA A100-PCIE-40GB", 39.4, "A100-PCIe-40GB"),
        ("NVIDIA A100 80GB PCIe", 79.3, "A100-PCIe-80GB"),
        ("NVIDIA L4", 22.0, "L4"),
        ("AMD Instinct MI300X", 191.98, "MI300X"),
        ("AMD Instinct MI250X / MI250", 63.98, "MI250-GCD"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.7, None),
        ("NVIDIA GeForce RTX 3090 Ti", 23.6, "RTX-3090-Ti"),
        ("NVIDIA GeForce RTX 4060 Ti", 15.6, "RTX-4060-Ti-16GB"),
        ("NVIDIA GeForce RTX 4060 Ti", 7.6, "RTX-4060-Ti-8GB"),
        ("NVIDIA GeForce GTX 1060 6GB", 5.9, "GTX-1060"),
        ("NVIDIA GeForce GTX 1060 3GB", 2.9, None),
        ("NVIDIA B300 SXM6 AC", 267.7, "B300"),
        ("NVIDIA GeForce RTX 3050", 7.8, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4.8, None),
        ("NVIDIA GeForce GTX 1080 Ti", 5.5, None),
    ],
)
def test_a_card_is_known_by_its_words_and_its_memory(
    label: str, gib: float, name: str | None
) -> None:
    assert catalogue_name(label, round(gib * GIB)) == name


def test_the_nic_is_that_of_the_default_route(tmp_path: Path) -> None:
    routes = tmp_path / "route"
    routes.write_text(
        "Iface\tDestination\tGateway\tFlags\n"
        "eth0\t0000FEA9\t00000000\t0001\neth1\t00000000\t0101A8C0\t0003\n"
    )
    assert default_interface(routes) == "eth1"
    assert default_interface(tmp_path / "absent") == ""
    for interface, speed in (("eth0", "25000"), ("eth1", "-1"), ("eth2", "unknown")):
        (tmp_path / interface).mkdir()
        (tmp_path / interface / "speed").write_text(f"{speed}\n")
    assert line_rate_bytes_per_s("eth0", tmp_path) == 25e9 / 8
    for interface in ("eth1", "eth2", "eth3", ""):
        assert line_rate_bytes_per_s(interface, tmp_path) is None


def test_this_machine_is_described_by_a_file_that_loads(tmp_path: Path) -> None:
    found = detect()
    text = cluster_yaml(found)
    cluster = parse_cluster(text, tmp_path / "cluster.yaml")
    assert cluster.num_devices == len(found.devices) == max(torch.cuda.device_count(), 1)
    assert cluster.devices[0].type.name == local_type_name(), "what profile calls its rows"
    for device in cluster.devices:
        assert 1e8 < device.type.peak_flops_per_s["float32"] < 1e16
        assert 1e8 < device.type.memory_bandwidth_bytes_per_s < 1e14
    assert text.count("check: ") >= 2
