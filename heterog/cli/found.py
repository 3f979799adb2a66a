"""The result of ``heterog plan`` as a printed answer and as JSON."""

from dataclasses import dataclass
from typing import Any

from heterog.cli.common import out, print_line
from heterog.cli.objective import money_remarks, offers_lines
from heterog.cluster.topology import Cluster
from heterog.explain.explanation import Explanation
from heterog.modes.built_in import method_names
from heterog.pricing.calibration import Calibration, cost_model_of, extrapolated_by
from heterog.pricing.device_models.model import DeviceModels, provenance
from heterog.report.tables import (
    answer,
    brief_answer,
    explanation_text,
    memory_table,
    methods_table,
)
from heterog.search.background import BackgroundPlan
from heterog.search.plan import Plan
from heterog.search.portfolio import UNPLAYED, UNREHEARSED
from heterog.search.rows import DATA_PARALLEL, REFERENCES
from heterog.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    """A plan with everything that is printed about it.

    Attributes:
        plan: The plan.
        explanation: Its explanation, if the plan ``is_written``.
        about_codec: A sentence about the requested codec; empty without one.
        files: The files written, and their uses.
    """

    plan: Plan
    explanation: Explanation | None
    about_codec: str
    files: list[str]

    def document(self) -> dict[str, Any]:
        """All of it as JSON."""
        return {
            **self.plan.summary(),
            "extrapolated": _extrapolated(self.plan),
            "explanation": None if self.explanation is None else self.explanation.to_dict(),
            **({"lossy": self.about_codec} if self.about_codec else {}),
        }

    def print(self, *, is_explained: bool) -> None:
        """Print the answer, and then, if it is explained, every method and every fact."""
        width, remarks = min(out.width, 100), self._remarks()
        if self.explanation is None:
            lines = brief_answer(self.plan, width=width, remarks=remarks, files=self.files)
        else:
            lines = answer(
                self.explanation,
                width=width,
                remarks=remarks,
                files=self.files,
                advice="" if is_explained else "--explain says why and shows all methods",
            )
        for line in lines:
            out.print(line, soft_wrap=True, highlight=False)
        if is_explained:
            self._print_everything()

    def _remarks(self) -> list[str]:
        """Sentences beside the answer, the most important first."""
        plan, extrapolated = self.plan, _extrapolated(self.plan)
        remarks = _not_rehearsed(plan)
        if plan.background is not None:
            remarks.append(_beside(plan.background, plan.cluster))
        if extrapolated is not None:
            remarks.append(_trust(plan.calibration, extrapolated))
        if not remarks:
            remarks = _modelled(plan.cluster)
        asked = [self.about_codec, *_not_exact(plan), *money_remarks(plan)]
        return [*filter(None, asked), *remarks]

    def _print_everything(self) -> None:
        """Print every method, and everything there is to say about the plan."""
        out.print()
        out.print(methods_table(self.plan.rows, self.plan.cluster, title=_title(self.plan)))
        out.print(_verdict(self.plan))
        for line in offers_lines(self.plan):
            print_line(line)
        if self.explanation is not None:
            out.print()
            out.print(explanation_text(self.explanation))
            out.print(memory_table(self.explanation.fit))


def _not_rehearsed(found: Plan) -> list[str]:
    """A remark if the winner should have been rehearsed and was not."""
    winner = next(row for row in found.rows if row.method == found.method)
    return [why for why in (UNPLAYED, UNREHEARSED) if why in winner.note]


def _not_exact(found: Plan) -> list[str]:
    """A remark on each requested method that does not train exactly: chosen or not, and why."""
    return [
        f"{row.method} ({'chosen' if row.method == found.method else 'not chosen'}): "
        f"{row.note or row.shortage}"
        for row in found.rows
        if row.method in method_names()
    ]


def _beside(beside: BackgroundPlan, cluster: Cluster) -> str:
    """One or two sentences on the speed of a background job and its cost for the step."""
    where = beside.devices
    text = f"Background {beside.model}, batch {beside.batch_size}: no device has room."
    if where:
        idle = sum(beside.idle_share[device] for device in where) / len(where)
        text = (
            f"Background {beside.model}, batch {beside.batch_size} on each of {len(where)} "
            f"device{'s' * (len(where) > 1)}, idle {idle:.0%} of the step: "
            f"{beside.total_samples_per_s:.1f} samples/s; the step takes "
            f"{format_seconds(beside.step_time_s)}, {beside.slow_down:.3f}x (limit "
            f"{beside.limit:g}x)."
        )
    for device, why in enumerate(beside.shortage):
        if why:
            text += f" Not on {cluster.devices[device].name}: {why}."
    return text


def _extrapolated(found: Plan) -> dict[str, Any] | None:
    """Part of a plan's compute time that is far from all measurements; ``None`` for a roofline."""
    model = cost_model_of(found.cluster)
    if not isinstance(model, Calibration):
        return None
    shares = extrapolated_by(model, found.graph, found.cluster, found.strategy)
    return {"share": sum(shares.values()), "kinds": list(shares)}


def _modelled(cluster: Cluster) -> list[str]:
    """Sources of measured kernel times, if there are no measurements of one's own."""
    if not isinstance(cost_model_of(cluster), DeviceModels):
        return []
    return [f"kernels by device models ({provenance(cluster.device_types)})"]


def _trust(calibration: str, extrapolated: dict[str, Any]) -> str:
    """One sentence: how much of a prediction was measured."""
    share, kinds = extrapolated["share"], extrapolated["kinds"]
    if not kinds:
        return f"calibrated on {calibration}; every op was measured near its size"
    shown = ", ".join(kinds[:4]) + (", ..." if len(kinds) > 4 else "")
    return (
        f"calibrated on {calibration}; {share:.0%} of the compute time is extrapolated ({shown})"
    )


def _title(found: Plan) -> str:
    barrier = "" if found.strategy.step_barrier else ", no step barrier"
    return (
        f"{found.graph.name}, batch {found.graph.batch_size}, on {found.cluster.name} "
        f"(predicted by {found.calibration}, seed {found.seed}, budget {found.budget}{barrier})"
    )


def _verdict(found: Plan) -> str:
    """A few sentences: the winner, its gain, and how stable that is."""
    if found.step_time_s is None:
        return f"No method fits. The nearest is {found.method}: {found.shortage}."
    text = (
        f"{found.method}: {format_seconds(found.step_time_s)} a step, "
        f"{found.throughput_samples_per_s:.1f} samples/s, order {found.order}, at least "
        f"{format_seconds(found.lower_bound_s)} by any strategy with a step barrier."
    )
    for each in found.gains:
        text += f" {each.speedup:,.2f}x over {each.over}"
        if each.low < each.high:
            text += f" ({each.low:,.2f}x to {each.high:,.2f}x if predictions are off)"
        text += "."
    simple = found.gains[0] if found.gains else None
    is_simple = found.method in (*DATA_PARALLEL, *REFERENCES)
    if simple is not None and not is_simple and simple.speedup < 1.01:
        text += f" That is within 1 % of data parallelism: prefer the simpler {simple.over}."
    return text
