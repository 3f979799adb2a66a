from importlib import resources
from pathlib import Path

import pytest

from heterog.cluster import device_type, device_type_names
from heterog.cluster.catalog import ListedType, listed_types
from heterog.errors import UnknownNameError
from heterog.units import GIB
from heterog.yaml_files import load_shipped, parse_yaml


@pytest.mark.parametrize("name", ["devices.yaml", "links.yaml"])
def test_the_shipped_data_is_as_strict_as_files_from_outside(name: str) -> None:
    file = resources.files("heterog.cluster") / "data" / name
    _, value = parse_yaml(file.read_text(), Path(name), what="a data file", if_empty="")
    assert value == load_shipped(file)


def test_every_type_names_its_sheet_and_is_listed_once() -> None:
    file = resources.files("heterog.cluster") / "data" / "devices.yaml"
    names = [each["name"] for each in load_shipped(file)["types"]]
    assert len(set(names)) == len(names)
    assert tuple(names) == device_type_names()
    assert all(each.type.source for each in listed_types())


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
        ("V100-PCIe-16GB", 14.0, 900, 16),
        ("V100-PCIe-32GB", 14.0, 900, 32),
        ("P100-SXM2-16GB", 10.6, 732, 16),
        ("P40", 12.0, 346, 22.5),
        ("RTX-3080", 29.8, 760, 10),
        ("RTX-5090", 104.8, 1792, 32),
        ("RTX-A6000", 38.7, 768, 48),
        ("RTX-6000-Ada", 91.1, 960, 48),
        ("A10G", 35.0, 600, 22.5),
        ("A30", 10.3, 933, 24),
        ("L4", 30.3, 300, 22.5),
        ("L40", 90.5, 864, 45),
        ("A100-PCIe-40GB", 19.5, 1555, 40),
        ("A100-PCIe-80GB", 19.5, 1935, 80),
        ("H20", 44.0, 4000, 96),
        ("H100-PCIe", 51.0, 2000, 80),
        ("H100-NVL", 60.0, 3900, 94),
        ("H200-NVL", 60.0, 4800, 139),
        ("B200", 75.0, 7750, 179),
        ("GB200", 80.0, 8000, 185),
        ("MI100", 23.1, 1228.8, 32),
        ("MI210", 22.6, 1638.4, 64),
        ("MI250-GCD", 22.65, 1638.4, 64),
        ("MI300X", 163.4, 5300, 192),
        ("RTX-3060", 12.7, 360, 12),
        ("RTX-4060-Ti-16GB", 22.1, 288, 16),
        ("RTX-4070-Ti-Super", 44.1, 672, 16),
        ("RTX-5070-Ti", 43.9, 896, 16),
        ("GTX-1060", 4.4, 192, 6),
        ("A2", 4.5, 200, 15),
        ("B300", 75.0, 8000, 268),
    ],
)
def test_numbers_of_the_data_sheets(
    name: str, tflops: float, gb_per_s: float, memory_gib: float
) -> None:
    of_type = device_type(name)
    assert of_type.name == name
    assert of_type.peak_flops_per_s["float32"] == pytest.approx(tflops * 1e12)
    assert of_type.memory_bandwidth_bytes_per_s == pytest.approx(gb_per_s * 1e9)
    assert of_type.memory_bytes == memory_gib * GIB


def test_every_type_has_a_source_and_the_same_prior() -> None:
    assert len(device_type_names()) == len(set(device_type_names())) > 50
    for name in device_type_names():
        of_type = device_type(name)
        assert len(of_type.source) > 10
        prior = (of_type.compute_efficiency, of_type.memory_efficiency, of_type.launch_overhead_s)
        assert prior == (0.6, 0.75, 10e-6)


@pytest.mark.parametrize("each", listed_types(), ids=lambda each: each.type.name)
def test_peaks_are_dense_and_in_the_order_that_hardware_has_them(each: ListedType) -> None:
    peaks = each.type.peak_flops_per_s
    # The float16 of small Pascal chips is for compatibility only.
    is_slow = each.type.name.startswith(("P4", "GTX-10", "Titan-Xp"))
    if "float16" in peaks and not is_slow:
        # Tensor cores without sparsity: 2 to 34 times float32 in every generation so far.
        assert 2 * 0.99 <= peaks["float16"] / peaks["float32"] <= 34
    if each.tf32_flops_per_s is not None:
        # Between plain float32 and float16: half of float16, or float32 on consumer cards.
        assert 0.99 * peaks["float32"] <= each.tf32_flops_per_s <= 0.51 * peaks["float16"]
        assert peaks["bfloat16"] == peaks["float16"]
    assert peaks.get("float64", 0.0) <= peaks["float32"]
    assert each.type.memory_bytes <= (each.sheet_gb or each.memory_gib) * GIB


@pytest.mark.parametrize("each", listed_types(), ids=lambda each: each.type.name)
def test_multiprocessors_make_the_peak_at_a_clock_that_chips_have(each: ListedType) -> None:
    if each.type.name == "CPU":
        return
    by_one = each.type.peak_flops_per_s["float32"] / each.chip.multiprocessors
    # 64 or 128 lanes, two FLOPs each.
    assert any(0.9e9 <= by_one / (2 * lanes) <= 2.7e9 for lanes in (64, 128))
    assert 1.0 <= each.chip.cache_mib <= 256.0


@pytest.mark.parametrize("each", listed_types(), ids=lambda each: each.type.name)
def test_a_multiprocessor_has_the_power_that_boards_give_one(each: ListedType) -> None:
    if each.type.name == "CPU":
        return
    assert 1.0 <= each.chip.board_w / each.chip.multiprocessors <= 12.5
    assert 5.0 <= each.chip.process_nm <= 16.0


def test_bfloat16_only_where_the_hardware_has_it() -> None:
    without = {n for n in device_type_names() if "bfloat16" not in device_type(n).peak_flops_per_s}
    assert without == {
        "V100-16GB", "V100-32GB", "V100-PCIe-16GB", "V100-PCIe-32GB", "V100S-32GB", "P100-12GB",
        "P100-16GB", "P100-SXM2-16GB", "P40", "P4", "GTX-1060", "GTX-1070", "GTX-1070-Ti",
        "GTX-1080", "GTX-1080-Ti", "Titan-Xp", "Titan-V", "T4", "RTX-2060", "RTX-2070",
        "RTX-2070-Super", "RTX-2080", "RTX-2080-Super", "RTX-2080-Ti", "Titan-RTX",
        "Quadro-RTX-6000", "Quadro-RTX-8000", "CPU",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["v100-16gb", "V100-16", "V100_16GB", " V100 16GB "])
def test_lookup_is_tolerant(name: str) -> None:
    assert device_type(name).name == "V100-16GB"


@pytest.mark.parametrize("each", listed_types(), ids=lambda each: each.type.name)
def test_a_type_is_found_by_its_own_name_in_any_writing(each: ListedType) -> None:
    name = each.type.name
    for written in (name, name.lower(), name.replace("-", " "), name.replace("-", "_").upper()):
        assert device_type(written) == each.type
        assert device_type(f"{each.vendor} {written}") == each.type


@pytest.mark.parametrize(
    ("label", "name"),
    [  # by nvidia-smi, rocm-smi and torch.cuda.get_device_name
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA B200", "B200"),
        ("GB200 NVL72", "GB200"),
        ("Tesla V100-PCIE-32GB", "V100-PCIe-32GB"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("Tesla P100-SXM2-16GB", "P100-SXM2-16GB"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("Quadro RTX 6000", "Quadro-RTX-6000"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("AMD Instinct MI250X / MI250", "MI250-GCD"),
        ("AMD Instinct MI300X", "MI300X"),
        # what people write
        ("rtx3090", "RTX-3090"),
        ("1080ti", "GTX-1080-Ti"),
        ("5090", "RTX-5090"),
        ("a6000", "RTX-A6000"),
        ("MI250", "MI250-GCD"),
        ("H100-80GB", "H100"),
        ("h100 sxm5", "H100"),
        ("T4 16GB", "T4"),
    ],
)
def test_names_of_drivers_and_people_are_understood(label: str, name: str) -> None:
    assert device_type(label).name == name


@pytest.mark.parametrize(
    ("label", "advice"),
    [
        ("V100-64GB", "did you mean 'V100-16GB' or 'V100-32GB'"),
        ("mi300", "did you mean 'MI300X'"),
        ("A100", "it comes with different memory; write A100-40GB or A100-80GB."),
        ("V100-PCIE", "write V100-PCIe-16GB or V100-PCIe-32GB."),
        ("RTX 6000", "did you mean 'Quadro-RTX-6000' or 'RTX-6000-Ada'"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "did you mean 'RTX-4090'"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "'heterog devices' lists all"),
        ("NVIDIA GeForce RTX 3080 12GB", "did you mean 'RTX-3080'"),
        ("Gaudi2", "the catalogue has no devices by Intel; write its numbers as type: {name,"),
        ("Radeon RX 7900 XTX", "'heterog devices' lists all"),
        ("", "'heterog devices' lists all"),
        ("GPU", "'heterog devices' lists all"),
    ],
)
def test_what_is_unknown_or_open_says_what_to_write(label: str, advice: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        device_type(label)
    assert f"unknown device type '{label}'; " in str(caught.value)
    assert advice in str(caught.value)
    amd = "AMD" in label or "Radeon" in label
    assert not (amd and "RTX" in str(caught.value)), "a suggestion is of the same maker"
