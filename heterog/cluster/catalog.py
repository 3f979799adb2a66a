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
from typing import TypedDict, Unpack, cast

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
    multiprocessors, cache_mib = _CHIPS[name]
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
    )


def _both(tflops: float) -> _Half:
    """float16 and bfloat16 at the same rate."""
    return {"float16": tflops, "bfloat16": tflops}


_CHIPS = {
    "V100-16GB": (80, 6), "V100-32GB": (80, 6), "V100-PCIe-16GB": (80, 6),
    "V100-PCIe-32GB": (80, 6), "V100S-32GB": (80, 6), "P100-12GB": (56, 3), "P100-16GB": (56, 4),
    "P100-SXM2-16GB": (56, 4), "P40": (30, 3), "P4": (20, 2), "GTX-1080-Ti": (28, 2.75),
    "T4": (40, 4), "RTX-2080-Ti": (68, 5.5), "Titan-RTX": (72, 6), "Quadro-RTX-6000": (72, 6),
    "Quadro-RTX-8000": (72, 6), "RTX-3070": (46, 4), "RTX-3080": (68, 5), "RTX-3090": (82, 6),
    "RTX-4080": (76, 64), "RTX-4090": (128, 72), "RTX-5080": (84, 64), "RTX-5090": (170, 96),
    "RTX-A5000": (64, 6), "RTX-A6000": (84, 6), "RTX-6000-Ada": (142, 96), "A10": (72, 6),
    "A10G": (80, 6), "A30": (56, 24), "A40": (84, 6), "A100-40GB": (108, 40),
    "A100-80GB": (108, 40), "A100-PCIe-40GB": (108, 40), "A100-PCIe-80GB": (108, 40),
    "A800-80GB": (108, 40), "L4": (58, 48), "L20": (92, 96), "L40": (142, 96), "L40S": (142, 96),
    "H20": (78, 60), "H100": (132, 50), "H100-PCIe": (114, 50), "H100-NVL": (132, 50),
    "H800": (132, 50), "H200": (132, 50), "H200-NVL": (132, 50), "GH200": (132, 50),
    "B200": (148, 126), "GB200": (148, 126), "MI100": (120, 8), "MI210": (104, 8),
    "MI250-GCD": (104, 8), "MI250X-GCD": (110, 8), "MI300X": (304, 256), "MI325X": (304, 256),
    "CPU": (0, 0),
}  # fmt: skip
"""Multiprocessors and MiB of the last cache, from the same white papers and data sheets."""

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
