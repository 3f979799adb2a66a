"""One device that normalises the same samples together as a plan's devices do.

Plain PyTorch but for BatchNorm, which cuts its batch into the groups that each device, or with a
rule each team, has of a micro-batch. Who has which samples is said by the slow reference lowering
(``tests.strategy.reading``). The plan's program is only asked in which order a device takes up
micro-batches, which is the order in which it steps its running statistics.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from heterog.graph.op_graph import OpGraph, Phase
from heterog.lowering import lower
from heterog.lowering.program import TaskKind
from heterog.lowering.tables import graph_tables
from heterog.search.plan import Plan
from tests.runtime.cases import SGD, STEPS, Recipe, Trained, trained_by, workload_of
from tests.strategy.reading import Reading, Shares


class Group(NamedTuple):
    """Samples of the batch that some devices normalise together."""

    samples: range
    micro: int
    devices: tuple[int, ...]


class _InGroups(nn.Module):
    """BatchNorm, group by group.

    Args:
        norm: what is applied to each group; its buffers are those of the first device.
        groups: cut its batch; those of the first device in the order of its running statistics.
        first: that device.
    """

    def __init__(self, norm: nn.Module, groups: Sequence[Group], first: int) -> None:
        super().__init__()
        norm.num_batches_tracked = None  # type: ignore[assignment]  # of all modules together
        self.norm, self.groups, self.first = norm, groups, first

    def forward(self, x: Tensor) -> Tensor:
        parameters = dict(self.norm.named_parameters())
        parts: dict[int, Tensor] = {}
        for samples, _, devices in self.groups:
            counts = self.first in devices
            buffers = {k: v if counts else v.clone() for k, v in self.norm.named_buffers()}
            part = x[samples.start : samples.stop]
            state = {**parameters, **buffers}
            parts[samples.start] = torch.func.functional_call(self.norm, state, (part,))
        return torch.cat([parts[begin] for begin in sorted(parts)])


def reference_in_groups(name: str, plan: Plan, recipe: Recipe = SGD) -> Trained:
    """The same steps on one device, whose BatchNorm sees what that of the plan's ranks sees."""
    model = workload_of(name, recipe.optimizer).make_model()
    for path, groups in groups_of(plan).items():
        first = min(device for group in groups for device in group.devices)
        order = _micro_batches_in_order(plan, path, first)
        own = sorted((g for g in groups if first in g.devices), key=lambda g: order.index(g.micro))
        others = [group for group in groups if first not in group.devices]
        above, _, last = path.rpartition(".")
        norm = _InGroups(model.get_submodule(path), [*own, *others], first)
        setattr(model.get_submodule(above), last, norm)
    found = trained_by(model, name, recipe)
    assert found.weights is not None
    weights = {key.replace(".norm.", "."): value for key, value in found.weights.items()}
    weights |= {  # once a step, as without micro-batches
        key: torch.tensor(STEPS)
        for key in workload_of(name).make_model().state_dict()
        if key.endswith("num_batches_tracked")
    }
    gradients = {key.replace(".norm.", "."): value for key, value in found.gradients.items()}
    return found._replace(gradients=gradients, weights=weights)


def groups_of(plan: Plan) -> dict[str, list[Group]]:
    """The groups of each BatchNorm, by module."""
    graph, strategy = plan.graph, plan.strategy
    reading = Reading(graph, strategy.op_rules, strategy.blocks)
    shares = Shares(reading, strategy, plan.cluster.num_devices)
    sizes = strategy.micro_sizes or (graph.batch_size,)
    found: dict[str, list[Group]] = {}
    for op in _batch_norms(graph):
        layout = shares.layouts[reading.group[op]]
        for micro in range(len(sizes)):
            begin = sum(sizes[:micro])
            together: dict[range, list[int]] = {}
            for device, box in shares.boxes(layout, reading.axis(op), micro).items():
                together.setdefault(box.samples, []).append(device)
            found.setdefault(graph.ops[op].module, []).extend(
                Group(range(begin + own.start, begin + own.stop), micro, tuple(devices))
                for own, devices in together.items()
            )
    return found


def _batch_norms(graph: OpGraph) -> list[int]:
    return [
        op
        for op, node in enumerate(graph.ops)
        if "batch_norm" in node.kind and node.phase == Phase.FORWARD
    ]


def _micro_batches_in_order(plan: Plan, module: str, device: int) -> list[int]:
    """The micro-batches of a BatchNorm in the order in which a device takes them up."""
    strategy = plan.strategy
    program = lower(plan.graph, plan.cluster, strategy, num_steps=1)
    op_of = graph_tables(plan.graph, strategy.op_rules, strategy.blocks).op_id
    norms = {op for op in _batch_norms(plan.graph) if plan.graph.ops[op].module == module}
    return [
        int(program.micro[task])
        for task in plan.task_order
        if program.kind[task] == TaskKind.COMPUTE
        and program.device[task] == device
        and int(op_of[program.subject[task]]) in norms
    ]
