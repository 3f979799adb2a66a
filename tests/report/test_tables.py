import io
import re
from dataclasses import replace

import pytest
from rich.console import Console
from rich.table import Table

from heterog.cluster import Cluster, preset_names
from heterog.report.tables import clusters_table, methods_table, models_table
from heterog.search.rows import MethodRow
from heterog.zoo import registry

GIB = 1024**3


def row(method: str, step_time_s: float | None, *, shortage: str = "") -> MethodRow:
    return MethodRow(
        method=method,
        stage="baseline",
        outcome="ok" if step_time_s is not None else "out_of_memory",
        step_time_s=step_time_s,
        order="fifo",
        peak_memory_bytes=tuple(GIB * (index + 1) for index in range(8)),
        num_evaluations=12345,
        search_seconds=1.5,
        shortage=shortage,
    )


def text_of(table: Table, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(table)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text  # nothing is cut off
    return text


def line_of(text: str, name: str) -> list[str]:
    """The cells of a row, which are at least two spaces apart."""
    line = next(line for line in text.splitlines() if f" {name} " in line)
    return re.split(r"\s{2,}", line.strip())


def test_methods() -> None:
    shortage = "B:0 (GTX-1080-Ti) needs 12.0 GiB, 2.0 GiB more than its 10.0 GiB [of 11]"
    rows = [
        row("ev_ps", None, shortage=shortage),
        row("ev_ar", 0.5),
        row("cp_ar", 0.4),
        row("local_search", 0.2),
        replace(row("pipeline", None), outcome="not_applicable", peak_memory_bytes=()),
    ]
    text = text_of(methods_table(rows, Cluster.load("paper_8gpu"), title="bert_base [8]"))
    assert "bert_base [8]" in text
    # V100: devices 0 and 1; GTX 1080 Ti: 2 to 5; P100: 6 and 7. The fullest of each type.
    memory = ["2.0", "6.0", "8.0"]
    end = ["12,345", "1.50 s"]
    assert line_of(text, "local_search") == [
        "local_search",
        "200.0 ms",
        "2.00x",
        *memory,
        *end,
        "ok",
    ]
    assert line_of(text, "ev_ar")[2] == "0.80x"
    assert line_of(text, "ev_ps") == ["ev_ps", "-", "-", *memory, *end, "out of memory"]
    assert line_of(text, "pipeline")[3:6] == ["-", "-", "-"]
    flat = " ".join(text.split())
    assert f"ev_ps: {shortage}" in flat


def test_the_fastest_is_bold() -> None:
    rows = [row("ev_ar", 0.5), row("local_search", 0.2), row("ev_ps", None)]
    table = methods_table(rows, Cluster.load("paper_8gpu"))
    assert [str(each.style) for each in table.rows] == ["", "bold", ""]


def test_speed_up_needs_a_data_parallel_row() -> None:
    rows = [row("ev_ar", None), row("pipeline", 0.3)]
    text = text_of(methods_table(rows, Cluster.load("paper_8gpu")))
    assert line_of(text, "pipeline")[2] == "-"
    rows += [row("ddp", 0.6), row("best_ddp", 0.45)]
    text = text_of(methods_table(rows, Cluster.load("paper_8gpu")))
    assert line_of(text, "pipeline")[2] == "1.50x"


def test_many_device_types_share_a_column() -> None:
    cluster = Cluster.load("paper_8gpu")
    devices = tuple(
        replace(device, type=replace(device.type, name=f"type{index}"))
        for index, device in enumerate(cluster.devices)
    )
    many = replace(cluster, devices=devices)
    text = text_of(methods_table([row("ev_ar", 0.5)], many))
    assert line_of(text, "ev_ar")[3] == "8.0"


@pytest.mark.parametrize("width", [80, 100])
def test_models(width: int) -> None:
    text = text_of(models_table(map(registry.entry, registry.names())), width)
    for name in registry.names():
        assert f" {name} " in text
    assert line_of(text, "vgg19")[:4] == ["vgg19", "vision", "192", "143.7 M"]


def test_clusters() -> None:
    text = text_of(clusters_table(map(Cluster.load, preset_names())))
    assert line_of(text, "paper_8gpu")[1:3] == ["4", "2 x V100-16GB, 4 x"]
    assert line_of(text, "paper_8gpu")[-1] == "50 to 100 Gbit/s x 0.7"
    assert line_of(text, "homogeneous_8xa100")[-1] == "-"
