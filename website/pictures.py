"""Draws the pictures of the documentation from the project's own data.

    python -m website.pictures

Every picture is a small SVG file with a title and a description for readers who cannot see it. Its
colours are classes: a file on its own follows the system's choice of light or dark, on the site
``website/site.css`` follows the reader's.
"""

from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path

import heterog
from heterog.balance.shares import shares_from_speeds
from heterog.cluster.spec import parse_cluster
from heterog.envs.toy import chain_graph
from heterog.units import GIB

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
LIGHT = {
    "ink": "#1f2933", "quiet": "#5f6c7b", "first": "#2563a8", "second": "#c2560a",
    "third": "#5b7f1e", "fourth": "#8a3d8f", "on": "#ffffff", "head": "#9aa5b1",
}  # fmt: skip
DARK = {
    "ink": "#e4e7eb", "quiet": "#9fb0c0", "first": "#7ab3ef", "second": "#f0a35e",
    "third": "#a9cf62", "fourth": "#d59ada", "on": "#10151c", "head": "#64748b",
}  # fmt: skip
LINES = {"light": ("#9aa5b1", "#f5f7fa"), "dark": ("#64748b", "#232a36")}


def style() -> str:
    """Colours of a picture that stands alone."""

    def rules(colours: dict[str, str], line: str, paper: str) -> str:
        fills = "".join(f".p-{name}{{fill:{value}}}" for name, value in colours.items())
        return f"{fills}.p-line{{stroke:{line};fill:none}}.p-paper{{fill:{paper};stroke:{line}}}"

    dark = rules(DARK, *LINES["dark"])
    return (
        f"<style>{rules(LIGHT, *LINES['light'])}"
        f"@media(prefers-color-scheme:dark){{{dark}}}</style>"
    )


def text(x: float, y: float, words: str, *, kind: str = "ink", size: int = 14, **more: str) -> str:
    """A line of text; ``anchor`` and ``weight`` as in SVG."""
    anchor, weight = more.get("anchor", "middle"), more.get("weight", "400")
    return (
        f'<text x="{x:g}" y="{y:g}" class="p-{kind}" font-size="{size}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(words)}</text>'
    )


def box(x: float, y: float, width: float, height: float, kind: str = "paper") -> str:
    """A rectangle with round corners."""
    radius = min(6.0, width / 3, height / 3)
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'rx="{radius:.1f}" class="p-{kind}"/>'
    )


def arrow(x: float, y: float, to_x: float) -> str:
    """A horizontal arrow."""
    return (
        f'<path d="M{x:g} {y:g}H{to_x - 7:g}" class="p-line" stroke-width="2"/>'
        f'<path d="M{to_x - 9:g} {y - 5:g}L{to_x:g} {y:g}'
        f'L{to_x - 9:g} {y + 5:g}Z" class="p-head"/>'
    )


def picture(name: str, title: str, about: str, size: tuple[int, int], parts: list[str]) -> str:
    """A whole file."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" '
            f'role="img" '
            f'aria-labelledby="{name}-title {name}-about" font-family="system-ui, sans-serif">',
            style(),
            f'<title id="{name}-title">{escape(title)}</title>',
            f'<desc id="{name}-about">{escape(about)}</desc>',
            *parts,
            "</svg>\n",
        ]
    )


def from_model_to_step() -> str:
    """The way from a model and a cluster file to a running step."""
    stages = [
        ("Your model", "one training step", "paper"),
        ("Operator graph", "FLOPs and bytes", "first"),
        ("Strategy", "who does what", "second"),
        ("Program", "tasks and sends", "third"),
        ("Step on every rank", "same loss, same weights", "fourth"),
    ]
    verbs = ("capture", "plan", "lower", "run")
    width, gap, top = 160, 28, 46
    parts = []
    for number, (name, about, kind) in enumerate(stages):
        x = 10 + number * (width + gap)
        words = ("ink", "quiet") if kind == "paper" else ("on", "on")
        parts += [
            box(x, top, width, 62, kind),
            text(x + width / 2, top + 27, name, kind=words[0], size=14, weight="600"),
            text(x + width / 2, top + 47, about, kind=words[1], size=12),
        ]
        if number:
            parts.append(arrow(x - gap + 3, top + 31, x - 2))
            parts.append(text(x - gap / 2, top - 12, verbs[number - 1], kind="quiet", size=13))
    middle = 10 + 2 * (width + gap) + width / 2
    parts += [
        box(middle - 240, 160, 152, 44),
        text(middle - 164, 187, "Your cluster file", size=14, weight="600"),
        arrow(middle - 85, 182, middle - 50),
        text(
            middle - 44, 187, "searches propose, the simulator judges",
            kind="quiet", size=13, anchor="start",
        ),
        f'<path d="M{middle:g} 168V120" class="p-line" stroke-width="2"/>',
        f'<path d="M{middle - 5:g} 120L{middle:g} 111L{middle + 5:g} 120Z" class="p-head"/>',
    ]  # fmt: skip
    about = (
        "Five boxes from left to right: your model is captured as an operator graph, planned into "
        "a strategy, lowered to a program of tasks, and run as a step on every rank. The cluster "
        "file, searches and the simulator decide the strategy."
    )
    return picture("flow", "From model to running step", about, (940, 220), parts)


def cluster() -> str:
    """The hosts of a preset: cards by speed and memory, and the network between them."""
    shown = heterog.Cluster.load("paper_8gpu")
    kinds = {"V100-16GB": "first", "GTX-1080-Ti": "second", "P100-12GB": "third"}
    parts, told = [], []
    for index, host in enumerate(shown.hosts):
        x = 20 + index * 230
        parts += [box(x, 20, 200, 150), text(x + 100, 42, f"host {host.name}", weight="600")]
        rate = host.nic_line_rate_bytes_per_s * 8 / 1e9
        cards = [device for device in shown.devices if device.host_index == index]
        for number, device in enumerate(cards):
            left = x + 12 + number * 90
            name = device.type.name
            speed = device.type.peak_flops_per_s["float32"] / 1e12
            memory = f"{device.type.memory_bytes / GIB:.0f} GiB"
            parts += [
                box(left, 55, 86, 74, kinds[name]),
                text(left + 43, 78, name.replace("GTX-", "").rpartition("-16")[0]
                     or name.replace("GTX-", "").replace("-12GB", ""), kind="on", weight="600"),
                text(left + 43, 98, f"{speed:.1f} TFLOP/s", kind="on", size=12),
                text(left + 43, 115, memory, kind="on", size=12),
            ]  # fmt: skip
        told.append(f"host {host.name}: {len(cards)} {cards[0].type.name}, {rate:.0f} Gbit/s")
        parts += [
            text(x + 100, 155, f"NIC {rate:.0f} Gbit/s", kind="quiet", size=13),
            f'<path d="M{x + 100} 170V206" class="p-line" stroke-width="{rate / 25:g}"/>',
        ]
    parts += [box(20, 206, 890, 36), text(465, 229, "one switch that never blocks")]
    about = f"Four hosts on one switch. {'; '.join(told)}."
    return picture("cluster", "The preset paper_8gpu", about, (930, 255), parts)


def shares() -> str:
    """Two unlike cards with equal and with balanced shares of a batch of 48."""
    speeds, total = (3.0, 1.0), 48
    plans = (("equal", (24, 24)), ("balanced", shares_from_speeds(speeds, total)))
    slowest = max(
        share / speed for _, given in plans for share, speed in zip(given, speeds, strict=True)
    )
    parts: list[str] = []
    for row, (name, given) in enumerate(plans):
        y = 26 + row * 100
        end = max(share / speed for share, speed in zip(given, speeds, strict=True))
        parts.append(text(10, y + 30, f"{name} shares", anchor="start", weight="600"))
        for number, (share, speed) in enumerate(zip(given, speeds, strict=True)):
            top, scale = y + number * 36 - 6, 620 / slowest
            width = share / speed * scale
            parts += [
                box(150, top, width, 30, ("first", "second")[number]),
                text(158, top + 20, f"{share} samples", kind="on", size=13, anchor="start"),
            ]
            if share / speed < end:
                idle = (end - share / speed) * scale
                parts += [
                    box(150 + width, top, idle, 30),
                    text(150 + width + idle / 2, top + 20, "waits", kind="quiet", size=13),
                ]
        parts.append(text(160 + end * scale, y + 30, f"{end:.0f} units", anchor="start", size=13))
    about = (
        "Two cards, the first three times as fast as the second. With 24 samples each, the fast "
        "card works 8 units of time and waits 16. With 36 and 12 samples both work 12 units."
    )
    return picture("shares", "Equal and balanced shares", about, (880, 215), parts)


CARDS = """schema_version: 1
name: four
calibration: roofline
hosts: [{name: box, devices: [{type: A100-40GB, count: 4}], intra: nvlink_a100}]
"""


def lanes(schedule: str, num_micro: int) -> Iterator[tuple[int, int, bool, float, float]]:
    """(device, micro-batch, whether forward, begin, end in seconds) of every pass, simulated."""
    graph = chain_graph(8, 4096, 512 * num_micro)
    plan = heterog.layout(
        graph, parse_cluster(CARDS, Path("four.yaml")), pp=4, num_micro=num_micro,
        schedule=schedule,
    )  # fmt: skip
    timeline = plan.timeline()
    spans: dict[tuple[int, int, bool], tuple[float, float]] = {}
    for task in range(timeline.program.num_tasks):
        phase = timeline.phase(task) if timeline.is_compute(task) else ""
        if phase not in ("forward", "backward"):
            continue
        key = (
            int(timeline.program.device[task]),
            int(timeline.program.micro[task]),
            phase == "forward",
        )
        begin, end = spans.get(key, (float("inf"), 0.0))
        spans[key] = (
            min(begin, float(timeline.start[task])),
            max(end, float(timeline.finish[task])),
        )
    yield from ((*key, *span) for key, span in sorted(spans.items()))


def pipelines() -> str:
    """The same pipeline under two schedules, as simulated."""
    parts: list[str] = []
    num_micro = 6
    drawn = {name: list(lanes(name, num_micro)) for name in ("gpipe", "1f1b")}
    longest = max(end for rows in drawn.values() for *_, end in rows)
    for block, (name, rows) in enumerate(drawn.items()):
        top = 20 + block * 180
        parts.append(text(10, top + 4, {"gpipe": "GPipe", "1f1b": "1F1B"}[name],
                          anchor="start", weight="600"))  # fmt: skip
        for device in range(4):
            parts.append(text(10, top + 32 + device * 34, f"device {device}", kind="quiet",
                              size=13, anchor="start"))  # fmt: skip
        for device, micro, is_forward, begin, end in rows:
            x, width = 85 + begin / longest * 835, (end - begin) / longest * 835 - 1
            y = top + 14 + device * 34
            parts.append(box(x, y, width, 28, "first" if is_forward else "second"))
            if width > 12:
                parts.append(text(x + width / 2, y + 19, str(micro + 1), kind="on", size=12))
    parts += [
        box(85, 366, 16, 16, "first"), text(108, 379, "forward", size=13, anchor="start"),
        box(180, 366, 16, 16, "second"), text(203, 379, "backward", size=13, anchor="start"),
        text(290, 379, "numbers are micro-batches; gaps are bubbles", kind="quiet", size=13,
             anchor="start"),
    ]  # fmt: skip
    about = (
        "Two charts of four devices over time with six micro-batches. In GPipe every device does "
        "all forward passes first. In 1F1B a device turns to a backward pass as soon as one is "
        "ready. Both wait equally long; 1F1B keeps fewer micro-batches in memory."
    )
    return picture("pipelines", "GPipe and 1F1B, simulated", about, (930, 392), parts)


PICTURES: dict[str, Callable[[], str]] = {
    "from-model-to-step": from_model_to_step,
    "cluster": cluster,
    "shares": shares,
    "pipelines": pipelines,
}


def main() -> None:
    """Write every picture."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
