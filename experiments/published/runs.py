"""Rows of measured training runs with their layouts, as vTrain and Sailor published them.

Settings that the rows lack are chosen here: vTrain's vocabulary (50257), bfloat16 and full
recomputation (its own settings), 8 GPUs per A100 node behind 400 Gbit/s; Sailor's float32, 2048
tokens, the vocabulary padded to 50304 (its own parameter counts), one host per tensor-parallel
group, 800 Gbit/s per GH200 node and 10 Gbit/s for other cards. The head is tied to the embedding
where one device holds both; in a team or a pipeline there are two tables, whose gradients
Megatron-LM sums and we do not.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heterog.cluster import Cluster
from heterog.cluster.spec import parse_cluster
from heterog.errors import HeterogError
from heterog.graph.op_graph import OpGraph
from heterog.strategy.layouts.layout import Layout, Recompute
from heterog.strategy.layouts.pipelines import Pipeline, strategy_of_pipelines
from heterog.strategy.layouts.placed import place_layout
from heterog.strategy.layouts.stages import layers_of, stages_by_counts
from heterog.strategy.strategy import Strategy
from published.hosts import alike_hosts
from published.models import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One row.

    Attributes:
        name: where it comes from.
        model: what is trained.
        batch: samples of a step.
        cluster: that it ran on, as we describe it.
        num_stages: stages of the first pipeline.
        num_micro: micro-batches.
        measured_s: seconds of a step.
        measured_bytes: largest peak of a device, if recorded.
        layout: as text.
        build: makes the strategy for the captured graph.
        shortened: the same with so many micro-batches; ``None`` where programs are never large.
    """

    name: str
    model: Model
    batch: int
    cluster: Cluster
    num_stages: int
    num_micro: int
    measured_s: float
    layout: str
    measured_bytes: float | None = None
    build: Callable[[OpGraph, Cluster], Strategy]
    shortened: "Callable[[int], Run] | None" = None


def vtrain_run(row: dict[str, str]) -> Run:
    """A row of vTrain's tables."""
    count, batch, micro = (int(row[key]) for key in ("# GPUs", "global batch", "micro batch"))
    tp, dp, pp = (int(row[f"{kind} parallelism"]) for kind in ("tensor", "data", "pipeline"))
    model = Model(
        family="gpt",
        hidden=int(row["hidden size"]),
        heads=int(row["attention heads"]),
        layers=int(row["# layers"]),
        sequence=int(row["sequence length"]),
        vocabulary=50257,
        dtype="bfloat16",
        is_tied=tp == pp == 1,
    )
    layout = Layout(
        tp=tp, pp=pp, dp=dp, micro_batch=micro, recompute=Recompute.FULL, schedule="1f1b"
    )
    return Run(
        name="vtrain",
        model=model,
        batch=batch,
        cluster=alike_hosts(
            "A100-40GB", count, intra="nvlink_a100", nic="{line_rate: 400 Gbit/s}"
        ),
        num_stages=pp,
        num_micro=batch // (dp * micro),
        measured_s=float(row["iteration time (ms)"]) / 1e3,
        layout=str(layout),
        build=lambda graph, cluster: place_layout(layout, graph, cluster).strategy,
        shortened=lambda count: vtrain_run(row | {"global batch": str(count * micro * dp)}),
    )


def _float32(family: str, hidden: int, heads: int, layers: int) -> Model:
    return Model(
        family=family,
        hidden=hidden,
        heads=heads,
        layers=layers,
        sequence=2048,
        vocabulary=50304,
        dtype="float32",
        is_tied=False,
    )


SAILOR_MODELS = {
    "OPT-350": _float32("opt", 1024, 16, 24),
    "OPT-30": _float32("opt", 7168, 56, 48),
    "GPT-Neo-2.7": _float32("neo", 2560, 20, 32),
}
SAILOR_CARDS = {
    "GH-96": ("GH200", "nvlink4", "800 Gbit/s"),
    "A100-40": ("A100-40GB", "nvlink_a100", "10 Gbit/s"),
    "A100-80": ("A100-80GB", "nvlink_a100", "10 Gbit/s"),
    "V100-16": ("V100-16GB", "nvlink_v100", "10 Gbit/s"),
    "Titan-RTX": ("Titan-RTX", "pcie3", "10 Gbit/s"),
    "RTX-2080": ("RTX-2080-Ti", "pcie3", "10 Gbit/s"),
    "RTX-3090": ("RTX-3090", "pcie3", "10 Gbit/s"),
}


def sailor_rows(path: Path) -> list[Run]:
    """Rows of Sailor's validation results."""
    return [_sailor_run(row, number) for number, row in enumerate(json.loads(path.read_text()))]


def _sailor_run(row: dict[str, Any], number: int) -> Run:
    model = _sailor_model(row)
    size, batch = int(row["mbs"]), int(row["gbs"])
    hosts: list[str] = []
    first = 0
    plans = []
    for plan in row["pipeline_list"]:
        of_stages: list[tuple[tuple[int, ...], ...]] = []
        for replicas in plan["tmp_per_stage"]:
            made = []
            for entries, tp in replicas:
                made.append(tuple(range(first, first + tp)))
                hosts += _hosts_of_team(entries, tp, len(hosts))
                first += tp
            of_stages.append(tuple(made))
        plans.append(
            (
                tuple(of_stages),
                [
                    sum(1 <= number <= model.layers for number in each)
                    for each in plan["layers_per_stage"]
                ],
            )
        )
    per_column = [size * len(teams[0]) for teams, _ in plans]
    num_micro = max(-(-batch // sum(per_column)), 1)
    micro = _columns(batch, per_column, num_micro)
    layout = Layout()

    def build(graph: OpGraph, cluster: Cluster) -> Strategy:
        found = layers_of(graph)
        pipelines = [
            Pipeline(
                stages=stages_by_counts(found, counts),
                teams=teams,
                micro_batches=tuple(column for column in own if column),
            )
            for (teams, counts), own in zip(plans, micro, strict=True)
        ]
        return strategy_of_pipelines(graph, cluster, pipelines, layout)

    return Run(
        name=f"sailor:{number}:{row.get('file', '')}",
        model=model,
        batch=batch,
        cluster=parse_cluster(
            f"schema_version: 1\nname: sailor_{number}\nhosts:\n{''.join(hosts)}",
            Path(f"sailor_{number}.yaml"),
        ),
        num_stages=len(plans[0][0]),
        num_micro=num_micro,
        measured_s=float(row["real"]),
        measured_bytes=float(row["max_mem"]) if row.get("max_mem") else None,
        layout="; ".join(
            f"layers {counts}, teams {[[len(team) for team in stage] for stage in teams]}"
            for teams, counts in plans
        )
        + f"; micro_batch {size}",
        build=build,
    )


def _sailor_model(row: dict[str, Any]) -> Model:
    """The model by the file's name or the number of layers.

    Raises:
        HeterogError: neither is known.
    """
    for name, model in SAILOR_MODELS.items():
        if name in str(row.get("file", "")):
            return model
    count = sum(map(len, row["pipeline_list"][0]["layers_per_stage"]))
    for model in SAILOR_MODELS.values():
        if model.layers + 2 == count:
            return model
    raise HeterogError(f"no model of {count} layers is known: {row.get('file', 'no file')}.")


def _hosts_of_team(entries: Sequence[Sequence[Any]], size: int, first: int) -> list[str]:
    """One host for each node that a team has GPUs on, with as many as the team uses."""
    hosts: list[str] = []
    for card, count, _ in entries:
        used = min(size, int(count)) if len(entries) > 1 else size
        name, link, nic = SAILOR_CARDS.get(card, (card, "pcie3", "10 Gbit/s"))
        hosts.append(
            f"  - {{name: H{first + len(hosts)}, devices: [{{type: {name}, count: {used}}}], "
            f"intra: {link}, nic: {{line_rate: {nic}}}}}\n"
        )
        size -= used
        if not size:
            break
    return hosts


def _columns(batch: int, per_column: Sequence[int], num_micro: int) -> list[list[int]]:
    """Samples of each pipeline in each micro-batch; the last ones take what is left."""
    left = batch
    columns: list[list[int]] = [[] for _ in per_column]
    for _ in range(num_micro):
        for own, most in zip(columns, per_column, strict=True):
            own.append(min(most, left))
            left -= own[-1]
    return columns
