"""How settings are spelled on the command line.

Below the command line a message names a setting as Python does, between single backticks. Where
the command that runs has an option for it, its user reads that: ``--step-timeout``.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from functools import wraps
from typing import ParamSpec, get_args

from typer.models import ArgumentInfo, OptionInfo

from heterog.errors import HeterogError

P = ParamSpec("P")
_SETTING = re.compile(r"`([a-z_]+)`")


def options_of(command: Callable[..., None]) -> dict[str, str]:
    """What each parameter of a command is called on the command line."""
    parameters = inspect.signature(command, eval_str=True).parameters
    return {name: _option(name, each) for name, each in parameters.items()}


def _option(name: str, parameter: inspect.Parameter) -> str:
    for each in get_args(parameter.annotation):
        if isinstance(each, OptionInfo):
            return str(next(iter((each.default, *(each.param_decls or ())))))
        if isinstance(each, ArgumentInfo):
            return name.upper()
    return name


def as_options(text: str, options: Mapping[str, str]) -> str:
    """The text with options in the place of settings; other words between backticks stay."""

    def spelled(found: re.Match[str]) -> str:
        name = found[1]
        short = name.removeprefix("num_").removesuffix("_s")  # units are part of a value there
        return options.get(name) or options.get(short) or found[0]

    return _SETTING.sub(spelled, text)


def errors_spelled(command: Callable[P, None]) -> Callable[P, None]:
    """The command, whose errors name settings by its options."""
    options = options_of(command)

    @wraps(command)
    def spelling(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except HeterogError as error:
            error.args = (as_options(str(error), options),)
            raise

    return spelling
