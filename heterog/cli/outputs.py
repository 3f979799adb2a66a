"""Outputs of a command: all of them are checked before it begins.

A parameter whose annotation has a ``Written`` names an output. ``outputs_checked`` refuses a call
that could not write all of its outputs. It also refuses to overwrite an input, another output, or
a file whose name says that it is of another kind (``-o model.py``).

Standard streams may be closed, full, cut off or without Unicode; ``standard_streams`` copes.

Below the command line, messages name a setting as Python does, between single backticks. If the
running command has an option for the setting, ``errors_spelled`` puts its spelling there:
``--step-timeout``.
"""

import errno
import inspect
import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TextIO, get_args

from typer.models import ArgumentInfo, OptionInfo

from heterog.errors import HeterogError, InputFileError
from heterog.files import check_folder_writable, check_writable

P = ParamSpec("P")
_SETTING = re.compile(r"`([a-z_]+)`")


def options_of(command: Callable[..., None]) -> dict[str, str]:
    """The option, as it is typed, of each parameter of a command."""
    parameters = inspect.signature(command, eval_str=True).parameters
    return {name: _option(name, each) for name, each in parameters.items()}


def _option(name: str, parameter: inspect.Parameter) -> str:
    for each in get_args(parameter.annotation):
        if isinstance(each, OptionInfo):
            return str(next(iter((each.default, *(each.param_decls or ())))))
        if isinstance(each, ArgumentInfo):
            return name.upper()
    return name


def as_options(text: str, options: Mapping[str, str]) -> str:
    """The text with options in place of settings; other words between backticks stay."""

    def spelled(found: re.Match[str]) -> str:
        name = found[1]
        short = name.removeprefix("num_").removesuffix("_s")  # units are part of a value there
        return options.get(name) or options.get(short) or found[0]

    return _SETTING.sub(spelled, text)


def errors_spelled(command: Callable[P, None]) -> Callable[P, None]:
    """The command, whose errors name settings by its options."""
    options = options_of(command)

    @wraps(command)
    def spelling(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except HeterogError as error:
            error.args = (as_options(str(error), options),)
            raise

    return spelling


_SUFFIXES = frozenset(
    ".csv .gz .htm .html .ipynb .json .jsonl .md .pt .pth .py .sh .toml .yaml .yml".split()
)
"""Endings of files that people write or heterog reads; each ending means one kind of file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Marks a parameter that names an output.

    Attributes:
        suffixes: Endings of such a file; one that exists and has another of ``_SUFFIXES`` is not
            replaced.
        is_folder: Whether it is a folder, in which files are made.
        makes_parents: Whether folders above it are made, too.
        index: Name of a file that is written in the folder, too.
        renews: Parameter of an input that may be the same path, because the output continues it.
    """

    suffixes: tuple[str, ...] = ()
    is_folder: bool = False
    makes_parents: bool = False
    index: str = ""
    renews: str = ""


JSON = Written(suffixes=(".json", ".gz"))
HTML = Written(suffixes=(".html", ".htm"))
CSV = Written(suffixes=(".csv",))
LINES = Written(suffixes=(".jsonl",))
YAML = Written(suffixes=(".yaml", ".yml"))
POLICY = Written(suffixes=(".pt", ".pth"))
TRAINING = Written(suffixes=(".pt", ".pth"), renews="resume")
CHECKPOINT = Written(is_folder=True, index="checkpoint.json", renews="resume")
FOLDER = Written(is_folder=True)
CACHE = Written(is_folder=True, makes_parents=True)


def outputs_checked(command: Callable[P, None]) -> Callable[P, None]:
    """The command, which checks its outputs before anything else."""
    signature = inspect.signature(command, eval_str=True)
    marks = {
        name: mark
        for name, each in signature.parameters.items()
        for mark in get_args(each.annotation)
        if isinstance(mark, Written)
    }
    options = options_of(command)

    @wraps(command)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        outputs = {
            name: (mark, given[name])
            for name, mark in marks.items()
            if isinstance(given.get(name), Path)
        }
        inputs = {name: value for name, value in given.items() if name not in outputs}
        _check(outputs, inputs, options)
        with prints_beside() if given.get("as_json") else nullcontext():
            command(*args, **kwargs)

    return checked


_answers: list[TextIO] = []


@contextmanager
def prints_beside() -> Iterator[None]:
    """Print to stderr in the body, as a model's own file may; ``answers`` is stdout as before."""
    _answers.append(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _answers.pop()


def answers() -> TextIO:
    """Where the answer of the running command is printed."""
    return _answers[-1] if _answers else sys.stdout


def not_replaced(path: str | Path | None, what: str, *outputs: Path | None) -> None:
    """Refuse to write over a file that an input names.

    Args:
        path: Path of the file, if there is one.
        what: Description of the input, for the message.
        outputs: Paths of the outputs; those not asked for are ``None``.

    Raises:
        InputFileError: one of the outputs is that file.
    """
    for output in outputs:
        if path is not None and output is not None and _is_same(output, Path(path)):
            raise InputFileError(
                f"cannot write {output}: {what} is read there; name another file."
            )


def _check(
    outputs: Mapping[str, tuple[Written, Path]],
    inputs: Mapping[str, object],
    options: Mapping[str, str],
) -> None:
    written: list[tuple[str, Path]] = []
    for name, (mark, path) in outputs.items():
        files = _files(mark, path)
        for each in files:
            for other, before in written:
                if _is_same(each, before):
                    raise InputFileError(
                        f"cannot write {each}: {options[other]} and {options[name]} name the same "
                        "file; name two."
                    )
            for asked, value in inputs.items():
                if asked == mark.renews or (mark.is_folder and isinstance(value, str)):
                    continue  # `--to ddp -o ddp` is no input
                if any(_is_same(each, read) for read in _paths(value)):
                    raise InputFileError(
                        f"cannot write {each} ({options[name]}): {options[asked]} reads it; name "
                        "another file."
                    )
        written += [(name, each) for each in files]
        _check_one(mark, path, options[name])


def _check_one(mark: Written, path: Path, option: str) -> None:
    """Refuse an output that cannot be written, or that is something else by its name."""
    files = _files(mark, path)
    if mark.is_folder:
        check_folder_writable(path, makes_parents=mark.makes_parents)
        files = files[1:] if path.is_dir() else []
    for each in files:
        target = check_writable(each)
        suffix = target.suffix.lower()
        is_other = bool(mark.suffixes) and suffix in _SUFFIXES - {*mark.suffixes}
        if is_other and target.exists() and target.stat().st_size > 0:
            raise InputFileError(
                f"cannot write {each} ({option}): there is a {suffix} file, and what is written "
                f"ends in {mark.suffixes[0]}; name another file, or remove that one."
            )


def _files(mark: Written, path: Path) -> list[Path]:
    """The output, and what is written in it."""
    return [path, path / mark.index] if mark.index else [path]


def _paths(value: object) -> Iterator[Path]:
    """Paths that the value of an argument may name: ``a.py:f``, or several with commas."""
    if isinstance(value, Path):
        yield value
    elif isinstance(value, str):
        for each in (value, *(part.strip() for part in value.split(","))):
            for text in filter(None, (each, each.rpartition(":")[0])):
                yield Path(os.path.expanduser(text))
    elif isinstance(value, Iterable):
        for each in value:
            yield from _paths(each)


def _is_same(one: Path, other: Path) -> bool:
    """Whether two paths lead to one file, there or not."""
    try:
        if os.path.realpath(one) == os.path.realpath(other):
            return True
        return one.exists() and other.exists() and one.samefile(other)
    except (OSError, ValueError):  # no path at all
        return False


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@contextmanager
def standard_streams() -> Iterator[None]:
    """Let the standard streams print any text, and flush them at the end.

    A closed stdout is refused at the beginning; text for a closed stderr is lost. Letters that the
    encoding lacks are escaped. If the reader goes away (``| head``), the program ends quietly.

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
        # Errors of heterog's own files name the file, and are reported as such.
        if error.errno not in _FULL or error.filename is not None:
            raise
        _lose_the_rest()
        raise InputFileError(f"cannot write to stdout: {error.strerror}.") from error


def _open_closed() -> list[int]:
    """Open closed streams: a file opened later would get such a number and the printed text."""
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
        # With PYTHONUNBUFFERED a text is written in part, without an error, if the disk is full.
        raw = io.FileIO(stream.fileno(), "w", closefd=False)
        return io.TextIOWrapper(
            io.BufferedWriter(raw), stream.encoding, "backslashreplace", line_buffering=True
        )
    stream.reconfigure(errors="backslashreplace")
    return stream


def _lose_the_rest() -> None:
    """Discard unwritten text, because Python tries to write it again when it exits."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
