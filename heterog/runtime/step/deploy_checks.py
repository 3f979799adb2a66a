"""Checks that ranks can run a plan together, and that the model does not change afterwards.

Before a step is made: the number of ranks, the captured step, its program. In every step:
``Unchanged`` compares which parameters train, how modules behave, and ties. It is needed because a
step is traced once: a parameter that is frozen later would go on training, a module that is put in
evaluation mode would go on dropping out, and a changed temperature would have no effect.
"""

import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from heterog.errors import HeterogWarning, StrategyError
from heterog.graph.capture import CapturedStep
from heterog.graph.op_graph import OpGraph
from heterog.graph.repeated_calls import WatchedState
from heterog.graph.workload import Workload, plain_entries
from heterog.lowering.program import Program
from heterog.lowering.tables import graph_tables
from heterog.modes.mode import fault_of_modes
from heterog.runtime.accelerators import from_every_rank
from heterog.runtime.step.alike import compared_at
from heterog.runtime.step.optimizer import LossScale, op_that_begins_backward
from heterog.search.plan import Plan
from heterog.strategy.strategy import Strategy, scope_fault


def check_world(plan: Plan) -> None:
    """Refuse what is no plan, and another number of ranks than that of the plan's devices."""
    if not isinstance(plan, Plan):
        raise StrategyError(
            f"the plan is of type {type(plan).__name__}; give a Plan, "
            "heterog.load_plan('plan.json') say."
        )
    if not dist.is_initialized():
        raise StrategyError(
            "there is no process group; call torch.distributed.init_process_group() first, in a "
            "script that torchrun starts."
        )
    ranks = dist.get_world_size()
    if ranks != plan.cluster.num_devices:
        raise StrategyError(
            f"the plan is for {plan.cluster.num_devices} devices of '{plan.cluster.name}', but "
            f"{ranks} ranks are running; start one rank per device."
        )


def as_planned(captured: CapturedStep, plan: Plan, name: str) -> CapturedStep:
    """The captured step; an optimizer that was planned by name is treated as in the plan.

    Raises:
        StrategyError: the step differs, or its optimizer would train differently under the plan.
    """
    graph = captured.graph
    difference = plan.graph.describe_difference(graph)
    if difference is not None:
        raise StrategyError(f"the plan was made for another step than '{name}': {difference}.")
    if fault := scope_fault(plan.graph, plan.strategy, graph.scope):
        raise StrategyError(
            f"the plan does not suit the optimizer of '{name}': {fault}. Plan again with this "
            "workload."
        )
    if plan.graph.scope.allows(graph.scope):
        return captured
    return replace(captured, graph=replace(graph, seen_scope=plan.graph.scope))


def check_plain_entries(captured: CapturedStep, batch: Any) -> None:
    """Refuse a batch with other numbers than those that the step has as constants."""
    given = plain_entries(batch)
    for path, before in captured.plain_entries.items():
        now = given.get(path, before)  # a tensor in its place is refused as such
        if now is not before and (type(now) is not type(before) or now != before):
            raise StrategyError(
                f"entry {path} of the batch is {now!r}, but the step was captured with {before!r} "
                "and goes on with that. Pass what changes as a tensor of one number (guide, 'What "
                "changes from step to step'), and leave out what the step does not read."
            )


def check_scaled(graph: OpGraph, loss_scale: LossScale | None) -> None:
    """Refuse a loss scale if no single loss begins the backward pass."""
    if loss_scale is not None and op_that_begins_backward(graph) is None:
        raise StrategyError(
            f"loss_scale cannot scale the loss of '{graph.name}': its backward pass does not "
            "begin with one loss (blocks with losses of their own have several); train without it."
        )


def check_same_everywhere(program_hash: str) -> None:
    """Refuse ranks that have lowered different programs, as their messages would not match."""
    mine = torch.tensor([int(program_hash, 16) >> 1], dtype=torch.int64)
    hashes = from_every_rank(mine)
    differing = [rank for rank, each in enumerate(hashes) if not torch.equal(each, mine)]
    if differing:
        raise StrategyError(
            f"rank {dist.get_rank()} lowered another program than ranks {differing}; every rank "
            "needs the same plan, model code and versions of torch and heterog."
        )


def check_masters(strategy: Strategy, workload: Workload) -> None:
    """Refuse master weights with a mode that does not support them."""
    faults = [mode.masters_fault for mode in strategy.modes if mode.masters_fault]
    if faults and workload.master_dtype is not None:
        raise StrategyError(faults[0])


def check_modes(graph: OpGraph, strategy: Strategy, program: Program, *, clips: bool) -> None:
    """Refuse settings that the modes of a plan do not support."""
    if clips and not all(mode.takes_clipping for mode in strategy.modes):
        raise StrategyError(
            "max_grad_norm is a norm over one gradient, and loss_scale asks for it, but the "
            "islands or stages of this plan have one each; train without them, or with an exact "
            "plan."
        )
    if strategy.modes:
        tables = graph_tables(graph, strategy.op_rules, strategy.blocks)
        if fault := fault_of_modes(program, strategy, tables):
            raise StrategyError(f"{fault}.")


_WAY_OUT = (
    "The step was captured as the model was then: save a checkpoint, let the workload's model "
    "function make the model as it is to be now, plan and deploy that, and load the checkpoint."
)

_MOST_NAMED = 3


def refuse_second_step(optimizer: Optimizer, *_: object) -> None:
    """Hook of a deployed optimizer: a loop that was ported may still step it.

    Raises:
        StrategyError: no parameter has a gradient.
    """
    if all(each.grad is None for group in optimizer.param_groups for each in group["params"]):
        raise StrategyError(
            "no parameter has a gradient, because each call of the deployed step runs the "
            "optimizer itself. Leave optimizer.step() out; to clip, deploy with max_grad_norm, "
            "and instead of accumulating gradients pass the batches as one."
        )


def _num_step_hooks(optimizer: Optimizer) -> int:
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


def _num_hooks_of_all() -> int:
    """Hooks of the steps of all optimizers."""
    return len(_global_optimizer_pre_hooks) + len(_global_optimizer_post_hooks)


_QUICK = 1 << 16
"""Elements of a buffer on the host that are compared before every step."""


class Unchanged:
    """Compares a model and an optimizer with their state at deployment.

    Args:
        workload: The workload.
        model: Its deployed model.
        optimizer: The optimizer.
        captured: The captured step.
        sliced: Trained parameters that the step does not read in other memory.
    """

    def __init__(
        self,
        workload: Workload,
        model: nn.Module,
        optimizer: Optimizer,
        captured: CapturedStep,
        sliced: Iterable[Tensor],
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._state = WatchedState(workload, model, captured.graph, captured.known)
        self._known = captured.known
        self._versions: dict[str, tuple[Tensor, int]] = {}  # of known buffers that were equal
        self._num_checks = 0
        self._num_groups = len(optimizer.param_groups)
        self._num_step_hooks = _num_step_hooks(optimizer)  # those of its class, and our own
        self._modules = [(name, each, each.training) for name, each in model.named_modules()]
        named, graph = dict(model.named_parameters()), captured.graph
        read = {tensor for op in graph.ops for tensor in op.inputs} - graph.trained
        frozen = (named.get(graph.tensors[tensor].name) for tensor in read)
        watched = set(map(id, (*sliced, *frozen)))  # read in the memory that they have now

        def memory(value: nn.Parameter) -> int | None:
            return value.data_ptr() if id(value) in watched else None

        self._parameters = [
            (module, name, key, value, value.requires_grad, memory(value))
            for name, module in model.named_modules()
            for key, value in module._parameters.items()
            if value is not None
        ]
        self._device_types = {each.device.type for each in model.parameters()}

    def check(self) -> None:
        """Refuse a model or optimizer that has changed, and modes that change every op.

        Raises:
            StrategyError: a parameter, a module, the number of parameter groups, or something
                that the model or its loss reads has changed; or the step is called under autocast
                or in inference mode.
        """
        is_cast = any(map(torch.is_autocast_enabled, self._device_types))
        if is_cast or torch.is_inference_mode_enabled():
            raise StrategyError(
                "the step is called under torch.autocast or in inference mode, which change what "
                "its ops compute. Call it outside, and open autocast in the model's forward pass."
            )
        self._check_parameters()
        self._check_known()
        for name, module, was_training in self._modules:
            if module.training != was_training:
                mode, before = ("eval", "train") if was_training else ("train", "eval")
                raise StrategyError(
                    f"module '{name or '(root)'}' is in {mode}() mode now, but the step was "
                    f"captured in {before}() mode and goes on like that; call {before}() on it "
                    "before the next step."
                )
        if len(self._optimizer.param_groups) != self._num_groups:
            raise StrategyError(
                f"the optimizer has {len(self._optimizer.param_groups)} parameter groups now, "
                f"{self._num_groups} when the plan was deployed. Give all of them to the workload "
                "(parameter_groups), and plan again."
            )
        num_step_hooks = _num_step_hooks(self._optimizer) + _num_hooks_of_all()
        if num_step_hooks > self._num_step_hooks:
            self._num_step_hooks = num_step_hooks
            warnings.warn(
                "the optimizer has a hook of its steps, which is called for each part of the "
                "parameters that this rank updates, several times a step, not for all of them. "
                "Clip to a norm of all with max_grad_norm; count steps by num_steps; what else "
                "looks at several parameters belongs in the step of an optimizer class of your "
                "own, as which it is planned.",
                HeterogWarning,
                stacklevel=4,
            )
        if hook := self._state.new_hook():
            raise StrategyError(
                f"a {hook} was registered after the step was captured, and would never run. One "
                "that changes what is computed belongs in the workload's model function."
            )
        if changed := self._state.changed():
            raise StrategyError(
                f"{', '.join(each.text for each in changed[:_MOST_NAMED])} has changed since the "
                "step was captured, and the step goes on with what it was. What changes from step "
                "to step is a buffer (register_buffer) that is written in place, or a tensor of "
                "one number in the batch (guide, 'What changes from step to step')."
            )

    def _check_parameters(self) -> None:
        """Refuse other parameters, or ones that are trained otherwise; see ``check``."""
        for module, name, key, value, trains, memory in self._parameters:
            found = module._parameters.get(key)
            has_memory = memory in (None, value.data_ptr())
            if found is value and value.requires_grad == trains and has_memory:
                continue
            path = f"{name}.{key}" if name else key
            if found is value and not has_memory:
                raise StrategyError(
                    f"'{path}' has other memory now (.data = ...), which this step does not read. "
                    "Write its values in place: with torch.no_grad(), parameter.copy_(value)."
                )
            if found is value:
                is_now = "requires_grad=False" if trains else "requires_grad=True"
                raise StrategyError(
                    f"'{path}' has {is_now} now, which this step does not know. {_WAY_OUT}"
                )
            raise StrategyError(
                f"'{path}' is another parameter now, or gone, which this step does not know. "
                f"{_WAY_OUT}"
            )

    def _check_known(self) -> None:
        """Refuse other values of buffers that decide what the step computes; see ``check``."""
        self._num_checks += 1
        for name, value in self._known.items():
            found = self._model.get_buffer(name)
            before = self._versions.get(name)
            is_quick = found.is_cpu and found.numel() <= _QUICK
            is_seen = before is not None and before[0] is found and before[1] == found._version
            if is_seen and not is_quick and not compared_at(self._num_checks):
                continue  # writes to .data are no versions
            now = found.cpu()
            is_same = now.shape == value.shape and now.dtype == value.dtype
            if not is_same or not torch.allclose(now, value, rtol=0, atol=0, equal_nan=True):
                is_short = value.numel() == 1 and found.numel() == 1
                values = f" ({value.tolist()}, now {found.tolist()})" if is_short else ""
                raise StrategyError(
                    f"buffer '{name}' has another value than when the step was captured{values}, "
                    "which decides what the step computes. Make the model with this value, and "
                    "plan again."
                )
            self._versions[name] = found, found._version
