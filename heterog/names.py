"""Legal names: names end up in files of other languages, on command lines and on terminals.

Graphs, clusters, hosts, devices, device types and methods have names from one alphabet, which has
no quote, no backslash and none of the characters that have a meaning for a shell, YAML, HTML or
Python. Everything that is written into such a file is escaped all the same.
"""

import operator
import re
import reprlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from heterog.errors import HeterogError

_Item = TypeVar("_Item")

MAX_NAME = 200
MAX_TEXT = 4000
_NAME = re.compile(r"\w[\w .:@+,()/#=-]*")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


_BRIEF = reprlib.Repr()
_BRIEF.maxlevel = 3
_BRIEF.maxstring = _BRIEF.maxother = 200


def first_of(words: Sequence[str], most: int = 8) -> str:
    """The first of some words, and the number of the others.

    >>> first_of(["a", "b", "c"]), first_of(["a", "b", "c"], most=1)
    ('a, b, c', 'a and 2 more')
    """
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def own_name(value: object) -> str:
    """Name of a function or class, or of an object's class."""
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def name_fault(name: str) -> str | None:
    r"""Why a text cannot be a name, in words; ``None`` if it can.

    >>> name_fault("V100-16GB"), name_fault("model.py:workload (batch 4)")
    (None, None)
    >>> name_fault('x"; rm')
    'has \'"\', which names cannot have: letters, digits, spaces and . _ : @ + , ( ) / # = -'
    """
    if not name:
        return "is empty; give it a name"
    if len(name) > MAX_NAME:
        return f"has {len(name):,} characters; names have at most {MAX_NAME}"
    if _NAME.fullmatch(name) and name.isprintable():
        return None
    if not re.match(r"\w", name):
        return "begins with something else than a letter, a digit or '_'"
    wrong = next(
        letter for letter in name if not (_NAME.fullmatch(f"a{letter}") and letter.isprintable())
    )
    return (
        f"has {wrong!a}, which names cannot have: letters, digits, spaces and "
        ". _ : @ + , ( ) / # = -"
    )


def text_fault(text: str) -> str | None:
    r"""Why a text (a module's path, a remark) is not one printable line; ``None`` if it is.

    >>> text_fault("layers.0"), text_fault("a\x1b[2J")
    (None, "has '\\x1b', which is not printable")
    """
    if len(text) > MAX_TEXT:
        return f"has {len(text):,} characters; at most {MAX_TEXT:,} are read"
    if text.isprintable():
        return None
    wrong = next(letter for letter in text if not letter.isprintable())
    return f"has {wrong!a}, which is not printable"


def is_identifier(text: str) -> bool:
    """Whether a text is a Python name, perhaps with dots, such as the class of an optimizer.

    >>> is_identifier("torch.optim.AdamW"), is_identifier("SGD(1)")
    (True, False)
    """
    return len(text) <= MAX_NAME and _IDENTIFIER.fullmatch(text) is not None


def shown(value: object) -> str:
    """A value for an error of one line, however large or deep it is.

    >>> shown("a" * 100)
    "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa..."
    """
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    text = _BRIEF.repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def items_of(name: str, value: object, kind: type[_Item]) -> tuple[_Item, ...]:
    """The items of an argument that is to be a sequence of texts, or of whole numbers.

    >>> items_of("layers", [2, 4], int)
    (2, 4)
    >>> import numpy as np
    >>> items_of("layers", np.array([2, 4]), int)
    (2, 4)

    Raises:
        HeterogError: it is something else.
    """
    items: tuple[Any, ...] = (None,)
    if isinstance(value, Iterable) and not isinstance(value, str):
        items = tuple(value)
    if kind is int:
        with suppress(TypeError):
            items = tuple(map(operator.index, items))  # of NumPy, say
    if not all(isinstance(each, kind) for each in items):
        wanted = "texts" if kind is str else "whole numbers"
        raise HeterogError(f"`{name}` is {shown(value)}; give a list of {wanted}.")
    return items


def refuse_link(name: str, own: str) -> None:
    """Refuse to import a package under the name of a link to its folder.

    The top folder links to ``heterog/agents``, ``heterog/envs`` and ``heterog/simulator``. Python
    would load such a folder a second time, as modules that know nothing of the first.

    Args:
        name: ``__name__`` of the package.
        own: The name that it has in ``heterog``.

    Raises:
        ImportError: The names differ.
    """
    if name != own:
        raise ImportError(
            f"'{name}' is a link to the folder of '{own}'; import '{own}'", name=name
        )
