"""Reads files of any origin within limits; writes a file completely or not at all.

Files may have been made by anybody. Only regular files are opened (a pipe would wait for ever),
every kind has a largest size, compressed content counts by its unpacked size, and JSON is
read strictly: UTF-8, no key twice, no ``NaN``.
"""

import errno
import gzip
import json
import os
import shutil
import stat
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from heterog.errors import HeterogError, InputFileError
from heterog.names import shown
from heterog.units import MIB, format_bytes

CHECKPOINT_INDEX = "checkpoint.json"
"""The index file in a checkpoint's folder."""
MAX_JSON_BYTES = 128 * MIB
"""Most bytes of a JSON text, unpacked. The plan of the zoo's largest graph takes 2 MiB;
measurements of the whole zoo at five shares 30 MiB."""
_POLL_S = 0.02
_BESIDE = ".heterog-"
_MOST_MEMORY = 256 * MIB
# Bytes in CPython of a list or an object (with its slot), a text, and anything else.
_CONTAINER_BYTES, _TEXT_BYTES, _VALUE_BYTES = 96, 72, 40


def as_path(path: object) -> Path:
    """The path that a person gave.

    Raises:
        InputFileError: it is neither a text nor a path.
    """
    if not isinstance(path, str | os.PathLike):
        raise InputFileError(f"{shown(path)} is no path; give a text or a pathlib.Path.")
    return Path(path)


def check_writable(path: str | Path) -> Path:
    """The path, links followed, of a file that can be written; to be called before long work.

    Raises:
        InputFileError: it exists and is no regular file (a folder, a device, a pipe), its folder
            is missing, or the system refuses.
    """
    target, status = _existing(path)
    if status is not None and stat.S_ISDIR(status.st_mode):
        raise InputFileError(f"cannot write {path}: it is a folder; name a file in it.")
    if status is not None and not stat.S_ISREG(status.st_mode):
        raise InputFileError(
            f"cannot write {path}: it is not a regular file, but "
            f"{_NO_FILE.get(stat.S_IFMT(status.st_mode), 'something else')}; name a new file."
        )
    _check_folder_of(path, target, status)
    return target


def check_folder_writable(path: str | Path, *, makes_parents: bool = False) -> Path:
    """The path of a folder, existing or new, in which files can be written.

    Args:
        path: Path of the folder.
        makes_parents: Whether folders above it are made, too.

    Raises:
        InputFileError: it exists and is no folder, the folder above it is missing, or the system
            refuses.
    """
    target, status = _existing(path)
    if status is not None and not stat.S_ISDIR(status.st_mode):
        raise InputFileError(f"cannot write {path}: it is a file; name a folder.")
    if status is None and makes_parents:
        while not os.path.lexists(target.parent):
            target = target.parent
    _check_folder_of(path, target, status)
    return target


_NO_FILE = {stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def _existing(path: str | Path) -> tuple[Path, os.stat_result | None]:
    """The path with links followed, and what is there, if anything."""
    path = as_path(path)
    try:
        # Links are resolved, so that a write replaces the file and not a link to it.
        target = Path(os.path.realpath(path))
        try:
            return target, target.stat()
        except FileNotFoundError:
            return target, None
    except OSError as error:
        raise cannot_write(path, error, 0) from error
    except ValueError as error:  # a zero byte
        raise InputFileError(f"cannot write {str(path)!r}: {error}.") from error


def _check_folder_of(path: str | Path, target: Path, status: os.stat_result | None) -> None:
    if not target.parent.is_dir():
        what = "is not a folder" if target.parent.exists() else "does not exist"
        folder = target.parent if os.path.islink(path) else Path(path).parent
        raise InputFileError(f"cannot write {path}: the folder {folder} {what}.")
    places = [target.parent, target] if status is not None else [target.parent]
    if not all(os.access(place, os.W_OK) for place in places):
        raise InputFileError(f"cannot write {path}: permission denied.")


def write_atomically(path: str | Path, content: bytes) -> None:
    """Write a file beside its place and move it there, so that no reader sees half of it.

    A replaced file keeps its permissions, a new one has those of the umask; a link stays, and its
    target is replaced.

    Raises:
        InputFileError: the path is no file that can be written, or the system refuses.
    """
    target = check_writable(path)
    try:
        with moved_to(target) as beside:
            beside.write_bytes(content)
            if target.exists():
                shutil.copymode(target, beside)
    except OSError as error:
        raise cannot_write(path, error, len(content)) from error


@contextmanager
def moved_to(target: Path, *, is_folder: bool = False) -> Iterator[Path]:
    """A new hidden file or folder beside a path, which moves there at the end of the block.

    It is removed if the block fails.

    Args:
        target: Path of a file, there or not, or of a folder that is empty or not there.
        is_folder: Whether a folder is made.
    """
    # A short name, because the file's own may already be as long as names can be. What tempfile
    # makes is the user's alone, whatever the umask says.
    beside = target.parent / f"{_BESIDE}{uuid4().hex}"
    if is_folder:
        beside.mkdir()
    else:
        beside.touch(exist_ok=False)
    try:
        yield beside
        os.replace(beside, target)
    except BaseException:
        if is_folder:
            shutil.rmtree(beside, ignore_errors=True)
        else:
            beside.unlink(missing_ok=True)
        raise


def cannot_write(path: str | Path, error: OSError, num_bytes: int) -> InputFileError:
    """The error for a file that the system refuses to write, with the bytes it would need.

    Args:
        path: Path of the file or folder.
        error: Error of the system.
        num_bytes: Number of bytes that were to be written.
    """
    why = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return InputFileError(
            f"cannot write {path}: {why}; it needs {format_bytes(num_bytes)}{_room(path)}. "
            "What was there before is unchanged."
        )
    return InputFileError(f"cannot write {path}: {why}.")


def _room(path: str | Path) -> str:
    """Free space at a path, as the end of a sentence; empty if unknown."""
    folder = Path(path).absolute()
    while not folder.is_dir():
        folder = folder.parent
    try:
        found = os.statvfs(folder)
    except OSError:
        return ""
    return f", {format_bytes(found.f_bavail * found.f_frsize)} are free there"


def write_json(path: str | Path, value: Any, *, indent: int | None = None) -> None:
    """Write a value as JSON, compressed if the name ends in ``.gz``."""
    separators = None if indent else (",", ":")
    content = json.dumps(value, indent=indent, separators=separators, allow_nan=False).encode()
    if str(path).endswith(".gz"):
        content = gzip.compress(content, mtime=0)
    write_atomically(path, content)


def wait_for_file(path: Path, timeout_s: float, late: str) -> None:
    """Wait until a file exists.

    Raises:
        HeterogError: it does not in time; the text is ``late``.
    """
    deadline_s = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise HeterogError(late)
        time.sleep(_POLL_S)


def read_bytes(path: str | Path, what: str, most_bytes: int) -> bytes:
    """The content of a regular file, unpacked if it was compressed with gzip.

    Args:
        path: Path of the file.
        what: Kind of file, for messages.
        most_bytes: Most bytes that the file and its unpacked content may have.

    Raises:
        InputFileError: the file is missing, unreadable, no regular file, too large or cut off.
    """
    source = as_path(path)
    try:
        # Opening a pipe would wait for its writer.
        handle = os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            status = os.fstat(file.fileno())
            if stat.S_ISDIR(status.st_mode):
                raise InputFileError(f"cannot read {what} {source}: Is a directory.")
            if not stat.S_ISREG(status.st_mode):
                raise InputFileError(f"cannot read {what} {source}: it is not a regular file.")
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise InputFileError(f"cannot read {what} {source}: {error.strerror or error}.") from error
    except ValueError as error:  # a path with a zero byte
        raise InputFileError(f"cannot read {what} {str(path)!r}: {error}.") from error
    if len(content) > most_bytes:
        raise _too_large(what, source, most_bytes)
    if content[:2] == b"\x1f\x8b":
        return _unpacked(content, what, source, most_bytes)
    return content


def decoded(content: bytes, where: str) -> str:
    """The text of a file, without the mark that some editors begin it with.

    Args:
        content: The file's bytes.
        where: Start of the message.

    Raises:
        InputFileError: it is not UTF-8.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputFileError(f"{where}: byte {error.start} is not UTF-8.") from error


def _unpacked(content: bytes, what: str, source: Path, most_bytes: int) -> bytes:
    """The members of a gzip file, up to the limit and not a byte further."""
    parts: list[bytes] = []
    room = most_bytes
    while content:
        member = zlib.decompressobj(wbits=31)
        try:
            parts.append(member.decompress(content, room + 1))
        except zlib.error as error:
            raise InputFileError(f"{what} {source} is no valid gzip file: {error}.") from error
        room -= len(parts[-1])
        if room < 0:
            raise _too_large(what, source, most_bytes)
        if not member.eof:
            raise InputFileError(f"{what} {source} is no valid gzip file: it is cut off.")
        content = member.unused_data.lstrip(b"\0")
    return b"".join(parts)


def _too_large(what: str, source: Path, most_bytes: int) -> InputFileError:
    return InputFileError(
        f"{what} {source} has more than {format_bytes(most_bytes)}, the most that is read."
    )


def read_json(path: str | Path, what: str, most_bytes: int = MAX_JSON_BYTES) -> Any:
    """Read JSON, compressed or not.

    Raises:
        InputFileError: the file is missing, too large, or holds something else; names it and the
            place.
    """
    return parse_json(read_bytes(path, what, most_bytes), f"{what} {path}")


def parse_json(content: bytes, where: str) -> Any:
    """The value of a JSON text.

    Args:
        content: The text in UTF-8.
        where: Beginning of every message.

    Raises:
        InputFileError: not UTF-8, not JSON, a key twice, ``NaN`` or an infinity, or so many small
            values that they would take more than 256 MiB of memory.
    """
    containers = content.count(b"[") + content.count(b"{")
    needed = containers * _CONTAINER_BYTES + content.count(b'"') // 2 * _TEXT_BYTES
    if needed + content.count(b",") * _VALUE_BYTES > _MOST_MEMORY:
        raise InputFileError(f"{where} holds more values than are read; it would not fit.")
    try:
        return json.loads(
            decoded(content, f"{where} is not valid JSON"),
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
        )
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise InputFileError(f"{where} is not valid JSON: {reason}.") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; one with a key twice is refused."""
    found = dict(pairs)
    if len(found) < len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {key[:60]!r} is there twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def check_save_folder(folder: Path) -> None:
    """Refuse a folder in which no checkpoint can be saved, before there is one to save.

    Raises:
        InputFileError: it is a file, the folder above it is missing, or the system refuses.
    """
    if check_folder_writable(folder).is_dir():
        check_writable(folder / CHECKPOINT_INDEX)
