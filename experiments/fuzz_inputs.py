"""What becomes of damaged and hostile files: is every one refused in a line, or valid?

python experiments/fuzz_inputs.py --cases 10000 --seed 0 --json

Makes a valid file of every kind that heterog reads, changes it (fields left out, doubled, renamed,
of other types; huge, negative and infinite numbers; texts with quotes and line ends; lists cut,
shuffled and lengthened; bytes cut off, garbled and packed; bombs) and reads it in a process of its
own with limits. What is refused has to be refused by one line. What is accepted is looked at again
by code that shares nothing with the readers: indices, permutations, sums, simulated seconds. Calls
of the command line with outputs of all kinds are a kind, too (``fuzzed_outputs``).

The worker is forked from a process that has imported everything, so a case takes milliseconds.
"""

import argparse
import contextlib
import csv
import gzip
import io
import json
import math
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import yaml
from fuzzed_outputs import check_call, make_call, make_case
from torch import nn

from heterog.agents.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from heterog.agents.config import PolicyConfig
from heterog.agents.policy import Policy
from heterog.cluster import Cluster
from heterog.cluster.validation import MAX_DEVICES
from heterog.errors import HeterogError, HeterogWarning
from heterog.export import TARGETS, ExportError, make_export
from heterog.fidelity.recorded import RecordedRun, read_runs
from heterog.files import MAX_JSON_BYTES, read_json
from heterog.graph import serialize
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph, Phase
from heterog.graph.serialize import graph_from_dict, load_graph, save_graph
from heterog.graph.sharding_rules import RULES
from heterog.graph.workload import Workload
from heterog.planners.plan import Plan, load_plan, make_plan
from heterog.planners.planner import Budget
from heterog.planners.request import Request
from heterog.report.html import report_html
from heterog.runtime.checkpoint.boxes import Box, whole_box
from heterog.runtime.checkpoint.contents import Contents, SavedOptimizer, read_contents
from heterog.runtime.checkpoint.files import Entry, publish, read_tensors, write_tensors
from heterog.runtime.profiler import Journal
from heterog.runtime.testbed import load_testbed
from heterog.simulator.calibration import Calibration, calibrate
from heterog.simulator.device_models.model import DeviceModels
from heterog.simulator.device_models.parameters import InTraining
from heterog.simulator.device_models.run_file import read_run_models, save_run_models
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.measurements import (
    LinkMeasurement,
    Measurements,
    OpMeasurement,
    op_kind,
    op_signature,
)
from heterog.simulator.roofline import Roofline
from heterog.strategy.channels import ChannelTable
from heterog.strategy.lowering import lower

LIMIT_S = 10.0
"""Of a case, in seconds of its processor; six times as long by the clock, for busy machines."""
LIMIT_BYTES = 2 * 2**30
CASES_PER_WORKER = 250
"""A worker's memory is that of all its cases: one that keeps a little from each is replaced."""
MOST_LINE = 5000

TEXTS = (
    "", " ", "\n", "\0", "x\ny", '"', "'''", '"""; import os; os._exit(3)', "$(id)", "`id`",
    "</script><script>alert(1)</script>", "[/red]", "[bold]x[/nope]", "../../etc/passwd",
    "/etc/shadow:workload", "m.py:f", "\u202eabc", "\ud800", "a" * 5000, "nan", "-1", "1e999",
    "R", "P", "L", "S(0)", "S(9,9)", "S(0,0)", "ok", "nonsense", "view.default", "update",
    "mm.default", "expand.default", "fifo", "zero3", "hierarchical", "{{x}}", "%s", "%%{model}",
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 2, 3, 7, 255, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53 + 1, 2**63, -(2**63) - 1,
    10**30, 10**400, 0.0, -0.0, 0.5, -0.5, 1e-300, 5e-324, 1e18, 1e30, 1e300, -1e300, math.inf,
    -math.inf, math.nan, 1.0000001,
)  # fmt: skip
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [0], {"t": 0}, {"f": "nan"}, [None])

Change = Callable[[random.Random, Any], Any]


# --- valid files ---


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
    loss = nn.functional.cross_entropy
    return capture(Workload(_Model, batch, loss, torch.optim.Adam, name="small"))


def documented() -> dict[str, Any]:
    """The graph that the format's documentation shows."""
    lines = (serialize.__doc__ or "").splitlines()
    begin = lines.index("    {")
    record: dict[str, Any] = json.loads("\n".join(lines[begin : lines.index("    }", begin) + 1]))
    return record


CLUSTER = """\
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
"""


def measurements(graph: OpGraph, cluster: Cluster) -> Measurements:
    """What a profile might say, from the roofline."""
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


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of file: how it is read, and what must hold of what was read.

    Attributes:
        name: of the kind.
        files: valid ones.
        read: reads a path; what comes back is checked.
        check: says what is wrong with what was accepted; empty if nothing.
        form: ``json``, ``yaml``, ``lines``, ``torch`` or ``folder``; ``call`` of the command line.
        weight: how often it is drawn.
    """

    name: str
    files: tuple[Path, ...]
    read: Callable[[Path], Any]
    check: Callable[[Any], str]
    form: str
    weight: int = 1


def make_kinds(folder: Path) -> tuple[Kind, ...]:
    """Valid files of every kind, and what to do with them."""
    graph = small_graph()
    save_graph(graph, folder / "graph.json")
    save_graph(graph, folder / "graph.json.gz")
    (folder / "hand.json").write_text(json.dumps(documented(), indent=1))
    (folder / "lab.yaml").write_text(CLUSTER)
    (folder / "bed.yaml").write_text(
        "schema_version: 1\nname: bed\nhosts:\n"
        "- {name: a, devices: [{type: CPU, count: 2}], intra: pcie3, testbed: {cpu_quota: 0.5}}\n"
    )
    cluster = Cluster.load(folder / "lab.yaml")
    plans = []
    for number, methods in enumerate((["ev_ps", "ddp"], ["cp_ar", "pipeline"], ["local_search"])):
        plan = make_plan(
            Request(
                graph=graph,
                cluster=cluster,
                methods=tuple(methods),
                budget=Budget.parse("30e"),
                seed=number,
            )
        )
        if number == 1:
            plan = plan.with_background(small_graph(4), 1.2)
        plan.save(folder / f"plan{number}.json")
        plan.save(folder / "plan.json")
        plans.append(folder / f"plan{number}.json")
    found = measurements(graph, cluster)
    found.save(folder / "measurements.json")
    calibrate(found, cluster, name="calibrated").save(folder / "calibration.json")
    factors = {"V100-16GB": InTraining(products=1.2, float32=1.1)}
    models = DeviceModels(host_s=2e-5, in_training=factors)
    save_run_models(folder / "runs.json", models, "mine", 5)
    (folder / "runs.csv").write_text(
        "model,batch_size,cluster,layout,seconds,peak_bytes,family\n"
        'gpt2,16,lab.yaml,"tp=2,dp=2",0.412,9126805504,small\n'
        "graph.json.gz,,lab.yaml,pp=4,3.87e-1,,\n"
    )
    (folder / "m.py").write_text("import torch\n")
    journal = Journal(folder / "rank0.jsonl", "a V100")
    journal.add("one", found.ops[:4])
    journal.add("two", found.links[:2])
    small = Policy(PolicyConfig(width=16, num_heads=2, num_rounds=1, rank=4)).eval()
    save_checkpoint(folder / "policy.pt", Checkpoint(policy=small, provenance={"name": "x"}))
    write_checkpoint(folder / "checkpoint")
    return (
        Kind(
            name="graph",
            files=(folder / "hand.json", folder / "graph.json", folder / "graph.json.gz"),
            read=load_graph,
            check=lambda read: check_graph(read, cluster),
            form="json",
            weight=3,
        ),
        Kind(
            name="plan",
            files=tuple(plans),
            read=load_plan,
            check=check_plan,
            form="json",
            weight=3,
        ),
        Kind(
            name="cluster",
            files=(folder / "lab.yaml",),
            read=Cluster.load,
            check=lambda read: check_cluster(read, graph),
            form="yaml",
            weight=2,
        ),
        Kind(
            name="testbed",
            files=(folder / "bed.yaml",),
            read=lambda path: load_testbed(str(path)),
            check=lambda read: check_cluster(read, graph),
            form="yaml",
        ),
        Kind(
            name="calibration",
            files=(folder / "calibration.json",),
            read=Calibration.load,
            check=lambda read: check_calibration(read, graph, cluster),
            form="json",
            weight=2,
        ),
        Kind(
            name="run models",
            files=(folder / "runs.json",),
            read=_run_models,
            check=lambda read: check_calibration(read, graph, cluster),
            form="json",
        ),
        Kind(
            name="recorded runs",
            files=(folder / "runs.csv",),
            read=read_runs,
            check=check_runs,
            form="csv",
        ),
        Kind(
            name="measurements",
            files=(folder / "measurements.json",),
            read=lambda path: (found := Measurements.load(path), _calibrated(found)),
            check=lambda read: check_measurements(read, graph, cluster),
            form="json",
            weight=2,
        ),
        Kind(
            name="journal",
            files=(folder / "rank0.jsonl",),
            read=lambda path: Journal(path, "a V100"),
            check=check_journal,
            form="lines",
        ),
        Kind(
            name="policy",
            files=(folder / "policy.pt",),
            read=load_checkpoint,
            check=check_policy,
            form="torch",
        ),
        Kind(
            name="checkpoint",
            files=(folder / "checkpoint",),
            read=read_checkpoint,
            check=check_checkpoint,
            form="folder",
            weight=2,
        ),
        Kind(
            name="outputs",
            files=(folder,),
            read=make_call,
            check=check_call,
            form="call",
            weight=3,
        ),
    )


def _run_models(path: Path) -> DeviceModels:
    return read_run_models(read_json(path, "calibration", MAX_JSON_BYTES), f"calibration {path}")


def _calibrated(found: Measurements) -> Calibration:
    cluster = None if found.cluster is None else Cluster.from_dict(found.cluster)
    return calibrate(found, cluster)


def read_checkpoint(folder: Path) -> Any:
    """All tensors of a checkpoint."""
    contents = read_contents(folder)
    return contents, read_tensors(contents, folder, contents.names)


# --- what must hold of what was accepted ---


def _is_word(text: object) -> bool:
    return isinstance(text, str) and text.isprintable()


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


def check_graph(graph: OpGraph, cluster: Cluster) -> str:
    """A graph whose ops read what was made before, and that can be simulated."""
    if not _is_name(graph.name) or not graph.optimizer.replace(".", "").isidentifier():
        return "its name or optimizer is no name"
    made, updated = set(range(graph.num_inputs)), set()
    for index, op in enumerate(graph.ops):
        outputs = list(graph.outputs(index))
        if not set(op.inputs) <= made or made & set(outputs) or not _is_word(op.module):
            return f"op {index} reads what is not made"
        made |= set(outputs)
        if op.phase == Phase.UPDATE:
            if op.inputs[0] in updated:
                return "a parameter is updated twice"
            updated.add(op.inputs[0])
        if not _good([op.flops, op.bytes_read, op.bytes_written]):
            return f"op {index} has impossible costs"
    if made != set(range(len(graph.tensors))) or graph.loss not in made:
        return "its tensors are not those of its ops"
    if graph.batch_size < cluster.num_devices or graph.batch_size > 4096:
        return ""
    plan = make_plan(
        Request(
            graph=graph,
            cluster=cluster,
            methods=(
                "ev_ar",
                "cp_ps",
            ),
            budget=Budget.parse("2e"),
        )
    )
    times = [row.step_time_s for row in plan.rows if row.step_time_s is not None]
    if not _good(times) or not _good(plan.peak_memory_bytes):
        return "its simulated seconds or bytes are impossible"
    again = graph_from_dict(json.loads(json.dumps(serialize.graph_to_dict(graph))), "again")
    return "" if again.fingerprint == graph.fingerprint else "it is another one when saved"


def check_plan(plan: Plan) -> str:
    """A plan that can be lowered, shown and exported, with an order that can be run."""
    program = lower(plan.graph, plan.cluster, plan.strategy, num_steps=1)
    order = list(plan.task_order)
    if sorted(order) != list(range(program.num_tasks)) or program.hash != plan.program_hash:
        return "its order is no permutation of its tasks"
    place = {task: number for number, task in enumerate(order)}
    for task in order:
        if any(place[each] >= place[task] for each in program.dependencies(task)):
            return f"task {task} is listed before what it needs"
    for decision in plan.strategy.decisions:
        if sum(decision.shares) != plan.graph.batch_size:
            return "its shares are not the batch"
    if plan.outcome == "ok" and not _good([plan.step_time_s], positive=True):
        return "it takes impossible seconds"
    if plan.outcome not in ("ok", "out_of_memory", "cannot_run", "not_applicable"):
        return "its outcome is no word"
    if len(plan.peak_memory_bytes) != plan.cluster.num_devices:
        return "its peaks are not those of its devices"
    seconds = plan.timeline().seconds
    if not _good([seconds, plan.lower_bound_s, plan.search_seconds]):
        return "its replayed seconds are impossible"
    json.dumps(plan.summary(), allow_nan=False)
    if random.random() < 0.05:
        page = report_html(plan)
        if "</script><script>alert" in page:
            return "its page runs a script"
    for target in TARGETS:
        with contextlib.suppress(HeterogError, ExportError):
            made = make_export(plan, target)
            for name, content in made.files.items():
                if name.endswith(".py"):
                    compile(content, name, "exec")
                if b"root:" in content:
                    return "its export copied another file"
    return ""


def check_cluster(cluster: Cluster, graph: OpGraph) -> str:
    """Devices on hosts, names that are names, rates that are rates."""
    names = [device.name for device in cluster.devices]
    words = [cluster.name, *names, *(host.name for host in cluster.hosts)]
    if len(set(names)) < len(names) or not all(map(_is_name, words)) or len(names) > MAX_DEVICES:
        return "its names are no names"
    if not _good([link.bandwidth_bytes_per_s for link in cluster.resources], positive=True):
        return "a link has an impossible rate"
    for device in cluster.devices:
        if not 0 < device.usable_memory_bytes <= device.type.memory_bytes:
            return "a device has an impossible memory"
    if Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) != cluster:
        return "it is another one when saved"
    if len(names) <= 8:
        bare = replace(cluster, calibration=None)
        plan = make_plan(
            Request(graph=graph, cluster=bare, methods=("ev_ar",), budget=Budget.parse("1e"))
        )
        if not _good([row.step_time_s for row in plan.rows if row.step_time_s is not None]):
            return "its simulated seconds are impossible"
    return ""


def check_runs(runs: list[RecordedRun]) -> str:
    """Positive seconds, and nothing that would be run."""
    if not _good([run.seconds for run in runs], positive=True):
        return "a run has impossible seconds"
    if any(run.model.endswith(".py") or ":" in run.model for run in runs):
        return "a run names code"
    return "" if all(run.family and run.cluster for run in runs) else "a run lacks a name"


def check_calibration(model: Calibration | DeviceModels, graph: OpGraph, cluster: Cluster) -> str:
    """Seconds that are finite and not negative, for every op, share and channel."""
    for device_type in cluster.device_types:
        for samples in (1, 12, 24):
            if not _good(model.op_seconds(graph, device_type, samples)):
                return "it prices an op at impossible seconds"
        if not _good(model.copy_seconds(device_type)):
            return "it prices copies at impossible seconds"
    table = ChannelTable(cluster)
    for number in range(len(table)):
        cost = model.channel_seconds(cluster, table[number])
        lost = (*cost.drag.values(), *cost.overhead_s.values())
        if not _good([cost.latency_s, cost.seconds_per_byte, cost.loaded_latency_s, *lost]):
            return "it prices a transfer at impossible seconds"
    evaluator = Evaluator(graph, cluster, model)
    plan = make_plan(
        Request(
            graph=graph,
            cluster=cluster,
            methods=("ev_ar",),
            budget=Budget.parse("1e"),
            cost_model=model,
        )
    )
    del evaluator
    times = [row.step_time_s for row in plan.rows if row.step_time_s is not None]
    return "" if _good(times) else "its simulated seconds are impossible"


def check_measurements(read: Any, graph: OpGraph, cluster: Cluster) -> str:
    """Rows of positive seconds, from which a calibration can be fitted."""
    found, model = read
    if not _good([row.seconds for row in (*found.ops, *found.links)], positive=True):
        return "a row has impossible seconds"
    if any(row.samples < 1 or row.count < 1 for row in found.ops):
        return "a row has no samples or calls"
    return check_calibration(model, graph, cluster)


def check_journal(journal: Journal) -> str:
    """Rows that are measurements."""
    for rows in journal._rows.values():
        for row in rows:
            if not _good([row["seconds"]], positive=True):
                return "a row has impossible seconds"
    return ""


def check_policy(checkpoint: Checkpoint) -> str:
    """Finite weights."""
    values = checkpoint.policy.state_dict().values()
    finite = all(bool(torch.isfinite(value).all()) for value in values)
    return "" if finite else "its weights are not finite"


def check_checkpoint(read: Any) -> str:
    """The very tensors that were saved."""
    contents, tensors = read
    wanted = {"model.w": torch.arange(12.0).reshape(3, 4), "optimizer.w.exp_avg": torch.ones(3, 4)}
    for name, value in tensors.items():
        if name not in wanted or not torch.equal(value, wanted[name]):
            return f"tensor {name} is not what was saved"
    return "" if contents.num_steps >= 0 else "it has trained a negative number of steps"


# --- changes ---


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a document."""
    found = [path]
    if isinstance(value, dict):
        for key in value:
            found += places(value[key], (*path, key))
    elif isinstance(value, list):
        # All of a short list, some of a long one.
        step = max(len(value) // 40, 1)
        for index in range(0, len(value), step):
            found += places(value[index], (*path, index))
    return found


def at(value: Any, path: tuple[Any, ...]) -> Any:
    """The value at a place."""
    for step in path:
        value = value[step]
    return value


def draw_value(rng: random.Random, old: Any) -> Any:
    """Something else, more often of the same type."""
    numeric = isinstance(old, int | float) and not isinstance(old, bool)
    if numeric and rng.random() < 0.7:
        small = abs(old) < 1e300  # what was changed before may be beyond any float
        near = [old + 1, old - 1, -old, *([old * 2, old * 1e6, float(old)] if small else [])]
        return rng.choice([*NUMBERS, *near])
    if isinstance(old, str) and rng.random() < 0.7:
        return rng.choice([*TEXTS, old + rng.choice(TEXTS), old[:-1], old.upper()])
    return rng.choice([*NUMBERS, *TEXTS, *OTHERS])


def change_value(rng: random.Random, document: Any) -> Any:
    """One change somewhere in a document."""
    everywhere = places(document)
    # By depth first, so that small parts are drawn as often as the long columns.
    depth = rng.randint(1, max(len(path) for path in everywhere))
    path = rng.choice([each for each in everywhere if len(each) == depth] or everywhere)
    if not path:
        return draw_value(rng, document)
    parent, key = at(document, path[:-1]), path[-1]
    old = parent[key]
    match rng.randrange(9):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, dict):
            parent[rng.choice([*TEXTS, f"{key}x", str(key)[:-1]])] = parent.pop(key)
        case 2 if isinstance(parent, dict):
            parent[rng.choice([*TEXTS, "extra"])] = draw_value(rng, old)
        case 3 if isinstance(old, list) and old:
            _change_list(rng, old)
        case 4:
            other = rng.choice(everywhere)
            parent[key] = json.loads(json.dumps(at(document, other)))
        case 5:
            nested: Any = old
            for _ in range(rng.choice([1, 2, 20, 60])):
                nested = [nested] if rng.random() < 0.5 else {"a": nested}
            parent[key] = nested
        case _:
            parent[key] = draw_value(rng, old)
    return document


def change_op(rng: random.Random, document: Any) -> Any:
    """One change of an op in a graph: its kind, the names of its arguments, its tensors.

    What comes out is of the right types, but no rule of that kind has seen its like.
    """
    graph: Any = document.get("graph", document) if isinstance(document, dict) else None
    ops: Any = graph.get("ops") if isinstance(graph, dict) else None
    if not isinstance(ops, dict) or not ops.get("args"):
        return change_value(rng, document)
    with contextlib.suppress(KeyError, IndexError, TypeError, ValueError):  # changed before
        index = rng.randrange(len(ops["args"]))
        args, inputs = ops["args"][index], ops["inputs"][index]
        match rng.randrange(6):
            case 0 if args:
                other = rng.choice([each for each in ops["args"] if each])
                args[rng.choice([*other, "selfx"])] = args.pop(rng.choice(list(args)))
            case 1 if args:
                args.pop(rng.choice(list(args)))
            case 2:
                ops["kind"][index] = rng.choice([*ops["kind"], *RULES])
            case 3:
                graph["kinds"][rng.randrange(len(graph["kinds"]))] = rng.choice([*RULES])
            case 4 if inputs:
                _change_list(rng, inputs)
            case _:
                shape = rng.choice(graph["tensors"]["shape"])
                _change_list(rng, shape)
    return document


def _change_list(rng: random.Random, values: list[Any]) -> None:
    index = rng.randrange(len(values))
    match rng.randrange(6):
        case 0:
            values.pop(index)
        case 1:
            values.insert(index, values[rng.randrange(len(values))])
        case 2:
            values.reverse()
        case 3:
            rng.shuffle(values)
        case 4:
            other = rng.randrange(len(values))
            values[index], values[other] = values[other], values[index]
        case _:
            values += values[:1] * rng.choice([1, 100, 5000])


def to_json(rng: random.Random, document: Any) -> bytes:
    """A document as JSON, now and then as only Python would write it."""
    text = json.dumps(document)
    if rng.random() < 0.05 and isinstance(document, dict) and document:
        key = rng.choice(list(document))
        text = f"{{{json.dumps(key)}: {json.dumps(draw_value(rng, 0))}, {text[1:]}"
    return text.encode("utf-8", "surrogatepass")


def change_bytes(rng: random.Random, content: bytes) -> bytes:
    """Bytes cut off, garbled, doubled, packed or exchanged."""
    size = max(len(content), 1)
    match rng.randrange(12):
        case 0:
            return content[: rng.randrange(size)]
        case 1 | 2 | 3:
            changed = bytearray(content)
            for _ in range(rng.choice([1, 1, 1, 2, 20])):
                changed[rng.randrange(size)] = rng.randrange(256)
            return bytes(changed)
        case 4:
            return content + content
        case 5:
            return b""
        case 6:
            return gzip.compress(content)[: rng.choice([10**9, 20, size // 3])]
        case 7:
            return packed_spaces(rng.choice([10**6, 200 * 2**20]))
        case 8:
            return rng.choice([b"[", b'{"a":']) * rng.choice([50, 1000, 200_000])
        case 9:
            return b"\xff\xfe" + content
        case 10:
            return b"[" + b"[]," * rng.choice([100, 3_000_000]) + b"1]"
        case _:
            cut = rng.randrange(size)
            return content[:cut] + bytes(rng.randrange(256) for _ in range(8)) + content[cut:]


@lru_cache
def packed_spaces(count: int) -> bytes:
    """A list of one number and many spaces, as gzip packs it."""
    return gzip.compress(b"[" + b" " * count + b"1]", 9)


@lru_cache
def packed_policy(count: int) -> bytes:
    """A zip file of zeros, packed."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * count)
    return buffer.getvalue()


def yaml_bomb(rng: random.Random) -> bytes:
    """Few lines that stand for many values."""
    lines = [f"a0: &a0 [{', '.join(['x'] * 10)}]"]
    for level in range(1, rng.choice([2, 5, 9])):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]")
    merged = "\n".join(["b: &b {a: 1}", *(f"c{n}: &c{n} {{<<: [*b, *b]}}" for n in range(5))])
    return rng.choice(["\n".join(lines), merged, "a: &a [*a]", "? [a]\n: 1"]).encode()


def change_file(rng: random.Random, kind: Kind, target: Path) -> str:
    """Write a changed file of a kind; says how it was changed."""
    source = rng.choice(kind.files)
    if kind.form == "call":
        return make_case(rng, source, target)
    if rng.random() < 0.02:
        return odd_file(rng, target)
    if kind.form == "folder":
        return change_folder(rng, source, target)
    content = source.read_bytes()
    by_value = rng.random() < 0.75
    if kind.form == "torch":
        target.write_bytes(change_torch(rng, content) if by_value else change_bytes(rng, content))
        return "weights" if by_value else "bytes"
    if not by_value:
        bomb = kind.form == "yaml" and rng.random() < 0.2
        target.write_bytes(yaml_bomb(rng) if bomb else change_bytes(rng, content))
        return "bytes"
    packed = content[:2] == b"\x1f\x8b"
    text = (gzip.decompress(content) if packed else content).decode()
    times = rng.choice([1, 1, 1, 2, 4])
    if kind.form == "yaml":
        document = yaml.safe_load(text)
        for _ in range(times):
            document = change_value(rng, document)
        # JSON is YAML, too, and has no trouble with what nests deeply.
        deep = max(len(place) for place in places(document)) > 30
        dumped = json.dumps(document) if deep else yaml.dump(document, allow_unicode=True)
        target.write_bytes(dumped.encode("utf-8", "surrogatepass"))
        return "values"
    if kind.form == "lines":
        lines = [json.loads(line) for line in text.splitlines()]
        changed = change_value(rng, lines)
        lines = changed if isinstance(changed, list) else [changed]
        target.write_bytes(b"".join(to_json(rng, line) + b"\n" for line in lines))
        return "values"
    if kind.form == "csv":
        rows: Any = list(csv.reader(text.splitlines()))
        for _ in range(times):
            rows = change_value(rng, rows)
        made = io.StringIO()
        for row in rows if isinstance(rows, list) else [rows]:
            csv.writer(made).writerow(row if isinstance(row, list) else [row])
        target.write_bytes(made.getvalue().encode("utf-8", "surrogatepass"))
        return "values"
    document = json.loads(text)
    for _ in range(times):
        changes_op = kind.name in ("graph", "plan") and rng.random() < 0.3
        document = (change_op if changes_op else change_value)(rng, document)
    changed_content = to_json(rng, document)
    target.write_bytes(gzip.compress(changed_content) if packed else changed_content)
    return "values"


def odd_file(rng: random.Random, target: Path) -> str:
    """No file, or none that one should read."""
    match rng.randrange(4):
        case 0:
            return "missing"
        case 1:
            target.mkdir()
            return "folder"
        case 2:
            os.mkfifo(target)
            return "pipe"
        case _:
            target.symlink_to("/dev/zero")
            return "device"


def change_torch(rng: random.Random, content: bytes) -> bytes:
    """A policy with other values, or one that is packed."""
    if rng.random() < 0.1:
        return packed_policy(rng.choice([100, 100 * 2**20]))
    record = torch.load(io.BytesIO(content), weights_only=True)
    where = rng.choice(["weights", "weights", "config", "top"])
    if where == "weights":
        name = rng.choice(list(record["weights"]))
        value = record["weights"][name]
        record["weights"][name] = rng.choice(
            [
                value * math.nan,
                value.double(),
                value.reshape(-1)[:1].expand(10**9),
                torch.zeros(3),
                value.to_sparse(),
                None,
                "text",
                torch.full_like(value, math.inf),
            ]
        )
    elif where == "config":
        name = rng.choice(list(record["config"]))
        record["config"][name] = draw_value(rng, record["config"][name])
    else:
        name = rng.choice(list(record))
        record[name] = draw_value(rng, record[name])
        if rng.random() < 0.3:
            del record[name]
    buffer = io.BytesIO()
    with contextlib.suppress(Exception):
        torch.save(record, buffer)
    return buffer.getvalue()


def change_folder(rng: random.Random, source: Path, target: Path) -> str:
    """A checkpoint with another index or other data."""
    shutil.copytree(source, target)
    index = target / "checkpoint.json"
    data = next((target / "data-0").glob("*.distcp"))
    match rng.randrange(6):
        case 0 | 1:
            content = bytearray(data.read_bytes())
            position = rng.randrange(len(content))
            content[position] ^= 1 << rng.randrange(8)
            data.write_bytes(bytes(content))
            return "flipped bit"
        case 2:
            content = bytearray(data.read_bytes())
            data.write_bytes(rng.choice([bytes(content[:-50]), b"", bytes(len(content))]))
            return "cut data"
        case 3:
            data.unlink()
            return "no data"
        case 4:
            index.write_bytes(change_bytes(rng, index.read_bytes()))
            return "index bytes"
        case _:
            document = change_value(rng, json.loads(index.read_text()))
            index.write_bytes(to_json(rng, document))
            return "index values"


# --- running ---


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of one case."""

    kind: str
    change: str
    outcome: str
    detail: str = ""


def judge(kind: Kind, path: Path, change: str) -> Verdict:
    """Read a file, and check what was accepted."""

    def verdict(outcome: str, detail: str = "") -> Verdict:
        return Verdict(kind=kind.name, change=change, outcome=outcome, detail=detail)

    try:
        read = kind.read(path)
    except HeterogError as error:
        line = str(error)
        if "\n" in line or len(line) > MOST_LINE or not line.isprintable():
            return verdict("not one line", line[:300])
        return verdict("refused", line[:200])
    except _TookTooLongError:
        return verdict("hang")
    except BaseException:
        return verdict("traceback", traceback.format_exc(limit=-6))
    try:
        problem = kind.check(read)
    except HeterogError as error:
        return verdict("refused later", str(error)[:300])
    except _TookTooLongError:
        return verdict("hang")
    except BaseException:
        return verdict("traceback", traceback.format_exc(limit=-6))
    return verdict("invalid" if problem else "accepted", problem)


def remove(path: Path) -> None:
    """Remove whatever is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class _TookTooLongError(BaseException):
    pass


def _too_long(number: int, frame: object) -> None:
    raise _TookTooLongError


def work(kinds: tuple[Kind, ...], cases: range, seed: int, folder: Path, sink: int) -> None:
    """Judge some cases in this process; each verdict is a line in ``sink``."""
    signal.signal(signal.SIGALRM, _too_long)
    signal.signal(signal.SIGPROF, _too_long)
    warnings.simplefilter("ignore", HeterogWarning)
    own_error = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    drawn = [kind for kind in kinds for _ in range(kind.weight)]
    for case in cases:
        rng = random.Random(f"{seed} {case}")
        random.seed(f"{seed} {case}")
        kind = rng.choice(drawn)
        path = folder / f"case{case}{kind.files[0].suffix}"
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            change = change_file(rng, kind, path)
        except Exception:
            os.write(own_error, traceback.format_exc().encode())
            raise
        os.write(sink, f"begin {case} {kind.name} {change}\n".encode())
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        signal.setitimer(signal.ITIMER_REAL, 6.0 * LIMIT_S)
        found = judge(kind, path, change)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if peak * 1024 > LIMIT_BYTES and peak > before:
            found = replace(found, outcome="over memory", detail=f"{peak // 1024} MiB")
        remove(path)
        record = [case, found.kind, found.change, found.outcome, found.detail]
        os.write(sink, json.dumps(record).encode() + b"\n")
        if found.outcome == "over memory":
            return


def run(cases: int, seed: int, *, tell: Callable[[int], None]) -> list[Verdict]:
    """Judge all cases, in one worker after another."""
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="heterog-fuzz-") as name:
        folder = Path(name)
        (folder / "valid").mkdir()
        os.chdir(folder)
        kinds = make_kinds(folder / "valid")
        packed_spaces(200 * 2**20)  # here, not in every worker again
        packed_policy(100 * 2**20)
        for kind in kinds:
            for path in kind.files:
                if kind.form not in ("lines", "call") and (problem := kind.check(kind.read(path))):
                    raise SystemExit(f"{path} is valid, but was judged: {problem}")
        begin = 0
        while begin < cases:
            batch = range(begin, min(begin + CASES_PER_WORKER, cases))
            done = _run_worker(kinds, batch, seed, folder)
            verdicts += done
            begin += len(done)
            tell(begin)
    return verdicts


def _run_worker(kinds: tuple[Kind, ...], cases: range, seed: int, folder: Path) -> list[Verdict]:
    """The verdicts of one worker, up to the case that it did not survive."""
    source, sink = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(source)
        try:
            work(kinds, cases, seed, folder, sink)
        finally:
            os._exit(0)
    os.close(sink)
    verdicts: list[Verdict] = []
    pending, buffer = "", b""
    deadline = time.monotonic() + 10 * LIMIT_S
    while True:
        ready, _, _ = select.select([source], [], [], 0.5)
        if not ready and time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            deadline = math.inf
            continue
        if not ready:
            continue
        received = os.read(source, 65536)
        if not received:
            break
        deadline = time.monotonic() + 10 * LIMIT_S
        *lines, buffer = (buffer + received).split(b"\n")
        for line in lines:
            if line.startswith(b"begin "):
                pending = line.decode(errors="replace")
                continue
            pending = ""
            _, kind, change, outcome, detail = json.loads(line)
            verdicts.append(Verdict(kind=kind, change=change, outcome=outcome, detail=detail))
    _, status = os.waitpid(pid, 0)
    os.close(source)
    if pending:
        _, _, kind, change = pending.split(" ", 3)
        outcome = "hang" if deadline == math.inf else "crash"
        detail = f"{pending}: ended with status {status}"
        verdicts.append(Verdict(kind=kind, change=change, outcome=outcome, detail=detail))
    elif not verdicts:
        raise SystemExit(f"case {cases.start} could not be made; see the traceback above")
    return verdicts


GOOD = ("refused", "refused later", "accepted")


def main() -> None:
    """Judge many changed files and print what became of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=10, help="failures of each kind in the answer")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    begin = time.perf_counter()

    def tell(done: int) -> None:
        print(f"{done} of {arguments.cases}", file=sys.stderr, flush=True)

    verdicts = run(arguments.cases, arguments.seed, tell=tell)
    table = Counter((each.kind, each.outcome) for each in verdicts)
    outcomes = Counter(each.outcome for each in verdicts)
    failures = [each for each in verdicts if each.outcome not in GOOD]
    document = {
        "cases": len(verdicts),
        "seed": arguments.seed,
        "seconds": round(time.perf_counter() - begin, 1),
        "tracebacks": outcomes["traceback"] + outcomes["crash"],
        "hangs": outcomes["hang"],
        "over_memory": outcomes["over memory"],
        "not_one_line": outcomes["not one line"],
        "accepted_but_invalid": outcomes["invalid"],
        "refused": outcomes["refused"] + outcomes["refused later"],
        "accepted": outcomes["accepted"],
        "by_kind": {f"{kind}: {outcome}": n for (kind, outcome), n in sorted(table.items())},
        "failures": [
            [each.kind, each.change, each.outcome, each.detail]
            for each in failures[: arguments.show]
        ],
    }
    print(json.dumps(document, indent=None if not arguments.json else 1))
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
