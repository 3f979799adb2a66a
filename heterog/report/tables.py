"""Texts for a terminal: tables of methods, models and clusters, explanations, and short answers.

Tables are for 100 columns. An explanation is paragraphs with headings, and memory as a table.

``answer`` is what ``heterog plan`` prints: in at most 15 lines what to do, what it brings and what
limits it. Its numbers are those of the explanation; ``Explanation.paragraphs`` has more words.
"""

import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from heterog.cluster.catalog import LinkKind, ListedType, NetworkKind
from heterog.cluster.topology import Cluster
from heterog.explain.decided import Decided, what_was_decided
from heterog.explain.explanation import Explanation
from heterog.explain.wording import near_limit, percent, size_with_interval
from heterog.grouped import grouped
from heterog.methods.built_in import MethodNote
from heterog.report.modules import placement_lines
from heterog.search.arrivals.queueing import JobVerdict
from heterog.search.objective import cost_per_step
from heterog.search.plan import Plan
from heterog.search.rows import MethodRow, reference_of
from heterog.simulator.critical_path import Limit
from heterog.simulator.memory_breakdown import DeviceMemory, Fit, MemoryKind
from heterog.units import GIB, format_bytes, format_range, format_seconds
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
    for header in headers:  # with spaces, so that long type names break between words
        columns[f"{header.replace('-', ' ')} (GiB)"] = {"justify": "right", "min_width": 5}
    columns |= {"evals": _NUMBER, "search": _NUMBER, "outcome": _NAME}
    table = _table(title, columns)
    table.caption, table.caption_justify = _reasons(rows), "left"
    for row in rows:
        seconds = row.step_time_s
        table.add_row(
            escape(row.method),
            "-" if seconds is None else format_seconds(seconds),
            f"{baseline / seconds:.2f}x" if baseline is not None and seconds else "-",
            *_cost_cells(row, cluster),
            *_memory_cells(row, members),
            f"{row.num_evaluations:,}",
            format_seconds(row.search_seconds),
            row.outcome.replace("_", " ") + ", starved" * row.starved,
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
    rows = (
        (
            escape(entry.name),
            entry.family,
            str(entry.default_batch_size),
            f"{entry.num_parameters / 1e6:,.1f} M",
            escape(entry.description),
        )
        for entry in entries
    )
    return _table("", columns | {"description": _TEXT}, rows)


def clusters_table(clusters: Iterable[Cluster], *, title: str = "") -> Table:
    """Clusters with their devices and their network."""
    wide = {"usable memory": {"justify": "right"}, "NIC": {"justify": "right"} | _TEXT}
    table = _table(title, {"cluster": _TEXT, "hosts": _NUMBER, "devices": _TEXT} | wide)
    for cluster in clusters:
        counts = Counter(device.type.name for device in cluster.devices)
        table.add_row(
            escape(cluster.name),
            str(cluster.num_hosts),
            ", ".join(f"{count} x {name}" for name, count in counts.items()),
            format_bytes(sum(device.usable_memory_bytes for device in cluster.devices)),
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
    rows = (
        (
            each.name,
            f"{each.link.bandwidth_bytes_per_s / 1e9:g}",
            f"{each.sheet_bytes_per_s / 1e9:g}",
            str(number),
            ", ".join(each.aliases),
        )
        for number, each in enumerate(kinds, start=1)
    )
    return _table(
        "intra: between the devices of a host, GB/s per direction",
        {"name": _NAME, "used": _NUMBER, "sheet": _NUMBER, "source": _NUMBER, "also": _TEXT},
        rows,
    )


def networks_table(kinds: Iterable[NetworkKind]) -> Table:
    """Networks between hosts with their line rates."""
    rows = (
        (each.name, f"{each.line_rate_bytes_per_s * 8e-9:g}", ", ".join(each.aliases), each.sheet)
        for each in kinds
    )
    return _table(
        "nic: between hosts, Gbit/s per direction, of which 'efficiency' is used",
        {"name": _NAME, "line rate": _NUMBER, "also": _TEXT, "source": _TEXT},
        rows,
    )


def fit_tables(types: Mapping[str, Any], links: Mapping[str, Any]) -> Iterator[Table]:
    """What a calibration fitted to ops and links, and the errors without the fit."""
    numbers = ("ops", "kinds", "error, new ops", "error, new models")
    errors = ("error_ops", "error_models")
    rows = (
        (
            escape(name),
            f"{row['ops']:,}",
            str(len(row["kinds"])),
            *(_error(row[e]) for e in errors),
        )
        for name, row in types.items()
    )
    yield _table("ops", {"device type": _NAME} | dict.fromkeys(numbers, _NUMBER), rows)
    if links:
        numbers = ("measured", "latency", "time per byte", "error, new sizes")
        table = _table("links", {"kind": _NAME} | dict.fromkeys(numbers, _NUMBER))
        for name, row in links.items():
            factors = (f"{row['latency_factor']:.2f}x", f"{row['bytes_factor']:.2f}x")
            count = f"{row['measurements']:,}"
            table.add_row(name.replace("_", " "), count, *factors, _error(row["error"]))
        yield table


def _error(part: float | None) -> str:
    return "-" if part is None else f"{part:.1%}"


def planners_table(methods: Iterable[MethodNote]) -> Table:
    """Methods, one line each."""
    return _table(
        "",
        {"method": _NAME, "stage": _NAME, "what it does": _TEXT, "needs": _TEXT},
        ((each.name, each.stage.replace("_", " "), each.what, each.needs) for each in methods),
    )


def _table(
    title: str, columns: Mapping[str, dict[str, Any]], rows: Iterable[Sequence[str]] = ()
) -> Table:
    """A narrow table with columns, the rich options of each, and rows."""
    table = Table(title=escape(title) or None, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header, how in columns.items():
        table.add_column(header, **how)
    for row in rows:
        table.add_row(*row)
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
    lines += [f"{row.method}: {row.note}" for row in rows if row.starved]
    return Text("\n".join(lines)) if lines else None


def jobs_table(verdicts: Sequence[JobVerdict], *, title: str = "") -> Table:
    """Result of each arriving job: devices, start and end, or why it was blocked."""
    times = dict.fromkeys(("arrives", "starts", "ends"), _NUMBER)
    rows = (
        (
            escape(verdict.request.name),
            _clock(verdict.request.arrives_s),
            _clock(verdict.starts_s) if verdict.is_accepted else "-",
            _clock(verdict.ends_s) if verdict.is_accepted else "-",
            str(verdict.outcome),
            escape(verdict.detail) or "-",
        )
        for verdict in verdicts
    )
    return _table(title, {"job": _TEXT} | times | {"outcome": _NAME, "runs": _TEXT}, rows)


def _clock(time_s: float) -> str:
    """Seconds since the first moment, which itself is ``0 s``, not ``0.0 us``."""
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
    return Group(*(_wrapped(part) for part in [first, *map(Text, explanation.paragraphs)]))


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
    rows = grouped(
        (
            (
                device.device_type,
                *(f"{device.bytes_of(kind) / GIB:.2f}" for kind in kinds),
                f"{device.peak_bytes / GIB:.2f}",
                f"{device.usable_bytes / GIB:.2f}",
                f"{device.lacking_bytes / GIB:.2f}" if device.lacking_bytes else "-",
            ),
            device.device,
        )
        for device in fit.devices
    )
    for cells, names in rows.items():
        ends = f"{names[0]} to {names[-1]} ({len(names)})"
        who = ", ".join(names) if len(names) <= 2 else ends
        style = "bold red" * (cells[-1] != "-")
        table.add_row(escape(who), *map(escape, cells), style=style)
    return table


MOST_LINES = 15
NARROWEST = 60
"""Narrowest terminal, in columns, for which lines are worded to fit; below it they are cut."""
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
    plan, decided, fit = explanation.plan, explanation.decided, explanation.fit
    wordings = {
        "do": [explanation.recommendation],
        "gain": [_gain(explanation, with_range=True), _gain(explanation, with_range=False)],
        "memory": [_memory(plan, fit, decided, with_interval=each) for each in (True, False)],
        "limits": [_limits(explanation, number) for number in (3, 2, 1, 0)],
    }
    return _page(plan, decided, wordings, width=width, remarks=remarks, files=files, advice=advice)


def brief_answer(
    plan: Plan, *, width: int = 80, remarks: Sequence[str] = (), files: Sequence[str] = ()
) -> list[Text]:
    """Like ``answer``, for a plan whose step has too many tasks for an explanation."""
    decided = what_was_decided(plan.strategy, plan.graph, plan.cluster)
    gains = [f"{each.speedup:,.2f}x over {each.over}" for each in plan.gains]
    peaks = zip(plan.cluster.devices, plan.peak_memory_bytes, strict=True)
    fit = Fit(
        devices=tuple(
            DeviceMemory(
                device=device.name,
                device_type=device.type.name,
                peak_bytes=peak,
                usable_bytes=device.usable_memory_bytes,
                parts=(),
            )
            for device, peak in peaks
        )
    )
    wordings = {
        "gain": [", ".join(gains) or "no other method fits"],
        "memory": [_memory(plan, fit, decided, with_interval=each) for each in (True, False)],
    }
    return _page(plan, decided, wordings, width=width, remarks=remarks, files=files)


def _page(
    plan: Plan,
    decided: Decided,
    wordings: Mapping[str, Sequence[str]],
    *,
    width: int,
    remarks: Sequence[str],
    files: Sequence[str],
    advice: str = "",
) -> list[Text]:
    """The lines of an answer; each of its first parts takes the longest wording that fits."""
    width = max(width, NARROWEST)
    room = width - _LABEL
    together = [", ".join(files)] if files else []
    written = together if together and len(together[0]) <= room else files
    for most in (_LINES, _FEW_LINES):
        texts = {
            label: _first_that_fits(each, room, most[label]) for label, each in wordings.items()
        }
        also = [("also", _in_lines(remark, room, most["also"])) for remark in remarks]
        last = [*also, ("files", written), ("more", [advice] if advice else [])]
        left = MOST_LINES - 1 - sum(len(lines) for _, lines in (*texts.items(), *last))
        if left >= min(2 + len(decided.ranges), _GOOD_TABLE):
            break
    where = placement_lines(plan, decided, room, max(left, _LEAST_TABLE))
    limits = [("limits", texts.pop("limits", []))]
    head = Text(_cut(_head(plan, width), width), style="bold", no_wrap=True)
    parts = (*texts.items(), ("where", where), *limits, *last)
    return [head, *_at_most([line for part in parts for line in _beside(part)], MOST_LINES - 1)]


def _first_that_fits(wordings: Sequence[str], room: int, most: int) -> list[str]:
    """The longest wording that needs no cut, or the shortest one, cut."""
    for words in wordings:
        if len(textwrap.wrap(words, room, break_on_hyphens=False)) <= most:
            return _in_lines(words, room, most)
    return _in_lines(wordings[-1], room, most)


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
            span = f" ({each.low:,.2f}x to {each.high:,.2f}x if predictions are off)"
        said.append(f"{each.speedup:,.2f}x over {each.over}{span}")
    known = {each.over for each in plan.gains}
    over_given = plan.gain_over_given
    if over_given is not None and plan.method != over_given.over:
        said.insert(0, f"{over_given.speedup:,.2f}x over your layout")
    if not known and quality.data_parallel_s is not None and plan.cluster.num_devices > 1:
        ratio = quality.data_parallel_s / plan.step_time_s
        said.append(f"{ratio:,.2f}x over {quality.data_parallel}")
    if quality.data_parallel_s is None and plan.cluster.num_devices > 1:
        said.insert(0, "no data parallelism fits")
    return ", ".join(said)


def _memory(plan: Plan, fit: Fit, decided: Decided, *, with_interval: bool) -> str:
    """Whether the plan fits, how sure that is near the limit, and the fullest device."""
    fullest = fit.fullest
    needs = size_with_interval(plan.peak_errors if with_interval else None, fullest.peak_bytes)
    size = f"{needs} of {format_bytes(fullest.usable_bytes)}"
    near = near_limit(plan.peak_errors, fit.peaks)
    who = f"{fullest.device} ({fullest.device_type})"
    if not fit.is_ok:
        others = sum(device.lacking_bytes > 0 for device in fit.devices) - 1
        also = f", and {others} more lack some" if others else ""
        verdict = f"does not fit, but {near}" if near else "does not fit"
        return f"{verdict}: {who} lacks {format_bytes(fullest.lacking_bytes)} ({size}){also}"
    if plan.step_time_s is None:
        return f"fits, but it cannot run: {plan.shortage or plan.outcome.replace('_', ' ')}"
    part = "" if near else f" ({percent(fullest.peak_bytes / fullest.usable_bytes)})"
    again = f"{decided.num_recomputing} of {decided.num_groups} groups recompute"
    recomputed = f"; {again} {decided.recomputed}" if decided.num_recomputing else ""
    but = f", but {near}" if near else ""
    return f"fits{but}; fullest is {who}, {size}{part}{recomputed}"


_LIMITS = {
    Limit.COMPUTE: ("compute", "on"),
    Limit.HOST: ("issuing kernels", "for"),
    Limit.LINK: ("links", "for the"),
    Limit.LATENCY: ("latency", "of the"),
    Limit.WAIT: ("waiting", "for"),
}


def _limits(explanation: Explanation, most_places: int) -> str:
    """The largest parts of the critical path, some with the place that has most of them."""
    whole = explanation.step_time_s
    by_limit: dict[Limit, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for piece in explanation.pieces:
        by_limit[piece.limit][piece.place] += piece.seconds
    parts = sorted(by_limit.items(), key=lambda entry: -sum(entry[1].values()))
    said = []
    for number, (limit, places) in enumerate(parts[:3]):
        seconds = sum(places.values())
        if seconds < 0.01 * whole:
            continue
        place, most = max(places.items(), key=lambda entry: entry[1])
        what, on = _LIMITS[limit]
        words = f"{percent(seconds / whole)} {what}"
        if place and number < most_places:
            where, part = f"{on} {place}", percent(most / whole)
            words += f" {where}" if part == percent(seconds / whole) else f" ({part} {where})"
        said.append(words)
    text = ", ".join(said)
    if explanation.fit.is_ok:
        which = "" if explanation.bound.with_op_rules else " without op rules"
        text += f"; no plan{which} can take less than {format_seconds(explanation.bound_s)}"
    return text


def _in_lines(text: str, room: int, most: int) -> list[str]:
    """A text in at most ``most`` lines; what is too long is cut off with dots."""
    if not text:
        return []
    return textwrap.wrap(
        " ".join(text.split()), room, max_lines=most, placeholder=" ...", break_on_hyphens=False
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
