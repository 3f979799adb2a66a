"""Methods by name, as a value that is passed on; importing a method's file registers nothing."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module

from heterog.errors import UnknownNameError
from heterog.methods.built_in import METHODS
from heterog.methods.planner import STAGES, Planner
from heterog.names import name_fault

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Methods:
    """The methods that a request may name; ``auto`` runs those that suit graph and cluster.

    Attributes:
        planners: Baselines, then policies, then searches; each in the order in which they run.

    Raises:
        ValueError: the name of a method is not allowed; see ``heterog.names``.
    """

    planners: tuple[Planner, ...]

    def __post_init__(self) -> None:
        for planner in self.planners:
            if (fault := name_fault(planner.name)) is not None:
                raise ValueError(f"the method's name {planner.name!r} {fault}.")
        ordered = sorted(self.planners, key=lambda planner: STAGES.index(planner.stage))
        object.__setattr__(self, "planners", tuple(ordered))

    def __iter__(self) -> Iterator[Planner]:
        return iter(self.planners)

    def __getitem__(self, name: str) -> Planner:
        """The method of a name.

        Raises:
            UnknownNameError: there is none; names the nearest.
        """
        for planner in self.planners:
            if planner.name == name:
                return planner
        raise UnknownNameError("method", name, [AUTO, *self.names])

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all methods."""
        return tuple(planner.name for planner in self.planners)

    def having(self, *planners: Planner) -> "Methods":
        """These methods and some more, which replace those of the same names."""
        new = {planner.name: planner for planner in planners}
        kept = [new.pop(planner.name, planner) for planner in self.planners]
        return Methods((*kept, *new.values()))


@cache
def built_in_methods() -> Methods:
    """All methods of this package that need no policy."""
    places = (note.made_by.split(":") for note in METHODS if note.made_by)
    return Methods(
        tuple(
            getattr(import_module(f"heterog.methods.{module}"), name)() for module, name in places
        )
    )
