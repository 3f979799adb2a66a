"""The options in a shell script, as far as they can be known without running it.

Variables are replaced by their values, with defaults (``${TP:-4}``) and sums (``$((2 * TP))``).
They may be set in scripts that this one reads, or by Slurm's directives. Text that only a shell
can evaluate, such as the output of a command, is left as it is. Functions are read where they are
called.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from posixpath import normpath
from types import MappingProxyType

from heterog.errors import InputFileError

_INNER = r"""
    \\. | \$\(\((?>[^()]|\([^()]*\))*+\)\) | \$\((?>[^()]|\((?>[^()]|\([^()]*\))*+\))*+\)
  | \$\{(?>[^{}]|\{(?>[^{}]|\{[^{}]*\})*+\})*+\} | \$\[[^\]]*\] | `[^`]*`
"""
"""Parts of a word in which blanks do not end it, also inside double quotes."""
_TOKEN = re.compile(
    rf"""(?P<gap> (?>[ \t\0]|\\\n)++ | \#[^\n]*+ )
    | (?P<to> \d?[<>]++&?\d? )
    | (?P<word> (?>{_INNER} | '[^']*' | "(?>{_INNER}|[^"\\])*+" | [^\s'"\\`;&|()<>\0])++ )
    | (?P<stop> && | \|\| | ;; | . )""",
    re.DOTALL | re.VERBOSE,
)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[\w*\])?(\+?)=(.*)", re.DOTALL)
_OVERRIDE = re.compile(r"(?:\+{0,2}[A-Za-z_]\w*\.)[\w.]+=.*", re.DOTALL)
"""A field of a configuration, written as in Hydra: ``model.tensor_model_parallel_size=4``."""
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?([-=?])([^{}]*))?\})", re.DOTALL)
_SUM = re.compile(r"\$\(\(([^$`]*?)\)\)|\$\[([^$`\]]*)\]", re.DOTALL)
_ALL_OF = re.compile(r"\$(?:[@*]|\{\w+\[[@*]\][^}]*\})")
_HERE = re.compile(r"(?:^|[\s\d])<<-?[ \t]*(['\"]?)([A-Za-z_]\w*)\1")
_WRITTEN = re.compile(r"(?:>|\btee\s)\s*([^\s<>|&;]+)")
_DIRECTIVE = re.compile(r"^#SBATCH[ \t]+(.*)", re.MULTILINE)
_OF_SLURM = re.compile(
    r"(?:--(nodes|ntasks-per-node|gpus-per-node|gres)|-(N))[= \t]*(?:[\w-]+:)*(\d{1,9})(?:\s|$)"
)
_SLURM_NAMES = {"N": "nodes", "gres": "gpus-per-node"}
_SLURM_VARIABLES = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
}
_UNKNOWN_FOLDER = re.compile(r"^(?:.*[)}`]|\$\w+)/")
_FUNCTION = re.compile(
    r"[ \t]*(?:function[ \t]+([\w-]+)[^{]*|([\w-]+)[ \t]*\([ \t]*\)[ \t]*)\{[ \t]*"
)
_ELSEWHERE = re.compile(r"\d?(?:&?[<>]{1,2}|\|{1,2}|&&|;).*", re.DOTALL)
"""Ends the options of a command in quotes: a redirection, or another command."""
_BRACE_BELOW = re.compile(r"\)[ \t]*\n[ \t]*\{[ \t]*\n")
_MOST_INSIDE = 64  # most scripts that are read, and functions that are called, together
_BEGINS = ("if", "case", "for", "while", "until", "select")
_ENDS = ("fi", "esac", "done")
_MOST_WORDS = 50_000
_MOST_NESTED = 8  # variables in the values of variables
_LONGEST = 10_000
_STOP = ";"
OR = "\0"
"""Separates alternative values, if a condition of the script chooses one of them."""


@dataclass(frozen=True, slots=True)
class Option:
    """An option and its value.

    Attributes:
        name: Its name, without leading dashes; empty for a word among options that only a shell
            can evaluate, such as ``$@``.
        value: The word that follows; ``true`` if none does.
        is_sure: Whether it is outside of every condition of the script.
    """

    name: str
    value: str
    is_sure: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The contents of a script that are known without running it.

    Attributes:
        options: The options of all commands and lists of options, in order.
        directives: Slurm's ``nodes``, ``ntasks-per-node`` and ``gpus-per-node``.
        written: Texts that it writes (here documents), by the names of their files.
        missing: Scripts that it reads, but that do not exist.
    """

    options: list[Option]
    directives: Mapping[str, str]
    written: Mapping[str, str]
    missing: tuple[str, ...]


def read_script(text: str, where: str, beside: Callable[[str], str | None]) -> Script:
    """Read a script.

    >>> script = 'TP=${TP:-4}; torchrun train.py --tp $TP --sp'
    >>> found = read_script(script, "here", lambda name: None)
    >>> [(each.name, each.value) for each in found.options]
    [('tp', '4'), ('sp', 'true')]

    Args:
        text: The script.
        where: Start of every message.
        beside: Text of the file of a name, relative to the script; ``None`` if there is none.

    Raises:
        InputFileError: a quote is left open, or there are too many words.
    """
    text = text.replace("\r\n", "\n")
    directives = _directives(text)
    script = _Script(where, beside)
    for name, value in directives.items():
        script.variables.update(dict.fromkeys(_SLURM_VARIABLES[name], value))
    options = _options(script.all_words(text))
    written = {
        normpath(script.value(name)): script.expanded(body)
        for name, body in script.written.items()
    }
    return Script(
        options=options, directives=directives, written=written, missing=tuple(script.missing)
    )


def _directives(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in _DIRECTIVE.findall(text):
        for long, short, value in _OF_SLURM.findall(line):
            name = long or short
            found.setdefault(_SLURM_NAMES.get(name, name), value)
    return found


def _options(words: Iterator[tuple[str, bool]]) -> list[Option]:
    found: list[Option] = []
    is_open = is_among = False
    for word, is_sure in words:
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
    beside: Callable[[str], str | None]
    variables: dict[str, str] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    functions: dict[str, str] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    depth: int = 0
    is_after_test: bool = False
    num_words: int = 0
    num_inside: int = 0

    def all_words(self, text: str) -> Iterator[tuple[str, bool]]:
        """The words of a script, and of functions that it never calls by name."""
        yield from self.words(text)
        while left := [name for name in self.functions if name not in self.called]:
            yield from self._called(left[:1])

    def words(self, text: str) -> Iterator[tuple[str, bool]]:
        """Words with variables replaced, and whether each is outside of every condition."""
        begins_command, is_loop, is_sourced, in_list = True, False, False, 0
        call: list[str] = []
        for kind, token in self._tokens(self._without_texts(text)):
            self.num_words += 1
            if call and kind != "word":
                yield from self._called(call)
                call = []
            if self.num_words > _MOST_WORDS:
                raise InputFileError(f"{self.where} holds more than {_MOST_WORDS:,} words.")
            if is_sourced and kind == "word":
                yield from self._sourced(self.value(token))
                is_sourced = False
                continue
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
            if begins_command and token in ("source", "."):
                begins_command, is_sourced = False, True
                continue
            if is_loop:  # its variable has many values
                self.variables.pop(token, None)
            is_loop = False
            if call or (begins_command and token in self.functions):
                call.append(self.value(token))
            begins_command = begins_command and token in ("then", "else", "do", "{", "!")
            is_sure = not (self.depth or (self.is_after_test and _ASSIGNMENT.fullmatch(token)))
            yield from ((each, is_sure) for each in self._spread(token))

    def _without_texts(self, text: str) -> str:
        """The text without functions and here documents, which are stored apart."""
        kept, body, end, name = [], list[str](), "", ""
        for line in _BRACE_BELOW.sub(") {\n", text).split("\n"):
            if end:
                if line.strip() == end:
                    (self.functions if end == "}" else self.written)[name] = "\n".join(body)
                    end = ""
                else:
                    body.append(line)
                continue
            if found := _FUNCTION.fullmatch(line):
                end, body, name = "}", [], found[1] or found[2]
                continue
            kept.append(line)
            found = _HERE.search(line)
            if found and "((" not in line and not line.lstrip().startswith("#"):
                target = _WRITTEN.search(line)
                end, body, name = found[2], [], target[1] if target else ""
        if end == "}":
            kept += body
        elif end:
            self.written[name] = "\n".join(body)
        return "\n".join([*kept, ""])

    def _sourced(self, name: str) -> Iterator[tuple[str, bool]]:
        """The words of a script that this one reads."""
        name = _UNKNOWN_FOLDER.sub("", name)
        self.num_inside += 1
        text = self.beside(name) if self.num_inside <= _MOST_INSIDE else None
        if text is None:
            self.missing.append(name)
        else:
            yield from self.words(text.replace("\r\n", "\n"))
            yield _STOP, True

    def _called(self, call: Sequence[str]) -> Iterator[tuple[str, bool]]:
        """The words of a function, with the arguments of a call as its variables."""
        self.num_inside += 1
        self.called.add(call[0])
        if self.num_inside > _MOST_INSIDE:
            return
        given = {str(place): word for place, word in enumerate(call) if place}
        outside = {name: self.variables[name] for name in given if name in self.variables}
        self.variables |= given
        yield _STOP, True
        yield from self.words(self.functions[call[0]])
        yield _STOP, True
        for name in given:
            self.variables.pop(name, None)
        self.variables |= outside

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
        if token.startswith("`#"):  # a comment between the lines of a command
            return []
        is_set = _ASSIGNMENT.fullmatch(token)
        if is_set:
            value = self.value(is_set[3])
            if is_set[2]:
                value = self.variables.get(is_set[1], "") + value
            self._assign(is_set[1], value)
        else:
            value = self.value(token)
        alternatives = value.split(OR)
        if not all(each.startswith("--") for each in alternatives):
            alternatives = [value]
        parts = [
            "" if _ELSEWHERE.fullmatch(part) else part
            for each in alternatives
            for part in _bare(each).split()
        ]
        if len(parts) > 1 and any(part.startswith("--") for part in parts):
            return [*parts, ""]
        return [] if is_set and not value.startswith("--") else [value]

    def _assign(self, name: str, value: str) -> None:
        before = self.variables.get(name, "")
        if (self.depth or self.is_after_test) and before and not value.startswith(before):
            kept = before.split(OR)
            value = before if not value or value in kept else f"{before}{OR}{value}"
        self.variables[name] = value[:_LONGEST]

    def value(self, token: str) -> str:
        """A word as the command gets it."""
        if token.startswith("'") and token.endswith("'"):
            return token[1:-1]
        return _bare(self.expanded(token))

    def expanded(self, text: str) -> str:
        """A text with the values of its variables."""
        for _ in range(_MOST_NESTED):
            changed = _SUM.sub(self._sum, _VARIABLE.sub(self._variable, text))
            if changed == text or len(changed) > _LONGEST:
                break
            text = changed
        return text

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
    return re.sub(r"\\\r?\n|[\"']|\\(?=[\"$`\\|()&;<>* ])", "", text)


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
    """The value of an arithmetic expression of whole numbers and variables.

    Raises:
        ValueError: the expression has other parts.
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
