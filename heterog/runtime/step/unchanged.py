"""What a model may not change once its step is captured: what trains, how modules behave, ties.

A step is traced once. A parameter that is frozen afterwards would go on training, a module in
evaluation mode go on dropping out, a temperature would stay what it was.
"""

from torch import nn
from torch.optim import Optimizer

from heterog.errors import StrategyError
from heterog.graph.changed_state import WatchedState
from heterog.graph.op_graph import OpGraph
from heterog.graph.workload import Workload

_WAY_OUT = (
    "The step was captured as the model was then: save a checkpoint, let the workload's model "
    "function make the model as it is to be now, plan and deploy that, and load the checkpoint."
)

_MOST_NAMED = 3


class Unchanged:
    """Compares a model and an optimizer with what they were.

    Args:
        workload: The workload.
        model: Its deployed model.
        optimizer: The optimizer.
        graph: The captured step.
    """

    def __init__(
        self, workload: Workload, model: nn.Module, optimizer: Optimizer, graph: OpGraph
    ) -> None:
        self._optimizer = optimizer
        self._state = WatchedState(workload, model, graph)
        self._num_groups = len(optimizer.param_groups)
        self._modules = [(name, each, each.training) for name, each in model.named_modules()]
        self._parameters = [
            (module, name, key, value, value.requires_grad)
            for name, module in model.named_modules()
            for key, value in module._parameters.items()
            if value is not None
        ]

    def check(self) -> None:
        """Refuse to go on with what has changed.

        Raises:
            StrategyError: a parameter, a module, the number of parameter groups, or something
                that the model or its loss reads has changed.
        """
        for module, name, key, value, trains in self._parameters:
            found = module._parameters.get(key)
            if found is value and value.requires_grad == trains:
                continue
            path = f"{name}.{key}" if name else key
            if found is value:
                is_now = "requires_grad=False" if trains else "requires_grad=True"
                raise StrategyError(
                    f"'{path}' has {is_now} now, which this step does not know. {_WAY_OUT}"
                )
            raise StrategyError(
                f"'{path}' is another parameter now, or gone, which this step does not know. "
                f"{_WAY_OUT}"
            )
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
