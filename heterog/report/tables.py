"""What a terminal of 100 columns shows: tables of methods, models and clusters, and explanations.

An explanation is paragraphs with headings, and memory as a table.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from heterog.cluster.catalog import LinkKind, ListedType, NetworkKind
from heterog.cluster.topology import Cluster
from heterog.explain.explanation import Explanation
from heterog.methods.built_in import MethodNote
from heterog.methods.planner import MethodRow
from heterog.search.arrivals.queueing import Verdict
from heterog.search.objective import cost_per_step
from heterog.search.stability import reference_of
from heterog.simulator.memory_breakdown import Fit, MemoryKind
from heterog.units import GIB, format_bytes, format_seconds
from heterog.zoo.registry import ZooEntry

# More device types than this do not fit side by side; then only the fullest device is shown.
_MAX_MEMORY_COLUMNS = 4
_NAME: dict[str, Any] = {"no_wrap": True}
_NUMBER: dict[str, Any] = {"justify": "right", "no_wrap": True}
_TEXT: dict[str, Any] = {"overflow": "fold"}


def methods_table(rows: Sequence[MethodRow], cluster: Cluster, *, title: str = "") -> Table:
    """Results of every method on one cluster, the best in bold.

    Speed-ups are over the row of ``reference_of``; there are none if no such row is ``ok``.
    Memory is that of the fullest device of each type. If hosts have prices, there is a column
    with the cost of a step. Reasons why a method cannot run are below the table.
    """
    best = reference_of(rows)
    baseline = None if best is None else best.step_time_s
    fastest = min((row.step_time_s for row in rows if row.step_time_s is not None), default=None)
    columns = {"method": _NAME, "step time": _NUMBER, "speed-up": _NUMBER}
    if cluster.prices is not None:
        columns[f"{cluster.prices.currency} a step"] = {"justify": "right"}
    headers, members = _memory_columns(cluster)
    for header in headers:
        # Spaces, so that long type names break between words.
        columns[f"{header.replace('-', ' ')} (GiB)"] = {"justify": "right", "min_width": 5}
    columns |= {"evals": _NUMBER, "search": _NUMBER, "outcome": _NAME}
    table = _table(title, columns)
    table.caption, table.caption_justify = _reasons(rows), "left"
    for row in rows:
        seconds = row.step_time_s
        ratio = f"{baseline / seconds:.2f}x" if baseline is not None and seconds else "-"
        table.add_row(
            escape(row.method),
            "-" if seconds is None else format_seconds(seconds),
            ratio,
            *_cost_cells(row, cluster),
            *_memory_cells(row, members),
            f"{row.num_evaluations:,}",
            format_seconds(row.search_seconds),
            row.outcome.replace("_", " ") + ", starved" * row.is_starved,
            style="bold" if seconds is not None and seconds == fastest else "",
        )
    return table


def _cost_cells(row: MethodRow, cluster: Cluster) -> list[str]:
    if cluster.prices is None:
        return []
    cost = cost_per_step(row, cluster)
    return ["-" if cost is None else f"{cost:.3g}"]


def models_table(entries: Iterable[ZooEntry]) -> Table:
    """The built-in models."""
    columns = {"model": _NAME, "family": _NAME, "batch": _NUMBER, "parameters": _NUMBER}
    table = _table("", columns | {"description": _TEXT})
    for entry in entries:
        table.add_row(
            escape(entry.name),
            entry.family,
            str(entry.default_batch_size),
            f"{entry.num_parameters / 1e6:,.1f} M",
            escape(entry.description),
        )
    return table


def clusters_table(clusters: Iterable[Cluster], *, title: str = "") -> Table:
    """Clusters with their devices and their network."""
    wide = {"usable memory": {"justify": "right"}, "NIC": {"justify": "right"} | _TEXT}
    table = _table(title, {"cluster": _TEXT, "hosts": _NUMBER, "devices": _TEXT} | wide)
    for cluster in clusters:
        counts = Counter(device.type.name for device in cluster.devices)
        usable = sum(device.usable_memory_bytes for device in cluster.devices)
        table.add_row(
            escape(cluster.name),
            str(cluster.num_hosts),
            ", ".join(f"{count} x {name}" for name, count in counts.items()),
            format_bytes(usable),
            _network(cluster),
        )
    return table


def devices_table(listed: Sequence[ListedType]) -> Table:
    """The catalogue: memory, bandwidth, peaks, and the number of the source below the table."""
    numbers_of = ("GiB", "GB/s", "fp64", "fp32", "tf32", "fp16", "bf16", "sheet")
    table = _table("", {"device": _NAME} | dict.fromkeys(numbers_of, _NUMBER))
    table.caption, table.caption_justify = "peaks in TFLOP/s, dense, by the data sheet", "left"
    numbers = _numbered([each.type.source for each in listed])
    for each in listed:
        peaks = {dtype: peak / 1e12 for dtype, peak in each.type.peak_flops_per_s.items()}
        if each.tf32_flops_per_s is not None:
            peaks["tf32"] = each.tf32_flops_per_s / 1e12
        table.add_row(
            escape(each.type.name),
            f"{each.type.memory_bytes / GIB:g}",
            f"{each.type.memory_bandwidth_bytes_per_s / 1e9:g}",
            *(
                f"{peaks[dtype]:.4g}" if dtype in peaks else "-"
                for dtype in ("float64", "float32", "tf32", "float16", "bfloat16")
            ),
            f"{numbers[each.type.source]}",
        )
    return table


def sources_text(sources: Sequence[str]) -> Text:
    """Distinct sources with the numbers that a table refers to."""
    lines = [f"{number:3} {source}" for source, number in _numbered(sources).items()]
    return Text("\n".join(lines))


def _numbered(sources: Iterable[str]) -> dict[str, int]:
    return {source: number for number, source in enumerate(dict.fromkeys(sources), start=1)}


def links_table(kinds: Sequence[LinkKind]) -> Table:
    """Links inside a host: the simulated rate beside that of the data sheet."""
    table = _table(
        "intra: between the devices of a host, GB/s per direction",
        {"name": _NAME, "used": _NUMBER, "sheet": _NUMBER, "source": _NUMBER, "also": _TEXT},
    )
    for number, each in enumerate(kinds, start=1):
        table.add_row(
            each.name,
            f"{each.link.bandwidth_bytes_per_s / 1e9:g}",
            f"{each.sheet_bytes_per_s / 1e9:g}",
            str(number),
            ", ".join(each.aliases),
        )
    return table


def networks_table(kinds: Iterable[NetworkKind]) -> Table:
    """Networks between hosts with their line rates."""
    table = _table(
        "nic: between hosts, Gbit/s per direction, of which 'efficiency' is used",
        {"name": _NAME, "line rate": _NUMBER, "also": _TEXT, "source": _TEXT},
    )
    for each in kinds:
        rate = f"{each.line_rate_bytes_per_s * 8e-9:g}"
        table.add_row(each.name, rate, ", ".join(each.aliases), each.sheet)
    return table


def planners_table(methods: Iterable[MethodNote]) -> Table:
    """Methods, one line each."""
    columns = {"method": _NAME, "stage": _NAME, "what it does": _TEXT, "needs": _TEXT}
    table = _table("", columns)
    for each in methods:
        table.add_row(each.name, each.stage.replace("_", " "), each.what, each.needs)
    return table


def _table(title: str, columns: Mapping[str, dict[str, Any]]) -> Table:
    """A table without rows, whose lines take little width, of columns and how they are set."""
    table = Table(title=escape(title) or None, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header, how in columns.items():
        table.add_column(header, **how)
    return table


def _network(cluster: Cluster) -> str:
    if cluster.num_hosts == 1:
        return "-"
    rates = sorted(
        {host.nic_line_rate_bytes_per_s * 8e-9 * host.num_nics for host in cluster.hosts}
    )
    span = f"{rates[0]:g}" if len(rates) == 1 else f"{rates[0]:g} to {rates[-1]:g}"
    return f"{span} Gbit/s x {cluster.efficiency:g}"


def _memory_columns(cluster: Cluster) -> tuple[list[str], list[list[int]]]:
    """Headers of the memory columns, and the devices of each."""
    if len(cluster.device_types) > _MAX_MEMORY_COLUMNS:
        return ["peak"], [list(range(cluster.num_devices))]
    members = [
        [device for device, each in enumerate(cluster.type_index) if each == number]
        for number in range(len(cluster.device_types))
    ]
    return [device_type.name for device_type in cluster.device_types], members


def _memory_cells(row: MethodRow, members: Sequence[Sequence[int]]) -> list[str]:
    if not row.peak_memory_bytes:
        return ["-"] * len(members)
    return [
        f"{max(row.peak_memory_bytes[device] for device in devices) / GIB:.1f}"
        for devices in members
    ]


def _reasons(rows: Iterable[MethodRow]) -> Text | None:
    lines = [f"{row.method}: {row.shortage}" for row in rows if row.shortage]
    lines += [f"{row.method}: {row.note}" for row in rows if row.is_starved]
    return Text("\n".join(lines)) if lines else None


def jobs_table(verdicts: Sequence[Verdict], *, title: str = "") -> Table:
    """Result of each arriving job: devices, start and end, or why it was blocked."""
    times = dict.fromkeys(("arrives", "starts", "ends"), _NUMBER)
    table = _table(title, {"job": _TEXT} | times | {"outcome": _NAME, "runs": _TEXT})
    for verdict in verdicts:
        moments = [verdict.starts_s, verdict.ends_s] if verdict.is_accepted else []
        table.add_row(
            escape(verdict.request.name),
            _clock(verdict.request.arrives_s),
            *([_clock(time_s) for time_s in moments] or ["-", "-"]),
            str(verdict.outcome),
            escape(verdict.detail) or "-",
        )
    return table


def _clock(time_s: float) -> str:
    """Seconds since the first moment: ``0 s``, not in microseconds, at that moment."""
    return format_seconds(time_s) if time_s else "0 s"


_HEADERS = {
    MemoryKind.PARAMETERS: "params",
    MemoryKind.OPTIMIZER_STATE: "optimizer",
    MemoryKind.GRADIENTS: "gradients",
    MemoryKind.ACTIVATIONS: "activ.",
    MemoryKind.BACKWARD: "backward",
    MemoryKind.COMMUNICATION: "comm.",
    MemoryKind.BATCH: "batch",
    MemoryKind.CONSTANTS: "constants",
    MemoryKind.WORKSPACE: "workspace",
    MemoryKind.STASH: "stash",
    MemoryKind.MARGIN: "margin",
}
_WIDTH = 100


def explanation_text(explanation: Explanation) -> Group:
    """The paragraphs of an explanation, with the advice first."""
    first = Text.assemble(("In short: ", "bold"), explanation.recommendation)
    parts = [first, *map(Text, explanation.paragraphs)]
    return Group(*(_wrapped(part) for part in parts))


def _wrapped(text: Text) -> Padding:
    lines = Table.grid()
    lines.add_column(max_width=_WIDTH)
    lines.add_row(text)
    return Padding(lines, (0, 0, 1, 0))


def memory_table(fit: Fit) -> Table:
    """Memory of each device by use, in GiB, without uses that are below 0.05 GiB everywhere.

    Devices that are equal to the last digit shown share a row.
    """
    kinds = [
        kind
        for kind in MemoryKind
        if any(device.bytes_of(kind) >= 0.05 * GIB for device in fit.devices)
    ]
    uses = {_HEADERS[kind]: {"justify": "right"} for kind in kinds}
    sums = dict.fromkeys(("needs", "usable", "lacks"), _NUMBER)
    columns = {"device": _TEXT, "type": _TEXT} | uses | sums
    table = _table("Memory of each device at its fullest (GiB)", columns)
    rows: dict[tuple[str, ...], list[str]] = {}
    for device in fit.devices:
        lacks = f"{device.lacking_bytes / GIB:.2f}" if device.lacking_bytes else "-"
        cells = (
            device.device_type,
            *(f"{device.bytes_of(kind) / GIB:.2f}" for kind in kinds),
            f"{device.peak_bytes / GIB:.2f}",
            f"{device.usable_bytes / GIB:.2f}",
            lacks,
        )
        rows.setdefault(cells, []).append(device.device)
    for cells, names in rows.items():
        who = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)})"
        who = ", ".join(names) if len(names) <= 2 else who
        style = "" if cells[-1] == "-" else "bold red"
        table.add_row(escape(who), *map(escape, cells), style=style)
    return table
