"""Explanations for a terminal of 100 columns: paragraphs with headings, memory as a table."""

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from heterog.explain.explanation import Explanation
from heterog.simulator.memory_breakdown import Fit, MemoryKind
from heterog.units import GIB

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


def memory_table(fit: Fit, *, title: str = "Memory of each device at its fullest (GiB)") -> Table:
    """Memory of each device by use, in GiB, without uses that are below 0.05 GiB everywhere.

    Devices that are equal to the last digit shown share a row.
    """
    table = Table(title=escape(title) or None, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("device", overflow="fold")
    table.add_column("type", overflow="fold")
    kinds = [
        kind
        for kind in MemoryKind
        if any(device.bytes_of(kind) >= 0.05 * GIB for device in fit.devices)
    ]
    for kind in kinds:
        table.add_column(_HEADERS[kind], justify="right")
    for header in ("needs", "usable", "lacks"):
        table.add_column(header, justify="right", no_wrap=True)
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
