"""The list of the modes of this package: the one place that names them."""

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
    """The method that a person asks for in words.

    >>> method_of("server=2").name, method_of("average=8").name
    ('server', 'average')

    Raises:
        HeterogError: a word is unknown, missing or has no such value.
    """
    known = {mode.word: mode for mode in built_in_modes() if mode.word}
    words = [part.partition("=")[0].strip() for part in text.split(",")]
    for word in words:
        if word in known:
            return known[word].method(text)  # which says what it takes
    raise UnknownNameError("mode of `asynchronous`", words[0], known)


def method_names(*, beside: str = "") -> tuple[str, ...]:
    """Names of the rows of modes' methods, if wanted of those only that go with a mode's key."""
    return tuple(
        mode.word
        for mode in built_in_modes()
        if mode.word and (not beside or beside in mode.goes_with)
    )
