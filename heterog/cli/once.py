"""Options are given once: a second value of one is refused, where the last would win silently."""

from typing import Any

from typer.core import TyperCommand

from heterog.errors import HeterogError


class EachOnce(TyperCommand):
    """A command that refuses two values of an option that takes one; flags may repeat."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as usual, then look for options that were given more often than they count.

        Raises:
            HeterogError: an option with one value stands twice.
        """
        given = [*args]  # parsing empties its list
        left = super().parse_args(ctx, args)
        order = () if ctx.resilient_parsing else self.make_parser(ctx).parse_args(given)[2]
        valued = [each for each in order if _holds_one_value(each)]
        for option in valued:
            if valued.count(option) > 1:
                several = "; names go into one, with commas" if _takes_commas(option) else ""
                raise HeterogError(f"{max(option.opts, key=len)} is given twice{several}.")
        return left


def _holds_one_value(parameter: Any) -> bool:
    if parameter.param_type_name != "option" or parameter.multiple:
        return False
    return not (parameter.is_flag or parameter.count)


def _takes_commas(option: Any) -> bool:
    return "commas" in (option.help or "")
