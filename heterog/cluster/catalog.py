"""The catalogue: device types and kinds of links, with the numbers of their data sheets.

A device type of ``data/devices.yaml`` is found by its name, by the name that a driver gives the
card (``NVIDIA A100-SXM4-80GB``), and by common short names (``rtx3090``, ``A6000``).

A kind of link of ``data/links.yaml`` is found by the name that cluster files use. ``intra`` of a
host names a link between its devices. Its simulated rate is the rate that large transfers reach: a
measured fraction of the sheet's rate or, if it was not measured, the fraction of the generation
before. ``nic`` of a host names a network: its line rate is the sheet's, and ``efficiency`` of the
cluster is the fraction of it that transfers reach.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, cached_property
from importlib import resources
from typing import Annotated, Literal, TypeVar

from pydantic import Field

from heterog.cluster.hardware import DTYPES, DeviceType, Link, SlowedCollectives
from heterog.errors import UnknownNameError
from heterog.records import Record, Text
from heterog.units import GIB
from heterog.yaml_files import read_shipped

_TERA = 1e12
_LEAST_MATRIX_GAIN = 3.0
"""Ratio of the 16-bit peak to the float32 peak above which a chip has matrix units; vector units
that take two numbers at a time reach 2."""
_FILE = resources.files("heterog.cluster") / "data" / "devices.yaml"
_GIGA = 1e9
_Positive = Annotated[float, Field(gt=0)]


class ChipSheet(Record):
    """Numbers of a chip and its board; 0 for the CPU.

    Attributes:
        multiprocessors: Number of units that work on tiles of their own (streaming
            multiprocessors, compute units).
        cache_mib: Size of the last cache before the memory, in MiB.
        board_w: Most power that the board may draw, in watts.
        process_nm: Nominal size of the manufacturing process in nm.
    """

    multiprocessors: int = 0
    cache_mib: float = 0.0
    board_w: float = 0.0
    process_nm: float = 0.0


class ListedType(Record):
    """A device type of the catalogue, with the numbers of its data sheet.

    Attributes:
        name: Its name.
        sheet: Name of the data sheet.
        vendor: Maker, as in ``"NVIDIA"``; empty for the CPU.
        form: ``"sxm"``, ``"pcie"`` or ``"nvl"`` if modules and cards of one name differ.
        aliases: Further names, in the form that ``device_type`` compares.
        memory_gib: Memory that a job sees.
        sheet_gb: Memory in GB according to the data sheet, if that differs.
        memory_gb_per_s: Rate of the memory.
        tflops: Peaks. That of float32 products with TF32 is not used by default: for training
            with ``torch.backends.cuda.matmul.allow_tf32`` give the devices of a cluster file
            ``peak_flops: {float32: ...}``. ``matrix`` is that of float32 products on matrix
            units, which the vendor's library uses by default.
        chip: Numbers of its chip and board.
    """

    name: str
    sheet: Text
    vendor: str = ""
    form: Literal["sxm", "pcie", "nvl", ""] = ""
    aliases: list[str] = Field(default_factory=list)
    memory_gib: _Positive
    sheet_gb: _Positive | None = None
    memory_gb_per_s: _Positive
    tflops: dict[Literal["float64", "float32", "tf32", "matrix", "float16", "bfloat16"], _Positive]
    chip: ChipSheet = ChipSheet()

    @cached_property
    def type(self) -> DeviceType:
        """The device type in SI units."""
        of_dtypes = {kind: peak for kind, peak in self.tflops.items() if kind in DTYPES}
        return DeviceType(
            name=self.name,
            peak_flops_per_s={dtype: peak * _TERA for dtype, peak in of_dtypes.items()},
            memory_bandwidth_bytes_per_s=self.memory_gb_per_s * _GIGA,
            memory_bytes=round(self.memory_gib * GIB),
            source=self.sheet,
        )

    @property
    def tf32_flops_per_s(self) -> float | None:
        """Peak of float32 matrix products with TF32, if the hardware has it."""
        return self.tflops["tf32"] * _TERA if "tf32" in self.tflops else None

    @property
    def matrix_flops_per_s(self) -> float | None:
        """Peak of float32 matrix products on matrix units, if there are any."""
        return self.tflops["matrix"] * _TERA if "matrix" in self.tflops else None

    @property
    def model(self) -> str:
        """The name without form and memory: ``"a100"``."""
        return _read(self.name).model

    @property
    def has_matrix_units(self) -> bool:
        """Whether 16-bit products have units of their own (tensor cores, matrix cores)."""
        peaks = self.type.peak_flops_per_s
        is_fast = peaks.get("float16", 0.0) > _LEAST_MATRIX_GAIN * peaks["float32"]
        return is_fast or bool(self.tf32_flops_per_s or self.matrix_flops_per_s)


class _Sheets(Record):
    schema_version: Literal[1]
    types: list[ListedType]


@cache
def _by_name() -> Mapping[str, ListedType]:
    """The catalogue by name; read at the first call."""
    return {each.name: each for each in read_shipped(_FILE, _Sheets).types}


_OTHER_WORDS = {
    "tesla": "NVIDIA", "geforce": "NVIDIA", "instinct": "AMD", "radeon": "AMD", "ati": "AMD",
    "intel": "Intel", "habana": "Intel", "apple": "Apple", "google": "Google",
}  # fmt: skip
_NO_WORDS = {"graphics", "gpu", "corporation", "tensor", "core", "accelerator"}
# The beginning of a model's name shows its maker, even if the catalogue lacks the model.
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
# A memory size without a unit after a model's name, as in A100-80.
_BARE_MEMORY = re.compile(r"(12|16|24|32|40|48|64|80|94|96|141|180|192)")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    """A name without vendor and fillers, and its parts: model, form, memory and vendor, if any."""

    whole: str
    model: str
    form: str = ""
    memory_gb: int | None = None
    vendor: str = ""


@cache
def _vendor_words() -> Mapping[str, str]:
    """Makers by the words that name them, including the makers' own names in the catalogue."""
    named = (each.vendor for each in _by_name().values() if each.vendor)
    return _OTHER_WORDS | {vendor.lower(): vendor for vendor in named}


def _read(name: str) -> _Words:
    """Take a name apart.

    >>> _read("NVIDIA A100-SXM4-80GB")
    _Words(whole='a100sxm480gb', model='a100', form='sxm', memory_gb=80, vendor='NVIDIA')
    """
    words = [word for word in re.split(r"[\s_/()-]+", name.lower()) if word]
    makers = _vendor_words()
    vendors = [makers[word] for word in words if word in makers]
    words = [word for word in words if word not in makers and word not in _NO_WORDS]
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
    return tuple(_by_name().values())


def listed_type(name: str) -> ListedType | None:
    """The catalogue's entry of a type, also if a cluster file has changed it; ``None`` if none."""
    return _by_name().get(listed_name(name))


def device_type_names() -> tuple[str, ...]:
    """Names of all device types of the catalogue."""
    return tuple(_by_name())


def matching_types(name: str) -> tuple[DeviceType, ...]:
    """The types that a name can mean, best first; several if the name leaves the memory open.

    Case, spaces for hyphens, the maker's name and a missing "GB" do not matter. A name without a
    form means the SXM module if there is one; a PCIe card of the same name is slower.

    >>> [kind.name for kind in matching_types("Tesla V100-PCIE")]
    ['V100-PCIe-16GB', 'V100-PCIe-32GB']
    """
    words = _read(name)
    found = [each for each in listed_types() if _is_model(each, words)]
    if words.form:
        forms = [each for each in found if each.form == words.form]
        found = forms or [each for each in found if not each.form]
    elif found:
        found = [each for each in found if each.form == found[0].form]
    if words.memory_gb is not None and not any(words.whole in each.aliases for each in found):
        found = [
            each
            for each in found
            if words.memory_gb in (each.sheet_gb, each.memory_gib, round(each.memory_gib))
        ]
    return tuple(each.type for each in found)


def _is_model(each: ListedType, words: _Words) -> bool:
    """Whether a name and a type have the same model; form and memory may differ."""
    if words.vendor and each.vendor and words.vendor != each.vendor:
        return False
    own = each.model
    names = {own, *each.aliases}
    for prefix in ("rtx", "gtx"):  # people say "3090"
        if own.startswith(prefix) and own.removeprefix(prefix)[0].isdigit():
            names.add(own.removeprefix(prefix))
    return words.model in names or words.whole in each.aliases


def may_mean(name: str, device_type: str) -> bool:
    """Whether a name, as drivers, launchers or people write it, can mean a type.

    >>> may_mean("Tesla T4", "T4"), may_mean("V100", "V100-32GB"), may_mean("CPU", "T4")
    (True, True, False)
    """
    return name == device_type or any(kind.name == device_type for kind in matching_types(name))


def device_type(name: str) -> DeviceType:
    """Find a device type of the catalogue, by its name, a driver's name or common usage.

    Raises:
        UnknownNameError: The catalogue has no such type, or the name leaves the memory open.

    >>> device_type("gtx 1080 ti").name, device_type("V100-16").memory_bytes // 2**30
    ('GTX-1080-Ti', 16)
    >>> device_type("NVIDIA A100 80GB PCIe").name, device_type("rtx3090").name
    ('A100-PCIe-80GB', 'RTX-3090')
    """
    if (listed := _by_name().get(name)) is not None:
        return listed.type
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


@cache
def listed_name(type_name: str) -> str:
    """The catalogue's name of a type that a cluster file may have changed.

    >>> listed_name("GH200-custom2"), listed_name("GH200")
    ('GH200', 'GH200')
    """
    return re.sub(r"-custom\d*$", "", type_name)


def product_peak(kind: DeviceType, dtype: str) -> float:
    """Peak FLOP/s of matrix products of a dtype, which libraries sum in float32.

    On a chip without matrix units, 16-bit products run at the rate of float32, whatever the sheet
    says of 16-bit arithmetic: half of the sheet's rate on a P100, 64 times that rate on a P40.

    >>> [product_peak(device_type(name), "float16") / 1e12 for name in ("P40", "V100-16GB")]
    [12.0, 125.0]
    """
    peaks, listed = kind.peak_flops_per_s, listed_type(kind.name)
    if dtype in ("float16", "bfloat16") and listed is not None and not listed.has_matrix_units:
        return peaks["float32"]
    return peaks.get(dtype, peaks["float32"])


def _advice(name: str) -> str:
    """A sentence with the nearest types of the same maker, or what to write without any."""
    words = _read(name)
    written = "write its numbers as type: {name, peak_flops, memory_bandwidth, memory}"
    same = [each for each in listed_types() if words.vendor in ("", each.vendor)]
    if words.vendor and not same:
        return f"the catalogue has no devices by {words.vendor}; {written}."
    close = [
        each.type.name for each in same if _is_model(each, words) and words.form in ("", each.form)
    ]
    close = close or _closest(words.model + words.form, same)
    hint = f"did you mean {' or '.join(repr(each) for each in close)}? " if close else ""
    return f"{hint}'heterog devices' lists all {len(_by_name())}; for another, {written}."


def _closest(model: str, among: Iterable[ListedType]) -> list[str]:
    """At most two names: first those that contain the model's name, then similar ones."""
    names: dict[str, str] = {}
    for each in among:
        for key in (each.model, re.sub(r"\W+", "", each.type.name.lower()), *each.aliases):
            names.setdefault(key, each.type.name)
    near = [key for key in names if len(model) > 3 and model in key]
    near += get_close_matches(model, names, n=3, cutoff=0.6)
    return list(dict.fromkeys(names[key] for key in near))[:2]


_LINKS_FILE = resources.files("heterog.cluster") / "data" / "links.yaml"
_GBIT = 1e9 / 8


class LinkKind(Record):
    """A link between the devices of one host.

    Attributes:
        name: Name for ``intra`` in cluster files.
        kind: Word for people.
        aliases: Further names.
        effective_gb_per_s: Simulated rate of one direction.
        share: Source of the effective rate.
        sheet_gb_per_s: Rate of one direction in the data sheet, per device.
        sheet: Name of the data sheet.
    """

    name: str
    kind: str
    aliases: list[str] = Field(default_factory=list)
    effective_gb_per_s: float
    share: Text
    sheet_gb_per_s: float
    sheet: Text

    @property
    def link(self) -> Link:
        """The link as it is simulated."""
        return Link(kind=self.kind, bandwidth_bytes_per_s=self.effective_gb_per_s * _GIGA)

    @property
    def sheet_bytes_per_s(self) -> float:
        """Rate of one direction in the data sheet."""
        return self.sheet_gb_per_s * _GIGA


class NetworkKind(Record):
    """A network adapter, as one port or as all of an instance.

    Attributes:
        name: Name for ``nic`` in cluster files.
        gbit_per_s: Line rate of one direction, data bits only; EFA's is per instance.
        aliases: Further names.
        sheet: Source of the line rate.
        rails: NICs that share the line rate.
        collectives: Measured slowdown of collectives between hosts; ``None`` if not measured.
    """

    name: str
    gbit_per_s: float
    aliases: list[str] = Field(default_factory=list)
    sheet: Text
    rails: int = 1
    collectives: SlowedCollectives | None = None

    @property
    def line_rate_bytes_per_s(self) -> float:
        """Line rate of one direction."""
        return self.gbit_per_s * _GBIT


class _LinkSheets(Record):
    schema_version: Literal[1]
    links: list[LinkKind]
    networks: list[NetworkKind]


@cache
def _sheets() -> _LinkSheets:
    """The file, read at the first call."""
    return read_shipped(_LINKS_FILE, _LinkSheets)


def link_kinds() -> tuple[LinkKind, ...]:
    """Links between the devices of a host."""
    return tuple(_sheets().links)


def network_kinds() -> tuple[NetworkKind, ...]:
    """Networks between hosts."""
    return tuple(_sheets().networks)


def _key(name: str) -> str:
    return re.sub(r"[\W_]+", "", name.lower())


_Kind = TypeVar("_Kind", bound=LinkKind | NetworkKind)


def _called(what: str, name: str, kinds: tuple[_Kind, ...]) -> _Kind:
    """The kind with this name or alias; case and punctuation do not matter."""
    by_key = {_key(own): kind for kind in kinds for own in (kind.name, *kind.aliases)}
    if _key(name) not in by_key:
        raise UnknownNameError(what, name, [each.name for each in kinds])
    return by_key[_key(name)]


def intra_link(name: str) -> Link:
    """Find a link by its name or an alias; case and hyphens do not matter.

    Raises:
        UnknownNameError: no link has this name.

    >>> intra_link("NVLink-4").bandwidth_bytes_per_s
    320000000000.0
    """
    return _called("link", name, link_kinds()).link


def network_kind(name: str) -> NetworkKind:
    """Find a network by its name or an alias; case and hyphens do not matter.

    Raises:
        UnknownNameError: no network has this name.

    >>> network_kind("HDR").line_rate_bytes_per_s
    25000000000.0
    """
    return _called("network", name, network_kinds())
