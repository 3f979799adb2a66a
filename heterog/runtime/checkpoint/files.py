"""The files of a checkpoint, in the form of torch.distributed.checkpoint.

A rank's file holds its tensors one after another, each as ``torch.save`` writes it.
"""

import errno
import hashlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from heterog.errors import HeterogError, InputFileError, StrategyError
from heterog.files import cannot_write, check_save_folder, write_json
from heterog.runtime.checkpoint.boxes import Box, Entry, whole_box
from heterog.runtime.checkpoint.contents import (
    DATA_FOLDER,
    SCHEMA_VERSION,
    Contents,
    SavedTensor,
    checksum_of,
    dtype_name,
    dtype_of,
    elements,
    to_json,
)

_BATCH_BYTES = 1 << 28
"""Most bytes read at once, besides a rank's own tensors: 256 MiB. Each read reopens the files."""


ReadSaved = Callable[[Sequence[str]], Mapping[str, Tensor]]
"""Reads tensors and parts of tensors as they were saved, by name."""


def make_data_folder(target: Path) -> int:
    """Make a new, empty data folder and return its number."""
    check_save_folder(target)
    target.mkdir(exist_ok=True)
    taken = [
        int(match[1]) for path in target.iterdir() if (match := DATA_FOLDER.fullmatch(path.name))
    ]
    number = max(taken, default=-1) + 1
    (target / f"data-{number}").mkdir()
    return number


def write_tensors(entries: Sequence[Entry], data: Path, rank: int) -> dict[str, SavedTensor]:
    """Write this rank's file."""
    saved: dict[str, SavedTensor] = {}
    if not entries:
        return saved
    file = f"__{rank}_0.distcp"
    try:
        with (data / file).open("wb") as stream:
            for entry in entries:
                value, offset = entry.value.detach().cpu(), stream.tell()
                # A view would be saved with all of its memory.
                is_view = value.untyped_storage().nbytes() != value.nbytes
                torch.save(value.clone() if is_view else value, stream)
                size = stream.tell() - offset
                saved[entry.name] = SavedTensor.of(entry, file, offset, size, checksum(value))
            stream.flush()
            os.fsync(stream.fileno())
    except (OSError, RuntimeError) as error:
        raise _cannot_save(data, error, sum(each.value.nbytes for each in entries)) from error
    assert len(saved) == len(entries), "every box is saved once"
    return saved


def _cannot_save(data: Path, error: BaseException, num_bytes: int) -> InputFileError:
    """The error for tensors that could not be saved; finds a full disk behind torch's error."""
    why: BaseException | None = error
    while why is not None and not isinstance(why, OSError):
        why = why.__cause__ or why.__context__
    if why is None and shutil.disk_usage(data).free < num_bytes:
        why = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if isinstance(why, OSError):
        return cannot_write(data, why, num_bytes)
    return InputFileError(f"cannot write {data}: {first_line(error)}")


def checksum(value: Tensor) -> str:
    """SHA-256 of a tensor's elements."""
    return hashlib.sha256(elements(value)).hexdigest()


def read_tensors(contents: Contents, folder: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """Read the tensors of these names, joined where they were saved in parts."""
    found = {
        name: torch.empty(contents.shape(name), dtype=dtype_of(contents.dtype(name)))
        for name in names
    }
    read_boxes(
        contents,
        folder,
        {name: [(whole_box(value.shape), value)] for name, value in found.items()},
    )
    return found


def read_boxes(
    contents: Contents,
    folder: Path,
    wanted: Mapping[str, Sequence[tuple[Box, Tensor]]],
    read: ReadSaved | None = None,
) -> None:
    """Fill tensors with boxes of saved tensors, which may have been saved in other boxes.

    Saved tensors are read in batches of up to ``_BATCH_BYTES``, or one tensor at a time, so that
    a rank never holds more than a batch beside the tensors that it fills.

    Args:
        contents: Index of the checkpoint.
        folder: Folder of the checkpoint.
        wanted: Boxes and the tensors to fill with their elements, by name.
        read: Reads saved tensors by name from another place than the folder.
    """
    read = read or (lambda names: _read_saved(contents, folder, names))
    batch: list[str] = []
    num_bytes = 0
    for each in needed(contents, wanted):
        if batch and num_bytes + contents.tensors[each].num_bytes > _BATCH_BYTES:
            _fill(contents, read, batch, wanted)
            batch, num_bytes = [], 0
        batch.append(each)
        num_bytes += contents.tensors[each].num_bytes
    _fill(contents, read, batch, wanted)


def needed(
    contents: Contents, wanted: Mapping[str, Sequence[tuple[Box, Tensor]]]
) -> Iterator[str]:
    """Names of the saved tensors that overlap a wanted box."""
    for name, boxes in wanted.items():
        if name not in contents.parts:
            yield name
            continue
        for part in contents.parts[name]:
            saved = contents.tensors[part].box
            if any(box.overlap(saved) for box, _ in boxes):
                yield part


def _fill(
    contents: Contents,
    read: ReadSaved,
    names: Sequence[str],
    wanted: Mapping[str, Sequence[tuple[Box, Tensor]]],
) -> None:
    """Read saved tensors and copy them to where they are wanted."""
    for name, value in read(names).items():
        saved = contents.tensors[name]
        for box, target in wanted[saved.whole or name]:
            both = box.overlap(saved.box)
            if both is not None:
                both.of(target, box).copy_(both.of(value, saved.box))


def _read_saved(contents: Contents, folder: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """Read tensors and parts as they were saved."""
    loaded = {}
    for name in names:
        saved = contents.tensors[name]
        file = folder / contents.data / saved.file
        try:
            with file.open("rb") as stream:
                own: Any = _create_file_view(stream, saved.offset, saved.num_bytes)
                value = torch.load(own, map_location="cpu", weights_only=True)
            is_said = value.layout == torch.strided and tuple(value.shape) == saved.shape
            is_said = is_said and dtype_name(value.dtype) == saved.dtype
        except Exception as error:  # its unpickler fails on damaged data in many different ways
            raise InputFileError(
                f"cannot read checkpoint {folder}: {first_line(error)}"
            ) from error
        if not is_said or checksum(value) != saved.sha256:
            raise InputFileError(
                f"checkpoint {folder} is damaged: the checksum of {name} in {file} is wrong. "
                "Resume from another checkpoint."
            )
        loaded[name] = value
    return loaded


def publish(contents: Contents, index: Path, data: Path) -> None:
    """Make the new checkpoint the current one, then remove older ones."""
    metadata = pickle.dumps(_metadata(contents))
    try:
        (data / ".metadata").write_bytes(metadata)
    except OSError as error:
        raise cannot_write(data / ".metadata", error, len(metadata)) from error
    try:
        record = {"schema_version": SCHEMA_VERSION, **asdict(contents)}
        # Through JSON, which turns tuples into lists, so that a later read has the same checksum.
        record = json.loads(json.dumps({**record, "tensors": to_json(contents.tensors)}))
        write_json(index, {**record, "sha256": checksum_of(record)})
    except (TypeError, ValueError) as error:
        raise StrategyError(f"'extra' cannot be saved as JSON: {error}.") from error
    for path in index.parent.iterdir():
        is_older = DATA_FOLDER.fullmatch(path.name) and path.name != data.name and path.is_dir()
        # Only with nothing but the data of a checkpoint.
        if is_older and all(
            each.suffix == ".distcp" or each.name == ".metadata" for each in path.iterdir()
        ):
            shutil.rmtree(path, ignore_errors=True)


def _metadata(contents: Contents) -> Metadata:
    """The index in torch's terms: tensors in chunks, which have an offset and sizes each."""
    chunks: dict[str, list[ChunkStorageMetadata]] = {}
    places = {}
    for name, saved in contents.tensors.items():
        whole = saved.whole or name
        offsets = torch.Size(saved.offsets or (0,) * len(saved.shape))
        chunk = ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(saved.shape))
        chunks.setdefault(whole, []).append(chunk)
        places[MetadataIndex(whole, offsets)] = _StorageInfo(
            saved.file, saved.offset, saved.num_bytes
        )
    tensors: dict[str, Any] = {
        name: TensorStorageMetadata(
            properties=TensorProperties(dtype=dtype_of(contents.dtype(name))),
            size=torch.Size(contents.shape(name)),
            chunks=own,
        )
        for name, own in chunks.items()
    }
    return Metadata(tensors, storage_data=places)


def first_line(error: BaseException) -> str:
    """The cause of an error, in one line that can be printed.

    torch writes some of its errors in bold, and puts bytes of damaged files into others.
    """
    lines = re.sub(r"\x1b\[\d*m", "", str(error)).strip().splitlines()
    own = isinstance(error, HeterogError | OSError)
    text = " ".join([*([] if own else [f"{type(error).__name__}:"]), *lines[:1]])
    return "".join(letter if letter.isprintable() else "?" for letter in text)
