"""Lists are given once: the last of two would win silently, where the first was to be kept."""

from typing import Any

from typer.core import TyperCommand

from heterog.errors import HeterogError


class EachOnce(TyperCommand):
    """A command that refuses two lists for one option; of other values the last one counts."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as usual, then look for lists that were given more often than they count.

        Raises:
            HeterogError: an option with names in commas stands twice.
        """
        given = [*args]  # parsing empties its list
        left = super().parse_args(ctx, args)
        order = () if ctx.resilient_parsing else self.make_parser(ctx).parse_args(given)[2]
        lists = [each for each in order if _is_one_list(each)]
        for option in lists:
            if lists.count(option) > 1:
                name = max(option.opts, key=len)
                raise HeterogError(f"{name} is given twice; names go into one, with commas.")
        return left


def _is_one_list(parameter: Any) -> bool:
    is_option = parameter.param_type_name == "option" and not parameter.multiple
    return is_option and "commas" in (parameter.help or "")
