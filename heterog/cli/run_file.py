"""Runs in files: ``heterog plan run.yaml`` with all that the command line can say.

A run file has a line for each option, under its long name without dashes in front, and one for the
argument; what is on the command line as well counts more. So the command's options are the file's
schema, and there is no other. ``--save-config`` writes one.
"""

from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from heterog.errors import InputFileError, UnknownNameError
from heterog.files import read_bytes, write_atomically
from heterog.names import shown
from heterog.units import MIB
from heterog.yaml_files import parse_yaml

_SUFFIXES = (".yaml", ".yml")
_SAVES = "save_config"
_WHAT = "run file"


class FromRunFile(TyperCommand):
    """A command whose first argument may be a run file."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take what a run file says for what is not on the command line.

        Raises:
            InputFileError: the file cannot be read, or a value is of a wrong kind.
            UnknownNameError: the command has no such option.
        """
        given, is_file = self._first(ctx, args)
        if is_file:
            ctx.default_map = {**(ctx.default_map or {}), **self._settings(Path(given))}
            ctx.meta[_WHAT] = Path(given)
            args = self._without(ctx, args, given)
        return super().parse_args(ctx, args)

    def _first(self, ctx: Any, args: list[str]) -> tuple[str, bool]:
        """The first argument, and whether it is a run file."""
        if ctx.resilient_parsing or any(each in ctx.help_option_names for each in args):
            return "", False
        given = self.make_parser(ctx).parse_args([*args])[0].get(self._argument.name)
        return str(given), isinstance(given, str) and given.lower().endswith(_SUFFIXES)

    def _without(self, ctx: Any, args: list[str], given: str) -> list[str]:
        """The arguments without the first one, which an option's value may equal."""
        for place in (number for number, each in enumerate(args) if each == given):
            rest = [*args[:place], *args[place + 1 :]]
            try:
                left = self.make_parser(ctx).parse_args([*rest])[0].get(self._argument.name)
            except Exception:  # its option stands alone now
                continue
            if left != given:
                return rest
        return args

    @property
    def _argument(self) -> Any:
        return next(each for each in self.params if each.param_type_name == "argument")

    def _settings(self, path: Path) -> dict[str, Any]:
        """Values of the command's parameters, as a file gives them."""
        try:
            text = read_bytes(path, _WHAT, MIB).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise InputFileError(f"{path}: byte {error.start} is not UTF-8.") from error
        found = parse_yaml(text, path, what="a run file", if_empty="see --save-config")[1]
        if not isinstance(found, dict):
            raise InputFileError(f"{path} holds {shown(found)}, not settings with names.")
        known = {name_of(each): each for each in self.params if name_of(each) not in _NOT_SAID}
        settings = {}
        for name, value in found.items():
            plain = str(name).replace("-", "_")
            if plain not in known:
                raise UnknownNameError(f"setting in {path}", str(name), known)
            settings[known[plain].name] = _value(path, str(name), value, known[plain])
        if self._argument.name not in settings:
            raise InputFileError(f"{path} does not say '{self._argument.name}'.")
        return settings


_NOT_SAID = (_SAVES, "help")


def name_of(parameter: Any) -> str:
    """The name of a parameter in a run file: its long option's, with underscores."""
    longest = max(parameter.opts, key=len)
    return str(longest.lstrip("-").replace("-", "_"))


def _value(path: Path, name: str, value: object, parameter: Any) -> object:
    """A value, which is a yes or no for flags, and one number or text for all others."""
    is_flag = bool(getattr(parameter, "is_flag", False))
    if isinstance(value, list) and not is_flag and value:
        value = ",".join(str(each) for each in value)
    if is_flag != isinstance(value, bool) or not isinstance(value, bool | int | float | str):
        wanted = "true or false" if is_flag else "a number or a text"
        raise InputFileError(f"{path}: '{name}' is {shown(value)}; it must be {wanted}.")
    return value if is_flag else str(value)


def run_file(context: typer.Context) -> Path | None:
    """The run file of the command that runs."""
    found: Path | None = context.meta.get(_WHAT)
    return found


def save_settings(context: typer.Context, path: Path) -> None:
    """Write what the command was asked as a run file."""
    lines = [f"# heterog {context.command.name} {path.name}"]
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if name_of(parameter) in _NOT_SAID or value is None or value is False or value == "":
            continue
        lines.append(f"{name_of(parameter)}: {_written(value)}")
    write_atomically(path, "\n".join([*lines, ""]).encode())


def _written(value: object) -> str:
    if isinstance(value, bool | int | float):
        return str(value).lower()
    return "'" + str(value).replace("'", "''") + "'"
