"""Shows doctests of docstrings as code; a part of how the site reads the source.

Docstrings have doctests between their paragraphs, without a heading of their own. Markdown would
take ``>>>`` for a quotation.
"""

import re
from typing import Any

from griffe import Extension, Object

DOCTEST = re.compile(r"^( *)>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


def fenced(docstring: str) -> str:
    """A docstring whose doctests are blocks of code."""
    return DOCTEST.sub(lambda match: f"{match[1]}```pycon\n{match[0]}\n{match[1]}```", docstring)


class Doctests(Extension):
    """Rewrites every docstring as it is read."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Fence the doctests of one object."""
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)
