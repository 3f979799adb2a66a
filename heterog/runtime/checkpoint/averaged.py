"""Entries of a checkpoint where islands average: their optimizers' states, and the outer one's.

After an averaging all islands have the same parameters, but each has the state of its own
optimizer. The first island's is saved as that of any plan; those of the others, and the momentum
of the outer optimizer, have names of their own. A plan with the same islands goes on exactly where
the saved one was, any other one from the first island's state.
"""

import re

from torch import Tensor

from heterog.errors import InputFileError
from heterog.runtime.checkpoint.boxes import whole_box
from heterog.runtime.checkpoint.contents import Contents, dtype_of
from heterog.runtime.checkpoint.files import Entry
from heterog.runtime.checkpoint.held import name_and_shape, stepped_values
from heterog.runtime.deploy import DeployedStep
from heterog.strategy.averaging import island_of, islands

OUTER = "averaging.outer"
"""Prefix of a parameter's name for its momentum in the outer optimizer."""


def averaging_entries(step: DeployedStep) -> list[Entry]:
    """Entries of this rank's island and of the outer optimizer; none in an exact plan."""
    if step.averager is None:
        return []
    found = [
        (f"{OUTER}.{name_and_shape(step, row)[0]}", state.momentum)
        for row, state in step.averager.outer.items()
        if state.momentum is not None and step.part.owner(row) == step.rank
    ]
    if _island_of(step) > 0:
        found += _island_state(step)
    return [
        Entry(whole=name, shape=tuple(value.shape), box=whole_box(value.shape), value=value)
        for name, value in found
    ]


def _island_of(step: DeployedStep) -> int:
    """Number of this rank's island; 0, whose state is saved as any plan's, for a rank of none."""
    return island_of(step.plan.strategy, step.rank) or 0


def _island_state(step: DeployedStep) -> list[tuple[str, Tensor]]:
    """Tensors of the optimizer's state that this rank saves for its island."""
    island, found = _island_of(step), []
    for row, stepped in _stepped_rows(step).items():
        team = step.part.decision(row).teams[island]
        if step.rank != min(team):
            continue
        name, _ = name_and_shape(step, row)
        for key, value in step.optimizer.state.get(stepped, {}).items():
            if isinstance(value, Tensor):
                found.append((_name(island, name, key), value.detach()))
    return found


def _name(island: int, parameter: str, key: str) -> str:
    return f"averaging.island{island}.{parameter}.{key}"


def _stepped_rows(step: DeployedStep) -> dict[int, Tensor]:
    """The optimizer's tensor of each parameter, by row of ``graph.updates``."""
    graph = step.captured.graph
    row_of = {graph.tensors[tensor].name: row for row, (_, tensor, _) in enumerate(graph.updates)}
    return {row_of[each.members[0].name]: each.stepped for each in stepped_values(step)}


class SavedAveraging:
    """State of a rank's island and of the outer optimizer, read beside the current one.

    Args:
        step: A freshly deployed step.
        contents: Index of the checkpoint.

    Attributes:
        wanted: New tensors by the name under which they were saved.

    Raises:
        InputFileError: the checkpoint contradicts itself.
    """

    def __init__(self, step: DeployedStep, contents: Contents) -> None:
        self.wanted: dict[str, Tensor] = {}
        self._step = step
        self._states: list[tuple[Tensor, str, str]] = []
        if step.averager is None:
            return
        rows = _stepped_rows(step)
        names = set(contents.names)
        for row in step.averager.outer if step.averager.averaging.has_outer else ():
            name = f"{OUTER}.{name_and_shape(step, row)[0]}"
            if name in names:
                self._want(contents, name, tuple(rows[row].shape), rows[row])
        island = _island_of(step)
        for row, stepped in rows.items() if _has_same_islands(step, names) else ():
            name, _ = name_and_shape(step, row)
            for key in contents.states[name].tensors:
                own = _name(island, name, key)
                if own in names:
                    shape = contents.shape(f"optimizer.{name}.{key}")
                    self._want(contents, own, shape, stepped)
                    self._states.append((stepped, key, own))

    def _want(self, contents: Contents, name: str, shape: tuple[int, ...], like: Tensor) -> None:
        if contents.shape(name) != shape:
            raise InputFileError(
                f"the checkpoint's {name} has shape {contents.shape(name)}, not {shape}; it is "
                "damaged."
            )
        dtype = dtype_of(contents.dtype(name))
        self.wanted[name] = like.detach().new_empty(shape, dtype=dtype)

    def take_over(self) -> None:
        """Make it the state of the step, whose parameters and optimizer are already loaded."""
        averager = self._step.averager
        if averager is None:
            return
        averager.begin(self._step.num_steps)
        for row, state in averager.outer.items():
            name = f"{OUTER}.{name_and_shape(self._step, row)[0]}"
            if state.momentum is not None and name in self.wanted:
                state.momentum.copy_(self.wanted[name])
        for stepped, key, name in self._states:
            now = self._step.optimizer.state[stepped][key]
            now.copy_(self.wanted[name].to(now.dtype))


def _has_same_islands(step: DeployedStep, names: set[str]) -> bool:
    """Whether as many islands were saved as there are; otherwise their states are useless."""
    found = (re.match(r"averaging\.island(\d{1,9})\.", name) for name in names)
    saved = {int(each[1]) for each in found if each is not None}
    return saved == set(range(1, len(islands(step.plan.strategy))))
