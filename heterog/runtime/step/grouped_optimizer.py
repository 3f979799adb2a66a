"""The user's optimizer of what a rank steps, with all parameter groups of the workload."""

from collections.abc import Sequence

import torch
from torch import nn

from heterog.graph.optimizer_probe import ParameterGroup
from heterog.graph.workload import Workload
from heterog.runtime.step.kept_state import keep_state_in


def make_optimizer(
    workload: Workload,
    groups: Sequence[ParameterGroup],
    stepped: Sequence[nn.Parameter],
    group_of: Sequence[int],
) -> torch.optim.Optimizer:
    """Make the user's optimizer of some tensors.

    Every rank has all groups, those of which it steps nothing without tensors: so all of them can
    make the same scheduler.

    Args:
        workload: The workload.
        groups: Its parameter groups.
        stepped: Tensors that the optimizer steps.
        group_of: Number of the group of each of them.
    """
    members: list[list[nn.Parameter]] = [[] for _ in groups]
    for value, group in zip(stepped, group_of, strict=True):
        members[group].append(value)
    optimizer = workload.optimizer(
        [{**group.options, "params": own} for group, own in zip(groups, members, strict=True)],
        **dict(workload.optimizer_options),
    )
    keep_state_in(optimizer, workload.state_dtype)
    return optimizer
