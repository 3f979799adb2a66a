"""Counts what there is to read: ``python -m tests.house.statements [--json]``.

A statement is an ``ast.stmt``, so that neither the length of a line nor a comment counts.
"""

import argparse
import ast
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COUNTED = ("heterog", "experiments", "benchmarks")
MANY_PARAMETERS = 8
"""From here on a function's parameters are a value that has no name yet."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What one folder holds.

    Attributes:
        lines: Number of lines of its Python files.
        statements: Number of ``ast.stmt``.
        functions: Number of functions and methods.
        docstring_lines: Lines of their docstrings.
        many_parameters: Functions with eight parameters or more, without ``self`` and ``cls``.
        longest_file: Lines of its longest file.
    """

    lines: int
    statements: int
    functions: int
    docstring_lines: int
    many_parameters: int
    longest_file: int


def python_files(folder: str) -> Iterator[Path]:
    """All Python files of a top folder."""
    return (ROOT / folder).rglob("*.py")


def parameters(function: Function) -> int:
    """Number of parameters that a caller may give."""
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args)]
    return len(names) + len(given.kwonlyargs) - (bool(names) and names[0] in ("self", "cls"))


def size_of(folder: str) -> Size:
    """Count one folder."""
    texts = [path.read_text() for path in python_files(folder)]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    functions = [node for node in nodes if isinstance(node, Function)]
    docstrings = [ast.get_docstring(each) or "" for each in functions]
    lengths = [len(text.splitlines()) for text in texts]
    return Size(
        lines=sum(lengths),
        statements=sum(isinstance(node, ast.stmt) for node in nodes),
        functions=len(functions),
        docstring_lines=sum(len(each.splitlines()) for each in docstrings),
        many_parameters=sum(parameters(each) >= MANY_PARAMETERS for each in functions),
        longest_file=max(lengths),
    )


def main() -> None:
    """Print the sizes of all counted folders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    as_json = parser.parse_args().json
    sizes = {folder: asdict(size_of(folder)) for folder in COUNTED}
    total = sum(size["statements"] for size in sizes.values())
    if as_json:
        print(json.dumps({"rows": sizes, "statements": total}))
        return
    for folder, size in sizes.items():
        print(folder, *(f"{name}={value}" for name, value in size.items()))
    print(f"statements={total}")


if __name__ == "__main__":
    main()
