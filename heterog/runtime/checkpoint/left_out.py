"""Parts of gradients that codecs have left out, as a part of a checkpoint.

It is kept for each parameter and rank, as ``left_out.PARAMETER.RANK``. A run that is resumed with
messages of the same ranks goes on as if it had not stopped. If other ranks send the parameter's
gradients now, the first of them takes over what all have left out together, which is what is still
missing in the parameter. Under a plan without codecs for it nobody sends it any more. Parameters
that live in slices by rules of their ops are left out here; they begin with nothing.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from heterog.runtime.checkpoint.boxes import Box, whole_box
from heterog.runtime.checkpoint.contents import Contents, dtype_of
from heterog.runtime.checkpoint.files import Entry
from heterog.runtime.checkpoint.held import name_and_shape
from heterog.runtime.deploy import DeployedStep
from heterog.runtime.feedback import Key
from heterog.strategy.codec import Traffic
from heterog.strategy.program import TaskKind


def left_out_entries(step: DeployedStep) -> Iterator[Entry]:
    """Entries of what this rank has left out, by parameter."""
    for key, flat in step.feedback.left_out.items():
        for row, value in _by_row(step, key, flat):
            name = f"{_prefix(step, row)}{step.rank}"
            shape = tuple(value.shape)
            yield Entry(whole=name, shape=shape, box=whole_box(shape), value=value)


class NewLeftOut:
    """Parts of gradients that codecs left out, in the form in which a rank resumes with them.

    Args:
        step: A freshly deployed step.
        contents: Index of the checkpoint.
        wanted: Boxes of saved tensors and the tensors to fill, by name; entries are added.
    """

    def __init__(
        self, step: DeployedStep, contents: Contents, wanted: dict[str, list[tuple[Box, Tensor]]]
    ) -> None:
        self._step = step
        self._found: dict[Key, Tensor] = {}
        self._reads: list[tuple[Tensor, Tensor]] = []  # (what is added to, what is read)
        senders = _senders(step)
        for key in (key for key, ranks in senders.items() if step.rank in ranks):
            rows = _rows(step, key)
            num_elements = sum(_size(step, row) for row in rows)
            dtype = step.rank_program.gradient_dtype(key[0])
            flat = torch.zeros(num_elements, dtype=dtype, device=step.device)
            if not contents.names or not any(_saved(contents, _prefix(step, r)) for r in rows):
                continue
            self._found[key] = flat
            for row, value in _by_row(step, key, flat):
                now = {
                    rank for each in senders if row in _rows(step, each) for rank in senders[each]
                }
                for name in self._names(contents, _prefix(step, row), now):
                    dtype = dtype_of(contents.dtype(name))
                    target = torch.empty(contents.shape(name), dtype=dtype)
                    wanted.setdefault(name, []).append((whole_box(tuple(target.shape)), target))
                    self._reads.append((value, target))

    def _names(self, contents: Contents, prefix: str, now: set[int]) -> list[str]:
        """The saved tensors of a parameter that this rank takes over."""
        saved, rank = _saved(contents, prefix), self._step.rank
        if set(saved) == now:
            return [saved[rank]]
        return list(saved.values()) if rank == min(now) else []

    def take_over(self) -> None:
        """Make it the state of the step's codecs."""
        for value, read in self._reads:
            value += read.to(value)
        self._step.feedback.left_out = self._found


def _saved(contents: Contents, prefix: str) -> dict[int, str]:
    """Names of the saved tensors of a parameter, by the rank that left them out."""
    found = {}
    for name in contents.names:
        rank = name.removeprefix(prefix)
        if rank != name and rank.isdecimal():
            found[int(rank)] = name
    return found


def _senders(step: DeployedStep) -> dict[Key, set[int]]:
    """The ranks that encode gradients, by key of what is left out."""
    part = step.rank_program
    program = part.program
    found: dict[Key, set[int]] = {}
    for task in np.flatnonzero(program.kind == TaskKind.ENCODE).tolist():
        if part.traffic(task) == Traffic.GRADIENTS:
            key = int(program.subject[task]), part.channel(part.message_of[task]).devices
            found.setdefault(key, set()).add(int(program.device[task]))
    return found


def _rows(step: DeployedStep, key: Key) -> list[int]:
    """Rows of the parameters of a key."""
    return step.rank_program.bucket_members.get(key[0], [key[0]])


def _size(step: DeployedStep, row: int) -> int:
    graph = step.captured.graph
    return graph.tensors[graph.updates[row][1]].meta.num_elements


def _prefix(step: DeployedStep, row: int) -> str:
    return f"left_out.{name_and_shape(step, row)[0]}."


def _by_row(step: DeployedStep, key: Key, flat: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Views of a flat tensor for each parameter in it that does not live in slices."""
    rows = _rows(step, key)
    if any(row in step.rank_program.sharded for row in rows):
        return
    begin = 0
    for row in rows:
        yield row, flat[begin : begin + _size(step, row)]
        begin += _size(step, row)
