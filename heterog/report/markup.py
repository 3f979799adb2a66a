"""Small pieces of the report's HTML; every text that is inserted is escaped here.

Pictures stretch with the page, so they hold no text: labels are beside them as HTML, which keeps
its size on every screen.
"""

from collections.abc import Iterable, Sequence
from html import escape

_FEW_COLUMNS = 4  # fit on a telephone
NUM_COLOURS = 8
"""Colours of ranges, ``--r0`` to ``--r7`` in the style sheet; ``--rest`` is for all others."""


def element(tag: str, content: str, **attributes: str) -> str:
    """An element with attributes; the content is HTML, the attributes are text.

    >>> element("b", "x", title="a < b")
    '<b title="a &lt; b">x</b>'
    """
    told = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(value, quote=True)}"'
        for name, value in attributes.items()
    )
    return f"<{tag}{told}>{content}</{tag}>"


def section(identity: str, title: str, *content: str, note: str = "") -> str:
    """A card of the page; empty without content."""
    inner = "\n".join(filter(None, content))
    if not inner:
        return ""
    hint = element("p", escape(note), class_="hint") if note else ""
    heading = element("h2", escape(title), id=f"{identity}-title")
    return (
        f'<section id="{escape(identity)}" aria-labelledby="{escape(identity)}-title">'
        f"{heading}{hint}\n{inner}\n</section>"
    )


def beside_each_other(*sections: str) -> str:
    """Sections side by side if the screen is wide enough."""
    kept = [each for each in sections if each]
    if len(kept) < 2:
        return "".join(kept)
    return f'<div class="pair">{"".join(f"<div>{each}</div>" for each in kept)}</div>'


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int]) -> str:
    """A table that scrolls sideways if it has to.

    Args:
        heads: Texts of the first row.
        rows: Cells as HTML.
        numbers: Columns that are set like numbers.
    """
    head = "".join(_cell("th", escape(text), i in numbers) for i, text in enumerate(heads))
    body = "\n".join(
        "<tr>" + "".join(_cell("td", text, i in numbers) for i, text in enumerate(row)) + "</tr>"
        for row in rows
    )
    many = ' class="many"' if len(heads) > _FEW_COLUMNS else ""
    return (
        f'<div class="wide"><table{many}><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody>'
        "</table></div>"
    )


def _cell(tag: str, content: str, is_number: bool) -> str:
    scope = ' scope="col"' if tag == "th" else ""
    return f"<{tag}{scope}{' class=num' * is_number}>{content}</{tag}>"


def chip(colour: str) -> str:
    """A small square of a colour of the style sheet."""
    return f'<i class="chip" style="background:var(--{escape(colour)})"></i>'


def meter(part: float, *, colour: str = "accent") -> str:
    """A bar that fills a part of its cell, 0 to 1."""
    width = 100.0 * min(max(part, 0.0), 1.0)
    return (
        f'<span class="meter"><span style="width:{width:.1f}%;background:var(--{escape(colour)})">'
        "</span></span>"
    )


def stacked(parts: Iterable[tuple[float, str, str]], label: str) -> str:
    """One bar of several parts: (part of the whole, colour, what it is)."""
    drawn = "".join(
        f'<span style="width:{100.0 * part:.2f}%;background:var(--{escape(colour)})" '
        f'title="{escape(what, quote=True)}"></span>'
        for part, colour, what in parts
        if part > 0.0
    )
    return (
        f'<div class="stacked" role="img" aria-label="{escape(label, quote=True)}">{drawn}</div>'
    )


def percent(part: float) -> str:
    """Whole percent; with a decimal for small parts.

    >>> percent(0.416), percent(0.0163)
    ('42 %', '1.6 %')
    """
    return f"{100.0 * part:.1f} %" if part < 0.0995 else f"{100.0 * part:.0f} %"


def range_colour(index: int) -> str:
    """Name of the colour of the range with this number among the coloured ones."""
    return f"r{index}" if 0 <= index < NUM_COLOURS else "rest"
