"""Parts of gradients and of parameters' changes that codecs have left out, in a checkpoint.

They are saved for each parameter and rank as ``left_out.PARAMETER.RANK``, and where islands
average as ``left_out_changes.PARAMETER.RANK``. A run that resumes with messages of the same ranks
continues as if it had not stopped. If other ranks send the parameter's messages now, the first of
them takes over the sum of all left-out parts, which the parameter still lacks. Under a plan
without codecs for the parameter these parts are lost. Parameters that live in slices by op rules
have no such entries; they resume with nothing left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from heterog.lowering.program import TaskKind
from heterog.modes.mode import Traffic
from heterog.runtime.checkpoint.boxes import Box, Entry, whole_box
from heterog.runtime.checkpoint.contents import Contents, dtype_of
from heterog.runtime.checkpoint.held import name_and_shape
from heterog.runtime.deploy import DeployedStep
from heterog.runtime.step.gradients import ErrorFeedback, Key


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Left-out parts of one kind on a rank.

    Attributes:
        word: First part of the names in a checkpoint.
        feedback: The rank's left-out parts.
        senders: Ranks that encode the messages of each key.
        rows: Rows of ``graph.updates`` in each of these messages.
        dtypes: Dtype of each of these messages.
    """

    word: str
    feedback: ErrorFeedback
    senders: Mapping[Key, set[int]]
    rows: Mapping[Key, Sequence[int]]
    dtypes: Mapping[Key, torch.dtype]


def left_out_entries(step: DeployedStep) -> Iterator[Entry]:
    """Entries of the parts that this rank has left out, by parameter."""
    for kept in _every_kind(step):
        for key, flat in kept.feedback.left_out.items():
            for row, value in _by_row(step, kept.rows[key], flat):
                yield Entry.of_whole(f"{_prefix(step, kept, row)}{step.rank}", value)


class NewLeftOut:
    """Left-out parts from a checkpoint, in the form that a resuming rank needs.

    Args:
        step: A freshly deployed step.
        contents: Index of the checkpoint.
        wanted: Boxes of saved tensors and the tensors to fill, by name; entries are added.
    """

    def __init__(
        self, step: DeployedStep, contents: Contents, wanted: dict[str, list[tuple[Box, Tensor]]]
    ) -> None:
        self._step = step
        self._found: list[tuple[ErrorFeedback, dict[Key, Tensor]]] = []
        self._reads: list[tuple[Tensor, Tensor]] = []  # (sum, tensor that is read and added)
        for kept in _every_kind(step):
            own = [key for key, ranks in kept.senders.items() if step.rank in ranks]
            found = {}
            for key in own:
                if any(_saved(contents, _prefix(step, kept, row)) for row in kept.rows[key]):
                    found[key] = self._read(contents, kept, key, wanted)
            self._found.append((kept.feedback, found))

    def _read(
        self,
        contents: Contents,
        kept: Kept,
        key: Key,
        wanted: dict[str, list[tuple[Box, Tensor]]],
    ) -> Tensor:
        """A new tensor for the parts of a key that this rank takes over; adds what it reads."""
        rows = kept.rows[key]
        num_elements = sum(_size(self._step, row) for row in rows)
        flat = torch.zeros(num_elements, dtype=kept.dtypes[key], device=self._step.device)
        for row, value in _by_row(self._step, rows, flat):
            now = {
                rank
                for other, ranks in kept.senders.items()
                if row in kept.rows[other]
                for rank in ranks
            }
            for name in self._names(contents, _prefix(self._step, kept, row), now):
                target = torch.empty(contents.shape(name), dtype=dtype_of(contents.dtype(name)))
                wanted.setdefault(name, []).append((whole_box(tuple(target.shape)), target))
                self._reads.append((value, target))
        return flat

    def _names(self, contents: Contents, prefix: str, now: set[int]) -> list[str]:
        """The saved tensors of a parameter that this rank takes over."""
        saved, rank = _saved(contents, prefix), self._step.rank
        if set(saved) == now:
            return [saved[rank]]
        return list(saved.values()) if rank == min(now) else []

    def take_over(self) -> None:
        """Make the read parts the state of the step's codecs."""
        for value, read in self._reads:
            value += read.to(value)
        for feedback, found in self._found:
            feedback.left_out = found


def _saved(contents: Contents, prefix: str) -> dict[int, str]:
    """Names of the saved tensors of a parameter, by the rank that left them out."""
    found = {}
    for name in contents.names:
        rank = name.removeprefix(prefix)
        if rank != name and rank.isdecimal():
            found[int(rank)] = name
    return found


def _every_kind(step: DeployedStep) -> Iterator[Kept]:
    """Left-out parts of gradients in steps, and of changes when islands average."""
    part = step.rank_program
    program = part.program
    senders: dict[Key, set[int]] = {}
    for task in np.flatnonzero(program.kind == TaskKind.ENCODE).tolist():
        if part.rule(task).traffic == Traffic.GRADIENTS:
            key = int(program.subject[task]), part.channel(part.message_of[task]).devices
            senders.setdefault(key, set()).add(int(program.device[task]))
    yield Kept(
        word="left_out",
        feedback=step.feedback,
        senders=senders,
        rows={
            key: part.bucket_members.get(key[0], [key[0]])
            for key in (*senders, *step.feedback.left_out)
        },
        dtypes={key: part.gradient_dtype(key[0]) for key in senders},
    )
    for mode in step.modes:
        yield from mode.left_out(step)


def _size(step: DeployedStep, row: int) -> int:
    graph = step.captured.graph
    return graph.tensors[graph.updates[row][1]].meta.num_elements


def _prefix(step: DeployedStep, kept: Kept, row: int) -> str:
    return f"{kept.word}.{name_and_shape(step, row)[0]}."


def _by_row(step: DeployedStep, rows: Sequence[int], flat: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Views of a flat tensor for each parameter in it that does not live in slices."""
    if any(row in step.rank_program.sharded for row in rows):
        return
    yield from zip(rows, torch.split(flat, [_size(step, row) for row in rows]), strict=True)
