"""Keeps the files of a user while ``heterog check`` runs a script again and again.

Python tells of files that it opens, moves and removes (``sys.addaudithook``); ``torch.save`` and
safetensors write without it and are followed, too. Other libraries that write outside of Python
(HDF5, SQLite, Arrow, programs that a script starts) are not stopped; ``times_of_files`` before and
``changed_files`` after tell what they have changed.
"""

import importlib
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from heterog.errors import HeterogError

_CACHES = {".cache", "__pycache__", ".triton", ".nv"}
"""Folders whose files may be replaced, wherever they are."""
_NAMED_CACHES = ("XDG_CACHE_HOME", "HF_HOME", "HF_DATASETS_CACHE", "TORCH_HOME")
"""Variables of the environment that name such folders."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_TRUNC


_MOST_FILES = 20_000
"""Most files whose times are noted, in less than a second; a data set may have millions."""


def times_of_files(folder: Path) -> dict[Path, int]:
    """When the files in a folder were changed last, in ns; of caches and hidden folders none.

    Files to which this process prints are left out. Of very many files, the first are looked at.
    """
    found: dict[Path, int] = {}
    printed = []
    for stream in (1, 2):
        with suppress(OSError):
            printed.append(os.fstat(stream))
    for top, folders, files in os.walk(folder):
        folders[:] = [
            each
            for each in sorted(folders)
            if not each.startswith((".", "__")) and not _is_cache(os.path.join(top, each, "file"))
        ]
        for path in (Path(top, each) for each in files):
            if len(found) == _MOST_FILES:
                return found
            with suppress(OSError):
                status = path.stat()
                if any(os.path.samestat(status, stream) for stream in printed) or _is_cache(path):
                    continue
                found[path] = status.st_mtime_ns
    return found


def changed_files(before: Mapping[Path, int]) -> list[Path]:
    """Those files of ``times_of_files`` that were changed or removed since."""
    changed = []
    for path, time_ns in before.items():
        try:
            is_same = path.stat().st_mtime_ns == time_ns
        except OSError:
            is_same = False
        if not is_same:
            changed.append(path)
    return changed


class KeptFiles:
    """Refuses to change files that were there before, and notes those that are made.

    Attributes:
        made: Files that were not there when they were first written.
    """

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s
        self.made: dict[Path, None] = {}

    def watch(self) -> None:
        """Follow this process, until it ends."""
        tempfile.gettempdir()  # it opens files to find out, while it holds a lock
        sys.addaudithook(self.hook)
        call_before(torch, "save", lambda *given, **named: self.write(_given(given, named, "f")))
        try:
            importlib.import_module("safetensors")
        except ImportError:
            return
        for name in ("safetensors", "safetensors.torch", "safetensors.numpy"):
            if name in sys.modules:  # those that are imported later take it of the first
                call_before(
                    sys.modules[name],
                    "serialize_file",
                    lambda *given, **named: self.write(_given(given, named, "filename")),
                )

    def hook(self, event: str, given: tuple[Any, ...]) -> None:
        """Called with each audit event of Python, before it happens."""
        if event == "open" and given[2] and given[2] & _WRITES:
            self.write(given[0])
        elif event == "os.truncate" or (event == "os.remove" and given[1] == -1):
            self.keep(given[0])
        elif event == "os.rename":
            self._keep_all(given[0])
            self.write(given[1])
        elif event == "shutil.rmtree":
            self._keep_all(given[0])

    def write(self, path: Any) -> None:
        """Before a file is written.

        Raises:
            HeterogError: it was there before.
        """
        if not isinstance(path, str | bytes | os.PathLike):  # an open file, or its number
            return
        self.keep(path)
        if not os.path.lexists(path) and not _is_cache(path):
            self.made[Path(os.path.abspath(os.fsdecode(path)))] = None

    def keep(self, path: Any) -> None:
        """Before a file is changed, moved or removed.

        Raises:
            HeterogError: it was there before.
        """
        if not isinstance(path, str | bytes | os.PathLike):
            return
        try:
            found = os.stat(path)
        except (OSError, ValueError):  # there is none
            return
        is_old = stat.S_ISREG(found.st_mode) and found.st_mtime < self._began_s
        if is_old and not _is_cache(path):
            raise HeterogError(
                f"the script would change, move or remove {os.path.relpath(os.fsdecode(path))}, "
                "which was there before the check. Move it away, or give the script another "
                "folder for its files."
            )

    def _keep_all(self, path: Any) -> None:
        self.keep(path)
        if isinstance(path, str | bytes | os.PathLike) and os.path.isdir(path):
            for each in Path(os.fsdecode(path)).rglob("*"):
                self.keep(each)


def _is_cache(path: Any) -> bool:
    """Whether a file may be replaced: it is locked, compiled, or in a folder of a cache."""
    whole = Path(os.path.abspath(os.fsdecode(path)))
    compiled = Path(tempfile.gettempdir()) / "torchinductor_"
    named = [os.environ[name] for name in _NAMED_CACHES if os.environ.get(name)]
    return (
        whole.suffix in (".lock", ".pyc")
        or not _CACHES.isdisjoint(whole.parts[:-1])
        or str(whole).startswith(str(compiled))
        or any(whole.is_relative_to(os.path.abspath(each)) for each in named)
    )


def _given(given: tuple[Any, ...], named: dict[str, Any], name: str) -> Any:
    """The second argument of a call, by place or by name."""
    return given[1] if len(given) > 1 else named.get(name)


def call_before(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Let a function of a class or module call another one first, with its arguments."""
    own = getattr(owner, name)

    @wraps(own)
    def both(*args: Any, **kwargs: Any) -> Any:
        call(*args, **kwargs)
        return own(*args, **kwargs)

    setattr(owner, name, both)
