"""The index of a checkpoint: what it holds, and where."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from heterog.errors import InputFileError
from heterog.files import read_json
from heterog.runtime.launch import CHECKPOINT_INDEX

SCHEMA_VERSION = 2
"""Of a checkpoint with parts of tensors; 1 without, as before there were any."""
DATA_FOLDER = re.compile(r"data-(\d+)")
_FILE = re.compile(r"__\d+_\d+\.distcp")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """Where a tensor is: ``num_bytes`` of a file from ``offset`` on.

    Of a part of a larger tensor, ``whole`` is the larger one's name, ``begin`` the part's first
    element in it and ``whole_shape`` its shape.
    """

    shape: tuple[int, ...]
    dtype: str
    file: str
    offset: int
    num_bytes: int
    whole: str = ""
    begin: int = 0
    whole_shape: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Of a part, the element after its last in the larger tensor."""
        return self.begin + math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedOptimizer:
    """What the optimizer knew about one parameter.

    Attributes:
        options: of its parameter group; ``lr`` is the one at the time of saving.
        tensors: names of its state that are tensors.
        values: the rest of its state.
    """

    options: Mapping[str, Any]
    tensors: tuple[str, ...]
    values: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a checkpoint holds, as ``checkpoint.json`` says it.

    Attributes:
        heterog: version that wrote it.
        torch: version that wrote it.
        model: name of the workload.
        graph: fingerprint of the step's graph; another batch size, say, has another one.
        optimizer: class name.
        num_steps: that were trained.
        data: name of the folder with the tensors.
        tensors: by name, ``model.`` or ``optimizer.`` before that of the parameter.
        states: the optimizer's, by parameter.
        extra: what the caller wanted to keep.
    """

    heterog: str
    torch: str
    model: str
    graph: str
    optimizer: str
    num_steps: int
    data: str
    tensors: Mapping[str, SavedTensor]
    states: Mapping[str, SavedOptimizer]
    extra: Mapping[str, Any]

    @cached_property
    def parts(self) -> Mapping[str, Sequence[str]]:
        """Names of the parts of each tensor that was saved in parts, from first to last."""
        found: dict[str, list[str]] = {}
        for name, tensor in self.tensors.items():
            if tensor.whole:
                found.setdefault(tensor.whole, []).append(name)
        return {
            whole: sorted(names, key=lambda name: self.tensors[name].begin)
            for whole, names in found.items()
        }

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a whole tensor.

        Raises:
            KeyError: there is none of this name.
        """
        if name in self.parts:
            return self.tensors[self.parts[name][0]].whole_shape
        return self.tensors[name].shape

    def dtype(self, name: str) -> str:
        """Dtype of a whole tensor."""
        return self.tensors[self.parts[name][0] if name in self.parts else name].dtype


def read_contents(folder: str | Path) -> Contents:
    """What a checkpoint holds; also checks that its files are all there.

    Raises:
        InputFileError: no checkpoint, of another version, or a damaged one.
    """
    index = Path(folder) / CHECKPOINT_INDEX
    record = read_json(index, "checkpoint")
    version = record.get("schema_version") if isinstance(record, dict) else None
    if version not in (1, SCHEMA_VERSION):
        raise InputFileError(
            f"checkpoint {index} has schema_version {version!r}; this heterog reads 1 to "
            f"{SCHEMA_VERSION}."
        )
    try:
        contents = Contents(
            heterog=str(record["heterog"]),
            torch=str(record["torch"]),
            model=str(record["model"]),
            graph=str(record["graph"]),
            optimizer=str(record["optimizer"]),
            num_steps=int(record["num_steps"]),
            data=str(record["data"]),
            tensors=tensors_from_json(record["tensors"]),
            states=states_from_json(record["states"]),
            extra=dict(record["extra"]),
        )
        # The names become paths: none may lead out of the folder.
        if not DATA_FOLDER.fullmatch(contents.data):
            raise ValueError(f"no data folder has the name {contents.data!r}")
        for name, tensor in contents.tensors.items():
            if not _FILE.fullmatch(tensor.file):
                raise ValueError(f"{name} cannot be in a file {tensor.file!r}")
            dtype_of(tensor.dtype)
        for name, state in contents.states.items():
            for key in state.tensors:
                if f"optimizer.{name}.{key}" not in {**contents.tensors, **contents.parts}:
                    raise ValueError(f"'{key}' of {name} is nowhere")
        for whole, names in contents.parts.items():
            _check_complete(contents, whole, names)
    except KeyError as error:
        raise InputFileError(f"checkpoint {index}: field {error} is missing.") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise InputFileError(f"checkpoint {index} does not make sense: {error}.") from error
    _check_files(contents, index.parent)
    return contents


def _check_complete(contents: Contents, whole: str, names: Sequence[str]) -> None:
    """The parts of a tensor follow one another and are all there."""
    shape, dtype = contents.shape(whole), contents.dtype(whole)
    end = 0
    for name in names:
        part = contents.tensors[name]
        if part.begin != end or (part.whole_shape, part.dtype) != (shape, dtype):
            raise ValueError(f"{name} does not follow element {end} of {whole}")
        end = part.end
    if end != math.prod(shape):
        raise ValueError(f"{whole} ends at element {end} of {math.prod(shape)}")


def _check_files(contents: Contents, folder: Path) -> None:
    """Every file that the index names is there, and long enough."""
    needed: dict[str, int] = {}
    for tensor in contents.tensors.values():
        needed[tensor.file] = max(needed.get(tensor.file, 0), tensor.offset + tensor.num_bytes)
    for file, num_bytes in needed.items():
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
            for field in ("whole", "begin", "whole_shape"):
                del record[field]
    return records


def tensors_from_json(record: Mapping[str, Any]) -> dict[str, SavedTensor]:
    """Tensors by name, from records of the index."""
    return {
        str(name): SavedTensor(
            shape=tuple(int(size) for size in each["shape"]),
            dtype=str(each["dtype"]),
            file=str(each["file"]),
            offset=int(each["offset"]),
            num_bytes=int(each["num_bytes"]),
            whole=str(each.get("whole", "")),
            begin=int(each.get("begin", 0)),
            whole_shape=tuple(int(size) for size in each.get("whole_shape", ())),
        )
        for name, each in record.items()
    }


def states_from_json(record: Mapping[str, Any]) -> dict[str, SavedOptimizer]:
    """States of the optimizer by parameter, from records of the index."""
    return {
        str(name): SavedOptimizer(
            options=dict(each["options"]),
            tensors=tuple(map(str, each["tensors"])),
            values=dict(each["values"]),
        )
        for name, each in record.items()
    }


def dtype_name(dtype: torch.dtype) -> str:
    """As the index has it: float32."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name in the index.

    Raises:
        ValueError: there is none.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return dtype
