"""Can every published layout be expressed, and do programs agree with the textbook?

    python experiments/published_layouts.py --vtrain FILE.csv --sailor FILE.json --json

For every row of measured training runs (Megatron-DeepSpeed GPT on A100 nodes as vTrain published
them; OPT and GPT-Neo on GH200 nodes and mixed cards as Sailor did) the layout is built for the
captured model, lowered and simulated. Then the parameters, FLOPs and bytes sent of each device are
counted in the lowered program and compared with ``published/textbook.py``, which has formulas
only. Simulated seconds stand beside the measured ones; nothing is fitted to them.

``published/runs.py`` reads the rows, ``published/models.py`` has the models that are captured.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from published import textbook as oracle
from published.models import graph_of
from published.runs import Run, sailor_rows, vtrain_rows
from rows import asked_of, finish, option, progress

from heterog.cluster.topology import Sends
from heterog.errors import HeterogError
from heterog.graph.op_graph import OpGraph
from heterog.lowering import lower
from heterog.lowering.channels import ChannelKind
from heterog.lowering.program import Program, TaskKind
from heterog.lowering.tables import graph_tables
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator

TOLERANCE = 0.01
PRODUCTS = frozenset({"mm.default", "addmm.default", "bmm.default", "baddbmm.default"})
_TEAM_KINDS = (TaskKind.REDUCE_VALUE, TaskKind.GATHER_VALUE)
_DATA_KINDS = (TaskKind.ALL_REDUCE, TaskKind.REDUCE_SCATTER, TaskKind.ALL_GATHER,
               TaskKind.GATHER_PARAMETERS)  # fmt: skip


@dataclass(slots=True)
class Counted:
    """Parameters, FLOPs and bytes sent of a device, by a lowered program."""

    parameters: float = 0.0
    flops: float = 0.0
    tensor_bytes: float = 0.0
    data_bytes: float = 0.0
    pipeline_bytes: float = 0.0


def count(program: Program, graph: OpGraph, run: Run) -> list[Counted]:
    """Add up the tasks of a program by device."""
    found = [Counted() for _ in range(program.num_devices)]
    team_of = {
        device: team for own in run.teams for stage in own for team in stage for device in team
    }
    # Tasks of a kind on a channel send the same multiple of their payload: add these up first.
    sent: dict[tuple[int, int], float] = defaultdict(float)
    rows = _Rows(program, graph)
    flops, kept = np.zeros(program.num_devices), np.zeros(program.num_devices)
    for begin in range(0, program.num_tasks, _CHUNK):
        tasks = slice(begin, begin + _CHUNK)
        flops += rows.flops(tasks)
        kept += rows.parameters(tasks)
        for key, payload in rows.payloads(tasks).items():
            sent[key] += payload
    for device, each in enumerate(found):
        each.flops, each.parameters = float(flops[device]), float(kept[device])
    for (code, number), payload in sent.items():
        channel = program.channels[number]
        if code == TaskKind.SEND:
            source, target = channel.devices
            if target in team_of.get(source, ()):
                found[source].tensor_bytes += payload
            else:
                found[source].pipeline_bytes += payload
            continue
        size = len(channel.devices)
        reduces = channel.kind in (
            ChannelKind.ALL_REDUCE_RING,
            ChannelKind.ALL_REDUCE_HIERARCHICAL,
        )
        each_bytes = payload * (2.0 if reduces else 1.0) * (size - 1) / size
        team = team_of.get(channel.devices[0], ())
        in_team = all(device in team for device in channel.devices)
        for device in channel.devices:
            if in_team:
                found[device].tensor_bytes += each_bytes
            else:
                found[device].data_bytes += each_bytes
    return found


_CHUNK = 1 << 22
_SENDING = tuple(map(int, (*_TEAM_KINDS, *_DATA_KINDS, TaskKind.SEND)))


class _Rows:
    """The tasks of a program, some at a time: there may be a hundred million.

    Args:
        program: of one step.
        graph: that it was lowered from.
    """

    def __init__(self, program: Program, graph: OpGraph) -> None:
        self.program = program
        tables = graph_tables(graph, program.op_rules, program.blocks)
        axes = tables.axis_units[tables.op_axis].astype(np.float64)
        products = [graph.ops[op].kind in PRODUCTS for op in tables.op_id.tolist()]
        flops = np.array([graph.ops[op].flops for op in tables.op_id.tolist()])
        self._flops = np.where(products, flops, 0.0) / graph.batch_size
        self._axis_units = np.where(axes > 0, axes, 1.0)
        elements = [graph.tensors[p].meta.num_elements for _, p, _ in graph.updates]
        self._elements = np.array(elements, np.float64)
        self._is_cut = tables.parameter_axis >= 0
        self._parameter_units = tables.parameter_units

    def flops(self, tasks: slice) -> Any:
        """FLOPs of matrix products by device: of the whole op, by samples and units.

        Returns:
            # [num_devices]
        """
        program = self.program
        kind = program.kind[tasks]
        mine = np.flatnonzero((kind == TaskKind.COMPUTE) | (kind == TaskKind.RECOMPUTE))
        row = program.subject[tasks][mine]
        units = program.units[tasks][mine].astype(np.float64)
        part = np.where(units > 0, units / self._axis_units[row], 1.0)
        work = self._flops[row] * program.samples[tasks][mine] * part
        return np.bincount(program.device[tasks][mine], work, program.num_devices)

    def parameters(self, tasks: slice) -> Any:
        """Numbers of the parameters that each device updates.  # [num_devices]"""
        program = self.program
        mine = np.flatnonzero(program.kind[tasks] == TaskKind.UPDATE)
        row = program.subject[tasks][mine]
        units = program.units[tasks][mine]
        part = np.where(self._is_cut[row], units / self._parameter_units[row], 1.0)
        return np.bincount(
            program.device[tasks][mine], self._elements[row] * part, program.num_devices
        )

    def payloads(self, tasks: slice) -> dict[tuple[int, int], float]:
        """Bytes of payload by kind and channel."""
        program = self.program
        kind = program.kind[tasks]
        found = {}
        for code in _SENDING:
            mine = np.flatnonzero(kind == code)
            numbers, place = np.unique(program.channel[tasks][mine], return_inverse=True)
            payload = np.bincount(place, program.num_bytes[tasks][mine], len(numbers))
            for number, amount in zip(numbers.tolist(), payload.tolist(), strict=True):
                found[code, number] = amount
        return found


FIELDS = ("parameters", "flops", "tensor_bytes", "data_bytes", "pipeline_bytes")


def expected(run: Run, place: tuple[int, int], team: oracle.Team) -> oracle.Costs:
    """The textbook's costs of a device of a team of a stage."""
    model = run.model
    sizes = oracle.Transformer(
        hidden=model.hidden,
        layers=model.layers,
        sequence=model.sequence,
        vocabulary=model.vocabulary,
        positions=model.sequence + 2 * (model.family == "opt"),
        wide=4 * model.hidden,
        has_final_norm=model.family != "opt",
        is_tied=model.is_tied,
        item_bytes=4 if model.dtype == "float32" else 2,
        loss_bytes=4,
    )
    return oracle.costs(
        sizes, run.pipelines, place, team, recompute=run.recompute, num_micro=run.num_micro
    )


def compared(run: Run, found: Sequence[Counted]) -> dict[str, dict[str, float]]:
    """For each quantity the stage where program and oracle differ most.

    It compares means over the devices in teams of one size. Bytes between stages are means over
    all devices, because the textbook does not say which of them sends to a larger or smaller team.
    """
    worst: dict[str, dict[str, float]] = {}
    for number, (stages, of_stages) in enumerate(zip(run.pipelines, run.teams, strict=True)):
        for index, (stage, teams) in enumerate(zip(stages, of_stages, strict=True)):
            for size in {len(members) for members in teams}:
                like = [device for members in teams if len(members) == size for device in members]
                everyone = [device for members in teams for device in members]
                team = next(each for each in stage.teams if each.size == size)
                textbook = expected(run, (number, index), team)
                for field in FIELDS:
                    devices = everyone if field == "pipeline_bytes" else like
                    mean = sum(getattr(found[d], field) for d in devices) / len(devices)
                    wanted = getattr(textbook, field)
                    off = abs(mean - wanted) / wanted if wanted else float(mean > 0.0)
                    if field not in worst or off > worst[field]["off"]:
                        worst[field] = {
                            "program": mean,
                            "oracle": wanted,
                            "off": off,
                            "pipeline": number,
                            "stage": index,
                        }
    return worst


def judge(run: Run, sends: Sends = Sends.OVERLAPPED) -> dict[str, Any]:
    """Build, lower, simulate and compare one row."""
    row: dict[str, Any] = {
        "row": run.name,
        "model": asdict(run.model),
        "batch": run.batch,
        "devices": run.cluster.num_devices,
        "layout": run.layout,
        "measured_s": run.measured_s,
        "expressible": False,
    }
    try:
        graph = graph_of(run.model, run.batch)
        evaluator = Evaluator(graph, replace(run.cluster, sends=sends))
        strategy = run.build(graph, run.cluster)
        evaluation = evaluator.evaluate(strategy, Order.FIFO)
        del evaluator  # its arrays have room for every task, and the program will need as much
        program = lower(graph, run.cluster, strategy)
        differences = compared(run, count(program, graph, run))
    except HeterogError as error:
        return row | {"problem": str(error)}
    return row | {
        "expressible": True,
        "problem": "",
        "outcome": str(evaluation.outcome),
        "simulated_s": evaluation.step_time_s,
        "peak_memory_bytes": max(evaluation.peak_memory_bytes),
        "tasks": program.num_tasks,
        "compared": differences,
        "agrees": all(each["off"] <= TOLERANCE for each in differences.values()),
    }


def main() -> None:
    """Judge every row of the files."""
    arguments = asked_of(
        __doc__,
        option("--vtrain", type=Path, help="CSV with vTrain's columns"),
        option("--sailor", type=Path, help="JSON with Sailor's fields"),
        option("--only", default="", help="texts that rows' layouts have, with ; between"),
        option("--every", type=int, default=1, help="judge one row of so many"),
        option(
            "--sends", default="overlapped", choices=list(map(str, Sends)), help="of who executed"
        ),
    )
    runs = vtrain_rows(arguments.vtrain) if arguments.vtrain else []
    runs += sailor_rows(arguments.sailor) if arguments.sailor else []
    only = [text for text in arguments.only.split(";") if text]
    chosen = [run for run in runs if not only or any(text in run.layout for text in only)]
    chosen = chosen[:: arguments.every]
    # Rows of one model and batch share a capture.
    chosen.sort(key=lambda run: (str(run.model), run.batch))
    rows = []
    for number, run in enumerate(chosen, 1):
        row = judge(run, Sends(arguments.sends))
        rows.append(row)
        said = row["problem"] or "  ".join(
            f"{name} {each['off']:.2%}" for name, each in row["compared"].items()
        )
        progress(f"{number}/{len(chosen)} {run.name} {run.layout}: {said}")
    document = {
        "rows": rows,
        "num_rows": len(rows),
        "expressible": sum(row["expressible"] for row in rows) / max(len(rows), 1),
        "agreeing": sum(row.get("agrees", False) for row in rows) / max(len(rows), 1),
        "tolerance": TOLERANCE,
    }
    finish(
        arguments,
        document,
        [
            f"{len(rows)} rows, expressible {document['expressible']:.3f}, "
            f"agreeing {document['agreeing']:.3f}"
        ],
    )


if __name__ == "__main__":
    main()
