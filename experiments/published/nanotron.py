"""Llama-like models in nanotron, as the sweep of the Ultra-Scale Playbook ran them on H100.

Columns: ``model, layers, hidden, heads, ffn, vocab, embeddings, seq, gpus, dp, tp, pp, zero, mbs,
grad_acc, gbs, status, step_s, mem_gb, polled, host_bound, split``.

``nanotron_program`` models that program. Hosts have 8 H100 behind EFA.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nanotron_program import (
    PROGRAM,
    Row,
    Sizes,
    beside_s,
    can_run,
    graph_of,
    kept_bytes,
    stages,
    strategy_of,
)
from rows import csv_rows, progress

from heterog.cluster import Cluster
from heterog.errors import HeterogError
from heterog.fidelity.comparison import Compared, FamilyErrors, family_errors
from heterog.fidelity.run_fit import Case, fit_runs
from heterog.grouped import grouped
from heterog.pricing.device_models.model import DeviceModels
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.layouts.layout import Layout
from published.hosts import alike_hosts

_COLUMNS = {"hidden", "ffn", "vocab", "grad_acc", "step_s", "polled"}


# --- rows ----------------------------------------------------------------------------------------


def sweeps(folder: Path) -> Iterator[Path]:
    """The tables of a folder that have the sweep's columns."""
    for path in sorted([*folder.glob("*.csv"), *folder.glob("*.csv.gz")]):
        if set(next(iter(csv_rows(path)), ())) >= _COLUMNS:
            yield path


def rows_of(path: Path, split: str) -> Iterator[Row]:
    """The rows of a split (all rows without splits), except those in which a send slept."""
    rows = csv_rows(path)
    for row, bound in zip(rows, _host_bound(rows), strict=True):
        if row.get("split", split) in (split, "") and row["polled"] in ("", "0", "False"):
            yield row_of(row, is_bound=bound)


_CALIBRATION = ((16, 1, 1, 2), (4, 4, 1, 1), (2, 8, 1, 16), (4, 2, 2, 1), (2, 4, 2, 4))
"""(dp, tp, pp, micro-batch) of five runs of 1B on two hosts with ZeRO-1: one in which kernels
decide, one the host, one the sums of teams, and two the host of a pipeline."""


def calibration_rows(path: Path) -> list[Row]:
    """The five rows that a fit may use, of any split; none if one is missing."""
    found = []
    for row in csv_rows(path):
        key = tuple(int(row[name]) for name in ("dp", "tp", "pp", "mbs"))
        is_one = (row["model"], row["gpus"], row["zero"]) == ("1B", "16", "1")
        if is_one and key in _CALIBRATION and row["status"] == "ok":
            found.append(row_of(row, is_bound=False))
    return found if len(found) == len(_CALIBRATION) else []


def _host_bound(rows: Sequence[dict[str, str]]) -> list[bool]:
    """The column, or if it is empty the value of sibling rows.

    Siblings have the same model, teams and stages. Among those with the same micro-batch the
    majority counts. Otherwise a sibling that is bound with more work, or not bound with less work,
    decides.
    """
    told = grouped(
        ((row["model"], row["tp"], row["pp"]), (int(row["mbs"]), row["host_bound"] == "True"))
        for row in rows
        if row["host_bound"]
    )
    found = []
    for row in rows:
        if row["host_bound"]:
            found.append(row["host_bound"] == "True")
            continue
        size, siblings = int(row["mbs"]), told.get((row["model"], row["tp"], row["pp"]), [])
        same = [bound for of, bound in siblings if of == size]
        more = [bound for of, bound in siblings if of > size]
        found.append(2 * sum(same) > len(same) if same else any(more))
    return found


def row_of(row: dict[str, str], *, is_bound: bool) -> Row:
    """A row of the table."""
    tp, pp, dp = (int(row[name]) for name in ("tp", "pp", "dp"))
    sizes = Sizes(
        layers=int(row["layers"]),
        hidden=int(row["hidden"]),
        heads=int(row["heads"]),
        ffn=int(row["ffn"]),
        vocabulary=-(-int(row["vocab"]) // tp) * tp,
        length=int(row["seq"]),
        is_tied=row["embeddings"] == "tied" and pp == 1,
    )
    begins = stages(sizes, pp)
    is_ok = row["status"] == "ok"
    return Row(
        model=row["model"],
        sizes=sizes,
        batch=int(row["gbs"]),
        num_gpus=int(row["gpus"]),
        layout=Layout(
            tp=tp,
            pp=len(begins) + 1,
            dp=dp,
            micro_batch=int(row["mbs"]),
            zero=int(row["zero"]),
            split=begins,
            sequence_parallel=tp > 1,
        ),
        num_micro=int(row["grad_acc"]),
        measured_s=float(row["step_s"]) if is_ok else None,
        measured_bytes=float(row["mem_gb"]) * 2**30 if is_ok and row["mem_gb"] else None,
        is_host_bound=is_bound,
        has_tied_table=row["embeddings"] == "tied",
        empty_stages=pp - len(begins) - 1,
    )


def cluster_of(num_gpus: int) -> Cluster:
    """Hosts of 8 H100, or one with fewer."""
    return alike_hosts("H100", num_gpus, intra="nvlink4", nic="efa_p5")


# --- comparison ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """A run of the sweep beside its prediction.

    Attributes:
        row: the run.
        compared: beside its prediction; ``None`` where it failed.
        fits: whether it was predicted to fit into memory.
    """

    row: Row
    compared: Compared | None
    fits: bool

    def words(self) -> str:
        """One line."""
        if self.compared is None:
            return f"{self.row.name}: failed, told to fit: {self.fits}"
        run = self.compared
        return (
            f"{run.name}: measured {run.measured_s:.4f} s, predicted {run.predicted_s:.4f} "
            f"({run.error:+.0%})"
        )


def calibrated(path: Path) -> DeviceModels | None:
    """The device models after a fit to five rows of the sweep, if it has them."""
    cases = []
    for row in calibration_rows(path):
        assert row.measured_s is not None
        graph, cluster = graph_of(row.sizes, row.batch), cluster_of(row.num_gpus)
        strategy = strategy_of(row, graph, cluster)
        within_s = row.measured_s - beside_s(row, PROGRAM, cluster, row.measured_s)
        cases.append(Case(graph=graph, cluster=cluster, strategy=strategy, measured_s=within_s))
    if not cases:
        return None
    found = fit_runs(cases, PROGRAM)
    host, factors = found.models.host, found.models.in_training("H100")
    progress(f"after five runs: {host}, {factors}, {found.before} before, {found.after} after")
    return found.models


def swept(
    path: Path, split: str, every: int, models: DeviceModels | None = None
) -> Iterable[Swept]:
    """Every n-th of the sweep's rows, priced by ``PROGRAM`` if ``models`` is ``None``.

    After a fit failed runs are left out, because the fit changes seconds, not bytes.
    """
    after = "" if models is None else ", after five runs"
    rows = sorted(rows_of(path, split), key=lambda row: str(row.sizes))[::every]
    if models is not None:
        rows = [row for row in rows if row.measured_s is not None]
    models = models or PROGRAM
    for row in rows:
        cluster = cluster_of(row.num_gpus)
        graph = graph_of(row.sizes, row.batch)
        evaluator = Evaluator(graph, cluster, models)
        try:
            strategy = strategy_of(row, graph, cluster)
        except HeterogError as error:
            progress(f"{row.name}: {error}")
            continue
        found = evaluator.evaluate(strategy, Order.FIFO)
        predicted_s = found.step_time_s + beside_s(row, models, cluster, found.step_time_s)
        peak_bytes = found.peak_memory_bytes[0] + kept_bytes(row)
        compared = None
        if row.measured_s is not None:
            compared = Compared(
                family=f"ultrascale_{row.model}{after}",
                name=row.name,
                measured_s=row.measured_s,
                predicted_s=predicted_s,
                interval_s=evaluator.interval(predicted_s, strategy),
                measured_bytes=row.measured_bytes,
                predicted_bytes=round(peak_bytes),
                choice=f"{row.model} on {row.num_gpus}",
            )
        memory_bytes = cluster.devices[0].usable_memory_bytes
        fits = found.is_ok and can_run(row, peak_bytes, memory_bytes)
        yield Swept(row=row, compared=compared, fits=fits)


_MANY_GPUS = 64
_LEAST_DIFFERENCE = 0.03


def swept_errors(runs: Sequence[Swept]) -> Iterable[FamilyErrors]:
    """Errors of a model's runs by number of GPUs; runs that the host limits are apart."""
    pairs = [(each.row, each.compared) for each in runs if each.compared is not None]
    parts = {
        "": [run for row, run in pairs if not row.is_host_bound],
        ", the host decides": [run for row, run in pairs if row.is_host_bound],
        f", all up to {_MANY_GPUS} GPUs": [r for row, r in pairs if row.num_gpus <= _MANY_GPUS],
        f", all above {_MANY_GPUS} GPUs": [r for row, r in pairs if row.num_gpus > _MANY_GPUS],
    }
    for words, members in parts.items():
        if members:
            name = f"{members[0].family}{words}"
            yield family_errors(name, members, least_difference=_LEAST_DIFFERENCE)


def told(runs: Sequence[Swept]) -> str:
    """How many of the runs that ran, and of those that failed, were predicted to.

    The data do not say why a run failed: some had two empty stages (``nanotron_program.can_run``),
    for others no reason is known. Runs with fewer micro-batches than stages less one are left out.
    """
    ran = [each.fits for each in runs if each.compared is not None]
    failed = [
        not each.fits
        for each in runs
        if each.compared is None and each.row.num_micro >= each.row.layout.pp - 1
    ]
    return (
        f"ultrascale_{runs[0].row.model}: {sum(ran)} of {len(ran)} that ran were told to fit, "
        f"{sum(failed)} of {len(failed)} that failed not to"
    )
