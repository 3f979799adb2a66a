"""The index of a checkpoint: its tensors and their places."""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field

from heterog.errors import InputFileError
from heterog.files import CHECKPOINT_INDEX, read_json
from heterog.grouped import grouped
from heterog.names import shown
from heterog.records import (
    VALUE,
    Identifier,
    Int32,
    Json,
    Name,
    NumBytes,
    Text,
    Word,
    parse_dataclass,
    parse_record,
)
from heterog.runtime.checkpoint.boxes import Box, Entry, check_tiling, whole_box

SCHEMA_VERSION = 4
"""No release wrote earlier versions."""
DATA_FOLDER = re.compile(r"data-(\d+)")
_Digest = Annotated[Word, Field(pattern=r"^([0-9a-f]{64})?$")]
_FILE = re.compile(r"__\d+_\d+\.distcp")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """Place of a tensor: ``num_bytes`` of a file from ``offset`` on.

    ``sha256`` is the checksum of its elements; empty in snapshots of jobs that heal.

    For a part of a larger tensor, ``whole`` is the larger tensor's name, ``whole_shape`` its shape
    and ``offsets`` the part's first indices in it.
    """

    __pydantic_config__: ClassVar = VALUE

    shape: tuple[Int32, ...]
    dtype: Word
    file: Word
    offset: NumBytes
    num_bytes: NumBytes
    sha256: _Digest = ""
    whole: Text = ""
    whole_shape: tuple[Int32, ...] = ()
    offsets: tuple[Int32, ...] = ()

    @classmethod
    def of(
        cls, entry: Entry, file: str, offset: int, num_bytes: int, sha256: str = ""
    ) -> "SavedTensor":
        """The place of a box of a tensor that has been written."""
        is_part = entry.name != entry.whole
        return cls(
            shape=tuple(entry.value.shape),
            dtype=dtype_name(entry.value.dtype),
            file=file,
            offset=offset,
            num_bytes=num_bytes,
            sha256=sha256,
            whole=entry.whole if is_part else "",
            whole_shape=entry.shape if is_part else (),
            offsets=entry.box.offsets if is_part else (),
        )

    @property
    def box(self) -> Box:
        """The box of the whole tensor that it holds."""
        return Box(self.offsets, self.shape) if self.whole else whole_box(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedOptimizer:
    """State of the optimizer for one parameter.

    Attributes:
        options: Options of its parameter group; ``lr`` is the one at the time of saving.
        tensors: Names of the entries of its state that are tensors.
        values: All other entries of its state.
        group: Number of its parameter group.
    """

    __pydantic_config__: ClassVar = VALUE

    options: Mapping[Text, Json]
    tensors: tuple[Text, ...]
    values: Mapping[Text, Json]
    group: Int32 = 0


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Contents of ``checkpoint.json``.

    Attributes:
        heterog: Version of heterog that wrote it.
        torch: Version of torch that wrote it.
        model: Name of the workload.
        graph: Fingerprint of the step's graph; it differs for, say, another batch size.
        optimizer: Class name of the optimizer.
        num_steps: Number of steps trained.
        data: Name of the folder with the tensors.
        tensors: Saved tensors by name: ``model.`` or ``optimizer.`` and the parameter's name.
        states: State of the optimizer, by parameter.
        extra: Values that the caller saved with it.
        sha256: Checksum of the file; see ``checksum_of``.
    """

    __pydantic_config__: ClassVar = VALUE

    heterog: Text
    torch: Text
    model: Name
    graph: Text
    optimizer: Identifier
    num_steps: Int32
    data: Text
    tensors: Mapping[Text, SavedTensor]
    states: Mapping[Text, SavedOptimizer]
    extra: Mapping[Word, Json]
    sha256: _Digest = ""

    @cached_property
    def parts(self) -> Mapping[str, Sequence[str]]:
        """Names of the parts of each tensor that was saved in parts."""
        return grouped(
            (tensor.whole, name) for name, tensor in self.tensors.items() if tensor.whole
        )

    @property
    def names(self) -> list[str]:
        """Names of the whole tensors."""
        return list(dict.fromkeys(each.whole or name for name, each in self.tensors.items()))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a whole tensor.

        Raises:
            KeyError: no tensor has this name.
        """
        if name in self.parts:
            return self.tensors[self.parts[name][0]].whole_shape
        return self.tensors[name].shape

    def dtype(self, name: str) -> str:
        """Dtype of a whole tensor."""
        return self.tensors[self.parts[name][0] if name in self.parts else name].dtype


def read_contents(folder: str | Path) -> Contents:
    """Read the index of a checkpoint; also checks that all its files exist.

    Raises:
        InputFileError: no checkpoint, of another version, or a damaged one.
    """
    index = Path(folder) / CHECKPOINT_INDEX
    where = f"checkpoint {index}"
    value = read_json(index, "checkpoint")
    contents = parse_record(value, Contents, where, versions=(SCHEMA_VERSION,))
    if contents.sha256 != checksum_of(value):
        raise InputFileError(
            f"{where} is damaged: its checksum is wrong. Resume from another checkpoint."
        )
    try:
        _check_contents(contents)
    except ValueError as error:
        raise InputFileError(f"{where} does not make sense: {error}.") from error
    _check_files(contents, index.parent)
    return contents


def checksum_of(record: Mapping[str, Any]) -> str:
    """SHA-256 of an index, without the field that stores it."""
    rest = {key: value for key, value in record.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _check_contents(contents: Contents) -> None:
    """Check that the fields of an index do not contradict each other.

    Raises:
        ValueError: says what is wrong.
    """
    # The names become paths: none may lead out of the folder.
    if not DATA_FOLDER.fullmatch(contents.data):
        raise ValueError(f"no data folder has the name {shown(contents.data)}")
    for name, tensor in contents.tensors.items():
        if not _FILE.fullmatch(tensor.file):
            raise ValueError(f"{name} cannot be in a file {shown(tensor.file)}")
        if not tensor.sha256:
            raise ValueError(f"{name} has no checksum")
        size = math.prod(tensor.shape) * dtype_of(tensor.dtype).itemsize
        if size > tensor.num_bytes:
            raise ValueError(f"{name} has {size} bytes, of which {tensor.num_bytes} are saved")
    for whole, names in contents.parts.items():
        _check_complete(contents, whole, names)
    known = {*contents.tensors, *contents.parts}
    for name, state in contents.states.items():
        for key in state.tensors:
            if f"optimizer.{name}.{key}" not in known:
                raise ValueError(f"'{key}' of {name} is nowhere")


def _check_complete(contents: Contents, whole: str, names: Sequence[str]) -> None:
    """Check that the parts of a tensor are of one kind, do not overlap and are complete."""
    if whole in contents.tensors:
        raise ValueError(f"{whole} is there whole and in parts")
    shape, dtype = contents.shape(whole), contents.dtype(whole)
    for name in names:
        part = contents.tensors[name]
        if (part.whole_shape, part.dtype) != (shape, dtype):
            raise ValueError(
                f"{name} is a part of {part.whole_shape} {part.dtype}, but {whole} is {shape} "
                f"{dtype}"
            )
    check_tiling(whole, shape, [contents.tensors[name].box for name in names])


def _check_files(contents: Contents, folder: Path) -> None:
    """Check that every file of the index exists and is long enough for all its tensors."""
    needed: dict[str, int] = {}
    total: dict[str, int] = {}
    for tensor in contents.tensors.values():
        needed[tensor.file] = max(needed.get(tensor.file, 0), tensor.offset + tensor.num_bytes)
        total[tensor.file] = total.get(tensor.file, 0) + tensor.num_bytes
    for file in needed:
        num_bytes = max(needed[file], total[file])
        path = folder / contents.data / file
        if not path.is_file():
            raise InputFileError(f"checkpoint {folder} is incomplete: {path} is missing.")
        if path.stat().st_size < num_bytes:
            raise InputFileError(
                f"checkpoint {folder} is cut off: {path} has {path.stat().st_size} bytes of "
                f"{num_bytes}."
            )


def to_json(items: Mapping[str, SavedTensor | SavedOptimizer]) -> dict[str, Any]:
    """Records of the index, by name."""
    records = {name: asdict(item) for name, item in items.items()}
    for record in records.values():
        if not record.get("whole", True):  # not a part
            del record["whole"], record["whole_shape"]
        for field in ("offsets", "group"):
            if not record.get(field, True):
                del record[field]
    return records


def tensors_from_json(record: Mapping[str, Any]) -> dict[str, SavedTensor]:
    """Tensors by name, from records of the index."""
    return parse_dataclass(record, dict[str, SavedTensor], "the index of a rank")


def states_from_json(record: Mapping[str, Any]) -> dict[str, SavedOptimizer]:
    """States of the optimizer by parameter, from records of the index."""
    return {
        name: SavedOptimizer(**{**each, "tensors": tuple(each["tensors"])})
        for name, each in record.items()
    }


def elements(value: torch.Tensor) -> memoryview:
    """The bytes of a tensor's elements, in the memory of this host."""
    plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype in the index, for example float32."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name in the index.

    Raises:
        ValueError: torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {shown(name)}")
    return dtype


def option_like(now: Any, saved: Any) -> Any:
    """A saved option in the type that the optimizer uses, which JSON may have lost."""
    if isinstance(now, torch.Tensor):
        return torch.full_like(now, saved)
    return tuple(saved) if isinstance(now, tuple) else saved
