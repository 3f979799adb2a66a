"""What must hold of files that were accepted, by code that shares nothing with their readers."""

import contextlib
import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from heterog.agents.checkpoint import Checkpoint
from heterog.cluster import Cluster
from heterog.cluster.hardware import MAX_DEVICES
from heterog.errors import HeterogError
from heterog.export import TARGETS, ExportError, make_export
from heterog.fidelity.recorded import RecordedRun
from heterog.graph import serialize
from heterog.graph.op_graph import OpGraph, Phase
from heterog.graph.serialize import graph_from_dict
from heterog.lowering import lower
from heterog.lowering.channels import ChannelTable
from heterog.methods.planner import Budget
from heterog.pricing.calibration import Calibration
from heterog.pricing.device_models.model import DeviceModels
from heterog.report.html import report_html
from heterog.runtime.measure.profiler import Journal
from heterog.search.plan import Plan, make_plan
from heterog.search.request import Request


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


def _planned(graph: OpGraph, cluster: Cluster, *methods: str, **more: Any) -> Plan:
    budget = Budget.parse(f"{len(methods)}e")
    return make_plan(Request(graph=graph, cluster=cluster, methods=methods, budget=budget, **more))


def _seconds(plan: Plan) -> list[float]:
    """Simulated seconds of all methods that have some."""
    return [row.step_time_s for row in plan.rows if row.step_time_s is not None]


def check_graph(graph: OpGraph, cluster: Cluster) -> str:
    """A graph whose ops read what was made before, and that can be simulated."""
    if not _is_name(graph.name) or not graph.optimizer.replace(".", "").isidentifier():
        return "its name or optimizer is no name"
    made, updated = set(range(graph.num_inputs)), set()
    for index, op in enumerate(graph.ops):
        outputs = list(graph.outputs[index])
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
    plan = _planned(graph, cluster, "ev_ar", "cp_ps")
    if not _good(_seconds(plan)) or not _good(plan.peak_memory_bytes):
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
        if not _good(_seconds(_planned(graph, replace(cluster, calibration=None), "ev_ar"))):
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
    times = _seconds(_planned(graph, cluster, "ev_ar", cost_model=model))
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
