"""Writes the page of the command line from the commands' own help.

python -m website.command_pages
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from heterog.cli import app

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "command-line.md"
HEAD = """# Command line

`--help` after a command prints the same. Errors in what you give are one line and exit code 2.
Files that are written are regular files or new ones, and none that the same call reads.
"""


def commands() -> Iterator[tuple[str, Any]]:
    """Every command with its full name, those of groups too, by name."""

    def below(name: str, command: Any) -> Iterator[tuple[str, Any]]:
        members: dict[str, Any] = getattr(command, "commands", {})
        if not members:
            yield name, command
        for each in sorted(members):
            yield from below(f"{name} {each}", members[each])

    yield from below("heterog", typer.main.get_command(app))


def cell(text: str) -> str:
    """Text inside a table's cell, on one line; nothing in it is markup."""
    flat = " ".join(text.split())
    for mark in "\\`|*_<[":
        flat = flat.replace(mark, f"\\{mark}" if mark != "<" else "&lt;")
    return flat


def section(name: str, command: Any) -> str:
    """One command: what it does, its arguments and its options."""
    about = "\n\n".join(" ".join(part.split()) for part in str(command.help).split("\n\n"))
    lines = [f"## `{name}`", "", about, "", "| argument | meaning |", "|---|---|"]
    for param in command.params:
        if param.param_type_name == "argument":
            called = f"`{param.name.upper()}`"
        else:
            called = ", ".join(f"`{option}`" for option in param.opts)
        lines.append(f"| {called} | {cell(getattr(param, 'help', '') or '')} |")
    return "\n".join(lines)


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(section(name, command) + "\n" for name, command in commands())])


if __name__ == "__main__":
    PAGE.write_text(page())
