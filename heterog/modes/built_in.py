"""The list of this package's modes: the only place that names them all."""

from functools import cache
from typing import TYPE_CHECKING

from heterog.errors import UnknownNameError
from heterog.modes.mode import Mode

if TYPE_CHECKING:
    from heterog.methods.planner import Planner


@cache
def built_in_modes() -> tuple[type[Mode], ...]:
    """The classes of all modes, by ascending key."""
    from heterog.modes.asynchronous.value import AsynchronousServer
    from heterog.modes.averaging.value import Averaging
    from heterog.modes.codecs.value import Codecs
    from heterog.modes.stash.value import WeightStash

    return AsynchronousServer, Averaging, Codecs, WeightStash


def method_of(text: str) -> "Planner":
    """The method of a mode that a user asks for in words.

    >>> method_of("server=2").name, method_of("average=8").name
    ('server', 'average')

    Raises:
        HeterogError: a word is unknown, missing or has no such value.
    """
    known = {mode.word: mode for mode in built_in_modes() if mode.word}
    words = [part.partition("=")[0].strip() for part in text.split(",")]
    for word in words:
        if word in known:
            return known[word].method(text)  # its errors name the words that it takes
    raise UnknownNameError("mode of `asynchronous`", words[0], known)


def method_names(*, beside: str = "") -> tuple[str, ...]:
    """Names of all modes' methods, or only of the modes that go with the key ``beside``."""
    return tuple(
        mode.word
        for mode in built_in_modes()
        if mode.word and (not beside or beside in mode.goes_with)
    )
