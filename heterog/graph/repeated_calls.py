"""Finds out whether a step computes the same at every call, as a captured step does.

A model may count its calls, anneal a weight, or leave layers out by numbers of ``random``. A
captured step would repeat the first call for ever. So ``check_repeats`` calls the step again, on
fake tensors and without a trace: once as it stands, then with other random states, then with
counters set to their values after many calls. State that changes and is not read (statistics for a
log, caches) makes no difference and is allowed.

Later changes matter too: a captured step contains numbers, strings and tensors that modules, their
settings and the loss held at its capture. ``WatchedState`` compares them before each step, which
takes about a microsecond for each module. Only if a value differs is the step called on fake
tensors, with the old values and with the new ones: values that the step does not read, or writes
itself, may change.

A capture must leave no fake tensors in caches (``caches_without_fakes``). Libraries keep tables
that depend only on sizes (positions of patches, say) in ``lru_cache``. A capture fills them with
fake tensors, and the real model would then read those.
"""

import datetime
import functools
import gc
import itertools
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from heterog.errors import CaptureError
from heterog.garbage import without_collector
from heterog.graph.op_graph import OpGraph, TensorKind
from heterog.graph.python_state import MISSING, NUM_SEEDS, PythonState, Slot
from heterog.graph.static_shapes import everywhere, plain_control_flow, with_static_shapes
from heterog.graph.step import OFTEN, Step
from heterog.graph.value_checks import answered_guards
from heterog.graph.value_numbers import Results
from heterog.graph.workload import Workload
from heterog.grouped import grouped

_FAR = (OFTEN - 1, OFTEN, 120)
_LONG = 1_000
"""Entries that are appended to a growing list to try its state after many calls."""
_MOST_NAMED = 40
"""Most call numbers that are tried because the code has them as constants."""
_MAX_TRIED = 40
_MAX_NAMED = 3


def check_repeats(name: str, step: Step, kept: PythonState) -> None:
    """Refuse a step that computes something else when it is called again.

    Args:
        name: Name of the workload.
        step: The step, after the call that captured it.
        kept: State of Python before that call; it is restored.

    Raises:
        CaptureError: it computes something else; says what decides that, and the way out.
    """
    try:
        _Check(name, step, kept).look()
    finally:
        kept.put_back()


class _Check:
    """Calls a step again and again, each time in another state of Python.

    The backward pass takes half of the time. It runs only if the first call has changed state
    other than random states, because the backward pass may then read it.
    """

    def __init__(self, name: str, step: Step, before: PythonState) -> None:
        self._name, self._step, self._before = name, step, before
        self._first = step.results
        self._backward = False

    def look(self) -> None:
        """Call the step in all states that are worth trying."""
        changed = self._before.changes()
        if swapped := [slot for slot in changed if has_parameters(slot)]:
            self._raise(swapped, "")
        drawn = [slot for slot in changed if slot.holder.seeded is not None]
        if len(changed) > len(drawn):
            self._backward = True
            self._before.put_back()
            self._first = self._step.call(backward=True)
        begun = self._before.taken_again()
        self._call_with(_seeded(drawn, 0))
        for choice in range(1, NUM_SEEDS if drawn else 0):
            begun = self._before.taken_again()
            self._call_with(_seeded(drawn, choice))
        moving = {slot.place: slot for slot in begun.changes() if slot.holder.seeded is None}
        if moving:
            self._look_far(begun.taken_again(), moving)
        self._look_later()
        self._refuse_written()

    def _look_later(self) -> None:
        """Call the step with clocks set years ahead, if its code reads a clock or an iterator."""
        if not self._before.unseen:
            return
        with self._step.of_later(), clocks_ahead():
            found = self._call_as_first(())
        if found is not None and self._call_as_first(()) is None:
            self._raise([], self._step.numbers.first_new)

    def _look_far(self, later: PythonState, moving: Mapping[tuple[Any, Any], Slot]) -> None:
        """Call the step once more, and then in the states that it will have after many calls.

        Args:
            later: State after the second call.
            moving: Places that that call has changed, by ``Slot.place``.
        """
        self._call_with([])
        changed = later.changes()
        paces = [(moving[each.place].before, each) for each in changed if each.place in moving]
        lists = [each for each in changed if each.before is MISSING and isinstance(each.key, int)]
        for calls in (*_FAR, *self._named_calls(paces)):
            far = [(slot, value) for start, slot in paces for value in _after(start, slot, calls)]
            for slot in lists:
                slot.append(min(calls, _LONG))
            if far or lists:
                self._call_with(far)
            lists = []

    def _named_calls(self, paces: Iterable[tuple[Any, Slot]]) -> list[int]:
        """Numbers of calls after which a counter equals a number that the code names.

        A model may do something in one step alone, whose number is a constant of its functions or
        an attribute next to the counter.
        """
        named: set[int] = set()
        for start, slot in paces:
            pace = slot.after - slot.before if type(slot.after) is int else 0
            if not pace or type(start) is not int or slot.before - start != pace:
                continue
            beside = {each for each in slot.holder.values.values() if type(each) is int}
            # A counter may be read before or after it counts.
            for number in self._before.constants | beside:
                named |= {number // pace - 1, number // pace}
        return sorted(each for each in named if 2 < each < OFTEN)[:_MOST_NAMED]

    def _call_with(self, values: Iterable[tuple[Slot, Any]]) -> None:
        """Put some values in their places and call the step; refuse it if its results differ."""
        for slot, value in values:
            slot.put(value)
        now = self._before.changes()
        if self._call() is not None:
            self._refuse(now, self._step.numbers.first_new)

    def _call(self) -> Results | None:
        """Results of the step now, if they differ from those of the first call; else ``None``."""
        found = self._step.call(self._backward)
        if self._step.refusal is not None:
            raise self._step.refusal
        return None if found is None or self._first is None or found == self._first else found

    def _call_as_first(self, slots: Iterable[Slot]) -> Results | None:
        """The same, with the state of the first call except in some places."""
        self._before.put_back()
        for slot in slots:
            slot.put(slot.after)
        return self._call()

    def _refuse(self, changed: list[Slot], where: str) -> None:
        """Raise an error that names the places which decide the results.

        Results may also differ because a tensor was made in a way that is not seen. Then they
        differ in the same way with the first call's state restored, and the step is not refused.
        """
        control = self._call_as_first(())
        if control is not None:
            if self._call_as_first(()) != control:
                self._raise(self._written(), where)
            return
        tried = changed[:_MAX_TRIED]
        named = [slot for slot in tried if self._call_as_first([slot]) is not None]
        self._raise(named or tried, where)

    def _written(self) -> list[Slot]:
        """Attributes that are tensors in whose memory the step writes."""
        numbers = self._step.numbers
        return [slot for slot in self._before.tensors() if numbers.is_written(slot.before)]

    def _refuse_written(self) -> None:
        """Refuse a step that writes to constants, because a plan keeps them for all steps."""
        if written := self._written():
            names = ", ".join(slot.text for slot in written[:_MAX_NAMED])
            raise CaptureError(
                f"workload '{self._name}': the step writes in place to {names}, a tensor that is "
                f"neither parameter nor buffer: {_WAYS_OUT['tensor']}"
            )

    def _raise(self, slots: list[Slot], where: str) -> None:
        unseen = self._before.unseen[:_MAX_NAMED] or ["something that Python keeps"]
        texts = [slot.text for slot in slots[:_MAX_NAMED]] or [" or ".join(unseen)]
        raise CaptureError(
            f"workload '{self._name}': the step computes something else when it is called again"
            f"{f', first at {where}' if where else ''}: {', '.join(texts)} decides that. "
            f"All steps of a plan run the same ops with the same constants: {_way_out(slots)}"
        )


@contextmanager
def clocks_ahead() -> Iterator[None]:
    """In the body each reading of a clock of Python is ten years later than the last."""
    looks = itertools.count(1)

    def ahead(clock: Callable[[], Any]) -> Callable[[], Any]:
        unit = 10**9 if clock.__name__.endswith("_ns") else 1
        return lambda: clock() + next(looks) * _YEARS_S * unit

    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.datetime.fromtimestamp(time.time() % _LAST_DATE_S, tz)

        utcnow = today = now

    clocks = [getattr(time, name) for name in _CLOCKS]
    with everywhere({datetime.datetime: Later, **{clock: ahead(clock) for clock in clocks}}):
        yield


_CLOCKS = [
    name + unit
    for name in ("time", "perf_counter", "monotonic", "process_time")
    for unit in ("", "_ns")
]
_YEARS_S = 3_652 * 86_400 + 43_200
"""Ten years and half a day, so that both the date and the hour change."""
_LAST_DATE_S = 200_000_000_000


def has_parameters(slot: Slot) -> bool:
    """Whether a value is a module with parameters: swapping it changes what their names mean."""
    modules = [each for each in (slot.before, slot.after) if isinstance(each, nn.Module)]
    return any(True for module in modules for _ in module.parameters())


def _seeded(slots: Iterable[Slot], choice: int) -> Iterator[tuple[Slot, Any]]:
    for slot in slots:
        if slot.holder.seeded is not None:
            yield slot, slot.holder.seeded(choice)


def _after(start: Any, slot: Slot, calls: int) -> Iterator[Any]:
    """Value of a place after many calls, if three values form a linear or geometric series."""
    one, two = slot.before, slot.after
    if not all(isinstance(each, int | float) for each in (start, one, two)):
        return
    if any(isinstance(each, bool) for each in (start, one, two)):
        return
    if two - one == one - start:
        yield (two - one) * calls if isinstance(two, int) else two + (two - one) * calls
    elif start and one and abs(two / one - one / start) < 1e-9:
        yield two * (two / one) ** min(calls, 100_000)


_WAYS_OUT = {
    "draw": (
        "draw with torch (torch.where(torch.rand(()) < p, ...)), whose draws are a part of the "
        "step, or draw outside and pass the result as a tensor of the batch."
    ),
    "module": (
        "which module runs may not change; keep all of them, and choose among their results with "
        "torch.where by a tensor of the batch or a buffer. If the first call replaces one, make "
        "the model with what it becomes (attention_type='original_full' of BigBird, say)."
    ),
    "tensor": (
        "what a step keeps for the next one belongs in a buffer that the model registers when it "
        "is made (register_buffer in __init__)."
    ),
    "other": (
        "what follows the number of the step is an input of it, a tensor of one number in the "
        "batch (guide, 'What changes from step to step'); what the step computes for the next one "
        "belongs in a buffer (register_buffer) of the model; a loss that has one is a part of the "
        "model, with loss=None."
    ),
}


def _way_out(slots: list[Slot]) -> str:
    """Advice for the kind of state that decides the results."""
    if any(slot.holder.seeded is not None for slot in slots):
        return _WAYS_OUT["draw"]
    if any(map(has_parameters, slots)):
        return _WAYS_OUT["module"]
    if any(isinstance(each, Tensor) for slot in slots for each in (slot.before, slot.after)):
        return _WAYS_OUT["tensor"]
    return _WAYS_OUT["other"]


# Compared by ``type``: ``isinstance`` on a lazy proxy may import or warn.
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

    Finding them visits every object of the process, a million and more, which takes a tenth of a
    second or two. Each cache holds a reference to its type. So there is no new cache while the
    number of these references is the same and all known caches still live.
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
                gc.unfreeze()  # frozen objects are not visited, so their caches would keep fakes
            # Objects refer to their type: this takes half the time of checking each one's type.
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


_MOST_ENTRIES = 1_000
"""Entries of a list or dict that is compared: larger ones are data and tables."""
_MOST_TRIED = 16
"""Most places that are tried one by one."""
_LATER = (1, 7, 120, OFTEN)
"""A number is also tried at its values after it has changed as much so many times more."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class WatchedState:
    """State of Python for a deployed model and its loss, compared before each step.

    Args:
        workload: The workload.
        model: Its deployed model.
        graph: Its captured step.
        known: See ``CapturedStep``.
    """

    def __init__(
        self,
        workload: Workload,
        model: nn.Module,
        graph: OpGraph,
        known: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._workload, self._model, self._graph = workload, model, graph
        self._known = known or {}
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
        """Copy the values that are held now, without the places that may change."""
        ignored = grouped(self._allowed)
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
        # Each step writes parameters and buffers, wherever else they are listed (``nn.LSTM``).
        trained = {id(each) for each in (*self._model.parameters(), *self._model.buffers())}
        self._tensors = [
            (slot, slot.before, slot.before._version)
            for slot in self._state.tensors()
            if not slot.before.is_inference()
            and slot.place not in self._allowed
            and id(slot.before) not in trained
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
        """Places whose values have changed and decide what the step computes."""
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
        """Whether a value may have changed; takes most of the time of a check."""
        try:
            return (
                any(held != copy for held, copy in self._copies)
                or any(each.read() != each.values for each in self._others)
                or any(tensor._version != version for _, tensor, version in self._tensors)
            )
        except Exception:  # comparing two arrays or tensors gives no single bool
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
            inputs = trained, rest, batch
            yield Step(self._workload, self._model, inputs, lambda: "", self._known)


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
            own = {slot.place for slot in before.changes()}  # places that the step itself sets
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
            yield from (after + (after - before) * calls for calls in _LATER)
