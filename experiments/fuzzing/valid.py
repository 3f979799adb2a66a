"""Valid files of every kind that heterog reads.

The checks of accepted files are here, too; they share no code with the readers.
"""

import contextlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fuzzing.outputs import check_call, make_call, need
from heterog.agents.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from heterog.agents.config import PolicyConfig
from heterog.agents.policy import Policy
from heterog.cluster import Cluster
from heterog.cluster.hardware import MAX_DEVICES
from heterog.errors import HeterogError
from heterog.export import TARGETS, ExportError, make_export
from heterog.fidelity.comparison import RecordedRun, read_runs
from heterog.files import MAX_JSON_BYTES, read_json
from heterog.graph import serialize
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph, Phase
from heterog.graph.serialize import graph_from_dict, load_graph, save_graph
from heterog.graph.workload import Workload
from heterog.lowering import lower
from heterog.lowering.channels import ChannelTable
from heterog.methods.planner import Budget
from heterog.pricing.calibration import Calibration, calibrate, read_run_models, save_run_models
from heterog.pricing.device_models.model import DeviceModels
from heterog.pricing.device_models.parameters import InTraining
from heterog.pricing.op_fits import (
    LinkMeasurement,
    Measurements,
    OpMeasurement,
    op_kind,
    op_signature,
)
from heterog.pricing.roofline import Roofline
from heterog.report.html import report_html
from heterog.runtime.checkpoint.boxes import Box, Entry, whole_box
from heterog.runtime.checkpoint.contents import Contents, SavedOptimizer, read_contents
from heterog.runtime.checkpoint.files import publish, read_tensors, write_tensors
from heterog.runtime.measure.profiler import Journal
from heterog.runtime.ranks.testbed import load_testbed
from heterog.search.plan import Plan, load_plan, make_plan
from heterog.search.request import Request


def _is_name(text: object) -> bool:
    allowed = " .:@+,()/#=-_"
    return (
        isinstance(text, str)
        and 0 < len(text) <= 200
        and all(letter.isalnum() or letter in allowed or letter.isidentifier() or
                f"a{letter}".isidentifier() for letter in text)
        and text[0] not in allowed.replace("_", "")
    )  # fmt: skip


def _good(values: Any, *, positive: bool = False) -> bool:
    array = np.asarray(values, np.float64)
    return bool(np.isfinite(array).all() and ((array > 0) if positive else (array >= 0)).all())


def _planned(graph: OpGraph, cluster: Cluster, *methods: str, **more: Any) -> Plan:
    budget = Budget.parse(f"{len(methods)}e")
    return make_plan(Request(graph=graph, cluster=cluster, methods=methods, budget=budget, **more))


def _seconds(plan: Plan) -> list[float]:
    """Simulated seconds of all methods that have some."""
    return [row.step_time_s for row in plan.rows if row.step_time_s is not None]


def check_graph(graph: OpGraph, cluster: Cluster) -> None:
    """A graph whose ops read what was made before, and that can be simulated."""
    need(
        _is_name(graph.name) and graph.optimizer.replace(".", "").isidentifier(),
        "its name or optimizer is no name",
    )
    made, updated = set(range(graph.num_inputs)), set()
    for index, op in enumerate(graph.ops):
        outputs = set(graph.outputs[index])
        is_in_order = set(op.inputs) <= made and not made & outputs
        need(
            is_in_order and isinstance(op.module, str) and op.module.isprintable(),
            f"op {index} reads what is not made",
        )
        made |= outputs
        if op.phase == Phase.UPDATE:
            need(op.inputs[0] not in updated, "a parameter is updated twice")
            updated.add(op.inputs[0])
        costs = [op.flops, op.bytes_read, op.bytes_written]
        need(_good(costs), f"op {index} has impossible costs")
    need(
        made == set(range(len(graph.tensors))) and graph.loss in made,
        "its tensors are not those of its ops",
    )
    if graph.batch_size < cluster.num_devices or graph.batch_size > 4096:
        return
    plan = _planned(graph, cluster, "ev_ar", "cp_ps")
    need(
        _good([*_seconds(plan), *plan.peak_memory_bytes]),
        "its simulated seconds or bytes are impossible",
    )
    need(
        graph_from_dict(
            json.loads(json.dumps(serialize.graph_to_dict(graph))), "again"
        ).fingerprint
        == graph.fingerprint,
        "it is another one when saved",
    )


def check_plan(plan: Plan) -> None:
    """A plan that can be lowered, shown and exported, with an order that can be run."""
    program = lower(plan.graph, plan.cluster, plan.strategy, num_steps=1)
    order = plan.task_order.tolist()
    need(
        sorted(order) == list(range(program.num_tasks)) and program.hash == plan.program_hash,
        "its order is no permutation of its tasks",
    )
    place = {task: number for number, task in enumerate(order)}
    for task in order:
        need(
            all(place[each] < place[task] for each in program.dependencies(task)),
            f"task {task} is listed before what it needs",
        )
    for decision in plan.strategy.decisions:
        need(sum(decision.shares) == plan.graph.batch_size, "its shares are not the batch")
    if plan.outcome == "ok":
        need(_good([plan.step_time_s], positive=True), "it takes impossible seconds")
    need(
        plan.outcome in ("ok", "out_of_memory", "cannot_run", "not_applicable"),
        "its outcome is no word",
    )
    need(
        len(plan.peak_memory_bytes) == plan.cluster.num_devices,
        "its peaks are not those of its devices",
    )
    need(
        _good([plan.timeline().seconds, plan.lower_bound_s, plan.search_seconds]),
        "its replayed seconds are impossible",
    )
    json.dumps(plan.summary(), allow_nan=False)
    if random.random() < 0.05:
        need("</script><script>alert" not in report_html(plan), "its page runs a script")
    for target in TARGETS:
        with contextlib.suppress(HeterogError, ExportError):
            for name, content in make_export(plan, target).files.items():
                if name.endswith(".py"):
                    compile(content, name, "exec")
                need(b"root:" not in content, "its export copied another file")


def check_cluster(cluster: Cluster, graph: OpGraph) -> None:
    """Devices on hosts, names that are names, rates that are rates."""
    names = [device.name for device in cluster.devices]
    words = [cluster.name, *names, *(host.name for host in cluster.hosts)]
    need(
        len(set(names)) == len(names) <= MAX_DEVICES and all(map(_is_name, words)),
        "its names are no names",
    )
    need(
        _good([link.bandwidth_bytes_per_s for link in cluster.resources], positive=True),
        "a link has an impossible rate",
    )
    for device in cluster.devices:
        need(
            0 < device.usable_memory_bytes <= device.type.memory_bytes,
            "a device has an impossible memory",
        )
    need(
        Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster,
        "it is another one when saved",
    )
    if len(names) <= 8:
        need(
            _good(_seconds(_planned(graph, replace(cluster, calibration=None), "ev_ar"))),
            "its simulated seconds are impossible",
        )


def check_runs(runs: list[RecordedRun]) -> None:
    """Positive seconds, and nothing that would be run."""
    need(_good([run.seconds for run in runs], positive=True), "a run has impossible seconds")
    for run in runs:
        need(not run.model.endswith(".py") and ":" not in run.model, "a run names code")
        need(bool(run.family and run.cluster), "a run lacks a name")


def check_calibration(model: Calibration | DeviceModels, graph: OpGraph, cluster: Cluster) -> None:
    """Seconds that are finite and not negative, for every op, share and channel."""
    for device_type in cluster.device_types:
        for samples in (1, 12, 24):
            need(
                _good(model.op_seconds(graph, device_type, samples)),
                "it prices an op at impossible seconds",
            )
        need(_good(model.copy_seconds(device_type)), "it prices copies at impossible seconds")
    table = ChannelTable(cluster)
    for number in range(len(table)):
        cost = model.channel_seconds(cluster, table[number])
        lost = (*cost.drag.values(), *cost.overhead_s.values())
        need(
            _good([cost.latency_s, cost.seconds_per_byte, cost.loaded_latency_s, *lost]),
            "it prices a transfer at impossible seconds",
        )
    need(
        _good(_seconds(_planned(graph, cluster, "ev_ar", cost_model=model))),
        "its simulated seconds are impossible",
    )


def check_measurements(read: Any, graph: OpGraph, cluster: Cluster) -> None:
    """Rows of positive seconds, from which a calibration can be fitted."""
    found, model = read
    need(
        _good([row.seconds for row in (*found.ops, *found.links)], positive=True),
        "a row has impossible seconds",
    )
    need(
        all(row.samples >= 1 and row.count >= 1 for row in found.ops),
        "a row has no samples or calls",
    )
    check_calibration(model, graph, cluster)


def check_journal(journal: Journal) -> None:
    """Rows that are measurements."""
    need(
        _good([row.seconds for rows in journal._rows.values() for row in rows], positive=True),
        "a row has impossible seconds",
    )


def check_policy(checkpoint: Checkpoint) -> None:
    """Finite weights."""
    for value in checkpoint.policy.state_dict().values():
        need(bool(torch.isfinite(value).all()), "its weights are not finite")


def check_checkpoint(read: Any) -> None:
    """The very tensors that were saved."""
    contents, tensors = read
    wanted = {"model.w": torch.arange(12.0).reshape(3, 4), "optimizer.w.exp_avg": torch.ones(3, 4)}
    for name, value in tensors.items():
        need(
            name in wanted and torch.equal(value, wanted[name]),
            f"tensor {name} is not what was saved",
        )
    need(contents.num_steps >= 0, "it has trained a negative number of steps")


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 12)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        result: torch.Tensor = self.head(self.norm(x).mean(1))
        return result


def small_graph(batch_size: int = 24) -> OpGraph:
    """A captured model with views, a tied sum and a loss over labels."""
    batch = (
        torch.zeros(batch_size, 6, dtype=torch.int64),
        torch.zeros(batch_size, dtype=torch.int64),
    )
    return capture(
        Workload(_Model, batch, nn.functional.cross_entropy, torch.optim.Adam, name="small")
    )


def documented() -> dict[str, Any]:
    """The graph that the format's documentation shows."""
    lines = (serialize.__doc__ or "").splitlines()
    begin = lines.index("    {")
    record: dict[str, Any] = json.loads("\n".join(lines[begin : lines.index("    }", begin) + 1]))
    return record


TEXT_FILES = {
    "lab.yaml": """\
schema_version: 1
name: lab
efficiency: 0.7
reserved_memory: 1.0 GiB
hosts:
  - name: a
    devices: [{type: V100-16GB, count: 2, usable_memory: 9 GiB}]
    intra: {kind: own, bandwidth: 20 GB/s, latency: 5 us, shared: true}
    nic: {line_rate: 100 Gbit/s, latency: 20 us}
  - name: b
    count: 2
    devices:
      - type: {name: mine, peak_flops: 10 TFLOP/s, memory_bandwidth: 500 GB/s, memory: 8 GiB}
        launch_overhead: 5 us
    nic: {line_rate: 50 Gbit/s}
    testbed: {cpu_quota: 0.8}
""",
    "bed.yaml": """\
schema_version: 1
name: bed
hosts:
- {name: a, devices: [{type: CPU, count: 2}], intra: pcie3, testbed: {cpu_quota: 0.5}}
""",
    "runs.csv": """\
model,batch_size,cluster,layout,seconds,peak_bytes,family
gpt2,16,lab.yaml,"tp=2,dp=2",0.412,9126805504,small
graph.json.gz,,lab.yaml,pp=4,3.87e-1,,
""",
    "m.py": "import torch\n",
}
"""Files that are texts, by name."""


def measurements(graph: OpGraph, cluster: Cluster) -> Measurements:
    """Measurements as a profile might have them, made from the roofline."""
    kind = cluster.devices[0].type
    rows = []
    for samples in (3, 12, 24):
        seconds = Roofline().op_seconds(graph, kind, samples)
        rows += [
            OpMeasurement(
                device_type=kind.name,
                model=graph.name,
                signature=op_signature(graph, index),
                kind=op_kind(graph, index),
                samples=samples,
                flops=float(graph.flops[index]),
                num_bytes=float(graph.bytes_moved[index]),
                seconds=float(seconds[index]),
                count=2,
            )
            for index in range(0, graph.num_ops, 3)
            if seconds[index] > 0
        ]
    names = [device.name for device in cluster.devices]
    links = [
        LinkMeasurement(
            kind=what,
            devices=members,
            slices=(1,) * len(members) if what == "all_gather" else (),
            num_bytes=size,
            seconds=1e-4 + size / 1e9,
            device_seconds=(1e-5,) * len(members),
        )
        for what, members in (
            ("point_to_point", tuple(names[:2])),
            ("all_reduce_ring", tuple(names)),
            ("all_gather", tuple(names)),
        )
        for size in (4096, 65536, 2**20)
    ]
    return Measurements(
        environment={"torch": "2"}, ops=tuple(rows), links=tuple(links), cluster=cluster.to_dict()
    )


def write_checkpoint(folder: Path) -> None:
    """A checkpoint of one layer, one of its tensors in parts, as rank 0 writes it."""
    folder.mkdir()
    data = folder / "data-0"
    data.mkdir()
    weight, state = torch.arange(12.0).reshape(3, 4), torch.ones(3, 4)
    left, right = Box((0, 0), (3, 1)), Box((0, 1), (3, 3))
    own = [
        Entry(whole="model.w", shape=(3, 4), box=whole_box((3, 4)), value=weight),
        Entry(whole="optimizer.w.exp_avg", shape=(3, 4), box=left, value=state[:, :1]),
        Entry(whole="optimizer.w.exp_avg", shape=(3, 4), box=right, value=state[:, 1:]),
    ]
    contents = Contents(
        heterog="0",
        torch="2",
        model="small",
        graph="0123456789abcdef",
        optimizer="Adam",
        num_steps=3,
        data="data-0",
        tensors=write_tensors(own, data, 0),
        states={
            "w": SavedOptimizer(
                options={"lr": 0.1, "betas": [0.9, 0.99]}, tensors=("exp_avg",), values={"step": 3}
            )
        },
        extra={"epoch": 1},
    )
    publish(contents, folder / "checkpoint.json", data)


@dataclass(frozen=True)
class Kind:
    """A kind of file: how it is read, and how the result is checked.

    Attributes:
        name: of the kind.
        files: valid ones.
        read: reads a path; what comes back is checked.
        check: raises ``Wrong`` if what was accepted is not valid.
        form: ``json``, ``yaml``, ``lines``, ``torch`` or ``folder``; ``call`` of the command line.
        weight: how often it is drawn.
    """

    name: str
    files: tuple[Path, ...]
    read: Callable[[Path], Any]
    check: Callable[[Any], None]
    form: str
    weight: int = 1


def make_kinds(folder: Path) -> tuple[Kind, ...]:
    """Valid files of every kind, and what to do with them."""
    graph = small_graph()
    (folder / "hand.json").write_text(json.dumps(documented(), indent=1))
    for name, text in TEXT_FILES.items():
        (folder / name).write_text(text)
    cluster = Cluster.load(folder / "lab.yaml")
    write_measured(folder, graph, cluster)
    write_checkpoint(folder / "checkpoint")
    small = Policy(PolicyConfig(width=16, num_heads=2, num_rounds=1, rank=4)).eval()
    save_checkpoint(folder / "policy.pt", Checkpoint(policy=small, provenance={"name": "x"}))
    graphs = ("hand.json", "graph.json", "graph.json.gz")
    for name in graphs[1:]:
        save_graph(graph, folder / name)
    plans = write_plans(folder, graph, cluster)

    of_cluster = partial(check_cluster, graph=graph)
    of_prices = partial(check_calibration, graph=graph, cluster=cluster)

    def named(*names: str) -> tuple[Path, ...]:
        return tuple(folder / name for name in names)

    return (
        Kind("graph", named(*graphs), load_graph,
             partial(check_graph, cluster=cluster), "json", 3),
        Kind("plan", plans, load_plan, check_plan, "json", 3),
        Kind("cluster", named("lab.yaml"), Cluster.load, of_cluster, "yaml", 2),
        Kind("testbed", named("bed.yaml"), lambda path: load_testbed(str(path)), of_cluster,
             "yaml"),
        Kind("calibration", named("calibration.json"), Calibration.load, of_prices, "json", 2),
        Kind("run models", named("runs.json"), _run_models, of_prices, "json"),
        Kind("recorded runs", named("runs.csv"), read_runs, check_runs, "csv"),
        Kind("measurements", named("measurements.json"),
             lambda path: (found := Measurements.load(path), _calibrated(found)),
             partial(check_measurements, graph=graph, cluster=cluster), "json", 2),
        Kind("journal", named("rank0.jsonl"), lambda path: Journal(path, "a V100"),
             check_journal, "lines"),
        Kind("policy", named("policy.pt"), load_checkpoint, check_policy, "torch"),
        Kind("checkpoint", named("checkpoint"), read_checkpoint, check_checkpoint,
             "folder", 2),
        Kind("outputs", (folder,), make_call, check_call, "call", 3),
    )  # fmt: skip


def write_plans(folder: Path, graph: OpGraph, cluster: Cluster) -> tuple[Path, ...]:
    """Plans of unlike methods, one of them beside other work."""
    files = []
    for number, methods in enumerate((("ev_ps", "ddp"), ("cp_ar", "pipeline"), ("local_search",))):
        budget = Budget.parse("30e")
        plan = make_plan(
            Request(graph=graph, cluster=cluster, methods=methods, budget=budget, seed=number)
        )
        if number == 1:
            plan = plan.with_background(small_graph(4), 1.2)
        for name in (f"plan{number}.json", "plan.json"):
            plan.save(folder / name)
        files.append(folder / f"plan{number}.json")
    return tuple(files)


def write_measured(folder: Path, graph: OpGraph, cluster: Cluster) -> None:
    """Measurements, what is fitted to them, and a journal of them."""
    found = measurements(graph, cluster)
    found.save(folder / "measurements.json")
    calibrate(found, cluster, name="calibrated").save(folder / "calibration.json")
    models = DeviceModels(
        host_s=2e-5, in_training={"V100-16GB": InTraining(products=1.2, float32=1.1)}
    )
    save_run_models(folder / "runs.json", models, "mine", 5)
    journal = Journal(folder / "rank0.jsonl", "a V100")
    journal.add("one", list(found.ops[:4]))
    journal.add("two", list(found.links[:2]))


def _run_models(path: Path) -> DeviceModels:
    return read_run_models(read_json(path, "calibration", MAX_JSON_BYTES), f"calibration {path}")


def _calibrated(found: Measurements) -> Calibration:
    return calibrate(found, None if found.cluster is None else Cluster.from_dict(found.cluster))


def read_checkpoint(folder: Path) -> Any:
    """All tensors of a checkpoint."""
    contents = read_contents(folder)
    return contents, read_tensors(contents, folder, contents.names)
