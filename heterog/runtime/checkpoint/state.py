"""What of a deployed step belongs to a checkpoint, and which rank saves it."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heterog.errors import StrategyError
from heterog.runtime.buffer_owners import buffer_owners
from heterog.runtime.checkpoint.contents import Contents, SavedOptimizer, dtype_name
from heterog.runtime.checkpoint.slices import begun_here, name_and_shape
from heterog.runtime.deploy import DeployedStep


def check_whole(step: DeployedStep) -> None:
    """Refuse a step whose parameters are sharded by rules of ops.

    Raises:
        StrategyError: names the first of them.
    """
    graph = step.captured.graph
    if step.part.sharded:
        name = graph.tensors[graph.updates[min(step.part.sharded)][1]].name
        raise StrategyError(
            f"the plan shards {len(step.part.sharded)} parameters ('{name}' first) over devices, "
            "which checkpoints cannot hold yet. Keep step.state_dict() instead, which has them "
            "whole on rank 0, or plan without op rules."
        )
    if any(bucket.ring.part < 1.0 or not bucket.is_first for bucket in step.part.buckets):
        raise StrategyError(
            "the plan keeps the optimizer's state in slices inside teams, which checkpoints "
            "cannot hold yet. Keep step.state_dict(), or plan without ZeRO or without teams."
        )


def check_fits(step: DeployedStep, contents: Contents, folder: str | Path) -> None:
    """Refuse a checkpoint of another model or optimizer."""
    what = f"checkpoint {folder} of '{contents.model}'"
    saved = {
        name.removeprefix("model."): (contents.shape(name), contents.dtype(name))
        for name in dict.fromkeys(each.whole or name for name, each in contents.tensors.items())
        if name.startswith("model.")
    }
    here = {
        name.removeprefix("model."): (tuple(value.shape), dtype_name(value.dtype))
        for name, value in _model_tensors(step).items()
    }
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
    for name in _names(step):
        if name not in contents.states:
            raise StrategyError(
                f"{what} has no optimizer state for {name}, which was not trained then."
            )


def _describe(tensor: tuple[tuple[int, ...], str] | None) -> str:
    return "missing" if tensor is None else f"{tensor[0]} {tensor[1]}"


def _names(step: DeployedStep) -> list[str]:
    """Name of each updated parameter, in the order of ``graph.updates``."""
    graph = step.captured.graph
    return [graph.tensors[parameter].name for _, parameter, _ in graph.updates]


def stepped_parameters(step: DeployedStep) -> list[tuple[int | None, list[str]]]:
    """What this rank's optimizer has, in its order: (bucket of a slice, names of parameters)."""
    name_of = {id(value): name for name, value in step.model.named_parameters()}
    found: list[tuple[int | None, list[str]]] = []
    for value in (value for group in step.optimizer.param_groups for value in group["params"]):
        bucket = step.part.slices.of_parameter(value)
        if bucket is None:
            found.append((None, [name_of[id(value)]]))
        else:
            pieces = bucket.pieces(step.rank)
            found.append((bucket.number, [name_and_shape(step, each.row)[0] for each in pieces]))
    return found


def _model_tensors(step: DeployedStep) -> dict[str, Tensor]:
    """All parameters and persistent buffers of the model, whether this rank needs them or not."""
    every_name = {name for name, _ in step.model.named_parameters(remove_duplicate=False)}
    state = step.model.state_dict()
    found = {name: value.detach() for name, value in step.model.named_parameters()}
    found |= {
        name: value
        for name, value in state.items()
        if name not in every_name and isinstance(value, Tensor)
    }
    return {f"model.{name}": value for name, value in found.items()}


def held_tensors(step: DeployedStep) -> dict[str, Tensor]:
    """What a rank needs of the model: its parameters, those nobody trains, and all buffers."""
    graph = step.captured.graph
    held = {graph.tensors[parameter].name for parameter in step.parameters} - _in_slices(step)
    foreign = {f"model.{name}" for name in set(_names(step)) - held}
    return {name: value for name, value in _model_tensors(step).items() if name not in foreign}


def _in_slices(step: DeployedStep) -> set[str]:
    """Names of the parameters that no rank has whole."""
    return {
        name_and_shape(step, row)[0]
        for bucket in step.part.buckets
        if bucket.stage == 3
        for row in bucket.rows
    }


def _owners(step: DeployedStep) -> dict[str, int]:
    """Rank that saves each tensor of the model; rank 0 saves what is the same everywhere."""
    owners = {
        f"model.{name}": owner
        for name, owner in buffer_owners(step.captured.graph, step.plan.strategy).items()
    }
    owners |= {f"model.{name}": step.part.owner(row) for row, name in enumerate(_names(step))}
    parts = {f"model.{name}" for name in _in_slices(step)}
    return {name: owners.get(name, 0) for name in _model_tensors(step) if name not in parts}


def own_state(step: DeployedStep) -> tuple[dict[str, Tensor], dict[str, SavedOptimizer]]:
    """(tensors, optimizer states by parameter) that this rank saves."""
    owners = _owners(step)
    model = _model_tensors(step)
    own = {name: value for name, value in model.items() if owners.get(name) == step.rank}
    states: dict[str, SavedOptimizer] = {}
    stepped = iter(stepped_parameters(step))
    for group in step.optimizer.param_groups:
        options = {key: _plain(key, value) for key, value in group.items() if key != "params"}
        for parameter in group["params"]:
            bucket, (name, *_) = next(stepped)
            state = step.optimizer.state.get(parameter, {})
            kept = {key: value for key, value in state.items() if isinstance(value, Tensor)}
            values = {key: _plain(key, state[key]) for key in state if key not in kept}
            saved = SavedOptimizer(options=options, tensors=tuple(kept), values=values)
            if bucket is not None:
                # Of each parameter that begins here; the slices' elements are saved as parts.
                kept = {key: v for key, v in kept.items() if v.shape != parameter.shape}
                mine = begun_here(step, bucket)
            else:
                mine = [name] if owners[f"model.{name}"] == step.rank else []
            for each in mine:
                own |= {f"optimizer.{each}.{key}": value.detach() for key, value in kept.items()}
                states[each] = saved
    return own, states


def _plain(key: str, value: Any) -> Any:
    """A value as JSON can hold it.

    Raises:
        StrategyError: it cannot.
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


def _like(current: Any, saved: Any) -> Any:
    """A saved option in the type that the optimizer uses, which JSON may have lost."""
    if isinstance(current, Tensor):
        return torch.full_like(current, saved)
    return tuple(saved) if isinstance(current, tuple) else saved


def new_options(step: DeployedStep, contents: Contents) -> list[dict[str, Any]]:
    """This rank's parameter groups with the saved options."""
    names = iter(
        (number, name)
        for number, (_, each) in enumerate(stepped_parameters(step))
        for name in each
    )
    # A rank that updates nothing has an empty group, for the sake of schedulers.
    some = [*(state.options for state in contents.states.values()), {}][:1]
    result = []
    for group in step.optimizer.param_groups:
        members = list(names)  # torch makes one group of what it is given
        options = [contents.states[name].options for _, name in members] or some
        for (_, name), other in zip(members, options, strict=False):
            if other != options[0]:
                raise StrategyError(
                    f"'{members[0][1]}' and '{name}' are in one group of the optimizer, but had "
                    f"different options when they were saved: {options[0]} and {other}."
                )
        # Also those that a scheduler has added.
        saved = {key: _like(group.get(key), value) for key, value in options[0].items()}
        numbers = list(dict.fromkeys(number for number, _ in members))
        result.append({**group, **saved, "params": numbers})
    return result
