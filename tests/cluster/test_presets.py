from collections.abc import Sequence
from pathlib import Path

import pytest

from heterog.cluster import Cluster, preset_names
from heterog.units import GIB

# Per host: number and type of devices, inner rate (GB/s), line rate (Gbit/s).
HOSTS: dict[str, Sequence[tuple[int, str, float, float | None]]] = {
    "paper_8gpu": [
        (2, "V100-16GB", 16, 100),
        (2, "GTX-1080-Ti", 9, 50),
        (2, "GTX-1080-Ti", 9, 50),
        (2, "P100-12GB", 9, 50),
    ],
    "paper_12gpu": [
        (4, "V100-16GB", 16, 100),
        (2, "GTX-1080-Ti", 9, 50),
        (2, "GTX-1080-Ti", 9, 50),
        (2, "P100-12GB", 9, 50),
        (2, "P100-12GB", 9, 50),
    ],
    "hap_v100_p100": [*[(8, "V100-16GB", 16, 10.4)] * 2, *[(8, "P100-16GB", 9, 10.4)] * 6],
    "hap_v100_p100_16": [*[(2, "V100-16GB", 16, 10.4)] * 2, *[(2, "P100-16GB", 9, 10.4)] * 6],
    "a100_v100_16": [*[(4, "A100-40GB", 200, 100)] * 2, *[(4, "V100-16GB", 16, 100)] * 2],
    "rtx_mixed": [(2, "RTX-3090", 9, 25), (2, "RTX-2080-Ti", 9, 25), (2, "Titan-RTX", 9, 25)],
    "poplar_v100_t4": [(4, "V100-16GB", 16, 100), (4, "T4", 9, 100)],
    "poplar_a800_v100s": [(4, "A800-80GB", 200, 100), (4, "V100S-32GB", 9, 100)],
    "homogeneous_8xa100": [(8, "A100-40GB", 200, None)],
    "mixed_16": [(8, "A100-40GB", 200, 100), *[(4, "V100-32GB", 16, 100)] * 2],
    "mixed_32": [
        *[(8, "A100-80GB", 200, 100)] * 2,
        *[(4, "A10", 20, 50)] * 2,
        *[(2, "T4", 9, 25)] * 4,
    ],
    "mixed_64": [
        *[(8, "H100", 320, 400)] * 2,
        *[(8, "A100-80GB", 200, 200)] * 4,
        *[(4, "L40S", 20, 100)] * 4,
    ],
    "mixed_128": [
        *[(8, "H100", 320, 400)] * 4,
        *[(8, "A100-40GB", 200, 100)] * 8,
        *[(4, "V100-32GB", 16, 50)] * 8,
    ],
    "mixed_256": [
        *[(8, "H200", 320, 400)] * 8,
        *[(8, "A100-80GB", 200, 200)] * 16,
        *[(4, "A10", 20, 50)] * 16,
    ],
    "mixed_1024": [
        *[(8, "H100", 320, 400)] * 32,
        *[(8, "A100-80GB", 200, 200)] * 32,
        *[(8, "A100-40GB", 200, 100)] * 32,
        *[(8, "V100-32GB", 16, 50)] * 32,
    ],
    "two_sites_32": [*[(8, "A100-80GB", 200, 200)] * 2, *[(8, "H100", 320, 200)] * 2],
}
HOSTS["paper_8gpu_net035"] = HOSTS["paper_8gpu"]


def test_all_presets_are_listed() -> None:
    assert preset_names() == tuple(sorted(HOSTS))


@pytest.mark.parametrize("name", sorted(HOSTS))
def test_preset_facts(name: str) -> None:
    cluster = Cluster.load(name)
    assert cluster.name == name
    assert cluster.efficiency == (0.35 if name == "paper_8gpu_net035" else 0.7)
    assert cluster.calibration is None
    assert cluster.num_hosts == len(HOSTS[name])
    for index, (num_devices, kind, inner, line_rate) in enumerate(HOSTS[name]):
        host = cluster.hosts[index]
        devices = [cluster.devices[d] for d in cluster.host_devices[index]]
        assert [d.name for d in devices] == [f"{host.name}:{i}" for i in range(num_devices)]
        assert {d.type.name for d in devices} == {kind}
        assert host.intra.bandwidth_bytes_per_s == inner * 1e9
        assert (host.intra.latency_s, host.intra.shared) == (5e-6, False)
        assert host.nic_latency_s == 20e-6
        if line_rate is not None:
            assert host.nic_line_rate_bytes_per_s == line_rate * 1e9 / 8
    for device in cluster.devices:
        assert device.usable_memory_bytes == device.type.memory_bytes - GIB


def test_rates_of_paper_8gpu_by_hand() -> None:
    cluster = Cluster.load("paper_8gpu")
    assert [h.name for h in cluster.hosts] == ["A", "B", "C", "D"]
    assert cluster.type_index == (0, 0, 1, 1, 1, 1, 2, 2)
    assert cluster.nic_bandwidth_bytes_per_s[0] == pytest.approx(8.75e9)
    assert cluster.bottleneck_bytes_per_s(0, 1) == 16e9
    assert cluster.bottleneck_bytes_per_s(2, 3) == 9e9
    assert cluster.bottleneck_bytes_per_s(0, 2) == pytest.approx(4.375e9)
    slower = Cluster.load("paper_8gpu_net035")
    assert slower.bottleneck_bytes_per_s(0, 2) == pytest.approx(2.1875e9)
    assert slower.describe_difference(cluster) == "NIC efficiency is 0.35, not 0.7"


@pytest.mark.parametrize("name", sorted(HOSTS))
def test_a_saved_preset_is_the_same_cluster(name: str, tmp_path: Path) -> None:
    cluster = Cluster.load(name)
    path = tmp_path / "cluster.yaml"
    cluster.save(path)
    again = Cluster.load(path)
    assert again == cluster
    assert again.fingerprint == cluster.fingerprint
    assert list(tmp_path.iterdir()) == [path]
