"""Writes the pages of the command line and of run files from the commands' own help.

python -m website.command_pages
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from heterog.cli import app
from heterog.cli.run_file import NOT_SAID, name_of

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
PAGE, RUN_FILE_PAGE = FOLDER / "command-line.md", FOLDER / "run-file.md"
HEAD = """# Command line

`--help` after a command prints the same. Errors in what you give are one line and exit code 2.
Files that are written are regular files or new ones, and none that the same call reads.
"""
RUN_FILE_HEAD = """# Run files

What `heterog plan run.yaml` reads and `--save-config run.yaml` writes: a YAML mapping with a line
for each setting, `-` or `_` in names alike. Options on the command line count more, paths are as
there. A setting that is none of these, or of another kind, is refused by name.

    model: my_model.py:workload
    cluster: lab.yaml
    method: [cp_ar, local_search]   # the same as cp_ar,local_search
    budget: 2000e
    seed: 3
    no_changes: true

| setting | kind | by default | meaning |
|---|---|---|---|
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


def run_file_page() -> str:
    """The page of run files."""
    plan = dict(commands())["heterog plan"]
    lines = []
    for param in plan.params:
        if (name := name_of(param)) in NOT_SAID:
            continue
        is_flag = bool(getattr(param, "is_flag", False))
        kind = "true or false" if is_flag else "number or text"
        usual = "needed" if param.required else param.default
        default = "" if usual is None or usual is False or usual == "" else f"`{usual}`"
        about = cell(getattr(param, "help", "") or "")
        lines.append(f"| `{name}` | {kind} | {default} | {about} |\n")
    return RUN_FILE_HEAD + "".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
    RUN_FILE_PAGE.write_text(run_file_page())
