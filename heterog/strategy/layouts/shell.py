"""The options in a shell script, as far as they can be known without running it.

Variables stand for their values, defaults (``${TP:-4}``) and sums (``$((2 * TP))``); what only a
shell can say, as the output of a command, is left as it is written.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from heterog.errors import InputFileError

_INNER = r"""
    \\. | \$\(\((?>[^()]|\([^()]*\))*+\)\) | \$\((?>[^()]|\((?>[^()]|\([^()]*\))*+\))*+\)
  | \$\{(?>[^{}]|\{(?>[^{}]|\{[^{}]*\})*+\})*+\} | \$\[[^\]]*\] | `[^`]*`
"""
"""What keeps its blanks in a word, also inside double quotes."""
_TOKEN = re.compile(
    rf"""(?P<gap> (?>[ \t\0]|\\\n)++ | \#[^\n]*+ )
    | (?P<to> \d?[<>]++&?\d? )
    | (?P<word> (?>{_INNER} | '[^']*' | "(?>{_INNER}|[^"\\])*+" | [^\s'"\\`;&|()<>\0])++ )
    | (?P<stop> && | \|\| | ;; | . )""",
    re.DOTALL | re.VERBOSE,
)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[\w*\])?(\+?)=(.*)", re.DOTALL)
_OVERRIDE = re.compile(r"(?:\+{0,2}[A-Za-z_]\w*\.)[\w.]+=.*", re.DOTALL)
"""A field of a configuration in the manner of Hydra: ``model.tensor_model_parallel_size=4``."""
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?([-=?])([^{}]*))?\})", re.DOTALL)
_SUM = re.compile(r"\$\(\(([^$`]*?)\)\)|\$\[([^$`\]]*)\]", re.DOTALL)
_ALL_OF = re.compile(r"\$(?:[@*]|\{\w+\[[@*]\][^}]*\})")
_BEGINS = ("if", "case", "for", "while", "until", "select")
_ENDS = ("fi", "esac", "done")
_MOST_WORDS = 50_000
_MOST_NESTED = 8  # variables in the values of variables
_LONGEST = 10_000
_STOP = ";"
OR = "\0"
"""Stands between values of which a condition of the script takes one."""


@dataclass(frozen=True, slots=True)
class Option:
    """An option and its value.

    Attributes:
        name: Its name, without dashes in front; empty for a word among options that only a shell
            can say, such as ``$@``.
        value: The word that follows; ``true`` where none does.
        is_sure: Whether it stands under no condition.
    """

    name: str
    value: str
    is_sure: bool


def options_of(text: str, where: str) -> list[Option]:
    """The options of all commands and lists of options in a script, in order.

    >>> script = 'TP=${TP:-4}; torchrun train.py --tp $TP --sp'
    >>> [(each.name, each.value) for each in options_of(script, "here")]
    [('tp', '4'), ('sp', 'true')]

    Raises:
        InputFileError: a quote is left open, or there are too many words.
    """
    found: list[Option] = []
    is_open = is_among = False
    for word, is_sure in _Script(where).words(text.replace("\r\n", "\n")):
        is_option = word.startswith("--") and len(word) > 2
        if is_option or _OVERRIDE.fullmatch(word):
            name, has_value, value = word.lstrip("-+").partition("=")
            found.append(Option(name, value if has_value else "true", is_sure))
        elif is_open and word not in ("", _STOP) and not _ALL_OF.fullmatch(word):
            found[-1] = replace(found[-1], value=word)
        elif is_among and word.startswith("$") and not word.endswith(("[@]}", ".py")):
            found.append(Option("", word, is_sure))
        is_open = is_option and "=" not in word
        is_among = word != _STOP and (is_among or is_option)
    return found


@dataclass(slots=True)
class _Script:
    where: str
    variables: dict[str, str] = field(default_factory=dict)
    depth: int = 0
    is_after_test: bool = False

    def words(self, text: str) -> Iterator[tuple[str, bool]]:
        """Words with their variables, and whether each stands under no condition."""
        begins_command, is_loop, in_list = True, False, 0
        for number, (kind, token) in enumerate(self._tokens(text)):
            if number > _MOST_WORDS:
                raise InputFileError(f"{self.where} holds more than {_MOST_WORDS:,} words.")
            if kind == "to":
                yield _STOP, True
                continue
            if kind == "stop":
                in_list = max(in_list + {"(": 1, ")": -1}.get(token, 0), 0)
                if not in_list:
                    begins_command = True
                    self.is_after_test = token in ("&&", "||")
                if token != "\n" or not in_list:
                    yield _STOP, True
                continue
            if begins_command and token in (*_BEGINS, *_ENDS):
                self.depth = max(self.depth + (1 if token in _BEGINS else -1), 0)
                begins_command, is_loop = False, token == "for"
                continue
            if is_loop:  # its variable has many values
                self.variables.pop(token, None)
            is_loop = False
            begins_command = begins_command and token in ("then", "else", "do", "{", "!")
            is_sure = not (self.depth or (self.is_after_test and _ASSIGNMENT.fullmatch(token)))
            yield from ((each, is_sure) for each in self._spread(token))

    def _tokens(self, text: str) -> Iterator[tuple[str, str]]:
        place = 0
        while found := _TOKEN.match(text, place):
            place = found.end()
            kind, token = found.lastgroup or "", found[0]
            if kind == "stop" and token in "'\"\\`":
                line = text.count("\n", 0, found.start()) + 1
                raise InputFileError(
                    f"{self.where} is no command line: the {token} of line {line} is left open."
                )
            if kind != "gap":
                yield kind, token

    def _spread(self, token: str) -> list[str]:
        """A word, or the words of a quoted list of options or command."""
        if token.startswith("`#"):  # a remark between the lines of a command
            return []
        is_set = _ASSIGNMENT.fullmatch(token)
        if is_set:
            value = self._value(is_set[3])
            if is_set[2]:
                value = self.variables.get(is_set[1], "") + value
            self._assign(is_set[1], value)
        else:
            value = self._value(token)
        alternatives = value.split(OR)
        if not all(each.startswith("--") for each in alternatives):
            alternatives = [value]
        parts = [part for each in alternatives for part in _bare(each).split()]
        if len(parts) > 1 and any(part.startswith("--") for part in parts):
            return [*parts, ""]
        return [] if is_set and not value.startswith("--") else [value]

    def _assign(self, name: str, value: str) -> None:
        before = self.variables.get(name, "")
        if (self.depth or self.is_after_test) and before and not value.startswith(before):
            kept = before.split(OR)
            value = before if not value or value in kept else f"{before}{OR}{value}"
        self.variables[name] = value[:_LONGEST]

    def _value(self, token: str) -> str:
        """A word as the command would get it."""
        if token.startswith("'") and token.endswith("'"):
            return token[1:-1]
        text = token
        for _ in range(_MOST_NESTED):
            changed = _SUM.sub(self._sum, _VARIABLE.sub(self._variable, text))
            if changed == text or len(changed) > _LONGEST:
                break
            text = changed
        return _bare(text)

    def _variable(self, found: re.Match[str]) -> str:
        name, how, default = found[1] or found[2], found[3], found[4]
        if how == "=":
            self.variables.setdefault(name, _bare(default))
        if (name in self.variables and how is None) or self.variables.get(name):
            return self.variables[name]
        return found[0] if how in (None, "?") else str(default)

    def _sum(self, found: re.Match[str]) -> str:
        said = found[1] if found[1] is not None else found[2]
        try:
            return str(_computed(ast.parse(said.strip(), mode="eval").body, self.variables))
        except (ValueError, SyntaxError, RecursionError, MemoryError, ZeroDivisionError):
            return found[0]


def _bare(text: str) -> str:
    """A text without the quotes and line ends of the shell."""
    return re.sub(r"\\\r?\n|[\"']|\\(?=[\"$`\\])", "", text)


_SIGNS: Mapping[type[ast.operator], Callable[[int, int], int]] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.floordiv,
        ast.Mod: operator.mod,
    }
)


def _computed(node: ast.expr, variables: Mapping[str, str]) -> int:
    """A sum of whole numbers and variables.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
        left, right = (_computed(side, variables) for side in (node.left, node.right))
        return _SIGNS[type(node.op)](left, right)
    said = variables.get(node.id, "") if isinstance(node, ast.Name) else None
    value = said if said is not None else getattr(node, "value", None)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10:
        value = int(value)
    if type(value) is not int or value >= 10**9:
        raise ValueError("not a whole number")
    return value
