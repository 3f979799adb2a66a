"""Notices what Python keeps for a model that is another value than when its step was captured.

A captured step has numbers, strings and tensors that modules, their settings and the loss kept
then. ``WatchedState`` compares them before each step, which takes about a microsecond for each
module. Only where something differs is the step called on fake tensors, with the old values and
with the new ones: what it does not read, or writes itself, may change.

Caches of functions that a capture must leave without fake tensors.

Libraries keep tables that depend only on sizes (positions of patches, say) in ``lru_cache``. A
model that is captured fills them with fake tensors, which the real model would then read.

Python's search for reference cycles, switched off where it would only look.
"""

import functools
import gc
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from heterog.graph.op_graph import OpGraph, TensorKind
from heterog.graph.python_state import PythonState, Slot
from heterog.graph.repeated_calls import has_parameters
from heterog.graph.static_shapes import plain_control_flow, with_static_shapes
from heterog.graph.step import Step
from heterog.graph.value_checks import answered_guards
from heterog.graph.value_numbers import Results
from heterog.graph.workload import Workload

# By type: asking a lazy proxy what it is an instance of may import or warn.
_KIND: type = functools._lru_cache_wrapper
_OWN = ("torch.", "sympy.", "heterog.")
"""Packages whose caches hold no tensors."""


@contextmanager
def caches_without_fakes() -> Iterator[None]:
    """Empty the caches that were filled during the body."""
    before = {id(cache): cache.cache_info().misses for cache in _FOUND.all()}
    try:
        yield
    finally:
        for cache in _FOUND.all():
            if cache.cache_info().misses != before.get(id(cache), 0):
                cache.cache_clear()


class _FunctionCaches:
    """Every ``lru_cache`` of this process, except torch's and our own.

    Finding them means to look at every object of the process, a million and more, which takes a
    tenth of a second or two. Each cache holds a reference to its type, so while their number is
    the same, and all that were found still live, there is no new one to find.
    """

    def __init__(self) -> None:
        self._found: list[weakref.ref[Any]] = []
        self._num_references = -1

    def all(self) -> list[Any]:
        """The caches."""
        caches = [each() for each in self._found]
        num_references = _num_references()  # before looking: another thread may make a cache
        if self._num_references != num_references or None in caches:
            if gc.get_freeze_count():
                gc.unfreeze()  # what is frozen is not looked at, so its caches would keep fakes
            # Objects refer to their type: half the time of looking at what all of them are.
            caches = [each for each in gc.get_referrers(_KIND) if type(each) is _KIND]
            self._found = [weakref.ref(each) for each in caches]
            self._num_references = num_references if _are_counted() else -1
        return [
            cache for cache in caches if not str(getattr(cache, "__module__", "")).startswith(_OWN)
        ]


def _num_references() -> int:
    return sys.getrefcount(_KIND)


def _are_counted() -> bool:
    """Whether a cache counts as a reference to its type; not in every build of Python."""
    before = _num_references()
    cache = functools.cache(_are_counted)
    after = _num_references()
    del cache
    return after == before + 1


_FOUND = _FunctionCaches()


@contextmanager
def without_collector() -> Iterator[None]:
    """Switch off Python's search for reference cycles.

    A capture or a rehearsal makes hundreds of thousands of objects, which reference counts free;
    the search would start again and again, and each time look through all of torch and the graph.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_MOST_ENTRIES = 1_000
"""Entries of a list or dict that is compared: larger ones are data and tables."""
_MOST_TRIED = 16
"""Places that are tried one by one."""
_FAR = (1, 7, 120, 720_720_000)
"""A number is also tried where it will be if it goes on like that, so many times."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class WatchedState:
    """What Python keeps for a deployed model and its loss, to be compared before each step.

    Args:
        workload: The workload.
        model: Its deployed model.
        graph: Its captured step.
    """

    def __init__(self, workload: Workload, model: nn.Module, graph: OpGraph) -> None:
        self._workload, self._model, self._graph = workload, model, graph
        self._state = PythonState({"the model": model, "the loss": workload.loss})
        self._allowed: set[tuple[Any, Any]] = set()
        self._hooks = {
            f"{kind.strip('_').replace('_', ' ')[:-1]} of module '{name or '(root)'}'": hooks
            for name, module in model.named_modules()
            for kind in _HOOKS
            if isinstance(hooks := vars(module).get(kind), dict)
        }
        self._hooks_before = {each: len(hooks) for each, hooks in self._hooks.items()}
        self._num_hooks = sum(self._hooks_before.values())
        self._without_hooks = [
            (name, each) for name, each in model.named_parameters() if not _has_hook(each)
        ]
        self._remember()

    def _remember(self) -> None:
        """Take copies of what is held now, without the places that may change."""
        ignored: dict[int, set[Any]] = {}
        for holder, key in self._allowed:
            ignored.setdefault(holder, set()).add(key)
        self._copies: list[tuple[Any, Any]] = []
        self._others = []
        for holder in self._state.holders:
            if holder.seeded is not None or len(holder.values) > _MOST_ENTRIES:
                continue
            if id(holder.read) in ignored:
                self._others.append(holder.without(ignored[id(holder.read)]))
            elif holder.held is None:
                self._others.append(holder)
            elif holder.values or holder.held:
                self._copies.append((holder.held, holder.held.copy()))
        self._tensors = [
            (slot, slot.before, slot.before._version)
            for slot in self._state.tensors()
            if not slot.before.is_inference() and slot.place not in self._allowed
        ]

    def new_hook(self) -> str:
        """A hook that was registered since, in words; empty if there is none."""
        if sum(map(len, self._hooks.values())) > self._num_hooks:
            return next(
                words
                for words, number in self._hooks_before.items()
                if len(self._hooks[words]) > number
            )
        for name, parameter in self._without_hooks:
            if _has_hook(parameter):
                return f"hook of the gradient of '{name}'"
        return ""

    def changed(self) -> list[Slot]:
        """What is another value now, and decides what the step computes."""
        if not self._may_differ():
            return []
        written = [slot for slot, tensor, version in self._tensors if tensor._version != version]
        slots = [
            slot
            for slot in (*self._state.changes(), *written)
            if slot.holder.seeded is None and slot.place not in self._allowed
        ]
        if found := _deciding(self._step, self._state, slots):
            return found
        self._allowed |= {slot.place for slot in slots}
        self._state = self._state.taken_again()
        self._remember()
        return []

    def _may_differ(self) -> bool:
        """Whether something may be another value; most of the time of a check."""
        try:
            return (
                any(held != copy for held, copy in self._copies)
                or any(each.read() != each.values for each in self._others)
                or any(tensor._version != version for _, tensor, version in self._tensors)
            )
        except Exception:  # two arrays or tensors have no single answer
            return True

    @contextmanager
    def _step(self) -> Iterator[Step]:
        """The step, to be called on fake tensors of the planned shapes."""
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        graph = self._graph
        meta = {each.name: each for each in graph.tensors[: graph.num_inputs]}
        with (
            warnings.catch_warnings(action="ignore"),
            without_collector(),
            caches_without_fakes(),
            mode,
            torch.backends.mkldnn.flags(enabled=False),
            with_static_shapes(self._model),
            plain_control_flow(),
            answered_guards(),
        ):
            fakes = {
                name: torch.empty(
                    meta[name].shape if name in meta else own.shape,
                    dtype=own.dtype,
                    requires_grad=name in meta and meta[name].kind == TensorKind.PARAMETER,
                )
                for name, own in (*self._model.named_parameters(), *self._model.named_buffers())
            }
            batch = pytree.tree_map_only(
                Tensor,
                lambda each: each if isinstance(each, FakeTensor) else mode.from_tensor(each),
                self._workload.make_batch(),
            )
            trained = {name: each for name, each in fakes.items() if each.requires_grad}
            rest = {name: each for name, each in fakes.items() if not each.requires_grad}
            yield Step(self._workload, self._model, trained, rest, batch, where=lambda: "")


def _has_hook(parameter: Tensor) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _deciding(
    step: Callable[[], AbstractContextManager[Step]], before: PythonState, slots: list[Slot]
) -> list[Slot]:
    """The places whose new values make a step compute something else."""
    if swapped := [each for each in slots if has_parameters(each)]:
        return swapped
    now = before.taken_again()
    values = {slot.place: list(_values(slot)) for slot in slots}
    try:
        with step() as called:
            before.put_back()
            first = called.call(backward=True)
            own = {slot.place for slot in before.changes()}  # which the step sets anew itself
            tried = [slot for slot in slots if slot.place not in own]
            if first is None or len(tried) > _MOST_TRIED:
                return tried
            return [
                slot for slot in tried if _decides(called, before, slot, values[slot.place], first)
            ]
    finally:
        now.put_back()


def _decides(
    step: Step, before: PythonState, slot: Slot, values: Iterable[Any], first: Results | None
) -> bool:
    for value in values:
        before.put_back()
        slot.put(value)
        if step.call(backward=True) != first:
            return True
    return False


def _values(slot: Slot) -> Iterator[Any]:
    """Values that a place has now, or may have later."""
    before, after = slot.before, slot.after
    if isinstance(after, Tensor) and after is before:  # written in place
        other = torch.zeros_like(after, device="cpu")
        yield torch.ones_like(other) if torch.equal(other, after.cpu()) else other
        return
    yield after
    if isinstance(before, int | float) and isinstance(after, int | float):
        if not isinstance(before, bool) and not isinstance(after, bool):
            yield from (after + (after - before) * calls for calls in _FAR)
