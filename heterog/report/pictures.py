"""Pictures of the report as inline SVG without text: the cluster, the search, a small timeline.

All of them are bounded, however large the plan: a device is a square, a method a line, and a
timeline a row of at most ``_BINS`` columns per device.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

import numpy as np
import numpy.typing as npt

from heterog.explain.explanation import Explanation
from heterog.explain.wording import percent
from heterog.grouped import grouped
from heterog.lowering.program import IntArray
from heterog.report.facts import chip, coloured, range_colour
from heterog.report.lanes import CATEGORIES, task_categories, view_lanes
from heterog.report.modules import amounts, range_names, sync_name
from heterog.search.history import MethodHistory
from heterog.simulator.timeline import Timeline
from heterog.units import format_seconds

_SIZE, _GAP, _PER_ROW = 34, 6, 8
_MOST_STAGES = 12
_MOST_LANES = 64
_BINS = 240
_ROW = 12


# --- cluster ------------------------------------------------------------------------------------


def cluster_picture(explanation: Explanation) -> str:
    """Hosts as cards, alike ones as one; devices as squares in the colours of what runs there."""
    cluster = explanation.plan.cluster
    told = _ranges_of_devices(explanation)
    cards: dict[tuple[object, ...], list[int]] = {}
    for index, devices in enumerate(cluster.host_devices):
        alike = [
            (cluster.devices[each].type, *told.get(each, []), percent(explanation.busy[each]))
            for each in devices
        ]
        cards.setdefault((_host_facts(explanation, index), *alike), []).append(index)
    drawn = "".join(_card(explanation, each, told) for each in cards.values())
    return f'<div class="hosts">{drawn}</div>'


def _host_facts(explanation: Explanation, index: int) -> str:
    """Devices and links of a host, in words."""
    cluster = explanation.plan.cluster
    host, devices = cluster.hosts[index], cluster.host_devices[index]
    facts = [", ".join(dict.fromkeys(cluster.devices[device].type.name for device in devices))]
    if len(devices) > 1:
        facts.append(f"{host.intra.kind} {host.intra.bandwidth_bytes_per_s / 1e9:g} GB/s")
    if cluster.num_hosts > 1:
        rate = host.nic_line_rate_bytes_per_s * 8e-9
        count = f"{host.num_nics} NICs of" if host.num_nics > 1 else "NIC"
        facts.append(f"{count} {rate:g} Gbit/s")
    return " · ".join(facts)


def _card(
    explanation: Explanation, hosts: Sequence[int], told: Mapping[int, list[tuple[str, str]]]
) -> str:
    """The card of hosts with equal devices and equal work, with the devices of the first."""
    names = [explanation.plan.cluster.hosts[host].name for host in hosts]
    name = names[0]
    if len(names) > 1:
        link = " and " if len(names) == 2 else " to "
        name = f"{len(names)} hosts: {names[0]}{link}{names[-1]}"
    devices = explanation.plan.cluster.host_devices[hosts[0]]
    return (
        f'<figure class="host"><figcaption><b>{escape(name)}</b> '
        f"{escape(_host_facts(explanation, hosts[0]))}</figcaption>"
        f"{_devices_svg(explanation, devices, told)}</figure>"
    )


def _ranges_of_devices(explanation: Explanation) -> Mapping[int, list[tuple[str, str]]]:
    """(colour, words) of each range in which a device has work, by device."""
    colours, names = coloured(explanation), range_names(explanation.decided.ranges)
    return grouped(
        (device, (range_colour(colours.get(index, -1)), f"{names[index]}: {amount}"))
        for index, each in enumerate(explanation.decided.ranges)
        for device, amount in zip(each.devices, amounts(each), strict=True)
        if amount != "-"
    )


def _devices_svg(
    explanation: Explanation, devices: Sequence[int], told: Mapping[int, list[tuple[str, str]]]
) -> str:
    columns = min(len(devices), _PER_ROW)
    rows = -(-len(devices) // _PER_ROW)
    width, height = columns * (_SIZE + _GAP) - _GAP, rows * (_SIZE + _GAP) - _GAP
    squares = "".join(
        _device_square(explanation, device, told.get(device, []), number)
        for number, device in enumerate(devices)
    )
    names = ", ".join(explanation.plan.cluster.devices[device].name for device in devices[:8])
    return (
        f'<svg role="img" aria-label="{escape(f"devices {names}", quote=True)}" width="{width}" '
        f'height="{height}" viewBox="0 0 {width} {height}">{squares}</svg>'
    )


def _device_square(
    explanation: Explanation, device: int, told: Sequence[tuple[str, str]], number: int
) -> str:
    """A striped square; the height of the dark bar at its right is the part of busy time."""
    x, y = number % _PER_ROW * (_SIZE + _GAP), number // _PER_ROW * (_SIZE + _GAP)
    place, busy = explanation.plan.cluster.devices[device], explanation.busy[device]
    colours = list(dict.fromkeys(colour for colour, _ in told))
    stripe = _SIZE / max(len(colours), 1)
    fills = "".join(
        f'<rect x="{x + i * stripe:.1f}" y="{y}" width="{stripe:.1f}" height="{_SIZE}" '
        f'fill="var(--{colour})"/>'
        for i, colour in enumerate(colours)
    )
    tall = busy * (_SIZE - 4)
    words = [
        f"{place.name} {place.type.name}",
        f"computes {percent(busy)} of the step" if told else "left out",
        *(text for _, text in told[:6]),
    ]
    return (
        f"<g><title>{escape(chr(10).join(words))}</title>{fills}"
        f'<rect class="{"frame" if told else "frame idle"}" x="{x + 0.5}" y="{y + 0.5}" '
        f'width="{_SIZE - 1}" height="{_SIZE - 1}" rx="4"/>'
        f'<rect class="busy" x="{x + _SIZE - 7}" y="{y + _SIZE - 2 - tall:.1f}" width="4" '
        f'height="{tall:.1f}"/></g>'
    )


def stages_picture(explanation: Explanation) -> str:
    """The ranges as boxes in the order of the forward pass, each with its devices."""
    ranges, colours = explanation.decided.ranges, coloured(explanation)
    if len(ranges) < 2:
        return ""
    cluster, stage_names = explanation.plan.cluster, range_names(ranges)
    boxes = []
    for index, each in enumerate(ranges[:_MOST_STAGES]):
        colour = range_colour(colours.get(index, -1))
        names = [
            cluster.devices[device].name
            for device, share in zip(each.devices, each.shares, strict=True)
            if share > 0
        ]
        who = ", ".join(names) if len(names) <= 4 else f"{len(names)} devices"
        boxes.append(
            f'<li style="border-color:var(--{colour})"><b>{escape(stage_names[index])}</b>'
            f"<span>{escape(who)}</span><span>{escape(sync_name(each))}</span></li>"
        )
    rest = len(ranges) - _MOST_STAGES
    if rest > 0:
        boxes.append(f"<li><b>{rest} more</b><span>see the table</span></li>")
    return f'<ol class="stages" aria-label="ranges of modules in order">{"".join(boxes)}</ol>'


# --- search -------------------------------------------------------------------------------------


def history_picture(histories: Sequence[MethodHistory], chosen: str) -> str:
    """Best step of each method over the seconds of the search, and the best of all so far.

    Values above three times the best are drawn at the upper edge.
    """
    if not any(len(each.points) for each in histories):
        return ""
    frame = _frame(histories)
    ranked = sorted(histories, key=lambda each: each.points[-1][2])
    lines, keys = [_so_far(histories, frame)], []
    for number, each in enumerate(ranked):
        colour = f"c{number % len(CATEGORIES)}"
        final = format_seconds(each.points[-1][2])
        is_chosen = ' class="chosen"' if each.method == chosen else ""
        lines.append(
            f'<path d="{_steps(each, frame)}" stroke="var(--{colour})"{is_chosen}>'
            f"<title>{escape(f'{each.method}: {final}')}</title></path>"
        )
        count = len(each.points)
        keys.append(
            f"<li{is_chosen}>{chip(colour)}{escape(each.method)} "
            f'<span class="soft">{final}{f", {count} improvements" * (count > 1)}</span></li>'
        )
    label = f"best step time over {format_seconds(frame.end_s)} of search; the best is {chosen}"
    heights = format_seconds(frame.top_s), format_seconds(frame.best_s)
    widths = "0 s", "seconds of search", format_seconds(frame.end_s)
    keys.insert(0, f"<li>{chip('ink')}best so far</li>")
    return plot(lines, label, heights, widths, keys)


def x_of(part: float) -> str:
    """Place of a part of the width of a plot; it has a margin."""
    return f"{4.0 + 992.0 * min(max(part, 0.0), 1.0):.1f}"


def y_of(part: float) -> str:
    """Place of a part of the height of a plot, from its lower edge."""
    return f"{190.0 - 184.0 * min(max(part, 0.0), 1.0):.1f}"


def plot(
    lines: Iterable[str],
    label: str,
    heights: tuple[str, str],
    widths: tuple[str, str, str],
    keys: Iterable[str],
) -> str:
    """A plot of paths on 1000 by 200 units.

    Args:
        lines: The paths.
        label: What it shows, for people who do not see it.
        heights: Values at the upper and lower edge.
        widths: Value at the left, what the width means, value at the right.
        keys: Items of the list below it.
    """
    return (
        '<div class="plot"><div class="ylabels">'
        f"<span>{heights[0]}</span><span>{heights[1]}</span>"
        f'</div><svg role="img" aria-label="{escape(label, quote=True)}" viewBox="0 0 1000 200" '
        f'preserveAspectRatio="none" class="lines">{"".join(lines)}</svg>'
        f'<div class="xlabels">{"".join(f"<span>{each}</span>" for each in widths)}</div></div>'
        f'<ul class="keys">{"".join(keys)}</ul>'
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """The frame of a plot of a search: seconds to the right, seconds per step upwards."""

    end_s: float
    best_s: float
    top_s: float

    def x(self, seconds: float) -> str:
        return x_of(seconds / self.end_s)

    def y(self, step_s: float) -> str:
        return y_of((step_s - self.best_s) / (self.top_s - self.best_s))


def _frame(histories: Sequence[MethodHistory]) -> _Frame:
    best = min(each.points[-1][2] for each in histories)
    worst = max(point[2] for each in histories for point in each.points)
    return _Frame(
        end_s=max(max(each.finish_s for each in histories), 1e-9),
        best_s=best,
        top_s=max(min(worst, 3.0 * best), best * 1.02),
    )


def _steps(each: MethodHistory, frame: _Frame) -> str:
    """A falling staircase from a method's first value to its end; a dot if both are at once."""
    seconds, _, value = each.points[0]
    drawn = [f"M{frame.x(seconds)} {frame.y(value)}"]
    drawn += [f"H{frame.x(at_s)}V{frame.y(step_s)}" for at_s, _, step_s in each.points[1:]]
    return f"{''.join(drawn)}H{frame.x(max(each.finish_s, each.points[-1][0]))}h0.1"


def _so_far(histories: Sequence[MethodHistory], frame: _Frame) -> str:
    """The best of all methods up to each moment."""
    found = sorted((point[0], point[2]) for each in histories for point in each.points)
    best = found[0][1]
    drawn = [f"M{frame.x(found[0][0])} {frame.y(best)}"]
    for seconds, step_s in found[1:]:
        if step_s < best:
            best = step_s
            drawn.append(f"H{frame.x(seconds)}V{frame.y(best)}")
    return f'<path class="so-far" d="{"".join(drawn)}H{frame.x(frame.end_s)}"/>'


# --- timeline -----------------------------------------------------------------------------------


def small_timeline(timeline: Timeline, end_s: float) -> str:
    """The compute of every device over time, in a picture of bounded size.

    Args:
        timeline: Timeline of a plan.
        end_s: Seconds at the right edge, so that several pictures can share a scale.
    """
    lanes = [lane for lane in view_lanes(timeline) if lane.device >= 0][:_MOST_LANES]
    categories = task_categories(timeline)
    rows = [
        drawn
        for number, lane in enumerate(lanes)
        for drawn in _runs(
            _most_used(timeline, lane.tasks, categories[lane.tasks], end_s), _ROW * number
        )
    ]
    height = max(_ROW * len(lanes) - 2, _ROW)
    names = ", ".join(lane.name for lane in lanes[:8])
    label = f"compute of {names} over {format_seconds(timeline.seconds)}"
    return (
        f'<svg role="img" aria-label="{escape(label, quote=True)}" class="mini" '
        f'viewBox="0 0 {_BINS} {height}" style="height:{height}px" preserveAspectRatio="none">'
        f"{''.join(rows)}</svg>"
    )


def _most_used(
    timeline: Timeline, tasks: IntArray, kinds: npt.NDArray[np.int64], end_s: float
) -> list[int]:
    """For each of ``_BINS`` equal spans, the category that fills most of it, -1 for idle."""
    edges = np.linspace(0.0, end_s, _BINS + 1)
    filled = np.zeros((len(CATEGORIES), _BINS))
    start, finish = timeline.start[tasks], timeline.finish[tasks]
    for category in np.unique(kinds):
        some = kinds == category
        # Tasks of one device do not overlap, so their seconds up to a moment grow in pieces.
        times = np.stack([start[some], finish[some]], axis=1).reshape(-1)
        done = np.cumsum(finish[some] - start[some])
        seconds = np.stack([done - (finish - start)[some], done], axis=1).reshape(-1)
        filled[category] = np.diff(np.interp(edges, times, seconds))
    best = filled.argmax(axis=0)
    is_used = filled.sum(axis=0) > 0.25 * (edges[1] - edges[0])
    return [int(number) for number in np.where(is_used, best, -1)]


def _runs(used: Sequence[int], top: int) -> Iterator[str]:
    """Rectangles, each of neighbouring spans of one category."""
    first = 0
    for category, alike in groupby(used):
        width = len(list(alike))
        if category >= 0:
            yield (
                f'<rect x="{first}" y="{top}" width="{width}" height="{_ROW - 2}" '
                f'fill="var(--c{category})"/>'
            )
        first += width
