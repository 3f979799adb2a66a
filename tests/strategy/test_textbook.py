"""Layouts of transformers: what a lowered program does is what the textbook says."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from published.hosts import alike_hosts
from published.models import Model, graph_of
from published.runs import sailor_rows

from heterog.graph.op_graph import OpGraph
from heterog.lowering import lower
from heterog.lowering.channels import ChannelKind
from heterog.lowering.program import Program, TaskKind
from heterog.lowering.tables import graph_tables
from heterog.strategy.layouts.layout import Layout, Recompute
from heterog.strategy.layouts.placed import place_layout
from tests.strategy import textbook
from tests.thorough import THOROUGH

PRODUCTS = ("mm.default", "addmm.default", "bmm.default", "baddbmm.default")
RINGS = (ChannelKind.ALL_REDUCE_RING, ChannelKind.ALL_REDUCE_HIERARCHICAL)
Teams = Sequence[Sequence[tuple[int, ...]]]
"""Devices of each team of each stage of a pipeline."""


def computed(program: Program, graph: OpGraph) -> npt.NDArray[np.float64]:
    """Parameters that each device updates, and FLOPs of its products.  # [2, num_devices]"""
    tables = graph_tables(graph, program.op_rules, program.blocks)
    ops = [graph.ops[op] for op in tables.op_id.tolist()]
    flops = np.array([op.flops * (op.kind in PRODUCTS) for op in ops]) / graph.batch_size
    axes = np.maximum(tables.axis_units[tables.op_axis], 1)
    elements = np.array([graph.tensors[p].num_elements for _, p, _ in graph.updates])
    found = np.zeros((2, program.num_devices))
    for task, kind in enumerate(program.kind.tolist()):
        row, units = program.subject[task], program.units[task]
        device = program.device[task]
        if kind == TaskKind.UPDATE:
            is_cut = tables.parameter_axis[row] >= 0
            part = units / tables.parameter_units[row] if is_cut else 1.0
            found[0, device] += elements[row] * part
        elif kind in (TaskKind.COMPUTE, TaskKind.RECOMPUTE):
            part = units / axes[row] if units > 0 else 1.0
            found[1, device] += flops[row] * program.samples[task] * part
    return found


def sent(program: Program, pipelines: Sequence[Teams]) -> npt.NDArray[np.float64]:
    """Bytes that each device sends inside its team, to copies and to stages.

    Returns:
        # [3, num_devices]
    """
    team_of = {d: team for own in pipelines for stage in own for team in stage for d in team}
    found = np.zeros((3, program.num_devices))
    for task in np.flatnonzero(program.kind >= TaskKind.SEND).tolist():
        channel = program.channels[program.channel[task]]
        devices, payload = channel.devices, float(program.num_bytes[task])
        is_inside = set(devices) <= set(team_of[devices[0]])
        if program.kind[task] == TaskKind.SEND:
            found[0 if is_inside else 2, devices[0]] += payload
            continue
        each = payload * (2.0 if channel.kind in RINGS else 1.0) * (1.0 - 1.0 / len(devices))
        found[0 if is_inside else 1, list(devices)] += each
    return found


def check(
    program: Program, graph: OpGraph, model: Model, pipelines: Sequence[tuple[Teams, list[int]]]
) -> None:
    """Compare the devices of a program of (teams, layers of each stage) with the textbook.

    Means over the devices in teams of one size are compared, as a vocabulary may be cut unevenly;
    bytes between stages are means over all devices, as the textbook does not say which of them
    sends to a larger or smaller team.
    """
    sizes = textbook.Transformer(
        hidden=model.hidden,
        layers=model.layers,
        sequence=model.sequence,
        vocabulary=model.vocabulary,
        positions=model.sequence + 2 * (model.family == "opt"),
        wide=4 * model.hidden,
        has_final_norm=model.family != "opt",
        is_tied=model.is_tied,
        item_bytes=4 if model.dtype == "float32" else 2,
    )
    samples = graph.batch_size / len(pipelines)
    stages = [
        [
            textbook.Stage(
                teams=tuple(textbook.Team(size=len(t), samples=samples / len(s)) for t in s),
                layers=layers[index],
                first_layer=sum(layers[:index]),
                is_first=index == 0,
                is_last=index == len(layers) - 1,
            )
            for index, s in enumerate(teams)
        ]
        for teams, layers in pipelines
    ]
    each = computed(program, graph)
    moved = sent(program, [teams for teams, _ in pipelines])
    for number, (of_stages, _) in enumerate(pipelines):
        for index, teams in enumerate(of_stages):
            everyone = [device for team in teams for device in team]
            for team in set(stages[number][index].teams):
                own = [d for members in teams if len(members) == team.size for d in members]
                wanted = textbook.costs(
                    sizes, stages, (number, index), team, recompute=model.family == "gpt"
                )
                found = {
                    "parameters": each[0, own],
                    "flops": each[1, own],
                    "tensor_bytes": moved[0, own],
                    "data_bytes": moved[1, own],
                    "pipeline_bytes": moved[2, everyone],
                }
                for name, of_devices in found.items():
                    right = pytest.approx(getattr(wanted, name), rel=1e-6)
                    assert of_devices.mean() == right, name


@pytest.mark.parametrize(
    ("num_devices", "batch", "micro_batch", "tp", "dp", "pp"),
    [
        (1, 8, 2, 1, 1, 1),
        (4, 8, 1, 4, 1, 1),
        (8, 8, 1, 2, 2, 2),
        (8, 8, 2, 1, 2, 4),
        (32, 64, 1, 2, 4, 4),
    ],
)
def test_programs_do_what_the_textbook_says(
    num_devices: int, batch: int, micro_batch: int, tp: int, dp: int, pp: int
) -> None:
    """As many heads as samples, more teams than a host has room for, one replica and many."""
    model = Model(
        family="gpt",
        hidden=64,
        heads=8,
        layers=4,
        sequence=32,
        vocabulary=50257,
        dtype="bfloat16",
        is_tied=tp == pp == 1,
    )
    layout = Layout(
        tp=tp, pp=pp, dp=dp, micro_batch=micro_batch, recompute=Recompute.FULL, schedule="1f1b"
    )
    cluster = alike_hosts(
        "A100-40GB", num_devices, intra="nvlink_a100", nic="{line_rate: 400 Gbit/s}"
    )
    graph = graph_of(model, batch)
    program = lower(graph, cluster, place_layout(layout, graph, cluster).strategy)
    devices = np.arange(num_devices).reshape(pp, dp, tp).tolist()
    teams = [[tuple(team) for team in stage] for stage in devices]
    check(program, graph, model, [(teams, [model.layers // pp] * pp)])


@THOROUGH
@pytest.mark.slow
def test_unlike_pipelines_on_mixed_cards(tmp_path: Path) -> None:
    """One copy over two stages with teams of two and four, one on a single team."""

    def replicas(*entries: tuple[str, int]) -> list[Any]:
        return [[[[card, count, "zone"]], count] for card, count in entries]

    layers = list(range(26))
    row = {
        "pipeline_list": [
            {
                "num_stages": 2,
                "layers_per_stage": [layers[:11], layers[11:]],
                "tmp_per_stage": [replicas(("Titan-RTX", 2)), replicas(("RTX-2080", 4))],
                "dp": [1, 1],
            },
            {
                "num_stages": 1,
                "layers_per_stage": [layers],
                "tmp_per_stage": [replicas(("RTX-3090", 2))],
                "dp": [1],
            },
        ],
        "mbs": 1,
        "gbs": 8,
        "real": 1.0,
        "file": "OPT-350/mixed.json",
    }
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([row]))
    (run,) = sailor_rows(file)
    graph = graph_of(run.model, run.batch)
    program = lower(graph, run.cluster, run.build(graph, run.cluster))
    pipelines: list[tuple[Teams, list[int]]] = [
        ([[(0, 1)], [(2, 3, 4, 5)]], [10, 14]),
        ([[(6, 7)]], [24]),
    ]
    check(program, graph, run.model, pipelines)
