"""The fields of another program's file: each is read once, and unread fields are named."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from heterog.errors import InputFileError
from heterog.names import first_of, shown
from heterog.strategy.layouts.layout import MOST, Layout, LayoutError, programs

_MOST_UNREAD = 40
_DEGREE = re.compile(
    r"^(?!.*(infer|eval|valid|test)).*"
    r"((?<!data)_parallel_(world_)?(size|degree)|(^|[._])(tp|cp|ep|sp|pp)_(size|degree))$"
)
"""Names of degrees of parallelism, except in sections about inference and evaluation."""
_TELLING = re.compile(
    "parallel|batch|recompute|checkpoint_|shard|zero|fsdp|pipeline|expert|moe|offload|overlap|stage"
    "|mapping|virtual|comm_|_comm|compress|quantiz|num_gpus|nproc|nodes|accumulat"
)
"""Names of fields that may change where and when ops run."""


_DEEPEST = 8
"""Most levels of nested sections that are searched."""


def leaves(document: object, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The fields of all sections with their dotted paths.

    >>> [*leaves({"a": {"b": 1}, "c": 2})]
    [('a.b', 1), ('c', 2)]
    """
    if not isinstance(document, dict) or depth > _DEEPEST:
        yield path, document
        return
    for name, value in document.items():
        yield from leaves(value, f"{path}.{name}".lstrip("."), depth + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutFile:
    """A layout read from a file.

    Attributes:
        layout: The layout.
        batch_size: Number of samples of the global batch; 0 if the file does not say.
        remarks: Sentences about parts of the file that the layout does not express.
    """

    layout: Layout
    batch_size: int = 0
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Twice:
    """Stands for the value of a field that a file gives two values.

    Attributes:
        fault: Sentence about the two values; the message of an error if the field is read.
    """

    fault: str


class Fields:
    """The fields of a document, each read once, with its type checked.

    Args:
        document: Content of the file.
        where: Start of every message.

    Attributes:
        remarks: Sentences about fields so far.
    """

    def __init__(self, document: object, where: str) -> None:
        if not isinstance(document, dict):
            raise InputFileError(f"{where} holds {shown(document)}, not fields with names.")
        self._document: dict[str, Any] = document
        self._where = where
        self._taken: dict[str, set[str]] = {}
        self._skipped: set[str] = set()
        self.remarks: list[str] = []

    def section(self, path: str) -> dict[str, Any]:
        """The mapping at a dotted path; empty if there is none.

        Raises:
            InputFileError: there is something else.
        """
        found: Any = self._document
        for part in filter(None, path.split(".")):
            found = found.get(part)
            if found is None:
                return {}
            if not isinstance(found, dict):
                self._refuse(path, found, "a section with fields")
        self._taken.setdefault(path, set())
        return dict(found)

    def take(self, path: str, name: str) -> Any:
        """The value of a field of any type; ``None`` if it is not there."""
        value = self.section(path).get(name)
        self._taken.setdefault(path, set()).add(name)
        if isinstance(value, Twice):
            raise LayoutError(value.fault)
        return value

    def merge(self, path: str, older: str, having: str = "") -> None:
        """Move fields of another section into a section: older files of a program have them there.

        Args:
            path: The section.
            older: The other section.
            having: Only fields with this in their names are moved.
        """
        moved = {name: value for name, value in self.section(older).items() if having in name}
        rest = {name: value for name, value in self.section(older).items() if name not in moved}
        self._document = {**self._document, path: {**moved, **self.section(path)}, older: rest}
        self._taken.pop(older, None)

    def below(self, path: str, prefix: str, names: Mapping[str, str]) -> "Fields":
        """The fields of a section as a document: names lose a prefix, and some are replaced."""
        self.skip("", path)
        short = {name.removeprefix(prefix): value for name, value in self.section(path).items()}
        found = Fields({names.get(name, name): short[name] for name in short}, self._where)
        found.remarks = self.remarks
        return found

    def number(
        self, path: str, name: str, default: int, *, least: int = 1, auto: bool = False
    ) -> int:
        """A whole number; with ``auto``, the word ``"auto"`` gives the default."""
        value = self.take(path, name)
        if value is None or (auto and value == "auto"):
            return default
        if type(value) is not int or not least <= value <= MOST:
            self._refuse(f"{path}.{name}", value, f"a whole number from {least} to {MOST}")
        return int(value)

    def flag(self, path: str, name: str, *, default: bool = False) -> bool:
        """True or false."""
        value = self.take(path, name)
        if value is None:
            return default
        if isinstance(value, str) and value.startswith("$"):  # more options after this one
            self.remark(f"Only a shell can say what stands for: {shown(value)[1:-1]}.")
            return True
        if isinstance(value, str):
            value = {"true": True, "false": False}.get(value.lower(), value)
        if type(value) is not bool:
            self._refuse(f"{path}.{name}", value, "true or false")
        return bool(value)

    def word(self, path: str, name: str, default: str = "") -> str:
        """A text; a number of one digit is accepted, too."""
        value = self.take(path, name)
        if value is None:
            return default
        if type(value) is int and 0 <= value < 10:
            return str(value)
        if not isinstance(value, str) or len(value) > 1000 or not value.isprintable():
            self._refuse(f"{path}.{name}", value, "a text")
        return str(value)

    def words(self, path: str, name: str) -> tuple[str, ...]:
        """A list of texts."""
        value = self.take(path, name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(
            isinstance(each, str) and each.isprintable() for each in value
        ):
            self._refuse(f"{path}.{name}", value, "a list of texts")
        return tuple(value)

    def skip(self, path: str, *names: str) -> None:
        """Ignore fields and sections that do not change where and when ops run."""
        self._skipped.update(f"{path}.{name}".lstrip(".") for name in names)

    def ignore_known(self, program: str) -> None:
        """Ignore the fields of a program that are known not to be parts of a layout."""
        for path, names in programs()["ignored"][program].items():
            self.skip(path, *names)

    def remark(self, text: str) -> None:
        """Add a remark about something that the layout does not express."""
        self.remarks.append(text)

    def check_that_some_are_known(self, besides: Collection[str]) -> None:
        """Refuse a file of another program, which would look like plain data parallelism.

        Args:
            besides: Fields that do not count, like those of a launcher.

        Raises:
            LayoutError: the file has fields, but none that was read.
        """
        known = {path.split(".")[0] for path in self._taken} | self._taken.get("", set())
        if self._document and not known & self._document.keys() - set(besides):
            names = ", ".join(shown(name)[1:-1] for name in [*self._document][:_MOST_UNREAD])
            raise LayoutError(
                f"its fields ({names}) are none that are read, so it is for another program. Say "
                "the layout in words instead, such as tp=2,pp=4."
            )

    def unread(self) -> list[str]:
        """A sentence that lists fields that were neither read nor skipped.

        All names about parallelism or batches are listed, and others up to a limit.

        Raises:
            LayoutError: an unread field is a degree of parallelism above 1.
        """
        left = [
            path
            for path, value in leaves(self._document)
            if value not in (None, {}) and not self._is_known(path)
        ]
        if not left:
            return []
        for path, value in leaves(self._document):
            if path in left and type(value) is int and value > 1 and _DEGREE.search(path):
                raise LayoutError(f"{path} is {value}; only 1 can be said.")
        left.sort(key=lambda name: not _TELLING.search(name))
        telling = sum(1 for name in left if _TELLING.search(name))
        most = max(telling, _MOST_UNREAD)
        names = [shown(name)[1:-1] for name in left]
        return [f"Not used from the file: {first_of(names, most)}."]

    def _is_known(self, path: str) -> bool:
        section, _, name = path.rpartition(".")
        parts = path.split(".")
        above = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
        return name in self._taken.get(section, ()) or bool(above & self._skipped)

    def _refuse(self, name: str, value: object, wanted: str) -> None:
        raise InputFileError(
            f"{self._where}: field '{name.lstrip('.')}' is {shown(value)}; it must be {wanted}."
        )
