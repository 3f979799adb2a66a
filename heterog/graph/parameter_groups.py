"""Parameter groups: which parameters the optimizer steps with which options.

What a user's function returns holds the parameters of one model. It is kept by names instead:
capture asks it about a model without memory, and every rank about its own before that is taken
apart.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from heterog.errors import CaptureError
from heterog.graph.workload import Workload

_MISSPELT = 0.85
"""Least likeness of two names, of ``difflib``, of which one is the other misspelt: a letter more,
less or swapped is above it, another word more is below it."""


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

    Entries that the optimizer does not know are kept, as torch does (some libraries' schedulers
    have their own), except ``param_names``: ranks also step parts of parameters.

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
    """Number of the group of each parameter that is in one, by its name."""
    return {name: number for number, group in enumerate(groups) for name in group.names}


class _Groups(torch.optim.Optimizer):
    """An optimizer that only holds groups: checks them as torch does, without any state."""

    def __init__(self, groups: list[Any]) -> None:
        super().__init__(groups, {})


def _checked_by_torch(workload: Workload, model: nn.Module) -> list[dict[str, Any]]:
    """What the user's function returns, as torch has it in ``param_groups``."""
    assert workload.parameter_groups is not None
    try:
        given = list(workload.parameter_groups(model))
        copies = [dict(each) if isinstance(each, Mapping) else each for each in given]
        with warnings.catch_warnings():
            # A parameter twice in a group: torch steps it twice, and will refuse it.
            warnings.filterwarnings("error", "optimizer contains a parameter group with dupl")
            return _Groups(copies).param_groups
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
