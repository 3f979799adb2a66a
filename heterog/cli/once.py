"""Lists are given once: the last of two would win silently, where the first was to be kept."""

from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from heterog.errors import HeterogError


class EachOnce(TyperCommand):
    """A command that refuses two lists for one option; of other values the last one counts."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Look for lists that are given more often than they count, then parse as usual.

        Raises:
            HeterogError: an option with names in commas stands twice, or a path is empty.
        """
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        said, _, given = self.make_parser(ctx).parse_args([*args])
        for option in filter(_is_one_list, self.params):
            if given.count(option) > 1:
                name = max(option.opts, key=len)
                raise HeterogError(f"{name} is given twice; names go into one, with commas.")
        left = super().parse_args(ctx, args)
        for parameter in self.params:
            if said.get(parameter.name) == "" and ctx.params.get(parameter.name) == Path():
                name = max(parameter.opts, key=len)
                raise HeterogError(f"{name} is an empty path; write . for this folder.")
        return left


def _is_one_list(parameter: Any) -> bool:
    is_option = parameter.param_type_name == "option" and not parameter.multiple
    return is_option and "commas" in (parameter.help or "")
