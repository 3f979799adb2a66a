"""An entry of the library for a solved plan, and the distance between two cases."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from heterog.cluster.topology import Cluster
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.methods.data_parallel import device_speeds
from heterog.records import Count, Int32, Name, PositiveSeconds, Record, Text
from heterog.search.plan import Plan
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.serialize import strategy_to_dict

SCHEMA_VERSION = 1
LIKE_UNTIL = 3.0
"""Distance up to which cases are alike, such as models of one family up to four times the size or
clusters of twice as many devices. From starts farther away, a search gains nothing."""
_SIZE_WEIGHT, _KINDS_WEIGHT, _TYPES_WEIGHT = 0.7, 3.0, 1.0
_Positive = Annotated[float, Field(gt=0.0, le=1e30, allow_inf_nan=False)]
_Part = Annotated[float, Field(ge=0.0, le=1.0 + 1e-6, allow_inf_nan=False)]
_Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


class DeviceRecord(Record):
    """A device of the solved case.

    Attributes:
        host: Number of its host.
        type: Name of its type.
        samples_per_s: Throughput for the whole model.
    """

    host: Int32
    type: Name
    samples_per_s: _Positive


class EntryRecord(Record):
    """One solved plan.

    Attributes:
        schema_version: Version of the format.
        model: Name of the model, for people.
        graph: Fingerprint of the graph.
        ops: Hash of the ops without their shapes, which models that differ only in sizes share.
        cluster: Fingerprint of the cluster.
        num_parameters: Number of scalar parameters.
        flops_per_sample: FLOPs of a step for each sample.
        batch_size: Samples of a step.
        kinds: Part of the FLOPs by kind of op.
        group_work: Part of the work in each group of ops, in their order.
        devices: Devices in the order of the cluster.
        step_time_s: Predicted step time.
        order: Order of tasks.
        strategy: JSON of the strategy.
    """

    schema_version: int
    model: Text
    graph: _Hash
    ops: _Hash
    cluster: _Hash
    num_parameters: _Positive
    flops_per_sample: _Positive
    batch_size: Count
    kinds: Annotated[dict[str, _Part], Field(max_length=1000)]
    group_work: Annotated[list[_Part], Field(min_length=1, max_length=4096)]
    devices: Annotated[list[DeviceRecord], Field(min_length=1, max_length=2048)]
    step_time_s: PositiveSeconds
    order: Annotated[str, Field(pattern=r"^(fifo|rank|program)$")]
    strategy: dict[str, Any]


def ops_hash(graph: OpGraph) -> str:
    """Hash of the sequence of ops, whatever the shapes of their tensors."""
    ops = [[op.kind, op.module, int(op.phase)] for op in graph.ops]
    return hashlib.sha256(json.dumps(ops).encode()).hexdigest()[:16]


def group_work(graph: OpGraph) -> list[float]:
    """Part of the FLOPs and bytes of a step in each group."""
    group = group_ops(graph).group
    work = [0.0] * group_ops(graph).num_groups
    weights = graph.flops + graph.bytes_moved
    for op, number in enumerate(group.tolist()):
        if number >= 0:
            work[number] += float(weights[op])
    total = math.fsum(work) or 1.0
    return [each / total for each in work]


def _kinds(graph: OpGraph) -> dict[str, float]:
    found: Counter[str] = Counter()
    for op, flops in zip(graph.ops, graph.flops.tolist(), strict=True):
        if flops:
            found[op.kind] += flops
    total = math.fsum(found.values()) or 1.0
    return {kind: flops / total for kind, flops in sorted(found.items())}


def described(evaluator: Evaluator) -> dict[str, Any]:
    """The entry of a case, without its solution."""
    graph, cluster = evaluator.graph, evaluator.cluster
    return {
        "schema_version": SCHEMA_VERSION,
        "model": graph.name,
        "graph": graph.fingerprint,
        "ops": ops_hash(graph),
        "cluster": cluster.fingerprint(),
        "num_parameters": float(max(graph.num_parameters, 1)),
        "flops_per_sample": max(float(graph.flops.sum()), 1.0) / graph.batch_size,
        "batch_size": graph.batch_size,
        "kinds": _kinds(graph),
        "group_work": group_work(graph),
        "devices": [
            {"host": device.host_index, "type": device.type.name, "samples_per_s": speed}
            for device, speed in zip(cluster.devices, device_speeds(evaluator), strict=True)
        ],
    }


def entry_of(plan: Plan, evaluator: Evaluator) -> dict[str, Any] | None:
    """The entry of a plan that fits; ``None`` if it does not."""
    if plan.step_time_s is None:
        return None
    return described(evaluator) | {
        "step_time_s": plan.step_time_s,
        "order": plan.order,
        "strategy": strategy_to_dict(plan.strategy),
    }


def distance(entry: EntryRecord, case: Mapping[str, Any], cluster: Cluster) -> float:
    """Distance between a solved case and a new one; 0 if they are the same.

    Args:
        entry: The solved case.
        case: ``described`` of the new one.
        cluster: Cluster of the new one.
    """
    sizes = (
        (entry.num_parameters, case["num_parameters"]),
        (entry.flops_per_sample, case["flops_per_sample"]),
        (entry.batch_size, case["batch_size"]),
        (len(entry.group_work), len(case["group_work"])),
        (len(entry.devices), cluster.num_devices),
        (1 + max(device.host for device in entry.devices), cluster.num_hosts),
    )
    size = sum(abs(math.log2(before / now)) for before, now in sizes)
    if entry.ops == case["ops"]:
        kinds = 0.0
    else:
        kinds = _apart(entry.kinds, case["kinds"])
    own = _parts([device.type for device in entry.devices])
    types = _apart(own, _parts([device.type.name for device in cluster.devices]))
    return _SIZE_WEIGHT * size + _KINDS_WEIGHT * kinds + _TYPES_WEIGHT * types


def _parts(names: Sequence[str]) -> dict[str, float]:
    return {name: count / len(names) for name, count in Counter(names).items()}


def _apart(first: Mapping[str, float], second: Mapping[str, float]) -> float:
    """Half the sum of the differences between two distributions, 0 to 1."""
    names = {*first, *second}
    return 0.5 * sum(abs(first.get(name, 0.0) - second.get(name, 0.0)) for name in names)
