"""Values that a step computes from none of its inputs, found out where code asks for them.

A mask of sizes alone (``~torch.eye(n, dtype=torch.bool)``) is the same in all steps, so that what
it chooses has one shape. Fake tensors have no values: ops that read no input and draw nothing are
noted, and run again on real tensors if code asks for what comes of them.

Buffers that no step writes (a flag, a mask of channels) may be given with their values, and count
as no input then. Ranks hold on to them: see ``CapturedStep.known``.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

_MOST_ELEMENTS = 1 << 24
"""Of a tensor that is computed to answer: a mask of 4,096 positions squared."""


class _Noted(NamedTuple):
    """An op that ran, with what it read and made."""

    op: Any
    args: Any
    keywords: Any
    result: Any


class KnownValues:
    """Ops of a step that read none of its inputs, in the order in which they ran."""

    def __init__(self) -> None:
        self._noted: list[_Noted] = []
        self._made: set[int] = set()
        self._given: dict[int, Tensor] = {}

    def give(self, tensor: Tensor, value: Tensor) -> None:
        """State the value of an input, which has to live as long as this object."""
        self._given[id(tensor)] = value
        self._made.add(id(tensor))

    def note(self, op: Any, args: Any, keywords: Any, result: Any) -> None:
        """Note an op that depends on no input of the step, nor on random draws."""
        self._noted.append(_Noted(op, args, keywords, result))
        self._made.update(map(id, _tensors(result)))

    def made(self, tensor: Tensor) -> bool:
        """Whether a tensor has come of such an op."""
        return id(tensor) in self._made

    def answer(self, op: Any, args: Any, keywords: Any) -> Any:
        """What an op returns whose shape or number depends on values, if these are known.

        Returns:
            Its result; ``None`` where it is no such op, or its inputs are not known.
        """
        if not _asks(op, args, keywords):
            return None
        real = self._computed([*_tensors((args, keywords))])
        if real is None:
            return None
        with _disable_current_modes():
            found = op(*_with(real, args), **_with(real, keywords))
        return pytree.tree_map_only(Tensor, _aten.lift_fresh_copy.default, found)

    def _computed(self, wanted: list[Tensor]) -> dict[int, Tensor] | None:
        """Real tensors by the ids of fake ones; ``None`` if one of those wanted is not known."""
        with _disable_current_modes():
            real = {key: value.clone() for key, value in self._given.items()}
            for each in self._ways_to(wanted):
                inputs = [*_tensors((each.args, each.keywords))]
                is_large = any(made.numel() > _MOST_ELEMENTS for made in _tensors(each.result))
                if is_large or not all(_is_real(one) or id(one) in real for one in inputs):
                    continue
                found = each.op(*_with(real, each.args), **_with(real, each.keywords))
                made = zip(_tensors(each.result), _tensors(found), strict=True)
                real.update((id(fake), value) for fake, value in made)
        return real if all(_is_real(one) or id(one) in real for one in wanted) else None

    def _ways_to(self, wanted: list[Tensor]) -> list[_Noted]:
        """The ops that have made or written the memory of tensors, first to last."""
        memory = {_memory(each) for each in wanted}
        found = []
        for each in reversed(self._noted):
            inputs = [*_tensors((each.args, each.keywords))]
            touched = {_memory(one) for one in (*_tensors(each.result), *_written(each))}
            if touched & memory:
                memory |= {_memory(one) for one in inputs}
                found.append(each)
        return found[::-1]


def asked_of(op: Any, args: Any, keywords: Any) -> list[Tensor]:
    """The tensors whose values an op asks for."""
    if op is _aten.index.Tensor:
        return [each for each in args[1] if each is not None and each.dtype in _MASKS]
    return [*_tensors((args, keywords))]


_ASKS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_aten = torch.ops.aten


def _asks(op: Any, args: Any, keywords: Any) -> bool:
    """Whether the shape of what an op returns, or the number that it is, depends on values."""
    if op is _aten.index.Tensor:
        return any(each is not None and each.dtype in _MASKS for each in args[1])
    if op is _aten.repeat_interleave.Tensor and keywords.get("output_size") is not None:
        return False
    return bool(_ASKS & set(getattr(op, "tags", ())))


_MASKS = (torch.bool, torch.uint8)


def _tensors(value: Any) -> Iterator[Tensor]:
    return (each for each in pytree.tree_leaves(value) if isinstance(each, Tensor))


def _written(noted: _Noted) -> Iterator[Tensor]:
    schema = getattr(noted.op, "_schema", None)
    if schema is not None and schema.is_mutable:
        yield from _tensors((noted.args, noted.keywords))


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else id(tensor)


def _is_real(tensor: Tensor) -> bool:
    real = tensor.constant if isinstance(tensor, FakeTensor) else tensor
    return real is not None and not real.is_meta


def _with(real: dict[int, Tensor], value: Any) -> Any:
    """Arguments with real tensors in the place of fake ones."""

    def of(tensor: Tensor) -> Tensor:
        if (found := real.get(id(tensor))) is not None:
            return found
        return tensor.constant if isinstance(tensor, FakeTensor) else tensor  # type: ignore[return-value]

    return pytree.tree_map_only(Tensor, of, value)
