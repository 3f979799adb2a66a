"""Device types with the numbers of their data sheets.

float32 peaks are without TF32, float16 and bfloat16 peaks those of dense tensor cores with float32
accumulation where the hardware has them, float64 peaks without tensor cores; nothing counts
sparsity. AMD's float32 and float64 are those of the vector units. The GB of a data sheet are GiB
for these memories. Cards with ECC in GDDR keep 1/16 of it for the check bits, so their size here
is 15/16 of the sheet's: planning with memory that is not there would be worse than leaving a
little unused.

A type is found by its name, by the name that a driver gives the card
(``NVIDIA A100-SXM4-80GB``), and by what people write (``rtx3090``, ``A6000``).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NamedTuple, TypedDict, Unpack, cast

from heterog.cluster.topology import DeviceType
from heterog.errors import UnknownNameError
from heterog.units import GIB

_TERA = 1e12
_GIGA = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedType:
    """A device type of the catalogue, and its names among people and drivers.

    Attributes:
        type: The device type with its numbers.
        vendor: ``"NVIDIA"`` or ``"AMD"``; empty for the CPU.
        form: ``"sxm"``, ``"pcie"`` or ``"nvl"`` where modules and cards of one name differ.
        sheet_gb: Memory in GB according to the data sheet.
        aliases: Further names, in the form that ``device_type`` compares.
        tf32_flops_per_s: Peak of float32 matrix products with TF32, where the hardware has it. Not
            used by default: for training with ``torch.backends.cuda.matmul.allow_tf32`` give the
            devices of a cluster file ``peak_flops: {float32: ...}``.
        matrix_flops_per_s: Peak of float32 matrix products on matrix units, which the vendor's
            library uses by default.
        multiprocessors: Number of units that work on tiles of their own (streaming
            multiprocessors, compute units); 0 for the CPU.
        cache_mib: Size of the last cache before the memory, in MiB.
        board_w: Most power that the board may draw, in watts; 0 for the CPU.
        process_nm: Size that the process is named by, in nm; 0 for the CPU.
    """

    type: DeviceType
    vendor: str
    form: str
    sheet_gb: float
    aliases: tuple[str, ...]
    tf32_flops_per_s: float | None
    matrix_flops_per_s: float | None
    multiprocessors: int
    cache_mib: float
    board_w: float
    process_nm: float

    @property
    def model(self) -> str:
        """The name without form and memory: ``"a100"``."""
        return _read(self.type.name).model


class _Half(TypedDict, total=False):
    """TFLOP/s of the dtypes of 16 bits."""

    float16: float
    bfloat16: float


class _Peaks(_Half, total=False):
    """TFLOP/s by dtype, and of float32 with TF32."""

    float64: float
    float32: float
    tf32: float


def _gpu(
    name: str,
    source: str,
    memory_gib: float,
    gb_per_s: float,
    *,
    vendor: str = "NVIDIA",
    form: str = "",
    sheet_gb: float = 0.0,
    aliases: tuple[str, ...] = (),
    matrix: float | None = None,
    **tflops: Unpack[_Peaks],
) -> ListedType:
    tf32 = tflops.get("tf32")
    peaks = {dtype: peak for dtype, peak in tflops.items() if dtype != "tf32"}
    multiprocessors, cache_mib, board_w, process_nm = _CHIPS[name]
    return ListedType(
        type=DeviceType(
            name=name,
            peak_flops_per_s={dtype: cast(float, peak) * _TERA for dtype, peak in peaks.items()},
            memory_bandwidth_bytes_per_s=gb_per_s * _GIGA,
            memory_bytes=round(memory_gib * GIB),
            source=source,
        ),
        vendor=vendor,
        form=form,
        sheet_gb=sheet_gb or memory_gib,
        aliases=aliases,
        tf32_flops_per_s=None if tf32 is None else tf32 * _TERA,
        matrix_flops_per_s=None if matrix is None else matrix * _TERA,
        multiprocessors=multiprocessors,
        cache_mib=cache_mib,
        board_w=board_w,
        process_nm=process_nm,
    )


def _both(tflops: float) -> _Half:
    """float16 and bfloat16 at the same rate."""
    return {"float16": tflops, "bfloat16": tflops}


_CHIPS = {
    "V100-16GB": (80, 6, 300, 16), "V100-32GB": (80, 6, 300, 16),
    "V100-PCIe-16GB": (80, 6, 250, 16), "V100-PCIe-32GB": (80, 6, 250, 16),
    "V100S-32GB": (80, 6, 250, 16), "P100-12GB": (56, 3, 250, 16), "P100-16GB": (56, 4, 250, 16),
    "P100-SXM2-16GB": (56, 4, 300, 16), "P40": (30, 3, 250, 16), "P4": (20, 2, 75, 16),
    "GTX-1080-Ti": (28, 2.75, 250, 16), "T4": (40, 4, 70, 16), "RTX-2080-Ti": (68, 5.5, 250, 16),
    "Titan-RTX": (72, 6, 280, 16), "Quadro-RTX-6000": (72, 6, 260, 16),
    "Quadro-RTX-8000": (72, 6, 260, 16), "RTX-3070": (46, 4, 220, 8), "RTX-3080": (68, 5, 320, 8),
    "RTX-3090": (82, 6, 350, 8), "RTX-4080": (76, 64, 320, 5), "RTX-4090": (128, 72, 450, 5),
    "RTX-5080": (84, 64, 360, 5), "RTX-5090": (170, 96, 575, 5), "RTX-A5000": (64, 6, 230, 8),
    "RTX-A6000": (84, 6, 300, 8), "RTX-6000-Ada": (142, 96, 300, 5), "A10": (72, 6, 150, 8),
    "A10G": (80, 6, 300, 8), "A30": (56, 24, 165, 7), "A40": (84, 6, 300, 8),
    "A100-40GB": (108, 40, 400, 7), "A100-80GB": (108, 40, 400, 7),
    "A100-PCIe-40GB": (108, 40, 250, 7), "A100-PCIe-80GB": (108, 40, 300, 7),
    "A800-80GB": (108, 40, 400, 7), "L4": (58, 48, 72, 5), "L20": (92, 96, 275, 5),
    "L40": (142, 96, 300, 5), "L40S": (142, 96, 350, 5), "H20": (78, 60, 400, 5),
    "H100": (132, 50, 700, 5), "H100-PCIe": (114, 50, 350, 5), "H100-NVL": (132, 50, 400, 5),
    "H800": (132, 50, 700, 5), "H200": (132, 50, 700, 5), "H200-NVL": (132, 50, 600, 5),
    "GH200": (132, 50, 700, 5), "B200": (148, 126, 1000, 5), "GB200": (148, 126, 1200, 5),
    "MI100": (120, 8, 300, 7), "MI210": (104, 8, 300, 6), "MI250-GCD": (104, 8, 280, 6),
    "MI250X-GCD": (110, 8, 280, 6), "MI300X": (304, 256, 750, 5), "MI325X": (304, 256, 1000, 5),
    "GTX-1060": (10, 1.5, 120, 16), "GTX-1070": (15, 2, 150, 16), "GTX-1070-Ti": (19, 2, 180, 16),
    "GTX-1080": (20, 2, 180, 16), "Titan-Xp": (30, 3, 250, 16), "Titan-V": (80, 4.5, 250, 16),
    "RTX-2060": (30, 3, 160, 16), "RTX-2070": (36, 4, 175, 16), "RTX-2070-Super": (40, 4, 215, 16),
    "RTX-2080": (46, 4, 215, 16), "RTX-2080-Super": (48, 4, 250, 16), "RTX-3060": (28, 3, 170, 8),
    "RTX-3060-Ti": (38, 4, 200, 8), "RTX-3070-Ti": (48, 4, 290, 8), "RTX-3080-Ti": (80, 6, 350, 8),
    "RTX-3090-Ti": (84, 6, 450, 8), "RTX-4060": (24, 24, 115, 5),
    "RTX-4060-Ti-8GB": (34, 32, 160, 5), "RTX-4060-Ti-16GB": (34, 32, 165, 5),
    "RTX-4070": (46, 36, 200, 5), "RTX-4070-Super": (56, 48, 220, 5),
    "RTX-4070-Ti": (60, 48, 285, 5), "RTX-4070-Ti-Super": (66, 48, 285, 5),
    "RTX-4080-Super": (80, 64, 320, 5), "RTX-5060-Ti-8GB": (36, 32, 180, 5),
    "RTX-5060-Ti-16GB": (36, 32, 180, 5), "RTX-5070": (48, 48, 250, 5),
    "RTX-5070-Ti": (70, 48, 300, 5), "RTX-A4000": (48, 4, 140, 8), "RTX-A4500": (56, 6, 200, 8),
    "RTX-PRO-6000": (188, 128, 600, 5), "A2": (10, 2, 60, 8), "B300": (160, 126, 1100, 5),
    "GB300": (160, 126, 1400, 5), "CPU": (0, 0, 0, 0),
}  # fmt: skip
"""Multiprocessors, MiB of the last cache, watts of the board, and nm of the process, from the same
white papers and data sheets. The 12 nm of Volta and Turing have the transistors of 16 nm."""

_V100 = "NVIDIA Tesla V100 data sheet, SXM2"
_V100_PCIE = "NVIDIA Tesla V100 data sheet, PCIe"
_P100 = "NVIDIA Tesla P100 PCIe data sheet"
_A100 = "NVIDIA A100 Tensor Core GPU data sheet, SXM4"
_A100_PCIE = "NVIDIA A100 Tensor Core GPU data sheet, PCIe"
_TURING = "NVIDIA Turing GPU architecture whitepaper"
_PASCAL_PEAKS = (
    "float64 1/32 and float16 1/64 of float32 (CUDA C programming guide, capability 6.1)"
)
_GA102 = "NVIDIA Ampere GA102 GPU architecture whitepaper"
_ADA = "NVIDIA Ada GPU architecture whitepaper"
_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture whitepaper"
_HOPPER: _Peaks = {"float64": 34.0, "float32": 67.0, "tf32": 494.7, **_both(989.4)}
_HOPPER_NVL: _Peaks = {"float64": 30.0, "float32": 60.0, "tf32": 417.5, **_both(835.5)}
_AMPERE: _Peaks = {"float64": 9.7, "float32": 19.5, "tf32": 156.0, **_both(312.0)}
_VOLTA: _Peaks = {"float64": 7.8, "float32": 15.7, "float16": 125.0}
_VOLTA_PCIE: _Peaks = {"float64": 7.0, "float32": 14.0, "float16": 112.0}
_PASCAL: _Peaks = {"float64": 4.7, "float32": 9.3, "float16": 18.7}
_CDNA3: _Peaks = {"float64": 81.7, "float32": 163.4, "tf32": 653.7, **_both(1307.4)}
_GCD = "one of its two GCDs, which is what a process sees as a device: half of the sheet's numbers"


class _Generation(NamedTuple):
    """What float32 of a generation of GeForce cards tells of other dtypes."""

    source: str
    over_float64: int
    float16: float  # over float32
    has_bfloat16: bool  # and TF32, at the rate of float32


_GEFORCE = {
    "GTX-10": _Generation("NVIDIA GeForce 10 series specifications", 32, 1 / 64, False),
    "RTX-20": _Generation(_TURING, 32, 4.0, False),
    "RTX-30": _Generation(_GA102, 64, 2.0, True),
    "RTX-40": _Generation(_ADA, 64, 2.0, True),
    "RTX-50": _Generation(_BLACKWELL, 64, 2.0, True),
}


def _geforce(name: str, memory_gib: float, gb_per_s: float, float32: float) -> ListedType:
    """A GeForce card: its peak of float32 on the sheet, those of other dtypes by generation."""
    generation = _GEFORCE[name[:6]]
    half = float32 * generation.float16
    peaks: _Peaks = {
        "float64": float32 / generation.over_float64,
        "float32": float32,
        "float16": half,
    }
    if generation.has_bfloat16:
        peaks["tf32"], peaks["bfloat16"] = float32, half
    source = f"{generation.source}; float64 1/{generation.over_float64} of float32"
    return _gpu(name, source, memory_gib, gb_per_s, **peaks)


_LISTED = (
    _gpu("V100-16GB", _V100, 16, 900, form="sxm", **_VOLTA),
    _gpu("V100-32GB", _V100, 32, 900, form="sxm", **_VOLTA),
    _gpu("V100-PCIe-16GB", _V100_PCIE, 16, 900, form="pcie", **_VOLTA_PCIE),
    _gpu("V100-PCIe-32GB", _V100_PCIE, 32, 900, form="pcie", **_VOLTA_PCIE),
    _gpu(
        "V100S-32GB",
        "NVIDIA V100 data sheet (2020), V100S PCIe",
        32,
        1134,
        float64=8.2,
        float32=16.4,
        float16=130.0,
    ),
    _gpu("P100-12GB", _P100, 12, 549, form="pcie", **_PASCAL),
    _gpu("P100-16GB", _P100, 16, 732, form="pcie", **_PASCAL),
    _gpu(
        "P100-SXM2-16GB",
        "NVIDIA Tesla P100 data sheet, SXM2",
        16,
        732,
        form="sxm",
        float64=5.3,
        float32=10.6,
        float16=21.2,
    ),
    _gpu(
        "P40",
        f"NVIDIA Tesla P40 data sheet; {_PASCAL_PEAKS}; 15/16 of 24 GB with ECC",
        22.5,
        346,
        sheet_gb=24,
        float64=0.375,
        float32=12.0,
        float16=0.188,
    ),
    _gpu(
        "P4",
        f"NVIDIA Tesla P4 data sheet; {_PASCAL_PEAKS}; 15/16 of 8 GB with ECC",
        7.5,
        192,
        sheet_gb=8,
        float64=0.172,
        float32=5.5,
        float16=0.086,
    ),
    _gpu(
        "GTX-1080-Ti",
        f"NVIDIA GeForce GTX 1080 Ti specifications; {_PASCAL_PEAKS}",
        11,
        484,
        float64=0.354,
        float32=11.3,
        float16=0.177,
    ),
    _geforce("GTX-1060", 6, 192, 4.4),
    _geforce("GTX-1070", 8, 256, 6.5),
    _geforce("GTX-1070-Ti", 8, 256, 8.2),
    _geforce("GTX-1080", 8, 320, 8.9),
    _gpu(
        "Titan-Xp",
        f"NVIDIA Titan Xp specifications; {_PASCAL_PEAKS}",
        12,
        547.7,
        float64=0.378,
        float32=12.1,
        float16=0.189,
    ),
    _gpu(
        "Titan-V",
        "NVIDIA Titan V specifications",
        12,
        652.8,
        float64=7.45,
        float32=14.9,
        float16=119.2,
    ),
    _gpu(
        "T4",
        "NVIDIA T4 data sheet; float64 1/32 of float32; 15/16 of 16 GB with ECC",
        15,
        320,
        sheet_gb=16,
        float64=0.253,
        float32=8.1,
        float16=65.0,
    ),
    _gpu(
        "RTX-2080-Ti",
        f"{_TURING}, reference card",
        11,
        616,
        float64=0.42,
        float32=13.4,
        float16=53.8,
    ),
    _geforce("RTX-2060", 6, 336, 6.5),
    _geforce("RTX-2070", 8, 448, 7.5),
    _geforce("RTX-2070-Super", 8, 448, 9.1),
    _geforce("RTX-2080", 8, 448, 10.1),
    _geforce("RTX-2080-Super", 8, 496, 11.2),
    _gpu(
        "Titan-RTX",
        _TURING,
        24,
        672,
        aliases=("rtxtitan",),
        float64=0.51,
        float32=16.3,
        float16=130.5,
    ),
    _gpu(
        "Quadro-RTX-6000",
        _TURING,
        24,
        672,
        float64=0.51,
        float32=16.3,
        float16=130.5,
    ),
    _gpu(
        "Quadro-RTX-8000",
        _TURING,
        48,
        672,
        aliases=("rtx8000",),
        float64=0.51,
        float32=16.3,
        float16=130.5,
    ),
    _geforce("RTX-3060", 12, 360, 12.7),
    _geforce("RTX-3060-Ti", 8, 448, 16.2),
    _geforce("RTX-3070-Ti", 8, 608, 21.7),
    _geforce("RTX-3080-Ti", 12, 912, 34.1),
    _geforce("RTX-3090-Ti", 24, 1008, 40.0),
    _geforce("RTX-4060", 8, 272, 15.1),
    _geforce("RTX-4060-Ti-8GB", 8, 288, 22.1),
    _geforce("RTX-4060-Ti-16GB", 16, 288, 22.1),
    _geforce("RTX-4070", 12, 504, 29.1),
    _geforce("RTX-4070-Super", 12, 504, 35.5),
    _geforce("RTX-4070-Ti", 12, 504, 40.1),
    _geforce("RTX-4070-Ti-Super", 16, 672, 44.1),
    _geforce("RTX-4080-Super", 16, 736, 52.2),
    _geforce("RTX-5060-Ti-8GB", 8, 448, 23.7),
    _geforce("RTX-5060-Ti-16GB", 16, 448, 23.7),
    _geforce("RTX-5070", 12, 672, 30.9),
    _geforce("RTX-5070-Ti", 16, 896, 43.9),
    _gpu("RTX-3070", _GA102, 8, 448, float64=0.317, float32=20.3, tf32=20.3, **_both(40.6)),
    _gpu(
        "RTX-3080",
        f"{_GA102}, 10 GB",
        10,
        760,
        float64=0.465,
        float32=29.8,
        tf32=29.8,
        **_both(59.5),
    ),
    _gpu("RTX-3090", _GA102, 24, 936, float64=0.556, float32=35.6, tf32=35.6, **_both(71.0)),
    _gpu("RTX-4080", _ADA, 16, 716.8, float64=0.761, float32=48.7, tf32=48.7, **_both(97.5)),
    _gpu("RTX-4090", _ADA, 24, 1008, float64=1.29, float32=82.6, tf32=82.6, **_both(165.2)),
    _gpu("RTX-5080", _BLACKWELL, 16, 960, float64=0.88, float32=56.3, tf32=56.3, **_both(112.6)),
    _gpu(
        "RTX-5090", _BLACKWELL, 32, 1792, float64=1.64, float32=104.8, tf32=104.8, **_both(209.5)
    ),
    _gpu(
        "RTX-PRO-6000",
        "NVIDIA RTX PRO 6000 Blackwell data sheet; float64 1/64 of float32; ECC off",
        96,
        1792,
        aliases=(
            "rtxpro6000blackwell",
            "rtxpro6000blackwellworkstationedition",
            "rtxpro6000blackwellserveredition",
        ),
        float64=1.95,
        float32=125.0,
        tf32=251.9,
        **_both(503.8),
    ),
    _gpu(
        "RTX-A4000",
        "NVIDIA RTX A4000 data sheet; float64 1/64 of float32; ECC off",
        16,
        448,
        aliases=("a4000",),
        float64=0.3,
        float32=19.2,
        tf32=38.3,
        **_both(76.7),
    ),
    _gpu(
        "RTX-A4500",
        "NVIDIA RTX A4500 data sheet; float64 1/64 of float32; ECC off",
        20,
        640,
        aliases=("a4500",),
        float64=0.37,
        float32=23.7,
        tf32=47.3,
        **_both(94.6),
    ),
    _gpu(
        "RTX-A5000",
        "NVIDIA RTX A5000 data sheet; float64 1/64 of float32; ECC off",
        24,
        768,
        aliases=("a5000",),
        float64=0.434,
        float32=27.8,
        tf32=55.6,
        **_both(111.1),
    ),
    _gpu(
        "RTX-A6000",
        f"NVIDIA RTX A6000 data sheet and {_GA102}; float64 1/64 of float32; ECC off",
        48,
        768,
        aliases=("a6000",),
        float64=0.605,
        float32=38.7,
        tf32=77.4,
        **_both(154.8),
    ),
    _gpu(
        "RTX-6000-Ada",
        "NVIDIA RTX 6000 Ada Generation data sheet; float64 1/64 of float32; ECC off",
        48,
        960,
        aliases=("rtx6000adageneration",),
        float64=1.42,
        float32=91.1,
        tf32=182.1,
        **_both(364.2),
    ),
    _gpu(
        "A2",
        "NVIDIA A2 data sheet; float64 1/64 of float32; 15/16 of 16 GB with ECC",
        15,
        200,
        sheet_gb=16,
        float64=0.07,
        float32=4.5,
        tf32=9.0,
        **_both(18.0),
    ),
    _gpu(
        "A10",
        "NVIDIA A10 data sheet; float64 1/32 of float32; 15/16 of 24 GB with ECC",
        22.5,
        600,
        sheet_gb=24,
        float64=0.975,
        float32=31.2,
        tf32=62.5,
        **_both(125.0),
    ),
    _gpu(
        "A10G",
        "NVIDIA A10G data sheet; float64 1/64 of float32; 15/16 of 24 GB with ECC",
        22.5,
        600,
        sheet_gb=24,
        float64=0.547,
        float32=35.0,
        tf32=35.0,
        **_both(70.0),
    ),
    _gpu(
        "A30",
        "NVIDIA A30 data sheet",
        24,
        933,
        float64=5.2,
        float32=10.3,
        tf32=82.0,
        **_both(165.0),
    ),
    _gpu(
        "A40",
        "NVIDIA A40 data sheet; float64 1/64 of float32; 15/16 of 48 GB with ECC",
        45,
        696,
        sheet_gb=48,
        float64=0.584,
        float32=37.4,
        tf32=74.8,
        **_both(149.7),
    ),
    _gpu("A100-40GB", _A100, 40, 1555, form="sxm", **_AMPERE),
    _gpu("A100-80GB", _A100, 80, 2039, form="sxm", **_AMPERE),
    _gpu("A100-PCIe-40GB", _A100_PCIE, 40, 1555, form="pcie", **_AMPERE),
    _gpu("A100-PCIe-80GB", _A100_PCIE, 80, 1935, form="pcie", **_AMPERE),
    _gpu("A800-80GB", "NVIDIA A800 data sheet, SXM", 80, 2039, form="sxm", **_AMPERE),
    _gpu(
        "L4",
        "NVIDIA L4 data sheet; float64 1/64 of float32; 15/16 of 24 GB with ECC",
        22.5,
        300,
        sheet_gb=24,
        float64=0.473,
        float32=30.3,
        tf32=60.0,
        **_both(121.0),
    ),
    _gpu(
        "L20",
        "NVIDIA L20 data sheet; float64 1/64 of float32; 15/16 of 48 GB with ECC",
        45,
        864,
        sheet_gb=48,
        float64=0.934,
        float32=59.8,
        tf32=59.8,
        **_both(119.5),
    ),
    _gpu(
        "L40",
        "NVIDIA L40 data sheet; float64 1/64 of float32; 15/16 of 48 GB with ECC",
        45,
        864,
        sheet_gb=48,
        float64=1.41,
        float32=90.5,
        tf32=90.5,
        **_both(181.0),
    ),
    _gpu(
        "L40S",
        "NVIDIA L40S data sheet; float64 1/64 of float32; 15/16 of 48 GB with ECC",
        45,
        864,
        sheet_gb=48,
        float64=1.43,
        float32=91.6,
        tf32=183.0,
        **_both(362.0),
    ),
    _gpu(
        "H20",
        "NVIDIA H20 data sheet, 96 GB HBM3",
        96,
        4000,
        float64=1.0,
        float32=44.0,
        tf32=74.0,
        **_both(148.0),
    ),
    _gpu(
        "H100",
        "NVIDIA H100 Tensor Core GPU data sheet, SXM5",
        80,
        3350,
        form="sxm",
        **_HOPPER,
    ),
    _gpu(
        "H100-PCIe",
        "NVIDIA H100 Tensor Core GPU data sheet, PCIe",
        80,
        2000,
        form="pcie",
        float64=26.0,
        float32=51.0,
        tf32=378.0,
        **_both(756.0),
    ),
    _gpu(
        "H100-NVL",
        "NVIDIA H100 Tensor Core GPU data sheet, NVL",
        94,
        3900,
        form="nvl",
        **_HOPPER_NVL,
    ),
    _gpu(
        "H800",
        "NVIDIA H800 Tensor Core GPU data sheet, SXM5",
        80,
        3350,
        form="sxm",
        float64=1.0,
        float32=67.0,
        tf32=494.7,
        **_both(989.4),
    ),
    # 141 GB on the sheet; the driver shows 139 GiB and a fraction.
    _gpu(
        "H200",
        "NVIDIA H200 Tensor Core GPU data sheet, SXM",
        139,
        4800,
        form="sxm",
        sheet_gb=141,
        **_HOPPER,
    ),
    _gpu(
        "H200-NVL",
        "NVIDIA H200 Tensor Core GPU data sheet, NVL",
        139,
        4800,
        form="nvl",
        sheet_gb=141,
        **_HOPPER_NVL,
    ),
    # The driver calls it by the 480 GB of its CPU.
    _gpu(
        "GH200",
        "NVIDIA GH200 Grace Hopper data sheet, 96 GB HBM3",
        96,
        4000,
        aliases=("gh200480gb",),
        **_HOPPER,
    ),
    # 180 GB on the sheet; the driver shows 179 GiB.
    _gpu(
        "B200",
        "NVIDIA HGX B200 data sheet, an eighth of the board",
        179,
        7750,
        sheet_gb=180,
        float64=37.0,
        float32=75.0,
        tf32=1125.0,
        **_both(2250.0),
    ),
    # 186 GB on the sheet; the driver shows 185 GiB.
    _gpu(
        "GB200",
        "NVIDIA GB200 NVL72 data sheet, one of its 72 GPUs",
        185,
        8000,
        sheet_gb=186,
        float64=40.0,
        float32=80.0,
        tf32=1250.0,
        **_both(2500.0),
    ),
    # 288 GB of 10^9 bytes.
    _gpu(
        "B300",
        "NVIDIA HGX B300 data sheet, an eighth of the board",
        268,
        8000,
        sheet_gb=288,
        aliases=("b300sxm6ac",),
        float64=1.25,
        float32=75.0,
        tf32=1125.0,
        **_both(2250.0),
    ),
    _gpu(
        "GB300",
        "NVIDIA GB300 NVL72 data sheet, one of its 72 GPUs",
        268,
        8000,
        sheet_gb=288,
        float64=1.3,
        float32=80.0,
        tf32=1250.0,
        **_both(2500.0),
    ),
    _gpu(
        "MI100",
        "AMD Instinct MI100 data sheet",
        32,
        1228.8,
        vendor="AMD",
        float64=11.5,
        float32=23.1,
        matrix=46.1,
        float16=184.6,
        bfloat16=92.3,
    ),
    _gpu(
        "MI210",
        "AMD Instinct MI210 data sheet",
        64,
        1638.4,
        vendor="AMD",
        float64=22.6,
        float32=22.6,
        matrix=45.3,
        **_both(181.0),
    ),
    _gpu(
        "MI250-GCD",
        f"AMD Instinct MI250 data sheet, {_GCD}",
        64,
        1638.4,
        vendor="AMD",
        aliases=("mi250", "mi250xmi250"),
        float64=22.65,
        float32=22.65,
        matrix=45.25,
        **_both(181.05),
    ),
    _gpu(
        "MI250X-GCD",
        f"AMD Instinct MI250X data sheet, {_GCD}",
        64,
        1638.4,
        vendor="AMD",
        aliases=("mi250x",),
        float64=23.95,
        float32=23.95,
        matrix=47.85,
        **_both(191.5),
    ),
    _gpu("MI300X", "AMD Instinct MI300X data sheet", 192, 5300, vendor="AMD", **_CDNA3),
    _gpu("MI325X", "AMD Instinct MI325X data sheet", 256, 6000, vendor="AMD", **_CDNA3),
    _gpu(
        "CPU",
        "chosen: one x86-64 core at 3.0 GHz with two 8-wide float32 FMA units, 10 GB/s and 4 GiB "
        "as its part of the machine; calibrate before trusting it",
        4,
        10,
        vendor="",
        float64=0.048,
        float32=0.096,
    ),
)
_BY_NAME = {each.type.name: each for each in _LISTED}

_VENDOR_WORDS = {
    "nvidia": "NVIDIA", "tesla": "NVIDIA", "geforce": "NVIDIA", "amd": "AMD", "instinct": "AMD",
    "radeon": "AMD", "ati": "AMD", "intel": "Intel", "habana": "Intel", "apple": "Apple",
    "google": "Google",
}  # fmt: skip
_NO_WORDS = {"graphics", "gpu", "corporation", "tensor", "core", "accelerator"}
# The beginning of a model's name shows its maker, also for models that the catalogue lacks.
_FAMILIES = (
    (re.compile(r"mi\d|rx\d"), "AMD"),
    (re.compile(r"gaudi|hpu|arc[ab]?\d|max1\d\d\d|pvc"), "Intel"),
    (re.compile(r"tpu|v\d[ep]$"), "Google"),
    (re.compile(r"m\d(pro|max|ultra)"), "Apple"),
    (re.compile(r"(rtx|gtx|quadro|titan|gh?b?[12]00|[tplavhb]\d)"), "NVIDIA"),
)
_FORM = re.compile(r"(sxm|pcie?|nvl)\d*")
_MEMORY = re.compile(r"(\d+)gi?b?")
_HBM = re.compile(r"hbm\d?e?|gddr\d?x?")
# 80GB behind a module's name that ends in a digit or a letter, as in A100-80.
_BARE_MEMORY = re.compile(r"(12|16|24|32|40|48|64|80|94|96|141|180|192)")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    """The parts of a name: all of it, and model, form, memory and vendor if it has them."""

    whole: str
    model: str
    form: str = ""
    memory_gb: int | None = None
    vendor: str = ""


def _read(name: str) -> _Words:
    """Take a name apart.

    >>> _read("NVIDIA A100-SXM4-80GB")
    _Words(whole='a100sxm480gb', model='a100', form='sxm', memory_gb=80, vendor='NVIDIA')
    """
    words = [word for word in re.split(r"[\s_/()-]+", name.lower()) if word]
    vendors = [_VENDOR_WORDS[word] for word in words if word in _VENDOR_WORDS]
    words = [word for word in words if word not in _VENDOR_WORDS and word not in _NO_WORDS]
    model, form, memory = "", "", None
    for word in words:
        if _HBM.fullmatch(word):
            continue
        if found := _FORM.fullmatch(word):
            form = "pcie" if found[1] == "pci" else found[1]
        elif model and (size := _MEMORY.fullmatch(word)) and not word.isdigit():
            memory = int(size[1])
        elif model and not model.isalpha() and _BARE_MEMORY.fullmatch(word):
            memory = int(word)
        else:
            model += word
    vendors += [maker for pattern, maker in _FAMILIES if pattern.match(model)]
    return _Words(
        whole="".join(words),
        model=model,
        form=form,
        memory_gb=memory,
        vendor=vendors[0] if vendors else "",
    )


def listed_types() -> tuple[ListedType, ...]:
    """The whole catalogue."""
    return _LISTED


def listed_type(name: str) -> ListedType | None:
    """The entry with exactly this name, if there is one."""
    return _BY_NAME.get(name)


def device_type_names() -> tuple[str, ...]:
    """Names of all device types of the catalogue."""
    return tuple(_BY_NAME)


def matching_types(name: str) -> tuple[DeviceType, ...]:
    """The types that a name can mean, best first; several where the name leaves the memory open.

    Case, spaces for hyphens, the maker's name and a missing "GB" do not matter. A name without a
    form means the SXM module where there is one: a PCIe card of the same name is slower.

    >>> [kind.name for kind in matching_types("Tesla V100-PCIE")]
    ['V100-PCIe-16GB', 'V100-PCIe-32GB']
    """
    words = _read(name)
    found = [each for each in _LISTED if _is_model(each, words)]
    if words.form:
        forms = [each for each in found if each.form == words.form]
        found = forms or [each for each in found if not each.form]
    elif found:
        found = [each for each in found if each.form == found[0].form]
    if words.memory_gb is not None and not any(words.whole in each.aliases for each in found):
        found = [
            each
            for each in found
            if words.memory_gb in (each.sheet_gb, round(each.type.memory_bytes / GIB))
        ]
    return tuple(each.type for each in found)


def _is_model(each: ListedType, words: _Words) -> bool:
    """Whether a name's model is that of a type, whatever its form and memory."""
    if words.vendor and each.vendor and words.vendor != each.vendor:
        return False
    own = each.model
    names = {own, *each.aliases}
    for prefix in ("rtx", "gtx"):  # people say "3090"
        if own.startswith(prefix) and own.removeprefix(prefix)[0].isdigit():
            names.add(own.removeprefix(prefix))
    return words.model in names or words.whole in each.aliases


def device_type(name: str) -> DeviceType:
    """Find a device type of the catalogue, by its name, a driver's name or common usage.

    Raises:
        UnknownNameError: The catalogue has no such type, or the name leaves the memory open.

    >>> device_type("gtx 1080 ti").name, device_type("V100-16").memory_bytes // 2**30
    ('GTX-1080-Ti', 16)
    >>> device_type("NVIDIA A100 80GB PCIe").name, device_type("rtx3090").name
    ('A100-PCIe-80GB', 'RTX-3090')
    """
    if name in _BY_NAME:
        return _BY_NAME[name].type
    found = matching_types(name)
    if len(found) == 1:
        return found[0]
    if found:
        names = [kind.name for kind in found]
        raise UnknownNameError(
            "device type",
            name,
            names,
            advice=f"it comes with different memory; write {' or '.join(names)}.",
        )
    raise UnknownNameError("device type", name, device_type_names(), advice=_advice(name))


def _advice(name: str) -> str:
    """A sentence with the nearest types of the same maker, and advice where there is none."""
    words = _read(name)
    written = "write its numbers as type: {name, peak_flops, memory_bandwidth, memory}"
    same = [each for each in _LISTED if words.vendor in ("", each.vendor)]
    if words.vendor and not same:
        return f"the catalogue has no devices by {words.vendor}; {written}."
    close = [
        each.type.name for each in same if _is_model(each, words) and words.form in ("", each.form)
    ]
    close = close or _closest(words.model + words.form, same)
    hint = f"did you mean {' or '.join(repr(each) for each in close)}? " if close else ""
    return f"{hint}'heterog devices' lists all {len(_LISTED)}; for another, {written}."


def _closest(model: str, among: Iterable[ListedType]) -> list[str]:
    """At most two names: those that contain the model's, or else those that look like it."""
    names: dict[str, str] = {}
    for each in among:
        for key in (each.model, re.sub(r"\W+", "", each.type.name.lower()), *each.aliases):
            names.setdefault(key, each.type.name)
    near = [key for key in names if len(model) > 3 and model in key]
    near += get_close_matches(model, names, n=3, cutoff=0.6)
    return list(dict.fromkeys(names[key] for key in near))[:2]
