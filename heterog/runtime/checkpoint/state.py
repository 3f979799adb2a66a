"""The state of a deployed step in a checkpoint: which rank saves which part, and loading it.

The whole model is gathered from the same parts (``whole_state``). When a checkpoint is loaded,
each rank reads the boxes that it now holds or updates.
"""

import copy
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from heterog.errors import StrategyError
from heterog.runtime.checkpoint.boxes import Box, Entry, Piece, whole_box, whole_piece
from heterog.runtime.checkpoint.contents import (
    Contents,
    SavedOptimizer,
    dtype_name,
    dtype_of,
    option_like,
)
from heterog.runtime.checkpoint.held import (
    MASTER,
    Member,
    Stepped,
    held_pieces,
    is_elementwise,
    is_saved_here,
    name_and_shape,
    stepped_values,
)
from heterog.runtime.checkpoint.left_out import left_out_reading
from heterog.runtime.deploy import DeployedStep
from heterog.runtime.step.collectives import gather_texts


def check_fits(
    step: DeployedStep, model: nn.Module, contents: Contents, folder: str | Path
) -> None:
    """Refuse a checkpoint of another model or optimizer."""
    what = f"checkpoint {folder} of '{contents.model}'"
    saved = {
        name.removeprefix("model."): (contents.shape(name), contents.dtype(name))
        for name in contents.names
        if name.startswith("model.")
    }
    here = {
        name: (tuple(value.shape), dtype_name(value.dtype))
        for name, value in _model_tensors(model).items()
    }
    for row in step.part.sharded:
        name, shape = name_and_shape(step, row)
        here[name] = shape, here[name][1]
    for name in [*here, *saved]:
        if saved.get(name) != here.get(name):
            raise StrategyError(
                f"{what} is of another model: {name} is {_describe(saved.get(name))} there and "
                f"{_describe(here.get(name))} here."
            )
    optimizer = step.captured.graph.optimizer
    if contents.optimizer != optimizer:
        raise StrategyError(
            f"{what} has the state of {contents.optimizer}, but the workload trains with "
            f"{optimizer}; resume with the same optimizer."
        )
    for name, group in zip(_names(step), step.part.group_of, strict=True):
        if name not in contents.states:
            raise StrategyError(
                f"{what} has no optimizer state for {name}, which was not trained then."
            )
        if contents.states[name].group != group:
            raise StrategyError(
                f"{what} has {name} in parameter group {contents.states[name].group}, but here it "
                f"is in group {group}; resume with the same parameter groups."
            )


def _describe(tensor: tuple[tuple[int, ...], str] | None) -> str:
    return "missing" if tensor is None else f"{tensor[0]} {tensor[1]}"


def _names(step: DeployedStep) -> list[str]:
    """Name of each updated parameter, in the order of ``graph.updates``."""
    graph = step.captured.graph
    return [graph.tensors[parameter].name for _, parameter, _ in graph.updates]


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and persistent buffers of the model, whether this rank needs them or not."""
    every_name = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    state = model.state_dict()
    found = {name: value.detach() for name, value in model.named_parameters()}
    found |= {
        name: value
        for name, value in state.items()
        if name not in every_name and isinstance(value, Tensor)
    }
    return found


def fixed_tensors(step: DeployedStep, model: nn.Module) -> dict[str, Tensor]:
    """Buffers, and parameters that are not trained: every rank has them whole."""
    trained = set(_names(step))
    return {name: value for name, value in _model_tensors(model).items() if name not in trained}


def held_rows(step: DeployedStep) -> list[tuple[int, Tensor]]:
    """Parameters that this rank has outside of slices, by row of ``graph.updates``."""
    in_slices = {row for bucket in step.part.buckets if bucket.stage == 3 for row in bucket.rows}
    return [
        (row, step.part.parameters[tensor].detach())
        for row, (_, tensor, _) in enumerate(step.captured.graph.updates)
        if tensor in step.part.parameters and row not in in_slices
    ]


def check_can_save(step: DeployedStep) -> None:
    """Refuse a step that no checkpoint can hold; every rank calls it after a first step.

    Raises:
        StrategyError: the optimizer has state that cannot be cut, or that JSON cannot hold.
    """
    own_entries(step, step.model)


def model_entries(step: DeployedStep, model: nn.Module) -> list[Entry]:
    """The parts of the model that this rank saves; those of all ranks are the whole model."""
    entries = [
        Entry.of_whole(f"model.{name}", value)
        for name, value in fixed_tensors(step, model).items()
        if step.buffers.owners.get(name, 0) == step.rank
    ]
    for row, value in held_rows(step):
        if is_saved_here(step, row):
            name, shape = name_and_shape(step, row)
            entries += _entries(f"model.{name}", shape, held_pieces(step, row), value)
    for each in stepped_values(step):
        if each.is_saved and each.bucket is not None and each.bucket.stage == 3:
            for name, shape, pieces in each.members:
                entries += _entries(f"model.{name}", shape, pieces, each.value.detach())
    return entries


def whole_state(step: DeployedStep, model: nn.Module) -> dict[str, Tensor] | None:
    """All parameters and buffers on rank 0, ``None`` on the others; every rank calls it."""
    own = model_entries(step, model)
    said = gather_texts(json.dumps([(each.whole, each.shape, each.box) for each in own]))
    if step.rank != 0:
        for each in own:
            dist.send(each.value.contiguous(), 0)
        return None
    state = {
        name: value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for name, value in model.state_dict().items()  # a module's extra state is of any type
    }
    held = _model_tensors(model)
    for rank, text in enumerate(said):
        for number, (whole, shape, (offsets, sizes)) in enumerate(json.loads(text)):
            name = whole.removeprefix("model.")
            if name not in state or list(state[name].shape) != shape:  # a slice of it is here
                state[name] = held[name].new_empty(shape)
            part = Box(offsets, sizes).of(state[name], whole_box(shape))
            if rank == 0:
                part.copy_(own[number].value)
                continue
            received = state[name].new_empty(sizes)
            dist.recv(received, rank)
            part.copy_(received)
    for name, twin in _tied_names(model).items():
        state[name] = state[twin]
    return state


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Further names in the state dict of tied parameters and buffers."""
    first: dict[int, str] = {id(value): name for name, value in model.named_parameters()}
    first |= {id(value): name for name, value in model.named_buffers()}
    every = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    kept = model.state_dict().keys()
    return {
        name: first[id(value)]
        for name, value in every
        if first[id(value)] != name and name in kept
    }


def own_entries(
    step: DeployedStep, model: nn.Module
) -> tuple[list[Entry], dict[str, SavedOptimizer]]:
    """The entries that this rank saves.

    Args:
        step: The step to save.
        model: Model of the step; ``step.model`` needs all ranks, and one may fail before.

    Returns:
        Tensors, and optimizer states by parameter.

    Raises:
        StrategyError: the optimizer has state that cannot be saved.
    """
    entries = model_entries(step, model)
    states: dict[str, SavedOptimizer] = {}
    stepped = iter(stepped_values(step))
    for number, group in enumerate(step.optimizer.param_groups):
        options = {key: _plain(key, value) for key, value in group.items() if key != "params"}
        for _ in group["params"]:
            each = next(stepped)
            if each.is_saved:
                entries += _own_state(step, each, (number, options), states)
    of_modes = (entry for mode in step.modes for entry in mode.entries(step))
    return [*entries, *of_modes], states


def _own_state(
    step: DeployedStep,
    stepped: Stepped,
    group: tuple[int, dict[str, Any]],
    states: dict[str, SavedOptimizer],
) -> Iterator[Entry]:
    """Entries for one of the optimizer's tensors; adds to the states of parameters.

    Args:
        step: The step to save.
        stepped: The tensor.
        group: Number and options of its parameter group.
        states: States of the optimizer by parameter.
    """
    state = step.optimizer.state.get(stepped.stepped, {})
    tensors = {key: each.detach() for key, each in state.items() if isinstance(each, Tensor)}
    values = {key: _plain(key, state[key]) for key in state if key not in tensors}
    if stepped.master is not None:
        tensors[MASTER] = stepped.master.detach()
    for member in stepped.members:
        if member.begins_here:
            states[member.name] = SavedOptimizer(
                options=group[1], tensors=tuple(tensors), values=values, group=group[0]
            )
        for key, value in tensors.items():
            name = f"optimizer.{member.name}.{key}"
            if is_elementwise(key, tuple(value.shape), tuple(stepped.value.shape)):
                yield from _entries(name, member.shape, member.pieces, value)
                continue
            check_is_once(stepped, member.name, key, value.numel())
            if member.begins_here:
                yield Entry.of_whole(name, value)


def check_is_once(stepped: Stepped, name: str, key: str, num_elements: int) -> None:
    """Check that a state of a part of a parameter is elementwise or one number.

    Raises:
        StrategyError: it is neither.
    """
    if stepped.is_cut and num_elements != 1:
        raise StrategyError(
            f"the optimizer's '{key}' of '{name}' has {num_elements} elements, which do not "
            "belong to elements of the parameter; a checkpoint cannot cut it. Plan without ZeRO "
            "and without op rules, or use another optimizer."
        )


def _entries(
    name: str, shape: tuple[int, ...], pieces: Iterable[Piece], held: Tensor
) -> list[Entry]:
    return [
        Entry(whole=name, shape=shape, box=piece.box, value=piece.of(held)) for piece in pieces
    ]


def _plain(key: str, value: Any) -> Any:
    """Convert a value to one that JSON can hold.

    Raises:
        StrategyError: it cannot be converted.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        return [_plain(key, each) for each in value]
    number = isinstance(value, float) and math.isfinite(value)
    if value is None or number or isinstance(value, bool | int | str):
        return value
    raise StrategyError(
        f"the optimizer's '{key}' is {value!r}; a checkpoint can keep tensors, finite numbers and "
        "text. Save the optimizer's state yourself."
    )


class NewState:
    """State that a rank resumes with: new tensors beside the current ones, as loading may fail.

    Args:
        step: A freshly deployed step.
        model: Model of the step.
        contents: Index of the checkpoint.

    Attributes:
        wanted: Boxes of saved tensors and the tensors to fill, by name.

    Raises:
        StrategyError: the optimizer's state or options cannot be cut as the plan requires.
    """

    def __init__(self, step: DeployedStep, model: nn.Module, contents: Contents) -> None:
        self.wanted: dict[str, list[tuple[Box, Tensor]]] = {}
        self._step = step
        self._contents = contents
        self._targets: list[tuple[Tensor, Tensor]] = []  # (tensor of the rank, its new elements)
        self._states: dict[int, dict[str, Any]] = {}
        self._counters: list[tuple[str, str, Tensor, Tensor]] = []
        for name, value in fixed_tensors(step, model).items():
            self._want(value, [(f"model.{name}", [whole_piece(value.shape)])])
        for row, value in held_rows(step):
            name, _ = name_and_shape(step, row)
            self._want(value, [(f"model.{name}", held_pieces(step, row))])
        everything = stepped_values(step)
        names = [[each.name for each in stepped.members] for stepped in everything]
        self._options = new_options(step.optimizer.param_groups, names, contents)
        for number, stepped in enumerate(everything):
            named = [(f"model.{each.name}", each.pieces) for each in stepped.members]
            if stepped.bucket is not None and stepped.bucket.stage == 3:
                self._want(stepped.value.detach(), named)
            if stepped.master is not None:
                self._want(stepped.master.detach(), self._masters_of(stepped) or named)
            state = self._state_of(stepped)
            if state:
                self._states[number] = state
        self._others = [left_out_reading(step, contents)]
        self._others += [mode.reading(step, contents) for mode in step.modes]
        for name, target in (pair for other in self._others for pair in other.wanted.items()):
            self.wanted.setdefault(name, []).append((whole_box(target.shape), target))

    def _want(self, value: Tensor, named: Sequence[tuple[str, list[Piece]]]) -> None:
        """Read new elements for a tensor of this rank."""
        self._targets.append((value, self._read(value, value.dtype, named)))

    def _read(
        self, value: Tensor, dtype: torch.dtype, named: Sequence[tuple[str, list[Piece]]]
    ) -> Tensor:
        """A new tensor of the same shape, to be filled with elements of saved tensors."""
        target = torch.empty(value.shape, dtype=dtype, device=value.device)
        for name, pieces in named:
            boxes = self.wanted.setdefault(name, [])
            boxes += [(piece.box, piece.of(target)) for piece in pieces]
        return target

    def _read_whole(self, name: str) -> Tensor:
        contents = self._contents
        target = torch.empty(contents.shape(name), dtype=dtype_of(contents.dtype(name)))
        self.wanted.setdefault(name, []).append((whole_box(target.shape), target))
        return target

    def _masters_of(self, stepped: Stepped) -> list[tuple[str, list[Piece]]]:
        """The saved master weights; empty if the model was trained without."""
        if any(MASTER not in self._contents.states[each.name].tensors for each in stepped.members):
            return []
        return [(f"optimizer.{each.name}.{MASTER}", each.pieces) for each in stepped.members]

    def _state_of(self, stepped: Stepped) -> dict[str, Any]:
        """State of the optimizer for one of its tensors."""
        first, *others = stepped.members
        saved = self._contents.states[first.name]
        state: dict[str, Any] = dict(saved.values)
        for other in others:
            also = self._contents.states[other.name]
            if set(also.tensors) != set(saved.tensors) or also.values != saved.values:
                raise _unlike(first.name, other.name)
        for key in saved.tensors:
            if key == MASTER:
                continue
            name = f"optimizer.{first.name}.{key}"
            if is_elementwise(key, self._contents.shape(name), first.shape):
                named = [(f"optimizer.{each.name}.{key}", each.pieces) for each in stepped.members]
                self._check_elementwise(key, stepped.members)
                state[key] = self._read(stepped.value, dtype_of(self._contents.dtype(name)), named)
                continue
            state[key] = self._read_whole(name)
            check_is_once(stepped, first.name, key, state[key].numel())
            for other in others:
                also_read = self._read_whole(f"optimizer.{other.name}.{key}")
                self._counters.append((first.name, other.name, state[key], also_read))
        return state

    def _check_elementwise(self, key: str, members: Sequence[Member]) -> None:
        """Check that parameters updated as one tensor have the same kinds of state."""
        for each in members[1:]:
            name = f"optimizer.{each.name}.{key}"
            if not is_elementwise(key, self._contents.shape(name), each.shape):
                raise _unlike(members[0].name, each.name)

    def check_counters(self) -> None:
        """Check that parameters of a slice have equal step counters: a slice has only one.

        Raises:
            StrategyError: they differ.
        """
        for first, other, value, also in self._counters:
            if not torch.equal(value, also):
                raise _unlike(first, other)

    def take_over(self) -> None:
        """Make the new state that of the step."""
        with torch.no_grad():
            for value, new in self._targets:
                value.copy_(new)
        self._step.optimizer.load_state_dict(
            {"state": self._states, "param_groups": self._options}
        )
        self._step.num_steps = self._contents.num_steps
        for other in self._others:
            other.take_over()


def _unlike(first: str, other: str) -> StrategyError:
    return StrategyError(
        f"'{first}' and '{other}' are stepped in one slice, but had different states of the "
        "optimizer when they were saved; plan with bucket_bytes 0."
    )


def new_options(
    groups: Sequence[Mapping[str, Any]], stepped: Sequence[Sequence[str]], contents: Contents
) -> list[dict[str, Any]]:
    """This rank's parameter groups with the saved options.

    Args:
        groups: Parameter groups of the optimizer.
        stepped: Names of the parameters in each tensor of the optimizer, in its order.
        contents: Index of the checkpoint.

    Raises:
        StrategyError: parameters of one group were saved with different options.
    """
    result, first = [], 0
    for number, group in enumerate(groups):
        numbers = list(range(first, first + len(group["params"])))
        first += len(numbers)
        members = [name for each in numbers for name in stepped[each]]
        options = [contents.states[name].options for name in members]
        for name, other in zip(members, options, strict=True):
            if other != options[0]:
                raise StrategyError(
                    f"'{members[0]}' and '{name}' are in one group of the optimizer, but had "
                    f"different options when they were saved: {options[0]} and {other}."
                )
        # Saved options include those that a scheduler has added.
        found = options[0] if options else _options_elsewhere(number, group, contents)
        saved = {key: option_like(group.get(key), value) for key, value in found.items()}
        result.append({**group, **saved, "params": numbers})
    return result


def _options_elsewhere(
    number: int, group: Mapping[str, Any], contents: Contents
) -> Mapping[str, Any]:
    """Saved options of a group without parameters that this rank updates.

    If no rank trains the group, its options were not saved. It then gets the options that other
    groups have and it lacks, because a scheduler needs its entries in all groups; ``initial_lr``
    is the group's own rate, which is still unchanged.
    """
    states = contents.states.values()
    own = [state.options for state in states if state.group == number]
    if own:
        return own[0]
    others = [state.options for state in states][:1]
    lacks = {key: value for each in others for key, value in each.items() if key not in group}
    return lacks | {key: group["lr"] for key in lacks if key == "initial_lr"}
