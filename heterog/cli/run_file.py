"""Run files: ``heterog plan run.yaml`` takes all settings of the command line from a file.

A run file has a line for each option, under its long name without dashes in front, and one for the
argument; options on the command line take precedence. The command's options are the file's only
schema. ``--save-config`` writes a run file.
"""

from pathlib import Path
from typing import Any

import typer

from heterog.cli.once import EachOnce
from heterog.errors import InputFileError, UnknownNameError
from heterog.files import decoded, read_bytes, write_atomically
from heterog.names import shown
from heterog.units import MIB

_SUFFIXES = (".yaml", ".yml")
_WHAT = "run file"


class FromRunFile(EachOnce):
    """A command whose first argument, a text, may be a run file."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take from the run file all settings that are not on the command line.

        Raises:
            InputFileError: the file cannot be read, or a value is of a wrong kind.
            UnknownNameError: the command has no such option.
        """
        path = self._path(ctx, args)
        if path is None:
            return super().parse_args(ctx, args)
        argument, settings = self._argument, self._settings(path)
        ctx.default_map = {**(ctx.default_map or {}), **settings}
        ctx.meta[_WHAT] = path
        left = super().parse_args(ctx, args)
        ctx.params[argument.name] = settings[argument.name]  # a text, as on the command line
        return left

    def _path(self, ctx: Any, args: list[str]) -> Path | None:
        """The first argument, if it is a run file."""
        if ctx.resilient_parsing or any(each in ctx.help_option_names for each in args):
            return None
        given = self.make_parser(ctx).parse_args([*args])[0].get(self._argument.name)
        if not isinstance(given, str) or not given.lower().endswith(_SUFFIXES):
            return None
        return Path(given)

    @property
    def _argument(self) -> Any:
        return next(each for each in self.params if each.param_type_name == "argument")

    def _settings(self, path: Path) -> dict[str, Any]:
        """Values of the command's parameters, as a file gives them."""
        from heterog.yaml_files import parse_yaml

        text = decoded(read_bytes(path, _WHAT, MIB), f"{path}")
        found = parse_yaml(text, path, what="a run file", if_empty="see --save-config")[1]
        if not isinstance(found, dict):
            raise InputFileError(f"{path} holds {shown(found)}, not settings with names.")
        known = {name_of(each): each for each in self.params if name_of(each) not in NOT_SAID}
        settings = {}
        for name, value in found.items():
            plain = str(name).replace("-", "_")
            if plain not in known:
                raise UnknownNameError(f"setting in {path}", str(name), known)
            settings[known[plain].name] = _value(path, str(name), value, known[plain])
        if self._argument.name not in settings:
            raise InputFileError(f"{path} does not say '{self._argument.name}'.")
        return settings


NOT_SAID = ("save_config", "help")
"""Options of the command line that a run file has not."""


def name_of(parameter: Any) -> str:
    """The name of a parameter in a run file: its long option's, with underscores."""
    longest = max(parameter.opts, key=len)
    return str(longest.lstrip("-").replace("-", "_"))


def _value(path: Path, name: str, value: object, parameter: Any) -> object:
    """A checked value: yes or no for flags, one number or text for all other parameters."""
    is_flag = bool(getattr(parameter, "is_flag", False))
    if isinstance(value, list) and not is_flag and value:
        value = ",".join(str(each) for each in value)
    if is_flag != isinstance(value, bool) or not isinstance(value, bool | int | float | str):
        wanted = "true or false" if is_flag else "a number or a text"
        raise InputFileError(f"{path}: '{name}' is {shown(value)}; it must be {wanted}.")
    return value if is_flag else str(value)


def run_file(context: typer.Context) -> Path | None:
    """The run file of the running command; ``None`` if it has none."""
    return context.meta.get(_WHAT)


def save_settings(context: typer.Context, path: Path) -> None:
    """Write the settings of the running command as a run file."""
    import yaml

    settings = {
        name_of(each): str(value) if isinstance(value, Path) else value
        for each in context.command.params
        for value in (context.params.get(each.name or ""),)
        if name_of(each) not in NOT_SAID and not (value is None or value is False or value == "")
    }
    text = f"# heterog {context.command.name} {path.name}\n"
    text += yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    write_atomically(path, text.encode())
