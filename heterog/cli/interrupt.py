"""Ctrl-C: the first one asks for the best so far, the second one ends at once."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from heterog.methods.planner import Stop

INTERRUPTED = 130
"""Exit code of an interrupted command, as in shells: 128 and SIGINT's number."""


@contextmanager
def stop_when_interrupted(also: Callable[[], None] = lambda: None) -> "Iterator[Stop]":
    """A switch that SIGINT and SIGTERM set; a second signal raises ``KeyboardInterrupt``.

    Args:
        also: Function that stops other workers.
    """
    from heterog.methods.planner import Stop

    stop = Stop()

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.is_requested:
            raise KeyboardInterrupt
        stop.request()
        _say("stopping with the best so far; once more ends at once")
        also()

    with _handled_by(ask):
        yield stop


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Make SIGTERM raise ``KeyboardInterrupt``, as SIGINT does anyway."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handled_by(interrupt):
        yield


def end_interrupted(what: str) -> None:
    """Print what was kept, and end with ``INTERRUPTED``.

    Raises:
        typer.Exit: always.
    """
    _say(f"interrupted; {what}")
    raise typer.Exit(INTERRUPTED)


@contextmanager
def _handled_by(handler: "signal._HANDLER") -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _say(text: str) -> None:
    sys.stderr.write(f"heterog: {text}\n")
    sys.stderr.flush()
