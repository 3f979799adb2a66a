"""A plan as one HTML page that needs no network: numbers, words, timeline, memory, modules.

The page's style and script are embedded. Its content security policy forbids every request and
every other script, so text from a model cannot run.
"""

import base64
import hashlib
import json
from collections.abc import Iterator
from html import escape
from importlib.resources import files
from pathlib import Path

import jinja2

import heterog
from heterog.explain.explanation import Explanation, explain
from heterog.explain.wording import chance_to_fit
from heterog.files import write_atomically
from heterog.report.facts import (
    beside_each_other,
    changes_section,
    comparison_table,
    left_out_table,
    limits_section,
    memory_section,
    ranges_table,
    section,
)
from heterog.report.lanes import view_data
from heterog.report.modules import ModuleNode, module_tree
from heterog.report.pictures import cluster_picture, history_picture, stages_picture
from heterog.search.plan import Plan
from heterog.search.rows import Gain, MethodRow, reference_of
from heterog.simulator.evaluator import MEMORY_MARGIN
from heterog.units import format_bytes, format_bytes_range, format_seconds

_PAGE = files("heterog.report") / "page"
# Most modules that the tree shows when the page opens.
_OPEN_MODULES = 24
# Most modules shown, so that the page stays small: the deepest are left out.
_MOST_MODULES = 3000
_NONE = "-"
_SAME = 1e-3
"""Two predictions of one plan with a smaller relative difference count as equal."""


def write_report(path: str | Path, plan: Plan, *, explanation: Explanation | None = None) -> None:
    """Write a plan as one self-contained HTML file.

    Args:
        path: Path of the file.
        plan: Plan to show.
        explanation: Explanation of the plan; one without savings by purchases if ``None``.

    Raises:
        InputFileError: the file cannot be written; no half of it is left behind.
    """
    write_atomically(path, report_html(plan, explanation=explanation).encode())


def report_html(plan: Plan, *, explanation: Explanation | None = None) -> str:
    """The page; see ``write_report``."""
    explanation = explanation or explain(plan, changes=False)
    script = (_PAGE / "report.js").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    timeline = plan.timeline()
    root = module_tree(plan.graph, plan.cluster, plan.strategy)
    opened = {id(node) for level in _levels(root, _OPEN_MODULES) for node in level}
    data = view_data(timeline)
    return fill_page(
        "report.html.jinja",
        heading=f"{plan.graph.name} on {plan.cluster.name}",
        version=heterog.__version__,
        plan=plan,
        cluster=plan.cluster,
        timeline=timeline,
        notes=outdated(explanation),
        tiles=_tiles(plan),
        facts=facts_html(explanation),
        paragraphs=explanation.paragraphs,
        num_merged=int(data["merged"]),
        memory_label=_memory_label(plan),
        margin=MEMORY_MARGIN,
        root=root,
        deepest=len(list(_levels(root, _MOST_MODULES))),
        is_open=lambda node: id(node) in opened,
        share_bars=_share_bars,
        placement=_placement,
        synchronisation=_synchronisation,
        methods=_methods(plan),
        # Inside a script element only "</" and "<!--" have a meaning.
        data=json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        script=script,
        script_hash=f"sha256-{digest}",
    )


def outdated(explanation: Explanation) -> list[str]:
    """A note if this version of heterog predicts another step time than the plan's file."""
    told, now = explanation.plan.step_time_s, explanation.step_time_s
    if told is None or abs(now - told) <= _SAME * told:
        return []
    plan = explanation.plan
    return [
        f"The plan of {plan.graph.name} on {plan.cluster.name} by {plan.method} was made with a "
        f"prediction of {format_seconds(told)}; this version of heterog, or the calibration that "
        f"the cluster has now, predicts {format_seconds(now)}. Plan again."
    ]


def page_style() -> str:
    """The style sheet of every page."""
    return (_PAGE / "report.css").read_text("utf-8")


def fill_page(template: str, **values: object) -> str:
    """A page by a template of the package, which escapes texts."""
    return _TEMPLATES.get_template(template).render(style=page_style(), **values)


def facts_html(explanation: Explanation) -> str:
    """The part of the page before the timeline: advice, places, and limits."""
    plan = explanation.plan
    lead = f'<p class="lead">{escape(explanation.recommendation)}</p>'
    where = section(
        "where",
        "What runs where",
        stages_picture(explanation),
        cluster_picture(explanation),
        ranges_table(explanation),
        left_out_table(explanation),
        note="Each square is a device in the colours of what runs there; the dark bar at its "
        "right is the part of the step in which it computes.",
    )
    search = section(
        "search",
        "How the search went",
        history_picture(plan.history, plan.method),
        note="The best step that each method knew of, by its own judge; the last word is the "
        "referee's.",
    )
    beside = section("gain", "Beside other plans", comparison_table(explanation))
    parts = (
        lead,
        where,
        beside_each_other(limits_section(explanation), beside + search),
        beside_each_other(memory_section(explanation), changes_section(explanation)),
    )
    return "\n".join(filter(None, parts))


def _tiles(plan: Plan) -> Iterator[tuple[str, str, str, bool]]:
    """Tiles as (what, value, remark, whether it is bad)."""
    step = plan.step_time_s
    yield (
        "outcome",
        _spaced(plan.outcome),
        f"{plan.num_evaluations:,} evaluations in {format_seconds(plan.search_seconds)}",
        step is None,
    )
    yield "step time", _seconds(step), "predicted by the referee", False
    rate = plan.throughput_samples_per_s
    yield "throughput", _NONE if rate is None else f"{rate:,.1f}", "samples/s", False
    yield from _peak_tile(plan)
    yield ("over data parallelism", *_gain(plan.gains[0] if plan.gains else None), False)
    if step is None or not plan.strategy.step_barrier:
        yield "lower bound", _seconds(plan.lower_bound_s), "with a step barrier", False
    else:
        gap = step / plan.lower_bound_s - 1.0
        yield "lower bound", _seconds(plan.lower_bound_s), f"the plan is {gap:.0%} above it", False


def _peak_tile(plan: Plan) -> Iterator[tuple[str, str, str, bool]]:
    """The fullest device, and how often the plan is expected to fit; nothing without errors."""
    chance = plan.fit_probability
    if chance is None:
        return
    peaks = zip(plan.peak_memory_bytes, plan.cluster.devices, strict=True)
    peak, device = max(peaks, key=lambda pair: pair[0] / pair[1].usable_memory_bytes)
    assert plan.peak_errors is not None, "it is what the chance follows from"
    ends = format_bytes_range(*plan.peak_errors.interval(peak), around=peak)
    remark = f"{ends} on {device.name}; {chance_to_fit(chance)}"
    yield "peak memory", format_bytes(peak), remark, chance < 0.5


def _gain(found: Gain | None) -> tuple[str, str]:
    """A speed-up and its reference; with its range under noise if there is one."""
    if found is None:
        return _NONE, "was not tried, or does not fit"
    span = f", {found.low:.2f}x to {found.high:.2f}x under noise" * (found.low < found.high)
    return f"{found.speedup:.2f}x", f"{found.over}{span}"


def _memory_label(plan: Plan) -> str:
    return "memory over time: " + "; ".join(
        f"{device.name}: at most {format_bytes(peak)} of "
        f"{format_bytes(device.usable_memory_bytes)}"
        for device, peak in zip(plan.cluster.devices, plan.peak_memory_bytes, strict=False)
    )


def _levels(root: ModuleNode, most: int) -> Iterator[list[ModuleNode]]:
    """Modules level by level, while they and the level below are at most so many rows."""
    level, shown = [root], 1
    while level:
        below = [child for node in level for child in node.children.values()]
        shown += len(below)
        if shown > most:
            return
        yield level
        level = below


def _share_bars(node: ModuleNode, plan: Plan) -> str:
    """A bar per device, in proportion to its samples."""
    if not node.weight:
        return ""
    devices = plan.cluster.devices
    width = 10 if len(devices) <= 8 else 5 if len(devices) <= 24 else 2
    shares = node.shares(len(devices))
    told, drawn = [], []
    for index, (device, share) in enumerate(zip(devices, shares, strict=True)):
        if share > 0.0:
            height = max(18.0 * share / max(shares), 1.0)
            told.append(f"{device.name}: {share:.4g}")
            drawn.append(f"M{index * width} 18v-{height:.1f}h{width - 1}v{height:.1f}z")
    label = escape("samples: " + ", ".join(told), quote=True)
    total = width * len(devices)
    return (
        f'<svg role="img" aria-label="{label}" width="{total}" height="18">'
        f'<title>{label}</title><rect y="17" width="{total}" height="1"/>'
        f'<path d="{"".join(drawn)}"/></svg>'
    )


def _placement(node: ModuleNode, plan: Plan) -> str:
    if not node.weight:
        return "parameters only"
    remark = ", partly recomputed" if len(node.recomputed) > 1 else ", recomputed"
    remark *= True in node.recomputed
    if len(node.weight) > 1:
        return f"{len(node.weight)} placements{remark}"
    ((devices, shares),) = node.weight
    names = [
        plan.cluster.devices[device].name
        for device, share in zip(devices, shares, strict=True)
        if share > 0
    ]
    if len(names) == 1:
        return f"{names[0]} alone{remark}"
    used = [share for share in shares if share > 0]
    span = f"{min(used)}" if min(used) == max(used) else f"{min(used)} to {max(used)}"
    return f"{len(names)} devices, {span} samples{remark}"


def _synchronisation(node: ModuleNode) -> str:
    """How gradients meet; with the servers' names, or their number if there are many."""
    if not node.parameter_bytes:
        return _NONE
    places: dict[str, list[str]] = {}
    for words in node.syncs:
        kind, _, place = words.partition(" on ")
        places.setdefault(kind, []).extend([place] if place else [])
    return "; ".join(
        kind
        + (f" on {', '.join(names)}" if 0 < len(names) <= 3 else "")
        + (f" on {len(names)} devices" if len(names) > 3 else "")
        for kind, names in places.items()
    )


def _methods(plan: Plan) -> Iterator[tuple[MethodRow, tuple[str, ...]]]:
    """Rows of the methods' table, each with its numbers."""
    best = reference_of(plan.rows)
    baseline = None if best is None else best.step_time_s
    for row in plan.rows:
        yield (
            row,
            (
                _seconds(row.step_time_s),
                f"{baseline / row.step_time_s:.2f}x" if baseline and row.step_time_s else _NONE,
                _fullest(row, plan),
                f"{row.num_evaluations:,}",
                format_seconds(row.search_seconds),
            ),
        )


def _fullest(row: MethodRow, plan: Plan) -> str:
    """The device that is fullest relative to its own limit."""
    devices = plan.cluster.devices
    if len(row.peak_memory_bytes) != len(devices):
        return _NONE
    part, peak, device = max(
        (peak / device.usable_memory_bytes, peak, device.name)
        for peak, device in zip(row.peak_memory_bytes, devices, strict=True)
    )
    return f"{format_bytes(peak)} on {device} ({part:.0%})"


def _spaced(name: str) -> str:
    return name.replace("_", " ")


def _seconds(value: float | None) -> str:
    return _NONE if value is None else format_seconds(value)


_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("heterog.report", "page"),
    undefined=jinja2.StrictUndefined,
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters |= {"bytes": format_bytes, "seconds": format_seconds, "spaced": _spaced}
