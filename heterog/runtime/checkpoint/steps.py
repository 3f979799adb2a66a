"""Saving a deployed step as a checkpoint, and loading it into another one."""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from heterog import __version__
from heterog.errors import HeterogError, InputFileError
from heterog.files import CHECKPOINT_INDEX
from heterog.runtime.checkpoint.contents import (
    Contents,
    SavedOptimizer,
    SavedTensor,
    read_contents,
    states_from_json,
    tensors_from_json,
    to_json,
)
from heterog.runtime.checkpoint.files import (
    first_line,
    make_data_folder,
    publish,
    read_boxes,
    write_tensors,
)
from heterog.runtime.checkpoint.left_out import left_out_entries
from heterog.runtime.checkpoint.state import NewState, check_fits, own_entries
from heterog.runtime.deploy import DeployedStep
from heterog.runtime.step.collectives import gather_texts


def save_checkpoint(
    step: DeployedStep, folder: str | Path, *, extra: Mapping[str, Any] | None = None
) -> None:
    """Save parameters, buffers and the optimizer's state; every rank calls it.

    A replicated parameter comes from its first replica, a parameter with a home from its home.
    BatchNorm statistics come from the first replica that has samples (rank 0 in plain data
    parallelism); those of other replicas, which have seen other samples, are not saved.

    Args:
        step: A step on which no call is running.
        folder: Folder, made if it does not exist; a checkpoint in it is replaced.
        extra: JSON values to keep with it, for example the epoch. Rank 0's are kept.

    Raises:
        HeterogError: a rank cannot write, the optimizer has state that JSON and tensors cannot
            hold, or islands have trained apart. Every rank raises; the old checkpoint stays.
    """
    model = step.model  # ends open updates, on all ranks
    step.require_averaged()
    target = Path(folder)
    number = 0
    with _together():
        if step.rank == 0:
            number = make_data_folder(target)
    data = target / f"data-{_from_rank_0(number)}"
    tensors: dict[str, SavedTensor] = {}
    states: dict[str, SavedOptimizer] = {}
    try:
        with _together():
            if not data.is_dir():
                raise InputFileError(
                    f"{data}, made by rank 0, is not there on rank {step.rank}; save to a folder "
                    "that all ranks share."
                )
            entries, states = own_entries(step, model)
            entries += left_out_entries(step)
            tensors = write_tensors(entries, data, step.rank)
        # Parts of the index are small, and collected as text.
        said = gather_texts(json.dumps([to_json(tensors), to_json(states)]))
        with _together():
            if step.rank == 0:
                graph = step.captured.graph
                contents = Contents(
                    heterog=__version__,
                    torch=torch.__version__,
                    model=graph.name,
                    graph=graph.fingerprint,
                    optimizer=graph.optimizer,
                    num_steps=step.num_steps,
                    data=data.name,
                    tensors=tensors_from_json(_merge(json.loads(part)[0] for part in said)),
                    states=states_from_json(_merge(json.loads(part)[1] for part in said)),
                    extra=dict(extra or {}),
                )
                publish(contents, target / CHECKPOINT_INDEX, data)
    except HeterogError:
        if step.rank == 0:
            shutil.rmtree(data, ignore_errors=True)
        raise


def load_checkpoint(step: DeployedStep, folder: str | Path) -> dict[str, Any]:
    """Restore the state of a saved step; every rank calls it.

    The plan may differ from that of the saved step: each rank reads what it holds or updates now.
    BatchNorm statistics become the saved ones on every rank. Random ops continue with the numbers
    of the next step, if the step has the seed of the saved one.

    Args:
        step: A freshly deployed step with the saved one's model and optimizer class.
        folder: Folder given to ``save_checkpoint``.

    Returns:
        The ``extra`` values that were saved.

    Raises:
        InputFileError: no checkpoint, or a damaged one.
        StrategyError: the checkpoint is of another model or optimizer (names the first
            difference), or the plan cuts state that the optimizer keeps whole.
    """
    model = step.model  # ends open updates, on all ranks
    # Into new tensors, so that all ranks stay as they were if one fails.
    with _together():
        contents = read_contents(folder)
        check_fits(step, model, contents, folder)
        state = NewState(step, model, contents)
        read_boxes(contents, Path(folder), state.wanted)
        state.check_counters()
    state.take_over()
    return dict(contents.extra)


@contextmanager
def _together() -> Iterator[None]:
    """Wait for all ranks at the end; if the body fails on one rank, it fails on all."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # the others wait for this rank, whatever the error
        error = caught
    said = gather_texts("" if error is None else first_line(error))
    if error is not None and not isinstance(error, OSError | RuntimeError):
        raise error
    for rank, text in enumerate(said):
        if text:
            raise HeterogError(f"rank {rank}: {text}") from error


def _from_rank_0(number: int) -> int:
    shared = torch.tensor([number])
    dist.broadcast(shared, 0)
    return int(shared)


def _merge(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for part in parts:
        assert not merged.keys() & part.keys(), "every tensor has one owner"
        merged |= part
    return merged
