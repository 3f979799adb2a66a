"""Standard streams that may be closed, full, cut off or without Unicode."""

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from heterog.errors import InputFileError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@contextmanager
def standard_streams() -> Iterator[None]:
    """Make the standard streams fit to print any text, and end with all of it written.

    Without stdout nothing begins; a closed stderr loses what is printed there. A letter that the
    encoding lacks is printed as an escape. A reader that goes away (``| head``) ends the program
    quietly.

    Raises:
        InputFileError: stdout is closed, or what was printed could not be written.
        SystemExit: the reader is gone.
    """
    if 1 in _open_closed():
        raise InputFileError(
            "stdout is closed, and the answer would be lost; give it a file (> answer.txt), or "
            "/dev/null."
        )
    sys.stdout, sys.stderr = _printable(sys.stdout), _printable(sys.stderr)
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _lose_the_rest()
        sys.exit(1)
    except OSError as error:
        # Files of ours have an error of their own, which names them.
        if error.errno not in _FULL or error.filename is not None:
            raise
        _lose_the_rest()
        raise InputFileError(f"cannot write to stdout: {error.strerror}.") from error


def _open_closed() -> list[int]:
    """Open what is closed; a file opened later would get its number, and what is printed."""
    closed = []
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            closed.append(number)
    return closed


def _printable(stream: TextIO | None) -> TextIO:
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    if isinstance(stream.buffer, io.RawIOBase) and stream is sys.stdout:
        # PYTHONUNBUFFERED: where a disk is full, a text is written in part, and nobody is told.
        raw = io.FileIO(stream.fileno(), "w", closefd=False)
        return io.TextIOWrapper(
            io.BufferedWriter(raw), stream.encoding, "backslashreplace", line_buffering=True
        )
    stream.reconfigure(errors="backslashreplace")
    return stream


def _lose_the_rest() -> None:
    """Let what is still to be printed go nowhere, as Python tries again at its end."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
