"""One op of the graph on a device's share: its local arguments, its kernel, and corrections."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from heterog.errors import StrategyError
from heterog.graph.axis_plan import BATCH_AXIS, AxisPlan
from heterog.graph.batch_plan import values_per_channel
from heterog.graph.capture import CapturedStep
from heterog.graph.capture.reading import ATTENTION_ALIASES
from heterog.graph.op_costs import SPARSE_PRODUCT
from heterog.graph.op_graph import OpGraph, Phase, TensorKind
from heterog.graph.placement import Arg, OpCall, Placement, R, TensorMeta, TensorRef
from heterog.graph.sharding_rules import (
    RUNS_ON_WINDOWS,
    RuleResult,
    Special,
    local_args,
    local_shape,
)
from heterog.graph.sharding_rules.indexing import row_index, rows_of_sample
from heterog.graph.sharding_rules.legal import halo_dim
from heterog.graph.sharding_rules.table import INSIDE_TEAMS, positions
from heterog.graph.sparse_pattern import Rows
from heterog.runtime.accelerators import has_flash_attention
from heterog.runtime.step.recipes import Step
from heterog.runtime.step.spans import ProductOfRows, Span, nested, unit_rows, window_rows
from heterog.runtime.step.special_ops import (
    ATTENTION,
    Run,
    numbers_of_rows,
    on_causal_rows,
    on_masked_rows,
    on_own_words,
)
from heterog.runtime.step.windows import Windows, run_on_windows

_RESHAPES = frozenset({"view.default", "_unsafe_view.default"})
_SUM_REDUCTION = 2  # at::Reduction::Sum
_RANDOM = frozenset({Special.OWN_RANDOM_STREAM, Special.SHARED_RANDOM_STREAM})
_OF_POSITION = frozenset({Special.CAUSAL_ROWS, Special.OWN_WORDS})
_AROUND = frozenset({Special.OWN_ROWS, Special.MEAN_TO_SUM})
"""Corrections before or after a kernel, which any share needs."""
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_INSTEAD = {"attention": "Use dropout_p=0 in attention, and torch.nn.Dropout after it."}

_WRITTEN_OUT = {
    "_conj.default": torch.ops.aten.conj_physical.default,
    "_neg_view.default": torch.ops.aten.neg.default,
}
"""Ops that only set a flag of their input, and ops that compute the same: messages lose flags."""

_FAST: Mapping[torch._ops.OpOverload, Callable[..., Any]] = {
    torch.ops.aten.t.default: torch.t,
    torch.ops.aten.detach.default: torch.detach,
    torch.ops.aten.transpose.int: torch.transpose,
    torch.ops.aten.permute.default: torch.permute,
    torch.ops.aten.unsqueeze.default: torch.unsqueeze,
    torch.ops.aten.squeeze.dim: torch.squeeze,
    torch.ops.aten.select.int: torch.select,
    torch.ops.aten.expand.default: Tensor.expand,
    torch.ops.aten.mm.default: torch.mm,
    torch.ops.aten.bmm.default: torch.bmm,
    torch.ops.aten.addmm.default: torch.addmm,
    torch.ops.aten.add.Tensor: torch.add,
    torch.ops.aten.sub.Tensor: torch.sub,
    torch.ops.aten.mul.Tensor: torch.mul,
    torch.ops.aten.div.Tensor: torch.div,
    torch.ops.aten.pow.Tensor_Scalar: torch.pow,
    torch.ops.aten.sum.dim_IntList: torch.sum,
    torch.ops.aten.mean.dim: torch.mean,
    torch.ops.aten.clone.default: torch.clone,
    torch.ops.aten.relu.default: torch.relu,
    torch.ops.aten.rsqrt.default: torch.rsqrt,
    torch.ops.aten._softmax.default: torch._softmax,
    torch.ops.aten._log_softmax.default: torch._log_softmax,
    torch.ops.aten.native_layer_norm.default: torch.native_layer_norm,
}
"""Functions of torch that call the same op in about 1 us less than ``torch.ops`` does."""
_PLAIN = (int, float, bool, type(None))

_IGNORE_STRIDES = ("native_group_norm", "_weight_norm_interface", "nll_loss2d", "attention")
"""Beginnings of the names of ops whose kernels for CPUs read memory as if it was in order: they
compute something else for other strides, or fail. Eager torch puts it in order before it calls
them; in a captured step it may come in another order, from another device or a real kernel."""


@cache  # equal layers are compiled once if their functions are the same
def _in_order(function: Callable[..., Any], is_of_rows: bool) -> Callable[..., Any]:
    """A function that is called on tensors in row-major order, or whose rows are in order."""

    def ordered(value: Any) -> Any:
        if not isinstance(value, Tensor) or (is_of_rows and value.dim() and value.stride(-1) == 1):
            return value
        return value.contiguous()

    def call(*given: Any, **keywords: Any) -> Any:
        return function(*map(ordered, given), **keywords)

    return call


class Share(NamedTuple):
    """The part of the batch and of an axis that an op runs on.

    Attributes:
        samples: Number of samples of the batch.
        units: Number of units of the axis of its rule.
        first_unit: Number of the first of them.
        is_first: Whether this device adds summands that must enter a sum over the batch once.
        is_first_member: Whether this device adds summands that must enter a team's sum once.
    """

    samples: int
    units: int
    first_unit: int = 0
    is_first: bool = True
    is_first_member: bool = True


class Kernel(NamedTuple):
    """A call of an op on a local share.

    Attributes:
        function: The function that is called.
        positional: Its arguments; a ``TensorRef``, also inside of tuples, stands for an input.
        keywords: Arguments by name.
        kept: Which of the returned tensors are outputs; ``None`` if it returns a single tensor.
    """

    function: Callable[..., Any]
    positional: tuple[Any, ...]
    keywords: Mapping[str, Any] = _NOTHING
    kept: tuple[int, ...] | None = None

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Make the call; returns the outputs."""
        keywords = {name: _fill(value, inputs) for name, value in self.keywords.items()}
        made = self.function(*_fill(self.positional, inputs), **keywords)
        return [made] if self.kept is None else [made[place] for place in self.kept]


class LocalOp:
    """Calls the kernel of one op on local tensors.

    An op without a rule is split along the batch. With a rule it is split along the batch between
    teams of devices, and along the axis of its rule inside a team.

    Args:
        graph: Graph of the captured step.
        plan: Placements of the graph along the batch and other axes.
        index: Index of the op.
        node: Its fx node in the capture.
        device: Device on which it runs, and on which it creates tensors.

    Attributes:
        whole: The share of one device alone.
        along_batch: Rule of the op along the batch.
        along_axis: Rule along its axis inside a team; all whole if it has none.
        has_windows: Whether it reads rows that neighbours own.
        minds_position: Whether its result depends on the number of its first unit.
        is_random: Whether it draws from torch's default generator.
        draws_own: Whether each share of it draws numbers of its own, along the batch and along its
            axis.
        is_of_whole_batch: Whether every share makes the output of the whole batch.
        weighs_labels: Whether it divides by the weight of all labels of the batch.
        steps_buffers: Positions of the running statistics that it updates in a copy of their
            units.
        counts_steps: Whether it counts a step in a buffer.
        steps_statistics: Whether it normalises a batch, and updates running statistics itself.

    Raises:
        StrategyError: the op cannot be executed on a part of the batch.
    """

    def __init__(
        self, graph: OpGraph, plan: AxisPlan, index: int, node: fx.Node, device: torch.device
    ) -> None:
        target = node.target
        assert isinstance(target, torch._ops.OpOverload)
        self.index = index
        self.call = graph.calls[index]
        is_ruled = plan.op_axis[index] != BATCH_AXIS
        self.whole = Share(graph.batch_size, max(plan.units(index), 1) if is_ruled else 1)
        self.along_batch, self.along_axis = _rules(plan, index, graph.outputs[index])
        self.has_windows = self.call.kind in RUNS_ON_WINDOWS and (
            halo_dim(self.along_axis.inputs) is not None
        )
        self._of_rows: ProductOfRows | None = None
        if self.has_windows and self.call.kind == SPARSE_PRODUCT:
            self._of_rows = ProductOfRows(self.call, graph, self.whole.units)
        self.specials = frozenset({self.along_batch.special, self.along_axis.special})
        self.minds_position = self.has_windows or bool(self.specials & _OF_POSITION)
        self.is_random = bool(self.specials & _RANDOM)
        own_stream = Special.OWN_RANDOM_STREAM
        self.draws_own = (
            self.along_batch.special == own_stream,
            self.along_axis.special == own_stream,
        )
        self.is_of_whole_batch = Special.OF_WHOLE_BATCH in self.specials
        self.weighs_labels = Special.NLL_GLOBAL_WEIGHT in self.specials
        self.steps_buffers = self._steps_buffers(graph)
        self.counts_steps = self.call.kind == "copy_.default"
        where = f"op '{self.call.kind}' in module '{graph.ops[index].module}'"
        self.steps_statistics = graph.ops[index].phase == Phase.FORWARD and (
            Special.LOCAL_STATISTICS in self.specials
        )
        if _draws(self.call, target) and (self.call.kind == "attention" or not self.is_random):
            raise StrategyError(
                f"{where} draws random numbers in a way that cannot be executed on several "
                f"devices yet. {_INSTEAD.get(self.call.kind, 'Use torch.nn.Dropout instead.')}"
            )
        self._target: Callable[..., Any] = _WRITTEN_OUT.get(self.call.kind, target)
        if device.type not in ("cpu", "meta") and self.call.kind in ATTENTION:
            # It was captured as a kernel of the CPU; other devices have other kernels.
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
        self._kernels: dict[Share, Kernel] = {}
        self._is_reshape = not self.has_windows and (
            self.call.kind in _RESHAPES or Special.AS_RESHAPE in self.specials
        )

    def _steps_buffers(self, graph: OpGraph) -> tuple[int, ...]:
        if Special.LOCAL_STATISTICS not in self.specials:
            return ()
        return tuple(
            position
            for position, (tensor, place) in enumerate(
                zip(graph.ops[self.index].inputs, self.along_axis.inputs, strict=True)
            )
            if place.kind == "S"
            and place.outer > 1  # a run of units is a view
            and graph.tensors[tensor].kind == TensorKind.BUFFER
        )

    def __call__(self, inputs: Sequence[Tensor], share: Share) -> list[Tensor]:
        """Run on local inputs.

        Args:
            inputs: Tensor inputs of the op, placed as its rules need them.
            share: The local share.

        Returns:
            The local outputs.

        Raises:
            StrategyError: a BatchNorm has one value per channel, which has no variance.
        """
        return self.kernel(share)(inputs)

    def kernel(self, share: Share) -> Kernel:
        """The kernel of a call on a share; see ``__call__``."""
        if share not in self._kernels:
            self._kernels[share] = self._make_kernel(share)
        return self._kernels[share]

    def _make_kernel(self, share: Share) -> Kernel:
        if self._is_reshape:
            # After a gather or a cut the strides may not allow a view.
            return Kernel(Tensor.reshape, (TensorRef(0), self.local_shape_of_output(0, share)))
        if self.steps_statistics:
            shape = self._local_shape(
                self.call.inputs[0].shape,
                self.along_batch.inputs[0],
                self.along_axis.inputs[0],
                share,
            )
            if values_per_channel(shape) == 1:
                raise StrategyError(
                    f"it would have one value per channel of {shape}, and torch trains BatchNorm "
                    "on more than one; give the device more samples, or none."
                )
        is_part = share.units < self.whole.units and self.specials & INSIDE_TEAMS
        if self.has_windows or self._summands(share) or is_part or self.specials & _AROUND:
            inputs = tuple(TensorRef(place) for place in range(len(self.call.inputs)))
            num_made = 1 if self.is_incomplete(share) else len(self.call.outputs)
            run = partial(self._on_windows, share)
            if not self.has_windows:
                run = partial(self._specially, share, self._plainly(share))
            return Kernel(run, (inputs,), kept=tuple(range(num_made)))
        return self._plainly(share)

    def _plainly(self, share: Share) -> Kernel:
        """The op's own kernel."""
        function, returns = self._target, self._schema.returns
        if isinstance(function, torch._ops.OpOverload):
            function = _FAST.get(function, function._op)
        if self.call.kind.startswith(_IGNORE_STRIDES):
            function = _in_order(function, self.call.kind.startswith("attention"))
        local = self._local_args(share)
        positional, keywords = [], {}
        for argument in self._schema.arguments:
            name = ATTENTION_ALIASES.get(argument.name, argument.name)
            value: Any = local.get(name)
            if not _holds_tensor(value) and value == self.call.args.get(name):
                # The original object: the graph has dtypes and devices as text.
                value = self._original[argument.name]
            if self.weighs_labels and argument.name == "reduction":
                value = _SUM_REDUCTION
            if not argument.kwarg_only:
                positional.append(value)
            elif type(value) not in _PLAIN or value != argument.default_value:
                keywords[argument.name] = value
        is_single = self._kept == [0] and [str(each.type) for each in returns] == ["Tensor"]
        return Kernel(
            function, tuple(positional), keywords, None if is_single else tuple(self._kept)
        )

    def _on_windows(self, share: Share, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run an op that reads rows of neighbours."""
        units = share.first_unit, share.units
        if self._of_rows is not None:
            return self._of_rows(inputs, units)
        return run_on_windows(self.call, inputs, self._windows(units))

    def _instead(
        self, kernel: Kernel, inputs: Sequence[Tensor], changes: Mapping[str, Any]
    ) -> list[Tensor]:
        """Make a call with other values of some arguments."""
        names = [each.name for each in self._schema.arguments if not each.kwarg_only]
        old = zip(names, kernel.positional, strict=True)
        by_name = {name: value for name, value in changes.items() if name not in names}
        return kernel._replace(
            positional=tuple(changes.get(name, value) for name, value in old),
            keywords={**kernel.keywords, **by_name},
        )(inputs)

    def _specially(self, share: Share, kernel: Kernel, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run the op with the corrections that make it exact on a part of its inputs."""
        given, changes = list(inputs), dict[str, Any]()
        for summand in self._summands(share):
            if summand is None:
                is_float = isinstance(self.call.args["other"], float)  # which decides the dtype
                changes["other"] = 0.0 if is_float else 0
            else:
                given[summand] = torch.zeros_like(given[summand])
        if Special.OWN_ROWS in self.specials:
            rows = row_index(self.call, self.along_batch)
            first = given[rows].flatten()[:1].sum()  # there may be none
            per_sample = rows_of_sample(self.call, self.along_batch, self.whole.samples)
            given[rows] = given[rows] - (first - first % per_sample)
        run = partial(self._instead, kernel)
        if Special.CAUSAL_ROWS in self.specials and share.units < self.whole.units:
            return self._on_causal_rows(given, share, run)
        if Special.OWN_WORDS in self.specials and share.units < self.whole.units:
            return self._on_own_words(given, share, run)
        if self.is_incomplete(share):
            return [numbers_of_rows(self.call, given)]
        made = run(given, changes) if changes else kernel(given)
        for rule, own_size, whole in zip(
            (self.along_batch, self.along_axis), share[:2], self.whole[:2], strict=True
        ):
            if rule.special == Special.MEAN_TO_SUM:
                made[0].mul_(own_size / whole)
        return made

    def _on_causal_rows(self, inputs: Sequence[Tensor], share: Share, run: Run) -> list[Tensor]:
        """Causal attention of the queries of some units, which see keys up to their own."""
        (query,) = positions(self.call, "query")
        num_rows = self.call.inputs[query].shape[2]
        first = share.first_unit * num_rows // self.whole.units
        rows = [inputs[place] for place in positions(self.call, "query", "key", "value")]
        has_flash = has_flash_attention(*rows, is_causal=False)
        is_masked = self._target is ATTENTION[self.call.kind] and not has_flash
        on_rows = on_masked_rows if is_masked else on_causal_rows
        return on_rows(self.call, run, inputs, first)

    def _on_own_words(self, inputs: Sequence[Tensor], share: Share, run: Run) -> list[Tensor]:
        """Run a look-up, or a choice of labels, on the words of some units."""
        place = next(place for place in self.along_axis.inputs if place.kind == "S")
        where = self.along_axis.inputs.index(place)
        per_unit = self.call.inputs[where].shape[place.dim] // self.whole.units
        first = share.first_unit
        words = range(first * per_unit, (first + share.units) * per_unit)
        return on_own_words(self.call, run, inputs, words, is_mean=not self.weighs_labels)

    def is_incomplete(self, share: Share) -> bool:
        """Whether the op makes one number per row, from which its team then makes the columns."""
        is_part = share.units < self.whole.units
        return is_part and self.along_axis.special == Special.NUMBERS_OF_ROWS

    def _windows(self, units: Span) -> Windows:
        """Rows at hand and rows to make of an op that reads rows of neighbours."""
        rule, all_units = self.along_axis, self.whole.units
        dim = halo_dim(rule.inputs)
        assert dim is not None

        def rows(place: Placement, meta: TensorMeta) -> Rows | None:
            size = meta.shape[dim] if place.is_split else 0
            if place.kind == "H":
                return window_rows(place, units, size)
            return unit_rows(units, size, all_units) if place.kind == "S" else None

        made = tuple(map(rows, rule.outputs, self.call.outputs))
        own = next((each for each in made if each is not None), Rows(0, 0))
        for where in positions(self.call, "grad_output"):
            own = unit_rows(units, self.call.inputs[where].shape[dim], all_units)
        if "output_mask" in self.call.args and not (rule.outputs and rule.outputs[0].is_split):
            made = (None, *made)  # the gradient of the input is not made
        return Windows(
            dim=dim, rows=tuple(map(rows, rule.inputs, self.call.inputs)), made=made, own=own
        )

    def as_view(self, output: int, share: Share) -> Step:
        """A function that makes an output from the op's only input, and its other arguments."""
        kernel = self.kernel(share)
        first, *others = kernel.positional
        is_method = first == TensorRef(0) and not any(map(_holds_tensor, others))
        if is_method and kernel.kept is None and not kernel.keywords:
            return kernel.function, tuple(others)
        return lambda value: self([value], share)[output], ()

    def local_shape_of_output(self, index: int, share: Share) -> tuple[int, ...]:
        """Shape of an output on a local share."""
        return self._local_shape(
            self.call.outputs[index].shape,
            self.along_batch.outputs[index],
            self.along_axis.outputs[index],
            share,
        )

    def _local_shape(
        self, shape: tuple[int, ...], in_batch: Placement, on_axis: Placement, share: Share
    ) -> tuple[int, ...]:
        shape = local_shape(shape, in_batch, share.samples, self.whole.samples)
        if share.units == self.whole.units:
            return shape
        inside = nested(on_axis, in_batch, self.whole.samples, share.samples)
        return local_shape(shape, inside, share.units, self.whole.units)

    def _summands(self, share: Share) -> list[int | None]:
        """Inputs that enter a sum over devices once, on another device; ``None`` is a number."""
        enters = (self.along_batch, share.is_first), (self.along_axis, share.is_first_member)
        return [
            summand
            for rule, is_here in enters
            if rule.special == Special.BIAS_ON_ONE_RANK and not is_here
            for summand in self._summands_of(rule)
        ]

    def _summands_of(self, rule: RuleResult) -> Sequence[int | None]:
        if "tensors" in self.call.args:
            return [place for place, needed in enumerate(rule.inputs) if needed == R]
        if "other" in self.call.args:  # of two operands, the one that all devices have
            both = positions(self.call, "self", "other")
            return [place for place in both if rule.inputs[place] == R] or [None]
        return positions(self.call, "bias" if "bias" in self.call.args else "self")

    def _local_args(self, share: Share) -> dict[str, Arg]:
        """Arguments on the samples of a device or team, then on the units of a device."""
        total, samples = self.whole.samples, share.samples
        args = local_args(self.call, self.along_batch, samples, total)
        if share.units == self.whole.units:
            return args

        def local(metas: tuple[TensorMeta, ...], places: tuple[Placement, ...]) -> Any:
            return tuple(
                TensorMeta(local_shape(meta.shape, place, samples, total), meta.dtype)
                for meta, place in zip(metas, places, strict=True)
            )

        def inside(outer: tuple[Placement, ...], inner: tuple[Placement, ...]) -> Any:
            pairs = zip(inner, outer, strict=True)
            return tuple(nested(place, around, total, samples) for place, around in pairs)

        batch, axis = self.along_batch, self.along_axis
        call = OpCall(
            kind=self.call.kind,
            args=args,
            inputs=local(self.call.inputs, batch.inputs),
            outputs=local(self.call.outputs, batch.outputs),
        )
        rule = RuleResult(
            inside(batch.inputs, axis.inputs), inside(batch.outputs, axis.outputs), axis.special
        )
        return local_args(call, rule, share.units, self.whole.units)


def _rules(plan: AxisPlan, index: int, outputs: range) -> tuple[RuleResult, RuleResult]:
    """Rules of an op along the batch, and along its axis inside a team."""
    special = plan.specials[index]
    own = RuleResult(
        inputs=plan.needed[index],
        outputs=tuple(map(plan.made, outputs)),
        special=Special(special) if special else None,
    )
    if plan.op_axis[index] == BATCH_AXIS:
        return own, RuleResult(tuple(R for _ in own.inputs), tuple(R for _ in outputs))
    special = plan.batch.specials[index]
    along_batch = RuleResult(
        inputs=plan.batch.needed[index],
        outputs=tuple(plan.batch.placements[tensor] for tensor in outputs),
        special=Special(special) if special else None,
    )
    return along_batch, own


def _draws(call: OpCall, target: torch._ops.OpOverload) -> bool:
    """Whether an op draws random numbers; fused attention does so only with dropout."""
    if call.kind in ("attention", "attention_backward"):
        return call.kind == "attention" and bool(call.args["dropout_p"])
    return torch.Tag.nondeterministic_seeded in target.tags


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(_holds_tensor(item) for item in value)
    return isinstance(value, TensorRef)


def _fill(argument: Any, inputs: Sequence[Tensor]) -> Any:
    if isinstance(argument, TensorRef):
        return inputs[argument.index]
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


def local_ops(captured: CapturedStep, plan: AxisPlan, device: torch.device) -> dict[int, LocalOp]:
    """The kernels of a captured step, by index of the op.

    Args:
        captured: The step.
        plan: Placements of its tensors along the batch and the axes of a strategy's rules.
        device: Device on which the kernels run.

    Raises:
        StrategyError: an op cannot be executed on a part of the batch.
    """
    return {
        index: LocalOp(captured.graph, plan, index, node, device)
        for index, node in enumerate(captured.node_of_op)
    }
