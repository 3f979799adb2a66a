"""Several plans on one page: a table of their numbers, and a column of pictures for each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from heterog.errors import HeterogError
from heterog.explain.explanation import Explanation, explain
from heterog.explain.wording import chance_to_fit, percent, size_with_interval
from heterog.files import write_atomically
from heterog.report.facts import limits_bar, meter, ranges_table, section
from heterog.report.html import fill_page, outdated
from heterog.report.lanes import CATEGORIES
from heterog.report.pictures import cluster_picture, small_timeline, stages_picture
from heterog.search.plan import Plan
from heterog.units import format_seconds

MOST_PLANS = 8
"""Most plans on one page."""
_NONE = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPlan:
    """A plan with its name on the page.

    Attributes:
        name: Name to show, for instance that of its file.
        plan: Plan to show.
    """

    name: str
    plan: Plan


def write_comparison_page(path: str | Path, plans: Sequence[NamedPlan]) -> None:
    """Write several plans side by side as one self-contained HTML file.

    Raises:
        HeterogError: there are more than ``MOST_PLANS``.
        InputFileError: the file cannot be written.
    """
    write_atomically(path, comparison_html(plans).encode())


def comparison_html(plans: Sequence[NamedPlan]) -> str:
    """The page; see ``write_comparison_page``."""
    if len(plans) > MOST_PLANS:
        raise HeterogError(
            f"{len(plans)} plans are too many for one page; give at most {MOST_PLANS}."
        )
    explained = [(each.name, explain(each.plan, changes=False)) for each in plans]
    notes = [*_differences(plans), *(note for _, found in explained for note in outdated(found))]
    heading = f"{len(plans)} plans: {', '.join(each.name for each in plans)}"
    end_s = max(each.plan.timeline().seconds for each in plans)
    return fill_page(
        "plans.html.jinja",
        title=f"heterog: {heading}",
        heading=heading,
        notes=notes,
        numbers=section("numbers", "Side by side", _numbers(explained)),
        categories=CATEGORIES,
        plans=[_column(name, found, end_s) for name, found in explained],
    )


def _differences(plans: Sequence[NamedPlan]) -> list[str]:
    """Remarks for plans that answer different questions."""
    asked: dict[str, Callable[[Plan], object]] = {
        "The plans are for different models.": lambda plan: plan.graph.name,
        "The batches differ: compare samples per second, not step times.": lambda plan: (
            plan.graph.batch_size
        ),
        "The clusters differ.": lambda plan: plan.cluster.fingerprint,
        "The predictions come from different cost models.": lambda plan: plan.calibration,
    }
    return [note for note, of in asked.items() if len({of(each.plan) for each in plans}) > 1]


def _numbers(explained: Sequence[tuple[str, Explanation]]) -> str:
    """A row per number, a column per plan; bars share a scale."""
    founds = [found for _, found in explained]
    steps = [found.plan.step_time_s for found in founds]
    longest = max((step for step in steps if step is not None), default=1.0)
    rates = [found.plan.throughput_samples_per_s for found in founds]
    fastest = max((rate for rate in rates if rate is not None), default=1.0)
    rows = [
        ("model", [escape(found.plan.graph.name) for found in founds]),
        ("cluster", [escape(found.plan.cluster.name) for found in founds]),
        ("batch", [f"{found.plan.graph.batch_size}" for found in founds]),
        ("method", [escape(found.plan.method) for found in founds]),
        ("step time", [_bar(step, longest, "accent", _seconds(step)) for step in steps]),
        (
            "samples/s",
            [_bar(r, fastest, "c3", _NONE if r is None else f"{r:,.1f}") for r in rates],
        ),
        ("over data parallelism", [_gain(found) for found in founds]),
        ("no plan can take less", [format_seconds(found.bound_s) for found in founds]),
        ("memory of the fullest", [_fullest(found) for found in founds]),
        ("ranges of modules", [f"{len(found.decided.ranges)}" for found in founds]),
        ("micro-batches", [f"{found.decided.num_micro_batches}" for found in founds]),
        ("devices left out", [f"{len(found.decided.idle)}" for found in founds]),
        (
            "search",
            [
                escape(f"{plan.num_evaluations:,} evaluations, {plan.budget}, seed {plan.seed}")
                for plan in (found.plan for found in founds)
            ],
        ),
    ]
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name, _ in explained)
    body = "\n".join(
        f'<tr><th scope="row">{escape(what)}</th>'
        + "".join(f"<td>{cell}</td>" for cell in cells)
        + "</tr>"
        for what, cells in rows
    )
    return (
        f'<div class="wide"><table class="plans-table"><thead><tr><td></td>{heads}</tr></thead>'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _bar(value: float | None, longest: float, colour: str, words: str) -> str:
    return words if value is None else f"{words}{meter(value / longest, colour=colour)}"


def _seconds(value: float | None) -> str:
    return "does not run" if value is None else f"<b>{format_seconds(value)}</b>"


def _gain(found: Explanation) -> str:
    for each in found.plan.gains:
        return f"{each.speedup:.2f}x <span class=soft>({escape(each.over)})</span>"
    return _NONE


def _fullest(found: Explanation) -> str:
    device = found.fit.fullest
    part = percent(device.peak_bytes / device.usable_bytes)
    size = size_with_interval(found.plan.peak_errors, device.peak_bytes)
    words = f"{size} on {device.device} ({part})"
    if (chance := found.plan.fit_probability) is not None:
        words += f", {chance_to_fit(chance)}"
    return f"<b>{escape(words)}</b>" if device.lacking_bytes else escape(words)


def _column(name: str, found: Explanation, end_s: float) -> str:
    """Everything about one plan; timelines of all plans have the same scale."""
    timeline = found.plan.timeline()
    return (
        f'<section aria-label="{escape(name, quote=True)}">'
        f"<h2>{escape(name)}</h2>"
        f'<p class="lead">{escape(found.recommendation)}</p>'
        f"{stages_picture(found)}{cluster_picture(found)}"
        f"<h3>Compute of each device, {format_seconds(timeline.seconds)} of "
        f"{format_seconds(end_s)}</h3>{small_timeline(timeline, end_s)}"
        f"<h3>What limits the step</h3>{limits_bar(found)}"
        f"<h3>What runs where</h3>{ranges_table(found, is_narrow=True)}</section>"
    )
