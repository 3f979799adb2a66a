"""The YAML text of a cluster file, and errors that name its line and field."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import yaml
from pydantic_core import ErrorDetails

from heterog.errors import InputFileError
from heterog.names import shown
from heterog.records import field_name
from heterog.yaml_files import parse_yaml


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A YAML text with the places of its fields."""

    path: Path
    root: yaml.Node
    value: object

    @staticmethod
    def parse(text: str, path: Path) -> "Document":
        """Read the text of a file.

        Raises:
            InputFileError: It is no YAML.
        """
        root, value = parse_yaml(
            text, path, what="a cluster file", if_empty="see 'heterog clusters'"
        )
        return Document(path=path, root=root, value=value)

    def line_and_field(self, location: Sequence[int | str]) -> tuple[int, str]:
        """Line of the field (or of its missing parent) and its name, as in hosts[0].nic."""
        node, line, shown = self.root, self.root.start_mark.line, ""
        for position, step in enumerate(location):
            last = position == len(location) - 1
            if isinstance(node, yaml.SequenceNode) and isinstance(step, int):
                if step < len(node.value):
                    node = node.value[step]
                    line, shown = node.start_mark.line, f"{shown}[{step}]"
            elif isinstance(node, yaml.MappingNode):
                found = _pair(node, str(step))
                if found is not None:
                    line, node = found[0].start_mark.line, found[1]
                # Elsewhere a step is pydantic's own (which branch of a union): not in the file.
                if found is not None or last:
                    shown = f"{shown}.{step}" if shown else str(step)
        return line + 1, shown

    def refuse(self, location: Sequence[int | str], fault: str) -> NoReturn:
        """Raises InputFileError with file, line and field."""
        line, field = self.line_and_field(location)
        where = f"{self.path}, line {line}" + (f", {field_name([field])}" if field else "")
        raise InputFileError(f"{where}: {fault}")

    def refuse_all(self, errors: Sequence[ErrorDetails]) -> NoReturn:
        """Raises InputFileError about the first error and counts the others."""
        location = errors[0]["loc"]
        if errors[0]["type"] == "unknown_field":
            location = (*location, str(errors[0]["ctx"]["field"]))
        if location and location[-1] == "mapping":  # pydantic's own: which branch of a union
            location = location[:-1]
        more = f" ({len(errors) - 1} more after this one)" if len(errors) > 1 else ""
        self.refuse(location, _fault(errors[0]) + more)


def _pair(node: yaml.MappingNode, key: str) -> tuple[yaml.Node, yaml.Node] | None:
    # The last one, because what a merge key brings in comes before the node's own fields.
    return next((pair for pair in reversed(node.value) if pair[0].value == key), None)


def _fault(error: ErrorDetails) -> str:
    """A sentence with the error and what to write instead."""
    kind, got, context = error["type"], shown(error["input"]), error.get("ctx", {})
    if kind in ("model_type", "dict_type"):
        return f"got {got}; write a mapping of fields."
    if kind == "list_type":
        return f"got {got}; write a list."
    if kind == "missing":
        return "this field is required."
    if kind == "string_type":
        return f"got {got}; write a text, in quotes if YAML reads it as something else."
    if kind in ("value", "unknown_field"):
        return f"{error['msg']}."
    if kind == "value_error":
        return f"{got} {context['error']}."
    limits = {
        "greater_than": "above {gt:g}",
        "greater_than_equal": "at least {ge:g}",
        "less_than_equal": "at most {le:g}",
        "finite_number": "a finite number",
    }
    if isinstance(error["input"], float) and math.isinf(error["input"]):
        return f"{got} is not a finite number."
    if kind in limits:
        return f"{got} is not {limits[kind].format(**context)}."
    return f"got {got}; {error['msg'][0].lower()}{error['msg'][1:]}."
