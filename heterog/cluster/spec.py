"""The YAML file of a cluster: its fields, errors with their line, and writing.

    schema_version: 1
    name: lab
    efficiency: 0.7                     # usable share of every NIC's line rate
    reserved_memory: 1.0 GiB            # per device: context and communication buffers
    calibration: lab_calibration.json   # optional, relative to this file; or roofline: data sheets
    sends: overlapped                   # or blocking: the program computes only when all is sent
    execution: eager                    # or megatron, compiled, graphs: which program runs steps
    tf32: convolutions                  # or none, everything: float32 products that use TF32
    pairs: {}                           # optional: limits between hosts, see cluster.schema
    prices: {currency: USD, device_hour: {V100-16GB: 2.48, P100-12GB: 1.46}}    # optional
    hosts:
      - name: A
        devices: [{type: V100-16GB, count: 2}]
        intra: nvlink_v100              # 'heterog links', or {kind, bandwidth, latency, shared}
        nic: {line_rate: 100 Gbit/s, latency: 20 us}    # or infiniband_edr, or {kind, count}
      - name: B                         # hosts B0 and B1
        count: 2
        devices: [{type: P100-12GB, count: 2, compute_efficiency: 0.5}]
        intra: pcie3
        nic: {line_rate: 50 Gbit/s}
        testbed: {cpu_quota: 0.8}       # only for ranks that are throttled processes

``nic`` may be left out if there is one host, ``intra`` if each host has one device.

``cluster_from_dict`` makes a cluster from JSON values, the form in plans and requests.
"""

from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

from pydantic import Field, Strict, ValidationError

from heterog.cluster.building import ClusterBuilder
from heterog.cluster.hardware import (
    MAX_DEVICES,
    MAX_PAIRS,
    MOST_BYTES,
    Device,
    DeviceType,
    Host,
    HourlyPrices,
    PairLimit,
)
from heterog.cluster.schema import (
    ClusterSpec,
    Document,
    FilePath,
)
from heterog.cluster.topology import SCHEMA_VERSION, Cluster, Execution, Sends, Tf32
from heterog.errors import ClusterError, InputFileError, UnknownNameError
from heterog.files import as_path, decoded, read_bytes
from heterog.records import Int32, Record, parse_record

_PRESETS = resources.files("heterog.cluster") / "presets"
MAX_FILE_BYTES = 1024**2
"""Size limit of a cluster file: a hundred times the size of a file with 512 hosts."""


def preset_names() -> tuple[str, ...]:
    """Names of the built-in clusters."""
    return yaml_names(_PRESETS)


def yaml_names(folder: Traversable) -> tuple[str, ...]:
    """Names of the YAML files in a folder of this package, without their suffix."""
    files = (entry.name for entry in folder.iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in files if name.endswith(".yaml")))


def load_cluster(
    source: str | Path, kind: str = "cluster", folder: Traversable = _PRESETS
) -> Cluster:
    """Reads a cluster that is built in by its name, or a file by its path; see ``Cluster.load``.

    Args:
        source: Name or path.
        kind: What a name that does not exist is called.
        folder: The files of the clusters that are built in.
    """
    path, names = as_path(source), yaml_names(folder)
    if isinstance(source, str) and source in names:
        text = (folder / f"{source}.yaml").read_text(encoding="utf-8")
        return parse_cluster(text, Path(f"{source}.yaml"))
    looks_like_name = path.name == str(source) and not path.suffix
    if isinstance(source, str) and looks_like_name and not path.exists():
        raise UnknownNameError(kind, source, names)
    try:
        text = decoded(read_bytes(path, "cluster file", MAX_FILE_BYTES), f"cluster file {path}")
    except InputFileError as error:
        raise InputFileError(
            f"{error} Give a YAML file or one of: {', '.join(preset_names())}."
        ) from error
    return parse_cluster(text, path)


def parse_cluster(text: str, path: Path) -> Cluster:
    """Makes a cluster from the text of a cluster file.

    Args:
        text: YAML.
        path: Path of the file: errors name it, and ``calibration`` is relative to its folder.

    Raises:
        InputFileError: Names file, line and field.
    """
    document = Document.parse(text, path)
    try:
        spec = ClusterSpec.model_validate(document.value)
    except ValidationError as error:
        document.refuse_all(error.errors())
    return ClusterBuilder(spec, document).cluster()


class _DeviceRecord(Record):
    name: str
    type_index: Int32
    host_index: Int32
    usable_memory_bytes: Annotated[int, Field(gt=0, le=MOST_BYTES)]


class _ClusterRecord(Record):
    schema_version: int
    name: str
    efficiency: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
    calibration: FilePath | None
    sends: Annotated[Sends, Strict(False)] = Sends.OVERLAPPED
    execution: Annotated[Execution, Strict(False)] = Execution.EAGER
    tf32: Annotated[Tf32, Strict(False)] = Tf32.CONVOLUTIONS
    device_types: Annotated[list[DeviceType], Field(max_length=MAX_DEVICES)]
    hosts: Annotated[list[Host], Field(max_length=MAX_DEVICES)]
    devices: Annotated[list[_DeviceRecord], Field(max_length=MAX_DEVICES)]
    pairs: Annotated[list[PairLimit], Field(default_factory=list, max_length=MAX_PAIRS)]
    prices: HourlyPrices | None = None


def cluster_from_dict(record: object) -> Cluster:
    """A cluster from JSON values; see ``Cluster.from_dict``."""
    try:
        found = parse_record(record, _ClusterRecord, "cluster record", versions=(SCHEMA_VERSION,))
    except InputFileError as error:
        raise ClusterError(str(error)) from error
    types = found.device_types
    for number, each in enumerate(found.devices):
        if each.type_index >= len(types):
            raise ClusterError(
                f"cluster record: field 'devices.{number}.type_index' is {each.type_index}, but "
                f"there are {len(types)} types."
            )
    devices = tuple(
        Device(
            name=each.name,
            type=types[each.type_index],
            host_index=each.host_index,
            usable_memory_bytes=each.usable_memory_bytes,
        )
        for each in found.devices
    )
    return Cluster(
        name=found.name,
        hosts=tuple(found.hosts),
        devices=devices,
        efficiency=found.efficiency,
        calibration=found.calibration,
        sends=found.sends,
        execution=found.execution,
        tf32=found.tf32,
        pairs=tuple(found.pairs),
        prices=found.prices,
    )
