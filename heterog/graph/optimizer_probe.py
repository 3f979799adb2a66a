"""Finds the ``UpdateScope`` of an optimizer by stepping small tensors whole, singly and in slices.

All ways get the same gradients. If parameters end at other values with one optimizer for each than
with one for all, the optimizer looks at all parameters. If flat slices, each stepped in a separate
call, end at other values than whole parameters, it looks at whole parameters.

This module also reads the parameter groups: which parameters the optimizer steps with which
options. A user's function returns groups that hold the parameters of one model. Here groups hold
names instead, because the function is called with two models: capture calls it with a model
without memory, every rank with its own model before this is taken apart.
"""

import random
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from heterog.errors import CaptureError, HeterogWarning
from heterog.graph.op_graph import ELEMENTWISE_OPTIMIZERS, UpdateScope
from heterog.graph.python_state import same_draws
from heterog.graph.step import OFTEN, CountedOptions, StepOptions
from heterog.graph.workload import Workload

_MISSPELT = 0.85
"""Similarity (``difflib``) above which one name is a misspelling of the other: a letter more, less
or swapped is above it, another word more is below it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """One of the optimizer's parameter groups.

    Attributes:
        names: Names of its parameters; a tied one has its first name.
        options: Options that the group states itself.
    """

    names: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


def parameter_groups(workload: Workload, model: nn.Module) -> tuple[ParameterGroup, ...]:
    """The parameter groups of a workload, for a model that it has made.

    Entries that the optimizer does not know are kept, as torch keeps them (schedulers of some
    libraries use them), except ``param_names``, which do not fit parts of parameters on ranks.

    Args:
        workload: The workload.
        model: Its model, whose values are not read.

    Raises:
        CaptureError: torch refuses the groups, a parameter is not one of the model or is in a
            group twice, or an option seems to be misspelt.
    """
    every = {id(value): name for name, value in model.named_parameters()}
    if workload.parameter_groups is None:
        return (ParameterGroup(names=tuple(every.values())),)
    found = []
    known = _known_options(workload)
    for number, group in enumerate(_checked_by_torch(workload, model)):
        where = f"workload '{workload.name}': group {number} of parameter_groups"
        values = group.pop("params")
        group.pop("param_names", None)
        for value in values:
            if id(value) not in every:
                raise CaptureError(
                    f"{where} has a tensor of shape {tuple(value.shape)} that is not a parameter "
                    "of the model; take the parameters from the model that the function is given."
                )
        for key in group:
            like = get_close_matches(key, known - {key}, n=1, cutoff=_MISSPELT)
            if key not in known and like:
                raise CaptureError(
                    f"{where} has the option '{key}', which {workload.optimizer.__name__} does "
                    f"not have; it has '{like[0]}'."
                )
        found.append(
            ParameterGroup(names=tuple(every[id(value)] for value in values), options=group)
        )
    return tuple(found)


def group_numbers(groups: tuple[ParameterGroup, ...]) -> dict[str, int]:
    """Number of each grouped parameter's group, by the parameter's name."""
    return {name: number for number, group in enumerate(groups) for name in group.names}


def _checked_by_torch(workload: Workload, model: nn.Module) -> list[dict[str, Any]]:
    """The groups that the user's function returns, in the form of torch's ``param_groups``."""
    assert workload.parameter_groups is not None
    try:
        given = list(workload.parameter_groups(model))
        copies = [dict(each) if isinstance(each, Mapping) else each for each in given]
        with warnings.catch_warnings():
            # Torch only warns of a parameter that is twice in a group, and steps it twice.
            warnings.filterwarnings("error", "optimizer contains a parameter group with dupl")
            return torch.optim.Optimizer(copies, {}).param_groups
    except Exception as error:
        said = (str(error).strip().splitlines() or ["no message"])[0].partition(";")[0]
        raise CaptureError(
            f"workload '{workload.name}': parameter_groups does not give groups that an optimizer "
            f"takes, [{{'params': [...], ...}}, ...]: {type(error).__name__}: {said}"
        ) from error


def _known_options(workload: Workload) -> set[str]:
    """Names of the options that a group of the optimizer can have."""
    some = nn.Parameter(torch.zeros(1, 1))
    try:
        return set(workload.optimizer([some], **dict(workload.optimizer_options)).defaults)
    except (TypeError, ValueError) as error:
        raise CaptureError(
            f"workload '{workload.name}': {workload.optimizer.__name__} cannot be made with "
            f"optimizer_options {dict(workload.optimizer_options)}: {error}"
        ) from error


_SCALES = (1.0, 1e-3, 30.0, 1.0, 1e3, 1e-2, 1.0, 0.3)
"""Size of all gradients in each step. Thresholds of gradient norms lie between these sizes. Eight
steps are more than RAdam waits for (5) and than Lookahead has between two averages (5 or 6)."""

_MATRICES = ((130, 129), (12, 20))
"""The first has more than 128 rows and columns, because descendants of Adafactor factor no smaller
matrix, and more than 4,096 elements, because 8-bit optimizers quantize no smaller tensor."""

_VECTORS = ((40,), (9,))

_SIZES = (7, 5, 3, 2)
"""First sizes of tensors of more than two dimensions; further sizes are 2."""

_NUM_ALIKE = 2
"""Parameters of each kind in each group, so that a norm over a group sees several parameters."""

_MOST_GROUPS = 16
"""Most groups with different options that are stepped."""

_TOLERANCE = 1e-5
"""Largest relative difference of movements that count as equal; a wider scope changes far more."""

_LARGE_RATE = 10.0
_STEADY = (1.0,) * 16
"""Gradients of one size: after a large gradient, its sum of squares would hide later movements."""

_MOST_KNOWN = 64

_MOST_WORK = 3e9
"""Elements that ops of one probe may read: a few seconds, and six times what SOAP reads."""

_OP_WORK = 1_000
"""Cost of calling an op, in elements."""

_known: dict[tuple[Any, ...], UpdateScope] = {}


@dataclass(frozen=True, slots=True)
class Kind:
    """The properties of a parameter that decide how an optimizer may treat it.

    Attributes:
        num_dims: Number of its dimensions.
        is_complex: Whether its elements are complex numbers.
        notes: Names of the attributes that the model gave it (``p.lr_scale = 0.1``).
    """

    num_dims: int
    is_complex: bool = False
    notes: frozenset[str] = frozenset()

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the probe's parameters of this kind."""
        if self.num_dims in (1, 2):
            return _VECTORS if self.num_dims == 1 else _MATRICES
        return ((*_SIZES, *(2 for _ in range(self.num_dims)))[: self.num_dims],) * _NUM_ALIKE


@dataclass(frozen=True, slots=True)
class ProbedGroup:
    """A parameter group as the probe makes it.

    Attributes:
        options: Options that the group states itself.
        kinds: Kinds of its parameters, each once.
    """

    options: Mapping[str, Any]
    kinds: tuple[Kind, ...]


def update_scope(
    optimizer: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    groups: Iterable[ProbedGroup],
) -> UpdateScope | None:
    """The update scope that an optimizer is seen to have; ``None`` if its name says it.

    The names of torch's elementwise optimizers do. Others, also a user's of such a name, are
    stepped, once for each class and options, without a change of the program's random numbers. If
    an optimizer cannot be stepped, its scope is taken as ``MODEL``, with a warning.

    Args:
        optimizer: Class of the optimizer.
        options: Its keyword arguments.
        groups: Its parameter groups.

    >>> matrices = [ProbedGroup({}, (Kind(2), Kind(1)))]
    >>> update_scope(torch.optim.AdamW, {"lr": 1e-3}, matrices)
    >>> str(update_scope(torch.optim.Adafactor, {"lr": 1e-3}, matrices))
    'parameter'
    """
    is_torchs_own = optimizer.__module__.partition(".")[0] == "torch"
    if is_torchs_own and optimizer.__name__ in ELEMENTWISE_OPTIMIZERS:
        return None
    distinct = {(repr(sorted(each.options.items())), each.kinds): each for each in groups}
    key = (optimizer, repr(sorted(options.items())), *distinct)
    if key not in _known:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        chosen = [each for each in distinct.values() if each.kinds][:_MOST_GROUPS]
        _known[key] = probed_scope(optimizer, options, chosen)
    return _known[key]


def probed_scope(
    optimizer: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    groups: Sequence[ProbedGroup],
) -> UpdateScope:
    """The update scope that probing an optimizer shows."""
    if not groups:
        return UpdateScope.MODEL
    failure = ""
    # Single precision only if the optimizer takes nothing else, because it hides small movements.
    for dtype in (torch.float64, torch.float32):
        probe = partial(_Probe, optimizer, options, groups, dtype)
        try:
            with same_draws(), warnings.catch_warnings(action="ignore"), torch.enable_grad():
                return _widest(probe)
        except Exception as error:  # whatever the user's class raises
            failure = f"{type(error).__name__}: {error}".partition("\n")[0]
            if isinstance(error, _TooMuchWorkError):
                break
    warnings.warn(
        f"what {optimizer.__name__} looks at is unknown, because it cannot step small tensors "
        f"({failure}): plans will let each device that steps any parameter step all of them.",
        HeterogWarning,
        stacklevel=2,
    )
    return UpdateScope.MODEL


def _widest(probe: Callable[..., "_Probe"]) -> UpdateScope:
    """The widest of the scopes at the options' learning rate, at a large one, and after long.

    Estimated step sizes (D-Adaptation, Prodigy) grow with the distance that parameters move. A
    small rate or a warm-up keeps that distance short for longer than the probe takes. Other
    optimizers begin to look at whole parameters after some hundred steps (Shampoo's start).
    """
    with _BoundedWork():
        found = probe().scope()
    for other in ({"rate": _LARGE_RATE, "scales": _STEADY}, {"num_before": OFTEN}):
        if found != UpdateScope.MODEL:
            with suppress(Exception), _BoundedWork():  # some refuse so large a rate
                wider = probe(**other).scope()
                found = wider if found.allows(wider) else found
    return found


class _TooMuchWorkError(Exception):
    """An optimizer takes more work for small tensors than a probe has."""


class _BoundedWork(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Ends a probe whose ops, by number and size, exceed ``_MOST_WORK``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._work = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [each for each in args if isinstance(each, Tensor)]
        self._work += _OP_WORK + sum(each.numel() for each in given)
        if given and (func.overloadpacket in flop_registry or "linalg" in func.__name__):
            # A multiplication in a product costs an eighth of reading an element.
            self._work += given[len(given) - 2].numel() * max(given[-1].shape[-1:], default=1) / 8
        if self._work > _MOST_WORK:  # before an op that alone takes too much
            raise _TooMuchWorkError(f"it would read more than {_MOST_WORK:g} elements")
        return func(*args, **(kwargs or {}))


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of what ops make, as long as it lives.

    Attributes:
        most: Most bytes at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = self._now = 0
        self._known: dict[int, int] = {}  # tensors of each memory that was made here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {
            each.untyped_storage().data_ptr()
            for each in tree_leaves((args, kwargs))
            if isinstance(each, Tensor)
        }
        for each in tree_leaves(made):
            if isinstance(each, Tensor) and each.dim():
                self._add(each, given)
        return made

    def _add(self, tensor: Tensor, given: set[int]) -> None:
        memory = tensor.untyped_storage()
        key, num_bytes = memory.data_ptr(), memory.nbytes()
        if key in given and key not in self._known:
            return
        if key not in self._known:
            self._now += num_bytes
            self.most = max(self.most, self._now)
        self._known[key] = self._known.get(key, 0) + 1
        weakref.finalize(tensor, self._let_go, key, num_bytes)

    def _let_go(self, key: int, num_bytes: int) -> None:
        self._known[key] -= 1
        if not self._known[key]:
            del self._known[key]
            self._now -= num_bytes


@dataclass(frozen=True, slots=True)
class _Piece:
    """A tensor that an optimizer of the probe steps: some elements of the probe's parameters.

    Attributes:
        group: Number of its group.
        cut: Function that takes it from a list with a tensor for each parameter of the probe.
    """

    group: int
    cut: Callable[[Sequence[Tensor]], Tensor]


class _Noted(nn.Parameter):
    """A parameter without notes of a model, which remembers those that an optimizer looks for."""

    asked: set[str]

    def __getattr__(self, name: str) -> Any:
        """Called for an attribute that no tensor has."""
        vars(self).get("asked", set()).add(name)
        raise AttributeError(f"no parameter of a probe has an attribute '{name}'")


class _Probe:
    """An optimizer class, and parameters and gradients to step it with."""

    def __init__(
        self,
        optimizer: type[torch.optim.Optimizer],
        options: Mapping[str, Any],
        groups: Sequence[ProbedGroup],
        dtype: torch.dtype,
        rate: float | None = None,
        scales: Sequence[float] = _SCALES,
        num_before: int = 0,
    ) -> None:
        self.optimizer = optimizer
        self.options = options
        self.rate = rate  # replaces the learning rate of the options
        self.scales = scales
        self.num_before = num_before  # steps that seem to be done when half of them are
        self.groups = groups
        self.group_of: list[int] = []
        self.values: list[Tensor] = []
        self.gradients: list[list[Tensor]] = [[] for _ in scales]
        self.epsilon = 100 * torch.finfo(dtype).eps
        self.asked: set[str] = set()  # attributes that the optimizer looks for in vain
        draw = torch.Generator().manual_seed(0)
        for number, group in enumerate(groups):
            for kind in group.kinds:
                own = dtype.to_complex() if kind.is_complex else dtype
                for shape in kind.shapes:
                    self._add(number, shape, own, draw)

    def _add(
        self, group: int, shape: tuple[int, ...], dtype: torch.dtype, draw: torch.Generator
    ) -> None:
        """Add a parameter; consecutive parameters differ in size, and so do their gradients."""

        def some() -> Tensor:
            return torch.randn(shape, dtype=dtype, generator=draw, device="cpu")

        size = 10.0 ** (len(self.values) % 3 - 1)
        self.group_of.append(group)
        self.values.append(some() * size)
        # Gradients mostly share a direction: estimated step sizes grow only downhill.
        direction = some() / size
        for scale, gradients in zip(self.scales, self.gradients, strict=True):
            gradients.append((direction + 0.3 * some() / size) * scale)

    def scope(self) -> UpdateScope:
        """The scope that stepping shows."""
        pieces = [_whole(number, group) for number, group in enumerate(self.group_of)]
        together = self._path(pieces, [range(len(pieces))])
        for number, piece in enumerate(pieces):
            alone = self._path([piece], [range(1)])
            if not self._are_alike([[step[number]] for step in together], alone):
                return UpdateScope.MODEL
        for slices in (self._flat_slices(), self._cut_apart()):
            wanted = [[each.cut(step) for each in slices] for step in together]
            try:  # as on ranks, each slice is stepped in a call of its own
                found = self._path(slices, [[number] for number in range(len(slices))])
                is_alike = self._are_alike(wanted, found)
            except Exception:  # it does not take flat tensors
                is_alike = False
            if not is_alike:
                return UpdateScope.PARAMETER
        # Only whole parameters have the notes that the model gave them.
        notes = frozenset().union(*(kind.notes for each in self.groups for kind in each.kinds))
        return UpdateScope.PARAMETER if notes & self.asked else UpdateScope.ELEMENT

    def _flat_slices(self) -> list[_Piece]:
        """The parameters of each group, joined to one flat tensor and cut at odd places."""
        found = []
        for group in range(len(self.groups)):
            members = [number for number, own in enumerate(self.group_of) if own == group]
            total = sum(self.values[number].numel() for number in members)
            ends = sorted({1, total // 5, total // 2 + 1, total - total // 7, total})
            bounds = pairwise([0, *ends])
            found += [_flat(group, members, *each) for each in bounds if each[0] < each[1]]
        return found

    def _cut_apart(self) -> list[_Piece]:
        """Each parameter cut in two along its first dimension, or its last one."""
        found = []
        for number, (group, value) in enumerate(zip(self.group_of, self.values, strict=True)):
            if value.dim() == 0:
                found.append(_whole(number, group))
                continue
            dim = -(number % 2)
            at = value.shape[dim] // 3 + 1
            found.append(_part(number, group, dim, 0, at))
            found.append(_part(number, group, dim, at, value.shape[dim]))
        return found

    def _path(
        self, pieces: Sequence[_Piece], calls: Iterable[Sequence[int]]
    ) -> list[list[Tensor]]:
        """Values of pieces at the start and after each step.

        Args:
            pieces: Pieces that one optimizer steps.
            calls: Numbers of the pieces in each call of the optimizer in a step.
        """
        torch.default_generator.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        calls = list(calls)
        values = [_Noted(piece.cut(self.values).clone()) for piece in pieces]
        for value in values:
            value.asked = self.asked
        groups = [
            {
                **probe_options(group.options),
                "params": [v for v, p in zip(values, pieces, strict=True) if p.group == number],
            }
            for number, group in enumerate(self.groups)
        ]
        optimizer = self.optimizer(groups, **probe_options(self.options))
        for made in optimizer.param_groups if self.rate is not None else ():
            if isinstance(made.get("lr"), float):
                made["lr"] = self.rate
        members = [group["params"] for group in optimizer.param_groups]
        path = [[value.detach().clone() for value in values]]
        options = CountedOptions(optimizer)
        before: Counters = {}
        for number, gradients in enumerate(self.gradients):
            counted = counters(optimizer)
            if self.num_before and 2 * number == len(self.gradients):
                put_forward(before, counted, self.num_before)
            before = counted
            step = StepOptions(options.now())
            for call in calls:
                stepped = {id(values[number]) for number in call}
                for number in call:
                    values[number].grad = pieces[number].cut(gradients).clone()
                for group, every in zip(optimizer.param_groups, members, strict=True):
                    group["params"] = [value for value in every if id(value) in stepped]
                with options.of(step):
                    optimizer.step()
                for number in call:
                    values[number].grad = None
            path.append([value.detach().clone() for value in values])
        return path

    def _are_alike(self, wanted: list[list[Tensor]], found: list[list[Tensor]]) -> bool:
        """Whether two paths agree in every step, as far as digits go."""
        for number, start in enumerate(wanted[0]):
            before, has_moved = start, False
            for right, other in zip(wanted[1:], found[1:], strict=True):
                now = right[number]
                moved = (now - before).abs().max()
                allowed = _TOLERANCE * moved + self.epsilon * now.abs().max()
                if not (now - other[number]).abs().max() <= allowed:
                    return False
                has_moved |= bool(moved > 0)
                before = now
            if not has_moved:  # a parameter that never moves shows nothing
                raise ValueError(f"it moves nothing in {len(self.scales)} steps")
        return True


Counters = dict[tuple[int, str], tuple[dict[str, Any], float]]
"""Numbers of an optimizer's state and options, with the dict that holds each."""


def counters(optimizer: torch.optim.Optimizer) -> Counters:
    """The numbers that an optimizer may count its steps in."""
    held = [*optimizer.state.values(), *optimizer.param_groups]
    return {
        (id(each), key): (each, float(value))
        for each in held
        if isinstance(each, dict)
        for key, value in each.items()
        if isinstance(value, int | float)
        or (isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex())
    }


def put_forward(before: Counters, now: Counters, number: int) -> None:
    """Let those that a step has raised by 1 count to ``number`` in the next step."""
    for place, (held, value) in now.items():
        if place in before and value - before[place][1] == 1:
            key = place[1]
            if isinstance(held[key], Tensor):
                held[key].fill_(number - 1)
            else:
                held[key] = type(held[key])(number - 1)


def probe_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of options for a CPU, with a learning rate above 0 (a schedule may begin at 0)."""
    found = {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in options.items()
    }
    if "capturable" in found:  # needs an accelerator
        found["capturable"] = False
    rate = found.get("lr")
    if isinstance(rate, int | float) and rate == 0:
        found["lr"] = 1e-3
    elif isinstance(rate, Tensor) and not rate.any():
        found["lr"] = torch.full_like(rate, 1e-3)
    return found


def _whole(number: int, group: int) -> _Piece:
    return _Piece(group, lambda tensors: tensors[number])


def _flat(group: int, members: Sequence[int], begin: int, end: int) -> _Piece:
    return _Piece(
        group,
        lambda tensors: torch.cat([tensors[each].reshape(-1) for each in members])[begin:end],
    )


def _part(number: int, group: int, dim: int, begin: int, end: int) -> _Piece:
    return _Piece(group, lambda tensors: tensors[number].narrow(dim, begin, end - begin))
