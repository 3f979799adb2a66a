"""What a cluster file may say, field by field; ``spec`` shows a whole file."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from heterog.cluster.fields import (
    NOT_NEGATIVE,
    POSITIVE,
    Bandwidth,
    Bytes,
    BytesOrZero,
    Count,
    Peaks,
    Seconds,
    Share,
    Spec,
    reading,
)
from heterog.cluster.pairs import PairsSpec
from heterog.cluster.prices import MAX_PRICE_PER_HOUR
from heterog.records import Name, Text
from heterog.units import GIB

SendsWord: TypeAlias = Literal["overlapped", "blocking"]
ExecutionWord: TypeAlias = Literal["eager", "megatron", "compiled"]
Tf32Word: TypeAlias = Literal["none", "convolutions", "everything"]
FilePath: TypeAlias = Annotated[Text, Field(min_length=1)]


class TypeSpec(Spec):
    """A device type written out in full."""

    name: Name
    peak_flops: Peaks
    memory_bandwidth: Bandwidth
    memory: Bytes
    source: Text = "cluster file"
    compute_efficiency: Share = 0.6
    memory_efficiency: Share = 0.75
    launch_overhead: Seconds = 10e-6


class LinkSpec(Spec):
    """A link inside a host written out in full."""

    kind: Name
    bandwidth: Bandwidth
    latency: Seconds = 5e-6
    shared: bool = Field(default=False, strict=True)


class CollectivesSpec(Spec):
    """What collectives over a host's NICs were measured to reach: see ``SlowedCollectives``."""

    ring: Annotated[float, POSITIVE]
    ring_growth: Annotated[float, NOT_NEGATIVE]
    tree: Annotated[float, POSITIVE]
    tree_growth: Annotated[float, NOT_NEGATIVE]


class NicSpec(Spec):
    """The NICs of a host: ``count`` NICs of a line rate or of a network of the catalogue.

    Neighbouring devices share one where there are more devices than NICs; a device has several
    to itself where there are fewer.
    """

    line_rate: Bandwidth | None = None
    kind: Name | None = None
    count: Count = 1
    latency: Seconds = 20e-6
    collectives: CollectivesSpec | None = None

    @model_validator(mode="after")
    def _has_one_rate(self) -> "NicSpec":
        if (self.line_rate is None) == (self.kind is None):
            raise PydanticCustomError(
                "value",
                "a NIC needs either its line_rate or its kind ('heterog links' lists them)",
            )
        return self


class TestbedSpec(Spec):
    """Throttling of the ranks of a host, for a host that is a process group on one machine."""

    __test__ = False  # for pytest: a name, not a test

    cpu_quota: Share | None = None


def _name_or_mapping(value: object) -> str:
    return "name" if isinstance(value, str) else "mapping"


class DeviceSpec(Spec):
    """Some equal devices of a host; most fields override the type's number of that name."""

    type: Annotated[
        Annotated[Name, Tag("name")] | Annotated[TypeSpec, Tag("mapping")],
        Discriminator(_name_or_mapping),
    ]
    count: Count = 1
    names: list[Name] | None = None
    type_name: Name | None = None
    usable_memory: Bytes | None = None
    peak_flops: Peaks | None = None
    memory_bandwidth: Bandwidth | None = None
    compute_efficiency: Share | None = None
    memory_efficiency: Share | None = None
    launch_overhead: Seconds | None = None


class HostSpec(Spec):
    """One host, or with ``count`` several equal ones, with 0, 1, ... appended to the name."""

    name: Name
    count: Count | None = None
    devices: Annotated[list[DeviceSpec], Field(min_length=1)]
    intra: (
        Annotated[
            Annotated[Name, Tag("name")] | Annotated[LinkSpec, Tag("mapping")],
            Discriminator(_name_or_mapping),
        ]
        | None
    ) = None
    nic: (
        Annotated[
            Annotated[Name, Tag("name")] | Annotated[NicSpec, Tag("mapping")],
            Discriminator(_name_or_mapping),
        ]
        | None
    ) = None
    testbed: TestbedSpec = TestbedSpec()


_Price = Annotated[float, reading(float), Field(ge=0, le=MAX_PRICE_PER_HOUR, allow_inf_nan=False)]


class PricesSpec(Spec):
    """Prices of hosts per hour; see ``cluster.prices``."""

    currency: Name
    device_hour: dict[Name, _Price] = Field(default_factory=dict)
    host_hour: dict[Name, _Price] = Field(default_factory=dict)


class ClusterSpec(Spec):
    """The whole file."""

    schema_version: Literal[1]
    name: Name
    efficiency: Share = 0.7
    reserved_memory: BytesOrZero = GIB
    calibration: FilePath | None = None
    sends: SendsWord = "overlapped"
    execution: ExecutionWord = "eager"
    tf32: Tf32Word = "convolutions"
    hosts: Annotated[list[HostSpec], Field(min_length=1)]
    pairs: PairsSpec = PairsSpec()
    prices: PricesSpec | None = None
