import pytest

from heterog.cluster import device_type, device_type_names
from heterog.errors import UnknownNameError
from heterog.units import GIB


@pytest.mark.parametrize(
    ("name", "tflops", "gb_per_s", "memory_gib"),
    [
        ("V100-16GB", 15.7, 900, 16),
        ("V100-32GB", 15.7, 900, 32),
        ("V100S-32GB", 16.4, 1134, 32),
        ("P100-12GB", 9.3, 549, 12),
        ("P100-16GB", 9.3, 732, 16),
        ("GTX-1080-Ti", 11.3, 484, 11),
        ("T4", 8.1, 320, 15),
        ("RTX-2080-Ti", 13.4, 616, 11),
        ("Titan-RTX", 16.3, 672, 24),
        ("RTX-3090", 35.6, 936, 24),
        ("RTX-4090", 82.6, 1008, 24),
        ("A10", 31.2, 600, 22.5),
        ("A40", 37.4, 696, 45),
        ("A100-40GB", 19.5, 1555, 40),
        ("A100-80GB", 19.5, 2039, 80),
        ("A800-80GB", 19.5, 2039, 80),
        ("L40S", 91.6, 864, 45),
        ("H100", 67.0, 3350, 80),
        ("H200", 67.0, 4800, 139),
        ("GH200", 67.0, 4000, 96),
        ("CPU", 0.096, 10, 4),
    ],
)
def test_numbers_of_the_data_sheets(
    name: str, tflops: float, gb_per_s: float, memory_gib: float
) -> None:
    kind = device_type(name)
    assert kind.name == name
    assert kind.peak_flops_per_s["float32"] == pytest.approx(tflops * 1e12)
    assert kind.memory_bandwidth_bytes_per_s == pytest.approx(gb_per_s * 1e9)
    assert kind.memory_bytes == memory_gib * GIB


def test_every_type_is_listed_and_has_a_source_and_the_same_prior() -> None:
    assert len(device_type_names()) == len(set(device_type_names())) == 21
    for name in device_type_names():
        kind = device_type(name)
        assert len(kind.source) > 10
        prior = (kind.compute_efficiency, kind.memory_efficiency, kind.launch_overhead_s)
        assert prior == (0.6, 0.75, 10e-6)


def test_bfloat16_only_where_the_hardware_has_it() -> None:
    having = {n for n in device_type_names() if "bfloat16" in device_type(n).peak_flops_per_s}
    assert having == {
        "RTX-3090", "RTX-4090", "A10", "A40", "A100-40GB", "A100-80GB", "A800-80GB", "L40S",
        "H100", "H200", "GH200",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["v100-16gb", "V100-16", "V100_16GB", " V100 16GB "])
def test_lookup_is_tolerant(name: str) -> None:
    assert device_type(name).name == "V100-16GB"


def test_unknown_type_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError) as caught:
        device_type("V100-64GB")
    assert "unknown device type 'V100-64GB'; did you mean 'V100-16GB'? Known: A10, " in str(
        caught.value
    )
