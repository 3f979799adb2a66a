"""Files of one idea, and functions of few parameters."""

import ast
from collections.abc import Iterator

import pytest

from tests.house.statements import MANY_PARAMETERS, ROOT, Function, parameters, python_files

MOST_LINES = 600
FOLDERS = ("heterog", "experiments", "benchmarks")
MOST_WITH_MANY_PARAMETERS = 15
"""Functions with eight parameters or more outside kernels; this number may only fall."""


def is_kernel(function: Function) -> bool:
    """Whether a function is compiled: such ones take flat arrays, which no value can group."""
    return any(
        isinstance(each, ast.Name) and each.id in ("kernel", "helper", "inlined")
        for each in function.decorator_list
    )


def wide_functions() -> Iterator[str]:
    """Functions with many parameters."""
    for folder in FOLDERS:
        for path in python_files(folder):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, Function) and not is_kernel(node):
                    if parameters(node) >= MANY_PARAMETERS:
                        yield f"{path.relative_to(ROOT)}: {node.name} has {parameters(node)}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_file_is_longer_than_600_lines(folder: str) -> None:
    assert not [
        str(path.relative_to(ROOT))
        for path in python_files(folder)
        if len(path.read_text().splitlines()) > MOST_LINES
    ]


def test_few_functions_have_eight_parameters_or_more() -> None:
    found = sorted(wide_functions())
    assert len(found) <= MOST_WITH_MANY_PARAMETERS, "\n".join(found)
