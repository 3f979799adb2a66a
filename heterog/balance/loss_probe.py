"""Runs a loss on a batch and on its parts, to tell sums and kinds of means apart.

Let L be the loss of samples that are cut into two parts with losses L_1, L_2 and counts c_1, c_2
of the elements that it may be a mean of (samples, or labels that are not ignored). Then

    L = L_1 + L_2                                 if it is a sum, which ``num_items_in_batch``
                                                  divides: L halves where that doubles;
    L = (c_1 L_1 + c_2 L_2) / (c_1 + c_2)         if it is a mean over what c counts.

The parts have one and three samples. If labels can be ignored, all but one in each of the three
samples are. So these values differ.

Losses of a batch and of its parts can only be compared if a loss is a function of its samples. So
``undisturbed`` runs the model as in training, but dropout keeps everything, other random draws are
replaced by their means, batch norms use their running statistics, and no state changes.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from heterog.balance.shares import BalanceError
from heterog.graph.python_state import same_draws
from heterog.runtime.accelerators import default_generator

Batch = Mapping[str, Any]
CountOf = Callable[[Batch], float]
UNCOUNTED = -100
"""The label that losses of PyTorch and Transformers ignore."""

NUM_ITEMS = "num_items"
SAMPLES = "samples"
LABELS = "labels"
SHIFTED_LABELS = "shifted_labels"
KINDS = (NUM_ITEMS, SAMPLES, LABELS, SHIFTED_LABELS)

NUM_SAMPLES = 4  # one in the first part, three in the second
_SAME_KERNELS = 1e-5
_ROUNDING = 1e-6
"""Absolute rounding of a loss in float32, due to logarithms of numbers near 1."""
MOST_CANDIDATES = 16


def label_of(batch: Batch, label_names: Sequence[str]) -> Tensor | None:
    """The labels of a batch: its first tensor of these names."""
    for name in label_names:
        if isinstance(batch.get(name), Tensor) and batch[name].dim():
            found: Tensor = batch[name]
            return found
    return None


def num_rows(batch: Batch, label_names: Sequence[str]) -> int:
    """Number of samples of a batch: the length of its labels, or of its first tensor."""
    first = label_of(batch, label_names)
    if first is None:
        tensors = (each for each in batch.values() if isinstance(each, Tensor) and each.dim())
        first = next(tensors, None)
    return 0 if first is None else len(first)


def candidates(batch: Batch, label_names: Sequence[str]) -> dict[str, CountOf]:
    """Kinds of means that a loss of such batches may be: names, and functions that count."""
    found: dict[str, CountOf] = {SAMPLES: lambda batch: num_rows(batch, label_names)}
    label = label_of(batch, label_names)
    if label is not None:
        found[LABELS] = lambda batch: _num_counted(_needed(batch, label_names))
        if label.dim() > 1:
            found[SHIFTED_LABELS] = lambda batch: _num_counted(_needed(batch, label_names)[:, 1:])
    for name, value in batch.items():
        if "mask" in name and isinstance(value, Tensor) and len(found) < MOST_CANDIDATES - 3:
            found[name] = _count_of_mask(name, 0)
            if value.dim() > 1:
                found[f"shifted {name}"] = _count_of_mask(name, 1)
    return found


def _needed(batch: Batch, label_names: Sequence[str]) -> Tensor:
    label = label_of(batch, label_names)
    if label is None:
        raise BalanceError(
            f"a batch has no tensor of labels ({', '.join(label_names)}), as the first one had. "
            "Give all batches the same contents."
        )
    return label


def _num_counted(label: Tensor) -> float:
    return float((label != UNCOUNTED).sum())


def _count_of_mask(name: str, begin: int) -> CountOf:
    return lambda batch: float((batch[name][..., begin:] != 0).sum()) if name in batch else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Losses of some samples and of their two parts.

    Attributes:
        whole: Loss of all.
        doubled: Loss of all with ``num_items_in_batch`` doubled; ``None`` if there is none.
        parts: Losses of both parts; ``None`` if the model could not run them.
        counts: By candidate, the counts of both parts.
        tolerance: Relative differences that rounding may make.
        failure: Why the model could not run the parts.
    """

    whole: float
    doubled: float | None
    parts: tuple[float, float] | None
    counts: Mapping[str, tuple[float, float]]
    tolerance: float
    failure: str = ""

    def expected(self, kind: str) -> float:
        """Loss of the whole, from those of its parts, if it is a sum or a mean of this kind."""
        assert self.parts is not None
        first, rest = self.parts
        if kind == NUM_ITEMS:
            return first + rest
        one, other = self.counts[kind]
        return (one * first + other * rest) / (one + other) if one + other else math.nan

    def difference(self, kind: str) -> float:
        """Relative difference from what is expected of this kind, beyond rounding of float32."""
        doubled = self.whole if self.doubled is None else self.doubled
        # Both losses are of the same samples, so the same kernels ran.
        is_divided = self._apart(2 * doubled, self.whole) <= _SAME_KERNELS
        if not is_divided and self._apart(doubled, self.whole) > _SAME_KERNELS:
            return math.inf
        if is_divided and kind != NUM_ITEMS:
            return math.inf
        if self.parts is None:
            return 0.0 if is_divided else math.inf
        found = self._apart(self.expected(kind), self.whole)
        return math.inf if math.isnan(found) else found

    def agrees(self, kind: str) -> bool:
        """Whether the loss may be of this kind."""
        return self.difference(kind) <= self.tolerance

    def _apart(self, one: float, other: float) -> float:
        largest = max(abs(self.whole), *map(abs, self.parts or (0.0,)))
        return max(0.0, abs(one - other) - _ROUNDING) / largest if largest else 0.0

    @property
    def tells(self) -> bool:
        """Whether anything was measured that tells kinds apart."""
        numbers = (self.whole, *(self.parts or ()), *filter(None, [self.doubled]))
        if not all(map(math.isfinite, numbers)) or not self.whole:
            return False
        return self.parts is not None or self.agrees(NUM_ITEMS)

    def __str__(self) -> str:
        text = f"for some samples it is {self.whole:.6g}"
        if self.doubled is not None:
            text += f" ({self.doubled:.6g} with twice the num_items_in_batch)"
        if self.parts is None:
            return f"{text}, and the model cannot run a part of them ({self.failure})"
        wanted = ", ".join(f"{self.expected(kind):.6g} for {kind}" for kind in self.counts)
        return (
            f"{text}, for the first {self.parts[0]:.6g}, for the others {self.parts[1]:.6g}. "
            f"A sum would be {self.expected(NUM_ITEMS):.6g}; a mean {wanted}"
        )


LossOf = Callable[[Batch, float], float]
"""The loss of a batch, with ``num_items_in_batch`` times a factor."""


def measure(
    loss_of: LossOf,
    batch: Batch,
    label_names: Sequence[str],
    counts: Mapping[str, CountOf],
    *,
    has_items: bool,
    masked: bool,
    tolerance: float,
) -> Measurement:
    """Measure a loss on samples of a batch, and on both parts of these.

    Args:
        loss_of: The loss.
        batch: Samples.
        label_names: Names of labels.
        counts: Candidates.
        has_items: Whether ``num_items_in_batch`` is given to the loss.
        masked: Whether labels of the second part may be ignored.
        tolerance: Relative differences that rounding may make.
    """
    found = Measurement(whole=math.nan, doubled=None, parts=None, counts={}, tolerance=tolerance)
    chosen = _chosen_samples(batch, label_names, masked=masked)
    if chosen is None:
        return replace(found, failure="no sample has a label that counts")
    parts = [_take(chosen, index, NUM_SAMPLES) for index in ([0], list(range(1, NUM_SAMPLES)))]
    try:
        found = replace(found, whole=loss_of(chosen, 1.0))
        if has_items:
            found = replace(found, doubled=loss_of(chosen, 2.0))
        told = {name: (count(parts[0]), count(parts[1])) for name, count in counts.items()}
        return replace(found, parts=(loss_of(parts[0], 1.0), loss_of(parts[1], 1.0)), counts=told)
    except Exception as error:  # a model may raise anything for inputs that it does not know
        return replace(found, failure=f"{type(error).__name__}: {error}".splitlines()[0][:200])


def _chosen_samples(batch: Batch, label_names: Sequence[str], *, masked: bool) -> Batch | None:
    """Samples of a batch: the one with the most labels, then those with the fewest above zero."""
    number = num_rows(batch, label_names)
    label = label_of(batch, label_names)
    order = list(range(number))
    if label is not None and not label.is_floating_point():
        counted = (label != UNCOUNTED).reshape(number, -1).sum(1).tolist()
        order = sorted((each for each in order if counted[each]), key=lambda each: counted[each])
        if order and label.dim() == 1:  # other classes first: they may have other weights
            classes, last = label.tolist(), order[-1]
            order = sorted(order, key=lambda each: (classes[each] == classes[last], each == last))
    if not order:
        return None
    rest = [order[index % len(order)] for index in range(NUM_SAMPLES - 1)]
    chosen: Batch = _take(batch, [order[-1], *rest], number)
    if masked and label is not None and _may_be_ignored(label):
        return _with_few_labels(chosen, label_names)
    return chosen


def _may_be_ignored(label: Tensor) -> bool:
    """Whether labels of -100 are safe: on GPUs an index out of range ends the process."""
    if label.is_floating_point() or not label.dtype.is_signed:
        return False
    return label.device.type == "cpu" or bool((label == UNCOUNTED).any())


def _with_few_labels(batch: Batch, label_names: Sequence[str]) -> Batch:
    """Ignore labels after the first sample: all but one in each, or in all if each has one."""
    changed = dict(batch)
    for name in label_names:
        label = batch.get(name)
        if not isinstance(label, Tensor) or not label.dim() or label.is_floating_point():
            continue
        rest = label[1:].clone()
        rows = rest.reshape(len(rest), -1) if rest.dim() > 1 else rest[None]
        for row in rows:
            row[(row != UNCOUNTED).nonzero().flatten()[:-1]] = UNCOUNTED
        changed[name] = torch.cat([label[:1], rows.reshape(rest.shape)])
    return changed


def _take(value: Any, index: Sequence[int], number: int) -> Any:
    """Some samples of all tensors and lists of a batch that are as long as it."""
    if isinstance(value, Mapping):
        return {name: _take(each, index, number) for name, each in value.items()}
    if isinstance(value, Tensor) and value.dim() and len(value) == number:
        return value[list(index)]
    if isinstance(value, list | tuple) and len(value) == number:
        return type(value)([value[each] for each in index])
    return value


_aten = torch.ops.aten


@contextmanager
def undisturbed(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Set a model's mode for the body, and restore its state afterwards.

    Modes, buffers, attributes of modules (counters, say) and random generators are restored.

    Args:
        model: The model.
        training: Whether it runs as in training, with fixed draws; else in evaluation mode.
    """
    kept = [(each, dict(vars(each)), dict(each._buffers)) for each in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    draws = FixedDraws() if training else nullcontext()  # type: ignore[no-untyped-call]
    devices = {each.device for each in model.parameters()} - {torch.device("meta")}
    with same_draws(map(default_generator, devices)):
        try:
            model.train(training)
            for module, *_ in kept:
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.training = False
            with torch.no_grad(), draws:
                yield
        finally:
            for module, attributes, named_buffers in kept:
                vars(module).clear()
                vars(module).update(attributes)
                module._buffers.clear()
                module._buffers.update(named_buffers)
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


class FixedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces random draws of PyTorch's ops by their means."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func.overloadpacket in _MEANS:
            return _MEANS[func.overloadpacket](func, args, kwargs)
        for index, argument in enumerate(func._schema.arguments):
            if argument.name in ("dropout_p", "dropout"):  # of fused attention, recurrent layers
                if index < len(args):
                    args = (*args[:index], 0.0, *args[index + 1 :])
                elif argument.name in kwargs:
                    kwargs[argument.name] = 0.0
        return func(*args, **kwargs)


def _probability(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The mean of zeros and ones; ``bernoulli`` has two forms."""
    probability = args[1] if len(args) > 1 else kwargs.get("p")
    if func.overloadpacket is _aten.bernoulli:
        return args[0].clone() if probability is None else torch.full_like(args[0], probability)
    target: Tensor = args[0]
    if isinstance(probability, Tensor):
        return target.copy_(probability)
    return target.fill_(0.5 if probability is None else probability)


def _of_range(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    low, high = (*args[1:], *(kwargs.get(name) for name in ("from", "to")), 0.0, 1.0)[:2]
    target: Tensor = args[0]
    low, high = 0.0 if low is None else low, 1.0 if high is None else high
    return target.fill_((low + high) / 2)


def _second(args: tuple[Any, ...], kwargs: dict[str, Any], name: str, default: float) -> Any:
    return args[1] if len(args) > 1 else kwargs.get(name, default)


def _filled(value: float) -> Callable[..., Any]:
    """A function's result with one value everywhere."""
    return lambda func, args, kwargs: func(*args, **kwargs).fill_(value)


def _middle_integer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    numbers = [each for each in args if isinstance(each, int)]
    low, high = numbers if len(numbers) == 2 else (0, numbers[0])
    return func(*args, **kwargs).fill_((low + high) // 2)


_MEANS: dict[Any, Callable[..., Any]] = {
    _aten.native_dropout: lambda _, args, __: (
        args[0].clone(),
        torch.ones_like(args[0], dtype=torch.bool),
    ),
    _aten.bernoulli: _probability,
    _aten.bernoulli_: _probability,
    _aten.uniform_: _of_range,
    _aten.normal_: lambda _, args, kwargs: args[0].fill_(_second(args, kwargs, "mean", 0.0)),
    _aten.normal: lambda func, args, kwargs: func(*args, **kwargs).copy_(torch.as_tensor(args[0])),
    _aten.exponential_: lambda _, args, kwargs: args[0].fill_(
        1.0 / _second(args, kwargs, "lambd", 1.0)
    ),
    _aten.rand: _filled(0.5),
    _aten.rand_like: _filled(0.5),
    _aten.randn: _filled(0.0),
    _aten.randn_like: _filled(0.0),
    _aten.randint: _middle_integer,
    _aten.randint_like: _middle_integer,
}
