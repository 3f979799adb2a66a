"""Device types with the numbers of their data sheets.

float32 peaks are without TF32, float16 and bfloat16 peaks those of dense tensor cores with float32
accumulation where the hardware has them, float64 peaks without tensor cores. The GB of a data
sheet are GiB for these memories. Cards with ECC in GDDR6 keep 1/16 of it for the check bits, so
their size here is 15/16 of the sheet's: planning with memory that is not there would be worse
than leaving a little unused.
"""

from heterog.cluster.topology import DeviceType
from heterog.errors import UnknownNameError
from heterog.units import GIB

_TERA = 1e12
_GIGA = 1e9


def _gpu(
    name: str, source: str, memory_gib: float, gb_per_s: float, **tflops: float
) -> DeviceType:
    return DeviceType(
        name=name,
        peak_flops_per_s={dtype: value * _TERA for dtype, value in tflops.items()},
        memory_bandwidth_bytes_per_s=gb_per_s * _GIGA,
        memory_bytes=round(memory_gib * GIB),
        source=source,
    )


_V100 = "NVIDIA Tesla V100 data sheet, SXM2"
_P100 = "NVIDIA Tesla P100 PCIe data sheet"
_A100 = "NVIDIA A100 Tensor Core GPU data sheet, SXM4"
_TURING = "NVIDIA Turing GPU architecture whitepaper"
_HOPPER = {"float64": 34.0, "float32": 67.0, "float16": 989.4, "bfloat16": 989.4}
_AMPERE = {"float64": 9.7, "float32": 19.5, "float16": 312.0, "bfloat16": 312.0}
_VOLTA = {"float64": 7.8, "float32": 15.7, "float16": 125.0}
_PASCAL = {"float64": 4.7, "float32": 9.3, "float16": 18.7}

_TYPES = (
    _gpu("V100-16GB", _V100, 16, 900, **_VOLTA),
    _gpu("V100-32GB", _V100, 32, 900, **_VOLTA),
    _gpu(
        "V100S-32GB",
        "NVIDIA V100 data sheet (2020), V100S PCIe",
        32,
        1134,
        float64=8.2,
        float32=16.4,
        float16=130.0,
    ),
    _gpu("P100-12GB", _P100, 12, 549, **_PASCAL),
    _gpu("P100-16GB", _P100, 16, 732, **_PASCAL),
    _gpu(
        "GTX-1080-Ti",
        "NVIDIA GeForce GTX 1080 Ti specifications; float64 1/32 and float16 1/64 of float32 "
        "(CUDA C programming guide, capability 6.1)",
        11,
        484,
        float64=0.354,
        float32=11.3,
        float16=0.177,
    ),
    _gpu(
        "T4",
        "NVIDIA T4 data sheet; float64 1/32 of float32; 15/16 of 16 GB with ECC",
        15,
        320,
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
    _gpu("Titan-RTX", _TURING, 24, 672, float64=0.51, float32=16.3, float16=130.5),
    _gpu(
        "RTX-3090",
        "NVIDIA Ampere GA102 GPU architecture whitepaper",
        24,
        936,
        float64=0.556,
        float32=35.6,
        float16=71.0,
        bfloat16=71.0,
    ),
    _gpu(
        "RTX-4090",
        "NVIDIA Ada GPU architecture whitepaper",
        24,
        1008,
        float64=1.29,
        float32=82.6,
        float16=165.2,
        bfloat16=165.2,
    ),
    _gpu(
        "A10",
        "NVIDIA A10 data sheet; float64 1/32 of float32; 15/16 of 24 GB with ECC",
        22.5,
        600,
        float64=0.975,
        float32=31.2,
        float16=125.0,
        bfloat16=125.0,
    ),
    _gpu(
        "A40",
        "NVIDIA A40 data sheet; float64 1/64 of float32; 15/16 of 48 GB with ECC",
        45,
        696,
        float64=0.584,
        float32=37.4,
        float16=149.7,
        bfloat16=149.7,
    ),
    _gpu("A100-40GB", _A100, 40, 1555, **_AMPERE),
    _gpu("A100-80GB", _A100, 80, 2039, **_AMPERE),
    _gpu("A800-80GB", "NVIDIA A800 data sheet, SXM", 80, 2039, **_AMPERE),
    _gpu(
        "L40S",
        "NVIDIA L40S data sheet; float64 1/64 of float32; 15/16 of 48 GB with ECC",
        45,
        864,
        float64=1.43,
        float32=91.6,
        float16=362.0,
        bfloat16=362.0,
    ),
    _gpu("H100", "NVIDIA H100 Tensor Core GPU data sheet, SXM5", 80, 3350, **_HOPPER),
    # 141 GB on the sheet; the driver shows 139 GiB and a fraction.
    _gpu("H200", "NVIDIA H200 Tensor Core GPU data sheet, SXM", 139, 4800, **_HOPPER),
    _gpu("GH200", "NVIDIA GH200 Grace Hopper data sheet, 96 GB HBM3", 96, 4000, **_HOPPER),
    _gpu(
        "CPU",
        "chosen: one x86-64 core at 3.0 GHz with two 8-wide float32 FMA units, 10 GB/s and 4 GiB "
        "as its part of the machine; calibrate before trusting it",
        4,
        10,
        float64=0.048,
        float32=0.096,
    ),
)


def _key(name: str) -> str:
    return name.strip().lower().replace(" ", "-").replace("_", "-").removesuffix("gb")


_BY_KEY = {_key(t.name): t for t in _TYPES}


def device_type_names() -> tuple[str, ...]:
    """Names of all device types of the catalogue."""
    return tuple(t.name for t in _TYPES)


def device_type(name: str) -> DeviceType:
    """A device type of the catalogue; case, spaces for hyphens and a missing "GB" do not matter.

    Raises:
        UnknownNameError: The catalogue has no such type.

    >>> device_type("gtx 1080 ti").name, device_type("V100-16").memory_bytes // 2**30
    ('GTX-1080-Ti', 16)
    """
    if _key(name) not in _BY_KEY:
        raise UnknownNameError("device type", name, device_type_names())
    return _BY_KEY[_key(name)]
