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
from heterog.modes.on_ranks import Reading
from heterog.runtime.checkpoint.boxes import Entry
from heterog.runtime.checkpoint.contents import Contents, dtype_of
from heterog.runtime.checkpoint.held import name_and_shape
from heterog.runtime.deploy import DeployedStep
from heterog.runtime.step.gradients import ErrorFeedback, Key


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOutParts:
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


def left_out_reading(step: DeployedStep, contents: Contents) -> Reading:
    """Read left-out parts from a checkpoint, in the form that a resuming rank needs.

    Args:
        step: A freshly deployed step.
        contents: Index of the checkpoint.
    """
    wanted: dict[str, Tensor] = {}
    found: list[tuple[ErrorFeedback, dict[Key, Tensor]]] = []
    sums: list[tuple[Tensor, str]] = []  # and what is added to each
    for kept in _every_kind(step):
        left_out: dict[Key, Tensor] = {}
        found.append((kept.feedback, left_out))
        for key in [key for key, ranks in kept.senders.items() if step.rank in ranks]:
            rows = kept.rows[key]
            if not any(_saved(contents, _prefix(step, kept, row)) for row in rows):
                continue
            num_elements = sum(_size(step, row) for row in rows)
            flat = torch.zeros(num_elements, dtype=kept.dtypes[key], device=step.device)
            left_out[key] = flat
            for row, value in _by_row(step, rows, flat):
                now = {
                    rank
                    for other, ranks in kept.senders.items()
                    if row in kept.rows[other]
                    for rank in ranks
                }
                saved = _saved(contents, _prefix(step, kept, row))
                for name in _taken_over(saved, now, step.rank):
                    like = contents.shape(name), dtype_of(contents.dtype(name))
                    wanted.setdefault(name, torch.empty(like[0], dtype=like[1]))
                    sums.append((value, name))

    def take_over() -> None:
        for value, name in sums:
            value += wanted[name].to(value)
        for feedback, left_out in found:
            feedback.left_out = left_out

    return Reading(wanted=wanted, take_over=take_over)


def _taken_over(saved: Mapping[int, str], now: set[int], rank: int) -> list[str]:
    """The saved tensors of a parameter that a rank takes over.

    Args:
        saved: Names by the ranks that left them out.
        now: Ranks that send the parameter's messages now.
        rank: The rank, one of these.
    """
    if set(saved) == now:
        return [saved[rank]]
    return list(saved.values()) if rank == min(now) else []


def _saved(contents: Contents, prefix: str) -> dict[int, str]:
    """Names of the saved tensors of a parameter, by the rank that left them out."""
    found = {}
    for name in contents.names:
        rank = name.removeprefix(prefix)
        if rank != name and rank.isdecimal():
            found[int(rank)] = name
    return found


def _every_kind(step: DeployedStep) -> Iterator[LeftOutParts]:
    """Left-out parts of gradients in steps, and of changes when islands average."""
    part = step.rank_program
    program = part.program
    senders: dict[Key, set[int]] = {}
    for task in np.flatnonzero(program.kind == TaskKind.ENCODE).tolist():
        if part.rule(task).traffic == Traffic.GRADIENTS:
            key = int(program.subject[task]), part.channel(part.message_of[task]).devices
            senders.setdefault(key, set()).add(int(program.device[task]))
    yield LeftOutParts(
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
    return graph.tensors[graph.updates[row][1]].num_elements


def _prefix(step: DeployedStep, kept: LeftOutParts, row: int) -> str:
    return f"{kept.word}.{name_and_shape(step, row)[0]}."


def _by_row(step: DeployedStep, rows: Sequence[int], flat: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Views of a flat tensor for each parameter in it that does not live in slices."""
    if any(row in step.rank_program.sharded for row in rows):
        return
    yield from zip(rows, torch.split(flat, [_size(step, row) for row in rows]), strict=True)
