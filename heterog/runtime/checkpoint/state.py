"""The state of a deployed step that a checkpoint holds, and which rank saves which part."""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from heterog.errors import StrategyError
from heterog.runtime.checkpoint.boxes import Piece, whole_box
from heterog.runtime.checkpoint.contents import (
    Contents,
    SavedOptimizer,
    dtype_name,
)
from heterog.runtime.checkpoint.files import Entry
from heterog.runtime.checkpoint.held import (
    MASTER,
    Stepped,
    held_pieces,
    is_elementwise,
    is_saved_here,
    name_and_shape,
    rows_in_slices,
    stepped_values,
)
from heterog.runtime.deploy import DeployedStep


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
    graph = step.captured.graph
    in_slices = rows_in_slices(step)
    return [
        (row, step.part.parameters[tensor].detach())
        for row, (_, tensor, _) in enumerate(graph.updates)
        if tensor in step.part.parameters and row not in in_slices
    ]


def check_can_save(step: DeployedStep) -> None:
    """Refuse a step that no checkpoint can hold; every rank calls it after a first step.

    Raises:
        StrategyError: the optimizer keeps what cannot be cut, or what JSON cannot hold.
    """
    own_entries(step, step.model)


def own_entries(
    step: DeployedStep, model: nn.Module
) -> tuple[list[Entry], dict[str, SavedOptimizer]]:
    """The entries that this rank saves.

    Args:
        step: The step to save.
        model: Model of the step; ``step.model`` needs all ranks, one of which may fail before.

    Returns:
        Tensors, and optimizer states by parameter.

    Raises:
        StrategyError: the optimizer keeps what cannot be saved.
    """
    entries = [
        _whole_entry(f"model.{name}", value)
        for name, value in fixed_tensors(step, model).items()
        if step.buffers.owners.get(name, 0) == step.rank
    ]
    for row, value in held_rows(step):
        if is_saved_here(step, row):
            name, shape = name_and_shape(step, row)
            entries += _entries(f"model.{name}", shape, held_pieces(step, row), value)
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
    if stepped.bucket is not None and stepped.bucket.stage == 3:
        for name, shape, pieces in stepped.members:
            yield from _entries(f"model.{name}", shape, pieces, stepped.value.detach())
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
                yield _whole_entry(name, value)


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


def _whole_entry(name: str, value: Tensor) -> Entry:
    shape = tuple(value.shape)
    return Entry(whole=name, shape=shape, box=whole_box(shape), value=value)


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
