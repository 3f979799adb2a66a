"""Recognizes guards: conditions on values that only raise (``assert``, ``if ...: raise``) or log.

Code that goes on after a guard has always got the same answer, so a guard changes no graph: it can
be checked when the step runs. An ``if`` that only prints, warns or logs changes no graph either.
An ``if`` that repairs values which are not finite is treated as one that raises. Any other
condition on values decides which ops run. The condition is found in the syntax tree of the running
frame: CPython gives the place of each instruction in the source (PEP 657).
"""

import ast
import dis
import linecache
import logging
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import PurePath
from types import FrameType

_LONGEST_TEXT = 120
"""Characters of a guard in a message: the beginning of a long test says enough."""
_Place = tuple[int, int, int, int]
"""First line, last line, first column and last column of a piece of source."""


@dataclass(frozen=True, slots=True)
class Guard:
    """A condition that only decides whether the code raises an error, or writes a message.

    Attributes:
        wanted: Answer with which the code goes on silently.
        raises: Whether the other answer raises an error; else it only prints, warns or logs.
        text: File, line and statement, for messages.
    """

    wanted: bool
    raises: bool
    text: str


def guard_of_truth(frame: FrameType) -> Guard | None:
    """Guard whose test converts a tensor to bool at the instruction that a frame executes.

    Args:
        frame: Frame that converts, by ``if``, ``assert``, ``not``, ``and``, ``or``, ``bool()``,
            ``all()`` or ``any()``.

    Returns:
        ``None`` if the answer may decide more than whether an error is raised.
    """
    now, before = _instructions(frame)
    if now is None or before is None:
        return None
    source = _source_of(frame)
    if "CALL" in now.opname:  # a built-in function converts: bool, all and any are understood
        for leaf in source.at(now):
            if isinstance(leaf, ast.Call) and (name := _called(leaf)) in ("bool", "all", "any"):
                guard = source.guard(leaf, frame)
                of_all = {"all": True, "any": False}
                return guard if guard and of_all.get(name, guard.wanted) == guard.wanted else None
        return None
    # Python 3.13 compares and converts the result to bool in one instruction.
    is_compared = now.opname == "COMPARE_OP" and sys.version_info >= (3, 13)
    if not is_compared and not now.opname.startswith(("POP_JUMP", "JUMP_IF", "TO_B", "UNARY_NOT")):
        return None
    leaves = source.at(now if is_compared else before)
    return next((guard for leaf in leaves if (guard := source.guard(leaf, frame))), None)


def guard_of_answer(frame: FrameType) -> Guard | None:
    """Guard whose test contains the call that a frame executes; the call returns a ``bool``.

    Args:
        frame: Frame that calls a function, or compares with ``in``.
    """
    now, _ = _instructions(frame)
    if now is None:
        return None
    source = _source_of(frame)
    for leaf in source.at(now):
        if isinstance(leaf, ast.Call | ast.Compare) and (guard := source.guard(leaf, frame)):
            negated = isinstance(leaf, ast.Compare) and isinstance(leaf.ops[0], ast.NotIn)
            return replace(guard, wanted=guard.wanted ^ negated)
    return None


def is_number_of_guard(frame: FrameType) -> bool:
    """Whether the number that a frame reads (by ``.item()``) is used only in tests of guards.

    It may be assigned to a variable, if the function reads that variable in guards only.
    """
    now, _ = _instructions(frame)
    return now is not None and _source_of(frame).is_number_of_guard(now, frame)


def _instructions(frame: FrameType) -> tuple[dis.Instruction | None, dis.Instruction | None]:
    """The instruction that a frame executes, and the one before it, which made its operand."""
    # During a call ``f_lasti`` may point into the instruction's inline cache.
    begun = [each for each in dis.get_instructions(frame.f_code) if each.offset <= frame.f_lasti]
    return (begun[-1], begun[-2]) if len(begun) > 1 else (None, None)


def _called(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _attribute(call: ast.Call) -> str:
    """Name of the function or method that is called."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else _called(call)


class _Source:
    """Expressions of a file by their places, each with the syntax node around it."""

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._parent: dict[ast.AST, ast.AST] = {}
        self._at: dict[_Place, list[ast.expr]] = {}
        for node in ast.walk(_parsed(text)):
            for child in ast.iter_child_nodes(node):
                self._parent[child] = node
            if isinstance(node, ast.expr):
                self._at.setdefault(_place(node), []).append(node)

    def at(self, instruction: dis.Instruction) -> list[ast.expr]:
        """The expressions whose source is exactly the place of an instruction."""
        found = instruction.positions
        if found is None or None in found:
            return []
        first, last, begin, end = (number or 0 for number in found)
        return self._at.get((first, last, begin, end), [])

    def guard(self, leaf: ast.expr, frame: FrameType) -> Guard | None:
        """The guard whose test contains a truth value, if the test always needs that value."""
        above = list(self._test_above(leaf))
        statement = self._parent.get(above[-1])
        found = self._goes_on_if(statement, above[-1], frame)
        if found is None:
            return self._guard_of_finite(leaf, statement, above[-1])
        wanted, raises = found
        # From the whole test down: the truth that each part must have for the wanted answer.
        for part, below in zip(above[:0:-1], above[-2::-1], strict=True):
            if isinstance(part, ast.UnaryOp):
                wanted = not wanted
            elif isinstance(part, ast.BoolOp):
                needs_all = isinstance(part.op, ast.And) == wanted
                if raises and not needs_all and below is not part.values[-1]:
                    return None  # the other parts may make up for it
        if raises and isinstance(leaf, ast.Compare) and len(leaf.ops) > 1 and not wanted:
            return None  # a < b < c is false as soon as one of its two comparisons is
        return Guard(wanted, raises, self._text(statement))

    def _guard_of_finite(
        self, leaf: ast.expr, statement: ast.AST | None, test: ast.AST
    ) -> Guard | None:
        """Guard of an ``if`` that repairs values which are not finite, or goes on without them.

        A step of a plan takes the branch for finite values, and raises if others occur.
        """
        if not isinstance(statement, ast.If) or statement.test is not test:
            return None
        asked = {_attribute(each) for each in ast.walk(leaf) if isinstance(each, ast.Call)}
        if any(isinstance(each, ast.Not | ast.Compare) for each in ast.walk(leaf)):
            return None
        if "isfinite" in asked and not asked & {"any", "isnan", "isinf"}:
            return Guard(True, True, self._text(statement))
        if asked & {"isnan", "isinf"} and not asked & {"all", "isfinite"}:
            return Guard(False, True, self._text(statement))
        return None

    def is_number_of_guard(self, instruction: dis.Instruction, frame: FrameType) -> bool:
        """Whether the number at a place is used only in arithmetic and comparisons of guards."""
        for leaf in self.at(instruction):
            node = self._computed(leaf)
            statement = self._parent[node]
            if self._goes_on_if(statement, node, frame) is not None:
                return True
            if isinstance(statement, ast.Assign | ast.AnnAssign):
                return self._is_only_for_guards(statement, frame)
        return False

    def _computed(self, leaf: ast.AST) -> ast.AST:
        """The outermost arithmetic, comparison or boolean expression that contains a number."""
        while isinstance(self._parent[leaf], ast.BinOp | ast.UnaryOp | ast.Compare | ast.BoolOp):
            leaf = self._parent[leaf]
        return leaf

    def _is_only_for_guards(self, statement: ast.Assign | ast.AnnAssign, frame: FrameType) -> bool:
        """Whether the variable of an assignment is only read in guards of its function.

        It may be read in their tests, and where they raise or log, which is not reached.
        """
        (target, *others) = (
            statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        )
        *_, (_, function) = self._above(statement)
        if others or not isinstance(target, ast.Name) or not isinstance(function, ast.FunctionDef):
            return False
        nodes = list(ast.walk(function))
        if any(isinstance(each, ast.Global | ast.Nonlocal) for each in nodes):
            return False
        return all(
            self._is_in_guard(each, frame)
            for each in nodes
            if isinstance(each, ast.Name) and each.id == target.id and each is not target
        )

    def _is_in_guard(self, name: ast.Name, frame: FrameType) -> bool:
        """Whether a variable is read in a guard's test, or in its branch that raises or logs."""
        test = self._computed(name)
        if self._goes_on_if(self._parent[test], test, frame) is not None:
            return True
        for node, above in self._above(name):
            if isinstance(above, ast.Assert | ast.If) and node is not above.test:
                found = self._goes_on_if(above, above.test, frame)
                if found is None:
                    return False
                is_in_body = isinstance(above, ast.If) and node in above.body
                return isinstance(above, ast.Assert) or found[0] is not is_in_body
        return False

    def _test_above(self, leaf: ast.expr) -> Iterator[ast.expr]:
        """An expression, then those around it whose truth follows from its truth (and others')."""
        node = leaf
        while True:
            yield node
            parent = self._parent[node]
            passes = isinstance(parent, ast.BoolOp) or (
                isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not)
            )
            if isinstance(parent, ast.Call) and node in parent.args:
                passes = _called(parent) == "bool"
            if not passes or not isinstance(parent, ast.expr):
                return
            node = parent

    def _goes_on_if(
        self, statement: ast.AST | None, test: ast.AST, frame: FrameType
    ) -> tuple[bool, bool] | None:
        """Truth of a test with which the code goes on, and whether the guard raises otherwise.

        ``None`` if the statement is no guard.
        """
        if isinstance(statement, ast.If) and statement.test is test and not statement.orelse:
            if all(_only_says(each, frame) for each in statement.body):
                return False, False
        if statement is None or self._is_caught(statement):
            return None
        if isinstance(statement, ast.Assert) and statement.test is test:
            return True, True
        if isinstance(statement, ast.If) and statement.test is test:
            if _only_raises(statement.body):
                return False, True
            return (True, True) if _only_raises(statement.orelse) else None
        return None

    def _is_caught(self, statement: ast.AST) -> bool:
        """Whether a ``try`` of the same function may catch the error that a statement raises."""
        return any(
            isinstance(above, ast.Try) and node in above.body and len(above.handlers) > 0
            for node, above in self._above(statement)
        )

    def _above(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Pairs of a node and the one around it, from a node up to its function."""
        while node in self._parent and not isinstance(node, ast.FunctionDef):
            yield node, self._parent[node]
            node = self._parent[node]

    def _text(self, statement: ast.AST | None) -> str:
        """File, line and test of a guard, on one line."""
        assert isinstance(statement, ast.Assert | ast.If)
        test = ast.unparse(statement.test)
        words = f"assert {test}"
        if isinstance(statement, ast.If):
            raises_at_once = _only_raises(statement.body)
            words = f"if {test}: raise" if raises_at_once else f"if {test}: ... else: raise"
            if not raises_at_once and not _only_raises(statement.orelse):
                words = f"if {test}:"
        if len(words) > _LONGEST_TEXT:
            words = words[: _LONGEST_TEXT - 3] + "..."
        # Not the whole path: it would differ between machines that run the same plan.
        return f"{self._name}:{statement.lineno} (`{words}`)"


def _only_raises(body: list[ast.stmt]) -> bool:
    """Whether statements end with ``raise``, and only assign or call before it."""
    if not body or not isinstance(body[-1], ast.Raise):
        return False
    return all(isinstance(each, ast.Expr | ast.Assign | ast.AnnAssign) for each in body[:-1])


def _only_says(statement: ast.stmt, frame: FrameType) -> bool:
    """Whether a statement does nothing but print, warn or write into a log."""
    if isinstance(statement, ast.Pass):
        return True
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    called = statement.value.func
    if isinstance(called, ast.Name):
        return called.id == "print" and _value(called, frame) is None
    if not isinstance(called, ast.Attribute) or not isinstance(called.value, ast.Name):
        return False
    owner = _value(called.value, frame)
    if owner is warnings:
        return called.attr == "warn"
    is_log = owner is logging or isinstance(owner, logging.Logger)
    return is_log and called.attr.startswith(_LEVELS)


_LEVELS = ("debug", "info", "warn", "error", "critical", "exception", "log")
"""Prefixes of the logging functions: libraries add functions with such prefixes to loggers."""


def _value(name: ast.Name, frame: FrameType) -> object:
    """Value of a local or global variable in a frame; ``None`` if there is none."""
    return frame.f_locals.get(name.id, frame.f_globals.get(name.id))


def _source_of(frame: FrameType) -> _Source:
    """Source of the file of a frame; empty if there is none, or if it is no Python."""
    path = frame.f_code.co_filename
    return _source(path, "".join(linecache.getlines(path, frame.f_globals)))


@lru_cache(maxsize=16)
def _source(path: str, text: str) -> _Source:
    return _Source(PurePath(path).name, text)


def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])


def _place(node: ast.expr) -> _Place:
    return (node.lineno, node.end_lineno or 0, node.col_offset, node.end_col_offset or 0)
