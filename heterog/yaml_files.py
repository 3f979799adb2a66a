"""Reads YAML files of users, within limits and without repeated keys, and those of the package."""

from collections.abc import Hashable
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

import yaml

from heterog.errors import InputFileError
from heterog.records import field_name, parse_record

_MOST_EVENTS = 100_000
_MOST_DEPTH = 32
# libyaml's parser, if PyYAML was built with it: ten times as fast.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


_V = TypeVar("_V")


def load_shipped(file: Traversable) -> Any:
    """The value of a YAML file of the package, which needs no limits."""
    return yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)


def read_shipped(file: Traversable, kind: type[_V]) -> _V:
    """The record of a YAML file that ships with the package.

    Raises:
        InputFileError: a field is missing, unknown or wrong.
    """
    return parse_record(load_shipped(file), kind, file.name)


def parse_yaml(text: str, path: Path, *, what: str, if_empty: str) -> tuple[yaml.Node, object]:
    """The nodes and the value of a YAML text.

    Args:
        text: The YAML text.
        path: File that it was read from; begins every message.
        what: Kind of file with its article, for messages.
        if_empty: Advice for an empty file.

    Raises:
        InputFileError: it is no YAML, is empty, has a key twice, or is larger than any such file.
    """
    try:
        _check_events(text, path, what)
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            raise InputFileError(f"{path}: the file is empty; {if_empty}.")
        _check_nodes(root, path)
        return root, loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}, line {mark.line + 1}" if mark else str(path)
        fault = " ".join(str(error.problem).split())
        raise InputFileError(f"{where}: not valid YAML: {fault}.") from error
    # A tag that does not fit its value ("!!bool x") raises any error of its constructor.
    except (
        *(yaml.YAMLError, ArithmeticError, AttributeError, LookupError),
        *(TypeError, ValueError, RecursionError),
    ) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputFileError(f"{path}: not valid YAML: {said[:200]}.") from error


def _check_events(text: str, path: Path, what: str) -> None:
    """Refuse deeper nesting or more content than any file needs, before anything is built.

    libyaml builds nodes by recursion without a limit of its own.
    """
    depth = 0
    for number, event in enumerate(yaml.parse(text, Loader=_Loader)):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _MOST_DEPTH or number > _MOST_EVENTS:
            fault = "nests too deeply" if depth > _MOST_DEPTH else "says too much"
            where = f"{path}, line {event.start_mark.line + 1}" if event.start_mark else path
            raise InputFileError(f"{where}: {fault} for {what}.")


def _check_nodes(root: yaml.Node, path: Path) -> None:
    """Refuse equal keys, of which PyYAML would silently keep the last one, and too many aliases.

    An alias may not contain itself, and all together may not stand for more than a file may hold:
    ten lines of ten aliases each expand to ten billion values.
    """
    num_seen, above = 0, set[int]()

    def look_at(node: yaml.Node) -> None:
        nonlocal num_seen
        num_seen += 1
        line = f"{path}, line {node.start_mark.line + 1}"
        if id(node) in above:
            raise InputFileError(f"{line}: an alias stands for a part of itself.")
        if num_seen > _MOST_EVENTS:
            raise InputFileError(f"{path}: its aliases stand for more values than are read.")
        is_mapping = isinstance(node, yaml.MappingNode)
        above.add(id(node))
        keys = set[Hashable]()
        for key, value in node.value if is_mapping else ():
            if isinstance(key, yaml.ScalarNode) and key.value in keys:
                raise InputFileError(
                    f"{path}, line {key.start_mark.line + 1}, {field_name([key.value])}: this "
                    "field is there twice; remove one."
                )
            keys.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
            look_at(key)
            look_at(value)
        for child in node.value if isinstance(node, yaml.SequenceNode) else ():
            look_at(child)
        above.remove(id(node))

    look_at(root)
