"""Which names the reference shows, and whether each says what it is.

The pages under ``docs/reference`` name objects in lines such as ``::: heterog.plan``; their text
is made from docstrings when the site is built. The source is read here, not imported, so that the
site needs neither torch nor a compiler.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHOWN = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)


def shown_names() -> list[str]:
    """Dotted names on the pages of the reference."""
    pages = sorted((ROOT / "docs" / "reference").glob("*.md"))
    return [name for page in pages for name in SHOWN.findall(page.read_text())]


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _module(parts: list[str]) -> Path | None:
    base = ROOT.joinpath(*parts)
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def find(dotted: str) -> ast.AST | None:
    """The definition that a dotted name means, also where a package only passes it on."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        path = _module(parts[:length])
        if path is not None:
            return _inside(_tree(path), parts[length:])
    return None


def _inside(node: ast.AST, names: list[str]) -> ast.AST | None:
    """What is called so inside a module or class; imports are followed."""
    if not names:
        return node
    for child in ast.walk(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef) and child.name == names[0]:
            return _inside(child, names[1:])
        if isinstance(child, ast.ImportFrom) and any(a.name == names[0] for a in child.names):
            return find(f"{child.module}.{'.'.join(names)}")
        if isinstance(child, ast.Assign | ast.AnnAssign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            if any(isinstance(each, ast.Name) and each.id == names[0] for each in targets):
                return child
    return None


def undocumented() -> list[str]:
    """Public names of the reference, and their members, that have no docstring or do not exist."""
    return [name for shown in shown_names() for name in _silent(shown, find(shown))]


def _silent(name: str, node: ast.AST | None) -> Iterator[str]:
    if node is None:
        yield f"{name} (does not exist)"
    elif isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
        doc = ast.get_docstring(node) or ""
        if not doc:
            yield name
        for child in node.body if isinstance(node, ast.Module | ast.ClassDef) else []:
            if isinstance(child, ast.ClassDef | ast.FunctionDef) and _is_public(child):
                yield from _silent(f"{name}.{child.name}", child)
        if isinstance(node, ast.ClassDef):
            yield from _silent_fields(name, node, doc)


def _is_public(node: ast.ClassDef | ast.FunctionDef) -> bool:
    """Not private, and no setter: that has the docstring of its property."""
    sets = any(
        isinstance(each, ast.Attribute) and each.attr == "setter" for each in node.decorator_list
    )
    return node.name[0] != "_" and not sets


def _silent_fields(name: str, node: ast.ClassDef, doc: str) -> Iterator[str]:
    """Fields that neither the class nor a text below them explains."""
    for child, after in zip(node.body, [*node.body[1:], None], strict=True):
        if not (isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name)):
            continue
        field = child.target.id
        said_below = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        said = re.search(rf"^ {{4}}(?:\w+, )*{field}(?:, \w+)*:", doc, re.MULTILINE)
        if field[0] != "_" and not said and not said_below:
            yield f"{name}.{field}"
