"""The snapshot to continue from: the newest one whose parts can all still be read."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from heterog.healing.wire import WireError


class Moment(NamedTuple):
    """A step of a generation; a later one compares as larger.

    Attributes:
        generation: Number of times the job's ranks were started before.
        step: Number of steps done.
    """

    generation: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Description of what one rank held at a moment, as keepers list it.

    Attributes:
        moment: Generation and step.
        number: Number of the part, which is the rank.
        num_parts: Number of parts of the snapshot, which is the number of ranks.
        num_bytes: Size of its tensors.
    """

    moment: Moment
    number: int
    num_parts: int
    num_bytes: int

    def to_header(self) -> dict[str, int]:
        """Encode it as a message header."""
        return {
            "generation": self.moment.generation,
            "step": self.moment.step,
            "number": self.number,
            "num_parts": self.num_parts,
            "num_bytes": self.num_bytes,
        }

    @staticmethod
    def from_header(header: Mapping[str, Any]) -> "Part":
        """Decode what ``to_header`` encoded.

        Raises:
            WireError: a number is missing or makes no sense.
        """
        names = ("generation", "step", "number", "num_parts", "num_bytes")
        values = [header.get(name) for name in names]
        if not all(isinstance(value, int) and value >= 0 for value in values):
            raise WireError(f"a part of a snapshot has {values} as {', '.join(names)}.")
        generation, step, number, num_parts, num_bytes = (int(value or 0) for value in values)
        if number >= num_parts:
            raise WireError(f"there is no part {number} of {num_parts}.")
        return Part(
            moment=Moment(generation, step),
            number=number,
            num_parts=num_parts,
            num_bytes=num_bytes,
        )


def newest_complete(lists: Iterable[Sequence[Part]]) -> Moment | None:
    """The newest moment of which all parts are in some list; ``None`` if there is none.

    >>> def part(step, number):
    ...     return Part(moment=Moment(0, step), number=number, num_parts=2, num_bytes=1)
    >>> newest_complete([[part(3, 0), part(4, 0)], [part(3, 1)]])
    Moment(generation=0, step=3)
    """
    found: dict[Moment, set[int]] = {}
    needed: dict[Moment, int] = {}
    for parts in lists:
        for part in parts:
            found.setdefault(part.moment, set()).add(part.number)
            needed[part.moment] = part.num_parts
    complete = [moment for moment, numbers in found.items() if len(numbers) == needed[moment]]
    return max(complete, default=None)
