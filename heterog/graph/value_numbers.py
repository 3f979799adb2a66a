"""Value numbering: tells whether two runs of a step compute the same from the same inputs.

Every tensor gets a value that stands for the expression that computed it: the op, and the values
of its inputs. Two runs compute the same if their results have the same values. A tensor that a run
has cached keeps its value, so a run that reads a cached mask is equal to one that makes it.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import c_char
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

_LARGEST_CONSTANT_BYTES = 1 << 26
"""Larger constants are not compared: they are tables, which no step writes."""
_MOST_ELEMENTS = 1 << 24
"""Of a tensor that is computed to answer: a mask of 4,096 positions squared."""


DATA_DEPENDENT = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)
"""Errors of code that asks for values which are not known while a step is captured."""


@dataclass(eq=False, slots=True)
class Value:
    """The expression that computed a tensor; equal expressions are the same object.

    Attributes:
        varies: Whether it depends on inputs of the step or on random draws.
    """

    varies: bool


Results = tuple[Value | None, ...]
"""Values after a run of a step: of its outputs, and of its inputs, which it may write to."""


class ValueNumbers:
    """Values of all tensors that were seen in some runs of one step.

    Attributes:
        first_new: Line where the last run first computed a new value; empty if nowhere.
        unanswered: Error that the last run got when it read unknown values; ``None`` if none.
        asked: Names of the inputs on which those values depend.
        known: Values that depend on no input.
    """

    def __init__(self, where: Callable[[], str], given: Mapping[str, Tensor]) -> None:
        self._given = given
        self.asked: frozenset[str] = frozenset()
        self.first_new = ""
        self.unanswered: Exception | None = None
        self._where = where
        self._run = 0
        self._value_of: dict[Any, Value] = {}
        self._of_tensor: dict[int, tuple[Value, int]] = {}  # by id, with the run
        self._of_storage: dict[int, tuple[Value, int]] = {}  # value last written to it
        self._alive: list[Tensor] = []  # keeps tensors alive, so that ids stay unique
        self._unknown: set[int] = set()  # constants of unknown values
        self._met: set[int] = set()  # those that this run has met
        self._num_draws = 0
        self._inputs: tuple[Tensor, ...] = ()
        self.known = KnownValues()
        self.seeds = Seeds()

    @contextmanager
    def run(self, inputs: Mapping[str, Tensor]) -> Iterator[None]:
        """Number the values that the body computes, which is one run of the step on inputs."""
        self._run += 1
        self._num_draws = 0
        self._met = set()
        self.first_new, self.unanswered, self.asked = "", None, frozenset()
        self._inputs = tuple(inputs.values())
        for name, tensor in inputs.items():
            self._of_storage.pop(storage_of(tensor), None)
            self._name(tensor, self._value(("input", name), varies=name not in self._given))
            if name in self._given:
                self.known.give(tensor, self._given[name])
        with self.numbering():
            yield

    def inputs_of(self, tensors: Sequence[Tensor]) -> frozenset[str]:
        """Names of the inputs from which some tensors were computed."""
        key_of = {value: key for key, value in self._value_of.items()}
        waiting: list[Any] = [self.of(each) for each in tensors]
        found, seen = set[str](), set[Any]()
        while waiting:
            each = waiting.pop()
            if isinstance(each, Value):
                if each in seen:
                    continue
                seen.add(each)
                each = key_of[each]
            if isinstance(each, tuple):
                if len(each) == 2 and each[0] == "input":
                    found.add(each[1])
                waiting += each
        return frozenset(found)

    def numbering(self) -> TorchDispatchMode:
        """Context in which ops belong to the last run."""
        return _Numbering(self)

    def results(self, *outputs: Tensor | None) -> Results:
        """Values of some results of the last run, and of its inputs."""
        return tuple(None if each is None else self.of(each) for each in (*outputs, *self._inputs))

    def of(self, tensor: Tensor) -> Value:
        """The value of a tensor as it is now."""
        if id(tensor) in self._unknown:
            self._met.add(id(tensor))
        found = self._of_tensor.get(id(tensor))
        value = self._name(tensor, self._constant(tensor)) if found is None else self._now(*found)
        written = self._of_storage.get(storage_of(tensor)) if self._of_storage else None
        if written is None:
            return value
        wrote = self._now(*written)
        return self._value(("written", value, wrote), varies=value.varies or wrote.varies)

    def _now(self, value: Value, run: int) -> Value:
        """A value as seen now: if it varies and is of an earlier run, it is another value."""
        if run == self._run or not value.varies:
            return value
        return self._value(("kept", value), varies=True)

    def is_written(self, tensor: Tensor) -> bool:
        """Whether a run has written to the memory of a tensor."""
        return storage_of(tensor) in self._of_storage

    def key_of(self, op: Any, args: Any, keywords: Any) -> tuple[Any, bool]:
        """Key of the value that an op will compute, and whether that value varies."""
        read: list[Value] = []
        if _overwrites(op, args):  # the old elements do not matter
            args = (str(args[0].dtype), tuple(args[0].shape), *args[1:])
        key = (op, self._key(args, read), self._key(sorted(keywords.items()), read))
        varies = any(value.varies for value in read)
        if torch.Tag.nondeterministic_seeded in getattr(op, "tags", ()):
            self._num_draws += 1
            self.seeds.draw(self._where)
            return (*key, self._num_draws), True
        return key, varies

    def record(
        self, op: Any, args: Any, keywords: Any, key: Any, *, varies: bool, result: Any
    ) -> None:
        """Note what an op has computed and written."""
        is_new = key not in self._value_of
        value = self._value(key, varies=varies)
        if is_new and self._run > 1 and not self.first_new:
            self.first_new = self._where()
        for tensor in _written_by(op, args, keywords):
            before = self._of_storage.get(storage_of(tensor))
            now = None if before is None or _overwrites(op, args) else self._now(*before)
            wrote = self._value(("writes", value, now), varies=varies)
            self._of_storage[storage_of(tensor)] = (wrote, self._run)
        outputs = result if isinstance(result, tuple | list) else (result,)
        given = {id(each) for each in (*args, *keywords.values())}
        for place, output in enumerate(outputs):
            if isinstance(output, Tensor) and id(output) not in given:
                self._name(output, self._value(("output", value, place), varies=varies))

    def _key(self, argument: Any, read: list[Value]) -> Any:
        """A hashable that is equal for equal arguments."""
        if isinstance(argument, Tensor):
            read.append(self.of(argument))
            return read[-1]
        if isinstance(argument, tuple | list):
            return tuple([self._key(each, read) for each in argument])
        if isinstance(argument, float | complex):
            return repr(argument)  # NaN differs from itself, and 1.0 equals the integer 1
        if callable(argument) or isinstance(argument, torch.Generator):
            return type(argument)
        try:
            hash(argument)
        except TypeError:
            return repr(argument)
        return argument

    def _value(self, key: Any, *, varies: bool) -> Value:
        found = self._value_of.get(key)
        if found is None:
            found = self._value_of[key] = Value(varies)
        return found

    def _name(self, tensor: Tensor, value: Value) -> Value:
        self._of_tensor[id(tensor)] = (value, self._run)
        self._alive.append(tensor)
        return value

    def _constant(self, tensor: Tensor) -> Value:
        """Value of a tensor that the step has not made: by its elements, if they are known."""
        shape = (str(tensor.dtype), tuple(tensor.shape))
        elements = _elements(tensor)
        if elements is not None:
            return self._value(("constant", elements, shape), varies=False)
        self._unknown.add(id(tensor))
        self._met.add(id(tensor))
        return self._value(("unknown", len(self._met), shape), varies=False)


class Seeds:
    """Notices code that sets the state of torch's random numbers, which a plan cannot follow.

    Draws on fake tensors do not change generators. While a step runs, generators have a seed that
    no program uses, and a new one after each draw. So code that sets a seed or restores a state is
    noticed.
    """

    def __init__(self) -> None:
        self._set_at = ""
        self._seed = _FIRST_SEED
        self._generators: tuple[torch.Generator, ...] = ()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the body, and restore the states after it."""
        self._set_at, self._generators = "", _generators()
        states = [(each, each.get_state()) for each in self._generators]
        self._next()
        try:
            yield
        finally:
            for generator, state in states:
                generator.set_state(state)

    def look(self, where: Callable[[], str]) -> str:
        """Place where a set state was first noticed; empty if there is none."""
        if not self._set_at and any(
            each.initial_seed() != self._seed for each in self._generators
        ):
            self._set_at = where()
        return self._set_at

    def draw(self, where: Callable[[], str]) -> None:
        """Note that numbers are drawn."""
        self.look(where)
        self._next()

    def _next(self) -> None:
        self._seed += 1
        for generator in self._generators:
            generator.manual_seed(self._seed)


_FIRST_SEED = 0x5EED_0F_A_57E9 << 20
"""No program is likely to choose this seed, or one of the next."""


def _generators() -> tuple[torch.Generator, ...]:
    """Default generators: of the CPU, and of accelerators in use."""
    every = torch.get_device_module() if torch.accelerator.is_available() else None
    return (torch.default_generator, *getattr(every, "default_generators", ()))


class _Numbering(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Numbers every op that runs."""

    def __init__(self, numbers: ValueNumbers) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers = numbers

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        key, varies = self.numbers.key_of(func, args, keywords)
        result = None if varies else self.numbers.known.answer(func, args, keywords)
        try:
            if result is None:
                result = func(*args, **keywords)
        except DATA_DEPENDENT as error:
            self.numbers.unanswered = error  # the step's code may catch it and go on
            self.numbers.asked = self.numbers.inputs_of(asked_of(func, args, keywords))
            raise
        self.numbers.record(func, args, keywords, key, varies=varies, result=result)
        if not varies:
            self.numbers.known.note(func, args, keywords, result)
        return result


def is_known(tensor: Tensor) -> bool:
    """Whether the step that runs has made a tensor of none of its inputs."""
    modes = _get_current_dispatch_mode_stack()
    numbers = (mode.numbers for mode in modes if isinstance(mode, _Numbering))
    return any(each.known.made(tensor) and not each.of(tensor).varies for each in numbers)


def _written_by(op: Any, args: Any, keywords: Any) -> Iterator[Tensor]:
    """The arguments that an op writes to."""
    schema = getattr(op, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[place] if place < len(args) else keywords.get(argument.name))


def _overwrites(op: Any, args: Any) -> bool:
    """Whether an op writes all elements of some memory anew."""
    if op not in _OVERWRITING or not isinstance(args[0], Tensor):
        return False
    tensor = args[0]
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


_aten = torch.ops.aten
_OVERWRITING = frozenset(
    {
        _aten.copy_.default, _aten.zero_.default, _aten.fill_.Scalar, _aten.fill_.Tensor,
        _aten.normal_.default, _aten.uniform_.default, _aten.bernoulli_.float,
    }
)  # fmt: skip


def storage_of(tensor: Tensor) -> int:
    """A key that is equal for views of the same memory."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return id(tensor)  # sparse


def _elements(tensor: Tensor) -> str | None:
    """Digest of the elements of a real tensor in CPU memory; ``None`` for others."""
    real = tensor.constant if isinstance(tensor, FakeTensor) else tensor
    if real is None or isinstance(real, FakeTensor) or type(real) not in _PLAIN:
        return None
    if real.device.type != "cpu" or real.layout != torch.strided:
        return None
    storage = real.untyped_storage()
    size = storage.nbytes()
    if size > _LARGEST_CONSTANT_BYTES:
        return None
    view = repr((real.stride(), real.storage_offset())).encode()
    memory = bytes((c_char * size).from_address(storage.data_ptr())) if size else b""
    return hashlib.blake2b(view + memory, digest_size=16).hexdigest()


_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


class _Noted(NamedTuple):
    """An op that ran, with what it read and made."""

    op: Any
    args: Any
    keywords: Any
    result: Any


class KnownValues:
    """Ops of a step that read none of its inputs, in the order in which they ran.

    A mask of sizes alone (``~torch.eye(n, dtype=torch.bool)``) is the same in all steps, so that
    what it chooses has one shape. Fake tensors have no values: ops that read no input and draw
    nothing are noted, and run again on real tensors if code asks for what comes of them.

    Buffers that no step writes (a flag, a mask of channels) may be given with their values, and
    count as no input then. Ranks hold on to them: see ``CapturedStep.known``.
    """

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
        memory = {storage_of(each) for each in wanted}
        found = []
        for each in reversed(self._noted):
            inputs = [*_tensors((each.args, each.keywords))]
            written = _written_by(each.op, each.args, each.keywords)
            touched = {storage_of(one) for one in (*_tensors(each.result), *written)}
            if touched & memory:
                memory |= {storage_of(one) for one in inputs}
                found.append(each)
        return found[::-1]


def asked_of(op: Any, args: Any, keywords: Any) -> list[Tensor]:
    """The tensors whose values an op asks for."""
    if op is _aten.index.Tensor:
        return [each for each in args[1] if each is not None and each.dtype in _MASKS]
    return [*_tensors((args, keywords))]


_ASKS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


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


def _is_real(tensor: Tensor) -> bool:
    real = tensor.constant if isinstance(tensor, FakeTensor) else tensor
    return real is not None and not real.is_meta


def _with(real: dict[int, Tensor], value: Any) -> Any:
    """Arguments with real tensors in the place of fake ones."""
    return pytree.tree_map_only(
        Tensor, lambda each: real.get(id(each), getattr(each, "constant", each)), value
    )
