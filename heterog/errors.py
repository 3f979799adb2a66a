"""Errors that users see, each one clear line: what is wrong, how much, what to do next."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar

_Named = TypeVar("_Named")


class HeterogError(Exception):
    r"""Base class of every error that bad input or an impossible request can cause.

    The command line prints its text as one line and exits with code 2. Characters that cannot be
    printed, as in the name of a file, are escaped.

    >>> print(HeterogError("cannot write \udcff.json"))
    cannot write \udcff.json
    """

    def __str__(self) -> str:
        """The text, safe for any stream."""
        text = super().__str__()
        if text.isprintable():
            return text
        return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


class UnknownNameError(HeterogError):
    """A name (model, cluster, method, device type, ...) that is not known.

    >>> print(UnknownNameError("model", "bert_lage", ["bert_large", "vgg19"]))
    unknown model 'bert_lage'; did you mean 'bert_large'? Known: bert_large, vgg19.
    """

    def __init__(self, what: str, name: object, known: Iterable[str], *, advice: str = "") -> None:
        if advice:  # if too many are known to list them all
            super().__init__(f"unknown {what} '{name}'; {advice}")
            return
        names = sorted(known)
        super().__init__(
            f"unknown {what} '{name}'{nearest(str(name), names)} Known: {', '.join(names)}."
        )


def nearest(name: str, known: Sequence[str]) -> str:
    """The end of a sentence about an unknown name: a question for the known one most like it."""
    close = get_close_matches(name, known, n=1, cutoff=0.4)
    return f"; did you mean '{close[0]}'?" if close else "."


def named(what: str, name: object, known: Mapping[str, _Named]) -> _Named:
    """The value of a name in a table.

    Raises:
        UnknownNameError: the table lacks the name, or it is no text.
    """
    if not isinstance(name, str) or name not in known:
        raise UnknownNameError(what, name, known)
    return known[name]


class InputFileError(HeterogError):
    """A file given by the user that cannot be read, parsed or written; names file, line, field."""


class CaptureError(HeterogError):
    """A training step that cannot be captured; names the module, the line and the way out."""


class GraphError(HeterogError):
    """An operator graph that is not well formed (a cycle, a missing tensor, ...)."""


class ClusterError(HeterogError):
    """A cluster description that makes no sense (a bandwidth of zero, no device, ...)."""


class StrategyError(HeterogError):
    """A strategy that is not legal for its graph and cluster, or made for other ones."""


class BudgetError(HeterogError):
    """A search budget that cannot be understood or allows no search."""


class ConformanceError(HeterogError):
    """A method, encoder or reward of your own that breaks what everything else relies on."""


class HeterogWarning(UserWarning):
    """A setting that is ignored or doubtful; the text shows the arithmetic."""


class OwnSamplesWarning(HeterogWarning):
    """Ranks seem to compute from their own samples what one process computes of all."""


class ExperimentalWarning(FutureWarning):
    """Something is used that may change in any release; see the page "What is stable"."""


_Class = TypeVar("_Class", bound=type)


def experimental(made: _Class) -> _Class:
    """Make a class warn when it is instantiated: it may change in any release."""
    begin: Any = made.__init__  # type: ignore[misc]

    @wraps(begin)
    def warned(self: Any, *arguments: Any, **options: Any) -> None:
        warnings.warn(
            f"{made.__module__}.{made.__name__} is experimental: it may change in any release.",
            ExperimentalWarning,
            stacklevel=2,
        )
        begin(self, *arguments, **options)

    made.__init__ = warned  # type: ignore[misc]
    return made
