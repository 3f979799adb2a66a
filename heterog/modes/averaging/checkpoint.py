"""Entries of a checkpoint where islands average: their optimizers' states, and the outer one's.

After an averaging all islands have the same parameters, but each has the state of its own
optimizer. The first island's is saved as that of any plan; those of the others, and the momentum
of the outer optimizer, have names of their own. A plan with the same islands goes on exactly where
the saved one was, any other one from the first island's state.
"""

import re

from torch import Tensor

from heterog.errors import InputFileError
from heterog.modes.averaging.ranks import Averager, changes_key
from heterog.modes.islands import island_of, islands
from heterog.modes.on_ranks import Reading
from heterog.runtime.checkpoint.boxes import whole_box
from heterog.runtime.checkpoint.contents import Contents, dtype_of
from heterog.runtime.checkpoint.files import Entry
from heterog.runtime.checkpoint.held import name_and_shape, stepped_values
from heterog.runtime.checkpoint.left_out import Kept
from heterog.runtime.deploy import DeployedStep

OUTER = "averaging.outer"
"""Prefix of a parameter's name for its momentum in the outer optimizer."""


def averaging_entries(step: DeployedStep, averager: Averager) -> list[Entry]:
    """Entries of this rank's island and of the outer optimizer."""
    found = [
        (f"{OUTER}.{name_and_shape(step, row)[0]}", state.momentum)
        for row, state in averager.outer.items()
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


class SavedAveraging(Reading):
    """State of a rank's island and of the outer optimizer, read beside the current one.

    Args:
        step: A freshly deployed step.
        averager: Its averager.
        contents: Index of the checkpoint.

    Raises:
        InputFileError: the checkpoint contradicts itself.
    """

    def __init__(self, step: DeployedStep, averager: Averager, contents: Contents) -> None:
        super().__init__()
        self._step, self._averager = step, averager
        self._states: list[tuple[Tensor, str, str]] = []
        rows = _stepped_rows(step)
        names = set(contents.names)
        for row in averager.outer if averager.averaging.has_outer else ():
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
        averager = self._averager
        averager.begin(self._step.num_steps)
        for row, state in averager.outer.items():
            name = f"{OUTER}.{name_and_shape(self._step, row)[0]}"
            if state.momentum is not None and name in self.wanted:
                state.momentum.copy_(self.wanted[name])
        for stepped, key, name in self._states:
            now = self._step.optimizer.state[stepped][key]
            now.copy_(self.wanted[name].to(now.dtype))


def changes_left_out(averager: Averager) -> Kept:
    """What codecs have left out of the changes that islands send."""
    coded = {changes_key(each): each for each in averager.every_bucket if each.codec}
    outer = averager.outer
    return Kept(
        word="left_out_changes",
        feedback=averager.feedback,
        senders={key: set(bucket.senders) for key, bucket in coded.items()},
        rows={key: bucket.rows for key, bucket in coded.items()},
        dtypes={key: outer[key[0]].anchor.dtype for key in coded if key[0] in outer},
    )


def _has_same_islands(step: DeployedStep, names: set[str]) -> bool:
    """Whether as many islands were saved as there are; otherwise their states are useless."""
    found = (re.match(r"averaging\.island(\d{1,9})\.", name) for name in names)
    saved = {int(each[1]) for each in found if each is not None}
    return saved == set(range(1, len(islands(step.plan.strategy))))
