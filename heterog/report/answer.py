"""The answer of ``heterog plan`` in at most 15 lines: what to do, what it brings, what limits it.

Every number is one of the explanation's; the longer words are ``Explanation.paragraphs``.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from rich.text import Text

from heterog.explain.decided import what_was_decided
from heterog.explain.explanation import Explanation
from heterog.explain.peak_words import near_limit, size_with_interval
from heterog.report.placement_table import placement_lines
from heterog.search.plan import Plan
from heterog.simulator.critical_path import Limit
from heterog.units import format_bytes, format_range, format_seconds

MOST_LINES = 15
NARROWEST = 60
"""Width in columns below which lines are cut instead of being made to fit."""
_LABEL = 8
_LEAST_TABLE, _GOOD_TABLE = 4, 7
_LINES = {"do": 4, "gain": 2, "memory": 2, "limits": 2, "also": 2}
"""Most lines of each part, if there is room."""
_FEW_LINES = {"do": 2, "gain": 1, "memory": 1, "limits": 1, "also": 1}
"""Most lines of each part, if there is little room."""

Part = tuple[str, Sequence[str]]
"""Label of a part, and its lines."""


def answer(
    explanation: Explanation,
    *,
    width: int = 80,
    remarks: Sequence[str] = (),
    files: Sequence[str] = (),
    advice: str = "",
) -> list[Text]:
    """The lines to print: at most ``MOST_LINES``, none but a file's wider than ``width``.

    Args:
        explanation: Explanation of the plan.
        width: Width of the terminal in columns.
        remarks: Further sentences, about a background job or the calibration.
        files: Lines about files that were written, and what they are for.
        advice: Last line, where to read on, if there is anywhere.
    """
    width = max(width, NARROWEST)
    room = width - _LABEL
    together = [", ".join(files)] if files else []
    written = together if together and len(together[0]) <= room else files
    rest = [("files", written), ("more", [advice] if advice else [])]
    for most in (_LINES, _FEW_LINES):
        texts = _texts(explanation, room, most)
        also = [("also", _wrapped(remark, room, most["also"])) for remark in remarks]
        around = [*texts, *also, *rest]
        left = MOST_LINES - 1 - sum(len(lines) for _, lines in around)
        if left >= min(2 + len(explanation.decided.ranges), _GOOD_TABLE):
            break
    where = placement_lines(explanation.plan, explanation.decided, room, max(left, _LEAST_TABLE))
    texts.insert(-1, ("where", where))
    head = Text(_cut(_head(explanation.plan, width), width), style="bold", no_wrap=True)
    shown = [line for part in (*texts, *also, *rest) for line in _beside(part)]
    return [head, *_at_most(shown, MOST_LINES - 1)]


def brief_answer(
    plan: Plan, *, width: int = 80, remarks: Sequence[str] = (), files: Sequence[str] = ()
) -> list[Text]:
    """The same for a plan without explanation, whose step has too many tasks to look at each.

    Args:
        plan: Plan that is not ``is_written``.
        width: Width of the terminal in columns.
        remarks: Further sentences, as for ``answer``.
        files: Lines about files, as for ``answer``.
    """
    width = max(width, NARROWEST)
    room = width - _LABEL
    decided = what_was_decided(plan.strategy, plan.graph, plan.cluster)
    gains = [f"{each.speedup:.2f}x over {each.over}" for each in plan.gains]
    texts: list[Part] = [
        ("gain", _wrapped(", ".join(gains) or "no other method fits", room, 2)),
        ("memory", _wrapped(_brief_memory(plan), room, 2)),
        ("where", placement_lines(plan, decided, room, _GOOD_TABLE)),
        *(("also", _wrapped(remark, room, 2)) for remark in remarks),
        *([("files", files)] if files else []),
    ]
    head = Text(_cut(_head(plan, width), width), style="bold", no_wrap=True)
    return [head, *_at_most([line for part in texts for line in _beside(part)], MOST_LINES - 1)]


def _brief_memory(plan: Plan) -> str:
    """Whether a plan fits, how sure that is if the limit is near, and the fullest device."""
    usable = [device.usable_memory_bytes for device in plan.cluster.devices]
    peaks = list(zip(plan.peak_memory_bytes, usable, strict=True))
    peak, limit = fullest = max(peaks, key=lambda pair: pair[0] / pair[1])
    device = plan.cluster.devices[peaks.index(fullest)]
    lacks = peak > limit
    verdict = "does not fit" if lacks or plan.shortage else "fits"
    if lacks or not plan.shortage:
        near = near_limit(plan.peak_errors, peaks)
        verdict += f", but {near}" if near else ""
    verdict += f": {plan.shortage}" if plan.shortage else ""
    size = f"{size_with_interval(plan.peak_errors, peak)} of {format_bytes(limit)}"
    return f"{verdict}; fullest is {device.name} ({device.type.name}), {size}"


def _texts(explanation: Explanation, room: int, most: Mapping[str, int]) -> list[Part]:
    """The parts that every answer has, each as lines."""
    texts = {
        "do": [explanation.recommendation],
        "gain": [_gain(explanation, with_range=True), _gain(explanation, with_range=False)],
        "memory": [_memory(explanation, with_interval=True), _memory(explanation)],
        "limits": [_limits(explanation, number) for number in (3, 2, 1, 0)],
    }
    return [
        (label, _first_that_fits(wordings, room, most[label])) for label, wordings in texts.items()
    ]


def _first_that_fits(wordings: Sequence[str], room: int, most: int) -> list[str]:
    """The longest wording that needs no cut, or the shortest one, cut."""
    for words in wordings:
        if len(textwrap.wrap(words, room, break_on_hyphens=False)) <= most:
            return _wrapped(words, room, most)
    return _wrapped(wordings[-1], room, most)


def _head(plan: Plan, width: int) -> str:
    """Seconds of a step and the method, with the samples per second if there is room."""
    name = f"{plan.graph.name} on {plan.cluster.name}"
    if plan.step_time_s is None:
        return f"{name}: does not run; the nearest is {plan.method}"
    barrier = ", no step barrier" * (not plan.strategy.step_barrier)
    said = (mode.brief_words(plan.strategy) for mode in plan.strategy.modes)
    barrier += "".join(f", not exact: {words}" for words in said if words)
    interval = ""
    if plan.interval_s is not None:
        interval = f" ({format_range(*plan.interval_s, around_s=plan.step_time_s)})"
    step = f"{name}: {format_seconds(plan.step_time_s)} a step{interval}"
    rate = f", {plan.throughput_samples_per_s:,.1f} samples/s"
    method = f", by {plan.method}{barrier}"
    return step + rate * (len(step + rate + method) <= width) + method


def _gain(explanation: Explanation, *, with_range: bool) -> str:
    """Speed-ups over other methods, perhaps with their range under noise."""
    plan, quality = explanation.plan, explanation.quality
    if plan.step_time_s is None:
        return ""
    said = []
    for each in plan.gains:
        if each.over == plan.method:
            continue
        span = ""
        if with_range and each.low < each.high:
            span = f" ({each.low:.2f}x to {each.high:.2f}x if predictions are off)"
        said.append(f"{each.speedup:.2f}x over {each.over}{span}")
    known = {each.over for each in plan.gains}
    over_given = plan.gain_over_given
    if over_given is not None and plan.method != over_given.over:
        said.insert(0, f"{over_given.speedup:.2f}x over your layout")
    if not known and quality.data_parallel_s is not None and plan.cluster.num_devices > 1:
        ratio = quality.data_parallel_s / plan.step_time_s
        said.append(f"{ratio:.2f}x over {quality.data_parallel}")
    if quality.data_parallel_s is None and plan.cluster.num_devices > 1:
        said.insert(0, "no data parallelism fits")
    return ", ".join(said)


def _memory(explanation: Explanation, *, with_interval: bool = False) -> str:
    """Whether the plan fits, how sure that is near the limit, and the fullest device."""
    plan, fit = explanation.plan, explanation.fit
    fullest = fit.fullest
    needs = size_with_interval(plan.peak_errors if with_interval else None, fullest.peak_bytes)
    size = f"{needs} of {format_bytes(fullest.usable_bytes)}"
    near = near_limit(plan.peak_errors, fit.peaks)
    who = f"{fullest.device} ({fullest.device_type})"
    if fit.is_ok:
        if plan.step_time_s is None:
            why = plan.shortage or plan.outcome.replace("_", " ")
            return f"fits, but it cannot run: {why}"
        if near:
            return f"fits, but {near}; fullest is {who}, {size}{_recomputed(explanation)}"
        part = _percent(fullest.peak_bytes / fullest.usable_bytes)
        return f"fits; fullest is {who}, {size} ({part}){_recomputed(explanation)}"
    others = sum(device.lacking_bytes > 0 for device in fit.devices) - 1
    also = f", and {others} more lack some" if others else ""
    verdict = f"does not fit, but {near}" if near else "does not fit"
    return f"{verdict}: {who} lacks {format_bytes(fullest.lacking_bytes)} ({size}){also}"


def _recomputed(explanation: Explanation) -> str:
    decided = explanation.decided
    if not decided.num_recomputing:
        return ""
    groups = f"{decided.num_recomputing} of {decided.num_groups} groups"
    return f"; {groups} recompute {decided.recomputed}"


_LIMITS = {
    Limit.COMPUTE: "compute",
    Limit.LINK: "links",
    Limit.LATENCY: "latency",
    Limit.WAIT: "waiting",
}
_ON = {Limit.COMPUTE: "on", Limit.LINK: "for the", Limit.LATENCY: "of the", Limit.WAIT: "for"}


def _limits(explanation: Explanation, most_places: int) -> str:
    """The largest parts of the critical path, some with the place that has most of them."""
    whole = explanation.step_time_s
    by_limit: dict[Limit, dict[str, float]] = {}
    for piece in explanation.pieces:
        places = by_limit.setdefault(piece.limit, {})
        places[piece.place] = places.get(piece.place, 0.0) + piece.seconds
    parts = sorted(by_limit.items(), key=lambda entry: -sum(entry[1].values()))
    said = []
    for number, (limit, places) in enumerate(parts[:3]):
        seconds = sum(places.values())
        if seconds < 0.01 * whole:
            continue
        place, most = max(places.items(), key=lambda entry: entry[1])
        words = f"{_percent(seconds / whole)} {_LIMITS[limit]}"
        if number >= most_places:
            pass
        elif place and len(places) > 1:
            words += f" ({_percent(most / whole)} {_ON[limit]} {place})"
        elif place:
            words += f" {_ON[limit]} {place}"
        said.append(words)
    text = ", ".join(said)
    if explanation.fit.is_ok:
        which = "" if explanation.bound.with_op_rules else " without op rules"
        text += f"; no plan{which} can take less than {format_seconds(explanation.bound_s)}"
    return text


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %"


def _wrapped(text: str, room: int, most: int) -> list[str]:
    """A text in at most ``most`` lines; what is too long is cut off with dots."""
    if not text:
        return []
    return textwrap.wrap(
        " ".join(text.split()),
        room,
        max_lines=most,
        placeholder=" ...",
        break_on_hyphens=False,
    )


def _beside(part: Part) -> Iterator[Text]:
    """The lines of a part, the first one with its label."""
    label, lines = part
    for number, line in enumerate(lines):
        head = (label if number == 0 else "").ljust(_LABEL)
        yield Text.assemble((head, "bold cyan"), line, no_wrap=True)


def _at_most(lines: Sequence[Text], most: int) -> list[Text]:
    """All lines, or without some in the middle; the last one says where to read on."""
    return list(lines) if len(lines) <= most else [*lines[: most - 1], lines[-1]]


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: room - 3]}..."
