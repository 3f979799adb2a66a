"""One op of the graph on a device's share: its arguments, its kernel, and what keeps it exact."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from heterog.errors import StrategyError
from heterog.graph.axis_plan import AxisPlan
from heterog.graph.capture import ATTENTION_ALIASES
from heterog.graph.op_graph import OpGraph
from heterog.graph.placement import Arg, OpCall, R, TensorRef
from heterog.graph.sharding_rules import RuleResult, Special, local_args, local_shape
from heterog.graph.sharding_rules.table import positions
from heterog.runtime.attention import ATTENTION

_RESHAPES = frozenset({"view.default", "_unsafe_view.default"})
_SUM_REDUCTION = 2
_RANDOM = (Special.OWN_RANDOM_STREAM, Special.SHARED_RANDOM_STREAM)
_INSTEAD = {"attention": "Use dropout_p=0 in attention, and torch.nn.Dropout after it."}


class LocalOp:
    """Calls the kernel of one op on local tensors.

    Args:
        graph: the captured step.
        plan: its placements along the batch and other axes.
        index: the op.
        node: the fx node it was read from.
        device: where it runs; what the graph makes on the CPU is made there.

    Attributes:
        units: of the axis that the op runs along: the batch size, mostly.
        is_random: it draws from torch's default generator.

    Raises:
        StrategyError: the op cannot be executed on a part of the batch.
    """

    def __init__(
        self, graph: OpGraph, plan: AxisPlan, index: int, node: fx.Node, device: torch.device
    ) -> None:
        target = node.target
        assert isinstance(target, torch._ops.OpOverload)
        self.index = index
        self.call = graph.call(index)
        self.units = max(plan.units(index), 1)
        special = plan.specials[index]
        self.rule = RuleResult(
            inputs=plan.needed[index],
            outputs=tuple(plan.placements[tensor] for tensor in graph.outputs(index)),
            special=Special(special) if special else None,
        )
        self.is_random = self.rule.special in _RANDOM
        where = f"op '{self.call.kind}' in module '{graph.ops[index].module}'"
        if _draws(self.call, target) and (self.call.kind == "attention" or not self.is_random):
            raise StrategyError(
                f"{where} draws random numbers in a way that cannot be executed on several "
                f"devices yet. {_INSTEAD.get(self.call.kind, 'Use torch.nn.Dropout instead.')}"
            )
        self._target: Callable[..., Any] = target
        if device.type not in ("cpu", "meta") and self.call.kind in ATTENTION:
            # Captured as a kernel of the CPU; each kind of device has kernels of its own.
            self._target = ATTENTION[self.call.kind]
        self._schema = target._schema
        self._original = {
            name: device if isinstance(value, torch.device) else value
            for name, value in _original_args(node, target).items()
        }
        meta = node.meta.get("val")
        values = list(meta) if isinstance(meta, tuple | list) else [meta]
        self._kept = [i for i, value in enumerate(values) if isinstance(value, Tensor)]
        self._kept = self._kept[: len(self.call.outputs)]
        self._templates: dict[int, list[tuple[str, Arg, bool]]] = {}

    def __call__(
        self, inputs: Sequence[Tensor], samples: int, *, is_first: bool = True
    ) -> list[Tensor]:
        """Run on local inputs.

        Args:
            inputs: the op's tensor inputs, placed as its rule wants them.
            samples: samples, or units of the op's axis, of the local share.
            is_first: what must enter a sum over devices once enters it on this device.

        Returns:
            The local outputs.
        """
        if self.call.kind in _RESHAPES or self.rule.special == Special.AS_RESHAPE:
            # After a gather or a cut the strides may not allow a view.
            shape = local_shape(
                self.call.outputs[0].shape, self.rule.outputs[0], samples, self.units
            )
            return [inputs[0].reshape(shape)]
        if self.rule.special == Special.BIAS_ON_ONE_RANK and not is_first:
            summand = self._summand()
            inputs = [*inputs[:summand], torch.zeros_like(inputs[summand]), *inputs[summand + 1 :]]
        positional: list[Any] = []
        keywords: dict[str, Any] = {}
        for name, argument, is_keyword in self._template(samples):
            value = _fill(argument, inputs)
            if is_keyword:
                keywords[name] = value
            else:
                positional.append(value)
        if self.rule.special == Special.NLL_GLOBAL_WEIGHT:
            positional[3] = _SUM_REDUCTION
        result = self._target(*positional, **keywords)
        outputs = list(result) if isinstance(result, tuple | list) else [result]
        kept = [outputs[position] for position in self._kept]
        if self.rule.special == Special.MEAN_TO_SUM:
            kept = [output * (samples / self.units) for output in kept]
        return kept

    def _summand(self) -> int:
        """The input that must enter a sum over devices once."""
        if "other" in self.call.args:
            return self.rule.inputs.index(R)  # of two that are added, the one that all have
        (summand,) = positions(self.call, "bias" if "bias" in self.call.args else "self")
        return summand

    def _template(self, samples: int) -> list[tuple[str, Any, bool]]:
        """Arguments in schema order for a number of samples, tensors still as references."""
        if samples not in self._templates:
            local = local_args(self.call, self.rule, samples, self.units)
            template: list[tuple[str, Any, bool]] = []
            for argument in self._schema.arguments:
                name = ATTENTION_ALIASES.get(argument.name, argument.name)
                value: Any = local.get(name)
                original = self._original[argument.name]
                if not _holds_tensor(value) and value == self.call.args.get(name):
                    # Unchanged: dtypes and devices are text in the graph, objects here.
                    value = _Constant(original)
                template.append((argument.name, value, bool(argument.kwarg_only)))
            self._templates[samples] = template
        return self._templates[samples]


def _draws(call: OpCall, target: torch._ops.OpOverload) -> bool:
    """Whether an op draws random numbers; fused attention does so only with dropout."""
    if call.kind in ("attention", "attention_backward"):
        return call.kind == "attention" and bool(call.args["dropout_p"])
    return torch.Tag.nondeterministic_seeded in target.tags


class _Constant:
    """An argument that is passed on as it is."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(_holds_tensor(item) for item in value)
    return isinstance(value, TensorRef)


def _fill(argument: Any, inputs: Sequence[Tensor]) -> Any:
    if isinstance(argument, TensorRef):
        return inputs[argument.index]
    if isinstance(argument, _Constant):
        return argument.value
    if isinstance(argument, tuple):
        return [_fill(item, inputs) for item in argument]
    return argument


def _original_args(node: fx.Node, target: torch._ops.OpOverload) -> dict[str, Any]:
    """The node's own arguments by schema name, defaults filled in."""
    values: dict[str, Any] = {}
    for position, argument in enumerate(target._schema.arguments):
        if not argument.kwarg_only and position < len(node.args):
            values[argument.name] = node.args[position]
        else:
            values[argument.name] = node.kwargs.get(argument.name, argument.default_value)
    return values
