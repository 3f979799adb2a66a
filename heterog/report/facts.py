"""Facts of an explanation as tables and bars of the report: places, limits, memory, changes.

Every text that is inserted into the report's HTML is escaped here. Pictures stretch with the page,
so labels stand beside them as HTML, which keeps its size on every screen.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby

from heterog.explain.decided import Range
from heterog.explain.explanation import Explanation
from heterog.explain.what_if import RemedyKind
from heterog.explain.wording import near_limit, percent, provenance
from heterog.grouped import grouped
from heterog.pricing.intervals import PeakErrors
from heterog.report.modules import amounts, range_names, split_name
from heterog.simulator.critical_path import Limit, Purpose
from heterog.simulator.memory_breakdown import DeviceMemory, MemoryKind
from heterog.units import format_bytes, format_bytes_range, format_seconds

_FEW_COLUMNS = 4  # fit on a telephone
NUM_COLOURS = 8
"""Colours of ranges, ``--r0`` to ``--r7`` in the style sheet; ``--rest`` is for all others."""


def section(identity: str, title: str, *content: str, note: str = "") -> str:
    """A card of the page; empty without content."""
    inner = "\n".join(filter(None, content))
    if not inner:
        return ""
    hint = f'<p class="hint">{escape(note)}</p>' if note else ""
    return (
        f'<section id="{escape(identity)}" aria-labelledby="{escape(identity)}-title">'
        f'<h2 id="{escape(identity)}-title">{escape(title)}</h2>{hint}\n{inner}\n</section>'
    )


def beside_each_other(*sections: str) -> str:
    """Sections side by side if the screen is wide enough."""
    kept = [each for each in sections if each]
    if len(kept) < 2:
        return "".join(kept)
    return f'<div class="pair">{"".join(f"<div>{each}</div>" for each in kept)}</div>'


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int]) -> str:
    """A table that scrolls sideways if it has to; empty without rows.

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
    return body and (
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


def range_colour(index: int) -> str:
    """Name of the colour of the range with this number among the coloured ones."""
    return f"r{index}" if 0 <= index < NUM_COLOURS else "rest"


_MOST_RANGES = 40
_MOST_PIECES = 10
_MOST_NAMES = 4

LIMIT_COLOURS = {
    Limit.COMPUTE: "c1",
    Limit.HOST: "c0",
    Limit.LINK: "c5",
    Limit.LATENCY: "c7",
    Limit.WAIT: "c4",
}
_LIMIT_WORDS = {
    Limit.COMPUTE: "compute",
    Limit.HOST: "issuing kernels, by the host",
    Limit.LINK: "bytes on links",
    Limit.LATENCY: "latency",
    Limit.WAIT: "waiting",
}
_PURPOSE_WORDS = {
    Purpose.FORWARD: "forward pass",
    Purpose.RECOMPUTE: "activations made again",
    Purpose.BACKWARD: "backward pass",
    Purpose.UPDATE: "updates of parameters",
    Purpose.COPIES: "splitting and joining",
    Purpose.GRADIENTS: "gradients",
    Purpose.PARAMETERS: "parameters",
    Purpose.ACTIVATIONS: "activations",
    Purpose.NOTHING: "-",
}
_MEMORY_COLOURS = {kind: f"c{number}" for number, kind in enumerate(MemoryKind)}


def coloured(explanation: Explanation) -> dict[int, int]:
    """Colour number of each coloured range; the longest ranges have colours, in their order."""
    ranges = explanation.decided.ranges
    longest = sorted(range(len(ranges)), key=lambda i: -ranges[i].num_groups)[:NUM_COLOURS]
    return {index: colour for colour, index in enumerate(sorted(longest))}


def ranges_table(explanation: Explanation, *, is_narrow: bool = False) -> str:
    """A table with a row per range of modules and its devices, in the colours of the diagram."""
    ranges, colours = explanation.decided.ranges, coloured(explanation)
    shown = list(enumerate(ranges))[:_MOST_RANGES]
    names = range_names(ranges)
    rows = [
        _range_row(explanation, each, names[index], colours.get(index, -1))
        for index, each in shown
    ]
    more = len(ranges) - len(shown)
    rest = f'<p class="hint">and {more} more ranges</p>' if more > 0 else ""
    has_units = any(each.units for each in ranges)
    heads = ["modules", "devices", "units" if has_units else "samples", "gradients", "split along",
             "groups"]  # fmt: skip
    if is_narrow:
        heads, rows = heads[:4], [row[:4] for row in rows]
    return table(heads, rows, numbers=(5,)) + rest


def _range_row(explanation: Explanation, each: Range, name: str, colour: int) -> list[str]:
    whole = f"{each.first} to {each.last}"
    return [
        f'{chip(range_colour(colour))}<span title="{escape(whole, quote=True)}">'
        f"{escape(name)}</span>",
        escape(_devices(explanation, each)),
        escape(_told(amounts(each))),
        escape(", ".join(each.syncs) or "-"),
        escape(split_name(each)),
        f"{each.num_groups}",
    ]


def _devices(explanation: Explanation, each: Range) -> str:
    """Names and types of devices with work; only the ends of long lists."""
    cluster = explanation.plan.cluster
    by_type = grouped(
        (cluster.devices[device].type.name, cluster.devices[device].name)
        for device, share in zip(each.devices, each.shares, strict=True)
        if share > 0
    )
    return "; ".join(f"{_names(names)} ({kind})" for kind, names in by_type.items())


def _names(names: Sequence[str]) -> str:
    if len(names) <= _MOST_NAMES:
        return ", ".join(names)
    return f"{len(names)} of {names[0]} to {names[-1]}"


def _told(found: Sequence[str]) -> str:
    """Amounts of devices with work, equal neighbours together: ``"2 x 13, 2 x 11"``."""
    runs = groupby(amount for amount in found if amount != "-")
    counts = [(len(list(alike)), amount) for amount, alike in runs]
    texts = [f"{count} x {amount}" if count != 1 else amount for count, amount in counts]
    return ", ".join(texts) if len(texts) <= 8 else f"{', '.join(texts[:7])}, ..."


def left_out_table(explanation: Explanation) -> str:
    """Devices without work, and the step time if they get some."""
    cluster = explanation.plan.cluster
    rows = []
    for left in explanation.left_out:
        names = [cluster.devices[device].name for device in left.devices]
        kinds = dict.fromkeys(cluster.devices[device].type.name for device in left.devices)
        cost = "does not fit"
        if left.step_time_s is not None:
            more = left.step_time_s / explanation.step_time_s - 1.0
            cost = f"{format_seconds(left.step_time_s)} ({100 * more:+.1f} %)"
        rows.append([escape(_names(names)), escape(", ".join(kinds)), escape(cost)])
    return table(["left out", "type", "step with work there"], rows, numbers=(2,))


def limits_bar(explanation: Explanation) -> str:
    """The parts of the critical path as one bar with its key."""
    whole = explanation.step_time_s
    by_limit = {
        limit: sum(piece.seconds for piece in explanation.pieces if piece.limit == limit)
        for limit in Limit
    }
    parts = [
        (
            seconds / whole,
            LIMIT_COLOURS[limit],
            f"{_LIMIT_WORDS[limit]} {percent(seconds / whole)}",
        )
        for limit, seconds in by_limit.items()
        if seconds > 0.0
    ]
    words = "".join(f"<li>{chip(colour)}{escape(what)}</li>" for _, colour, what in parts)
    bar = stacked(parts, "critical path: " + ", ".join(what for _, _, what in parts))
    return f'{bar}<ul class="keys">{words}</ul>'


def limits_section(explanation: Explanation) -> str:
    """The parts of the critical path as one bar and as a table."""
    return section(
        "limits",
        "What limits the step",
        limits_bar(explanation),
        table(
            ["spent on", "where", "of the step", "time", "for", ""],
            _limit_rows(explanation),
            numbers=(2, 3),
        ),
        note="The chain of tasks that the step's time follows from; its parts add up to the step.",
    )


def _limit_rows(explanation: Explanation) -> Iterator[list[str]]:
    whole = explanation.step_time_s
    summed: dict[tuple[Limit, str, Purpose], float] = defaultdict(float)
    for piece in explanation.pieces:
        summed[piece.limit, piece.place, piece.purpose] += piece.seconds
    ranked = sorted(summed.items(), key=lambda entry: -entry[1])
    for (limit, place, purpose), seconds in ranked[:_MOST_PIECES]:
        yield [
            chip(LIMIT_COLOURS[limit]) + escape(_LIMIT_WORDS[limit]),
            escape(place or "-"),
            percent(seconds / whole),
            format_seconds(seconds),
            escape(_PURPOSE_WORDS[purpose]),
            meter(seconds / whole, colour=LIMIT_COLOURS[limit]),
        ]
    rest = sum(seconds for _, seconds in ranked[_MOST_PIECES:])
    if rest > 0.0:
        count = len(ranked) - _MOST_PIECES
        yield [f"{count} others", "-", percent(rest / whole), format_seconds(rest), "-",
               meter(rest / whole, colour="c4")]  # fmt: skip


def comparison_table(explanation: Explanation) -> str:
    """The plan compared with methods that people would use without it, and the bound, as bars."""
    quality, plan = explanation.quality, explanation.plan
    named = [(f"this plan ({plan.method})", explanation.step_time_s, "accent")]
    if quality.data_parallel_s is not None:
        named.append(
            (f"best data parallelism ({quality.data_parallel})", quality.data_parallel_s, "c4")
        )
    given = explanation.given
    if given is not None and given.step_time_s is not None:
        named.append(("your layout", given.step_time_s, "c6"))
    if explanation.quickly_found_s is not None:
        named.append(("a quick search", explanation.quickly_found_s, "c4"))
    named.append(("no plan can take less", explanation.bound_s, "c3"))
    longest = max(seconds for _, seconds, _ in named)
    rows = [
        [
            escape(name),
            format_seconds(seconds),
            f"{seconds / explanation.step_time_s:.2f}x",
            meter(seconds / longest, colour=colour),
        ]
        for name, seconds, colour in named
    ]
    if given is not None and given.step_time_s is None:
        rows.append([escape(f"your layout ({given.outcome.replace('_', ' ')})"), "-", "-", ""])
    return table(["", "step time", "of this plan's", ""], rows, numbers=(1, 2))


def memory_section(explanation: Explanation) -> str:
    """The memory of every device at its fullest moment by use, compared with its limit."""
    devices = explanation.fit.devices
    most = max(max(d.peak_bytes, d.usable_bytes) for d in devices)
    alike = grouped(
        ((each.device_type, each.usable_bytes, format_bytes(each.peak_bytes)), each)
        for each in devices
    )
    kinds = [kind for kind in MemoryKind if any(d.bytes_of(kind) > 0.005 * most for d in devices)]
    keys = "".join(f"<li>{chip(_MEMORY_COLOURS[kind])}{escape(kind)}</li>" for kind in kinds)
    errors = explanation.plan.peak_errors
    rows = [_memory_row(members, most, errors) for members in alike.values()]
    near = near_limit(errors, explanation.fit.peaks)
    return section(
        "fit",
        "Memory at its fullest",
        f'<ul class="keys">{keys}</ul>',
        table(
            ["device", "needs", "80 % interval", "usable", "lacks", ""], rows, numbers=(1, 2, 3, 4)
        ),
        f"<p><b>{escape(near)}</b></p>" if near else "",
        remedies_table(explanation),
        note="" if errors is None else provenance(errors),
    )


def _memory_row(
    members: Sequence[DeviceMemory], most: int, errors: PeakErrors | None
) -> list[str]:
    first = members[0]
    names = [device.device for device in members]
    parts = [
        (size / most, _MEMORY_COLOURS[kind], f"{kind} {format_bytes(size)}")
        for kind, size in first.parts
        if size > 0
    ]
    label = f"{first.device}: " + ", ".join(what for _, _, what in parts)
    limit = f'<span class="limit" style="left:{100.0 * first.usable_bytes / most:.2f}%"></span>'
    return [
        escape(f"{_names(names)} ({first.device_type})"),
        format_bytes(first.peak_bytes),
        "-"
        if errors is None
        else format_bytes_range(*errors.interval(first.peak_bytes), around=first.peak_bytes),
        format_bytes(first.usable_bytes),
        f"<b>{format_bytes(first.lacking_bytes)}</b>" if first.lacking_bytes else "-",
        f'<div class="tank">{stacked(parts, label)}{limit}</div>',
    ]


_REMEDIES = {
    RemedyKind.RECOMPUTE: "compute {again} again in {amount} groups",
    RemedyKind.MICRO_BATCHES: "cut the batch into {amount} micro-batches",
    RemedyKind.BATCH_SIZE: "train with a batch of {amount}",
}


def remedies_table(explanation: Explanation) -> str:
    """Changes that make the plan fit, if it does not."""
    rows = []
    for remedy in explanation.remedies:
        if remedy.kind == RemedyKind.MEMORY:
            words = f"{format_bytes(remedy.amount)} usable on every {remedy.device_type}"
        else:
            words = _REMEDIES[remedy.kind].format(amount=remedy.amount, again=remedy.keeps.words)
        seconds = "-" if remedy.step_time_s is None else format_seconds(remedy.step_time_s)
        rows.append([escape(words), seconds])
    return table(["what would make it fit", "step time"], rows, numbers=(1,))


def changes_section(explanation: Explanation) -> str:
    """Savings by every possible purchase, most first."""
    rows = []
    for change in explanation.changes:
        before = "does not fit" if change.before_s is None else format_seconds(change.before_s)
        after = "does not fit" if change.after_s is None else format_seconds(change.after_s)
        rows.append(
            [
                escape(change.what),
                escape(change.where or "-"),
                escape(before),
                escape(after),
                percent(change.saving),
                meter(change.saving, colour="c3"),
            ]
        )
    return section(
        "changes",
        "What would help",
        table(["bought", "where", "now", "with it", "saves", ""], rows, numbers=(2, 3, 4)),
        note="Each change was planned anew by a quick search, and so was the cluster as it is.",
    )
