"""Writing files whole or not at all, and asking early whether one can be written."""

import gzip
import json
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

from heterog.errors import InputFileError


def check_writable(path: str | Path) -> Path:
    """The path, if a file can be written there: asked before long work, not after it.

    Raises:
        InputFileError: the folder is missing or not writable, or the path is a folder.
    """
    target = Path(path)
    folder = target.parent
    if target.is_dir():
        raise InputFileError(f"cannot write {target}: it is a folder; name a file in it.")
    if not folder.is_dir():
        raise InputFileError(f"cannot write {target}: the folder {folder} does not exist.")
    if not os.access(folder, os.W_OK) or (target.exists() and not os.access(target, os.W_OK)):
        raise InputFileError(f"cannot write {target}: permission denied.")
    return target


def write_atomically(path: str | Path, content: bytes) -> None:
    """Write a file beside its place and move it there, so that no reader sees half of it.

    Raises:
        InputFileError: the system refuses.
    """
    target = check_writable(path)
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.chmod(name, 0o644)
            os.replace(name, target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise InputFileError(f"cannot write {target}: {error.strerror or error}.") from error


def write_json(path: str | Path, value: Any, *, indent: int | None = None) -> None:
    """Write a value as JSON, compressed if the name ends in ``.gz``."""
    separators = None if indent else (",", ":")
    content = json.dumps(value, indent=indent, separators=separators, allow_nan=False).encode()
    if str(path).endswith(".gz"):
        content = gzip.compress(content, mtime=0)
    write_atomically(path, content)


def read_json(path: str | Path, what: str) -> Any:
    """Read JSON, compressed or not.

    Raises:
        InputFileError: the file is missing or holds something else; names it and the place.
    """
    source = Path(path)
    try:
        content = source.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        return json.loads(content)
    except OSError as error:
        raise InputFileError(f"cannot read {what} {source}: {error.strerror or error}.") from error
    except (ValueError, EOFError, RecursionError, zlib.error) as error:
        raise InputFileError(f"{what} {source} is not valid JSON: {error}.") from error
