"""Global batches of a stream (``IterableDataset``): all ranks read it and keep their part.

If the stream has ``state_dict`` and ``load_state_dict``, torchdata's ``Stateful`` protocol, a
state has its position. Other streams are read again from the beginning up to the position.
"""

import sys
import warnings
import zlib
from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import IterableDataset

from heterog.balance.group import RankGroup
from heterog.balance.shares import BalanceError, IndexArray, SampleBatches


@runtime_checkable
class Stateful(Protocol):
    """An object with a state: a scheduler, or a stream, as for torchdata's ``StatefulDataLoader``.

    A stream's state is its position after the read samples, where its next iterator begins.
    """

    def state_dict(self) -> dict[str, Any]:
        """The state, of values that JSON can hold."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Set the state from what ``state_dict`` returned."""


@runtime_checkable
class HasEpochs(Protocol):
    """A stream with another order in each epoch, as those of the library ``datasets``."""

    def set_epoch(self, epoch: int) -> None:
        """Let the next iterator have the order of this epoch."""


class StreamBatches(SampleBatches):
    """Global batches of consecutive samples of a stream; an index is a place in the stream.

    Every rank reads the whole stream, as with Accelerate's ``IterableDatasetShard``, so that
    shares may change at any step and a state fits any number of ranks.

    Args:
        dataset: The stream, alike on all ranks.
        batch_size: Number of samples of a global batch.
        drop_last: Whether to leave out samples at the end that do not fill a batch.
        group: The ranks.
    """

    has_length = False

    def __init__(
        self, dataset: IterableDataset[Any], batch_size: int, *, drop_last: bool, group: RankGroup
    ) -> None:
        super().__init__(sys.maxsize, batch_size, seed=0, shuffle=False, drop_last=drop_last)
        self._dataset, self._group = dataset, group
        self._ends: dict[int, int] = {}  # samples of the last epoch that was read to its end
        self._states: dict[tuple[int, int], dict[str, Any]] = {}  # by epoch and number of steps
        self._marks: dict[tuple[int, int], int] = {}  # of batches' first samples, same keys
        self._known: dict[tuple[int, int], int] = {}  # the loaded mark

    def num_steps(self, epoch: int) -> int:
        """Number of global batches of an epoch; very many until its last one is read."""
        whole, rest = divmod(self._ends.get(epoch, sys.maxsize), self._batch_size)
        return whole + bool(rest and not self._drop_last)

    def batch(self, epoch: int, step: int) -> IndexArray:
        """Places of a global batch.  # [num_samples]"""
        begin = step * self._batch_size
        return np.arange(
            begin,
            min(begin + self._batch_size, self._ends.get(epoch, sys.maxsize)),
            dtype=np.int64,
        )

    def begin_pass(self, epoch: int, step: int, *, is_here: bool) -> int:
        """Put the stream where a pass begins.

        Args:
            epoch: Number of the epoch.
            step: First step of the pass.
            is_here: Whether this process reads the stream, and not workers with copies of it.

        Returns:
            Number of samples that the reader then has to skip.
        """
        if isinstance(self._dataset, HasEpochs):
            self._dataset.set_epoch(epoch)
        state = self._states.get((epoch, step)) if step and is_here else None
        self._states = {} if state is None else {(epoch, step): state}
        self._ends = {}
        self._marks, self._known = self._known, {}
        if state is None:
            return step * self._batch_size
        assert isinstance(self._dataset, Stateful)
        self._dataset.load_state_dict(deepcopy(state))
        return 0

    def read(
        self, samples: Iterator[Any], epoch: int, step: int, *, num_workers: int
    ) -> Iterator[list[Any]]:
        """Whole global batches from a step on, read one ahead so that the last one is known."""
        is_here = not num_workers
        batch = self._next(samples, epoch, step, is_here=is_here)
        self._check_alike(batch)
        if not step:
            self._check_workers(batch, num_workers)
        while batch and step < self.num_steps(epoch):
            step += 1
            ahead = self._next(samples, epoch, step, is_here=is_here)
            yield batch
            batch = ahead

    def _next(self, samples: Iterator[Any], epoch: int, step: int, *, is_here: bool) -> list[Any]:
        """Read the batch of a step, which is short where the stream ends."""
        batch = list(islice(samples, self._batch_size))
        mark = fingerprint(batch[0]) if batch else -1
        if self._marks.setdefault((epoch, step), mark) != mark:
            warnings.warn(
                f"{type(self._dataset).__name__} goes on with another sample than the one that "
                "came next when the state was saved. Unless samples are drawn anew each time, "
                "some are lost or dealt twice: the stream's own state may lack a shuffle buffer; "
                "num_workers=1 reads the stream again instead.",
                stacklevel=2,
            )
        self._marks = {key: each for key, each in self._marks.items() if key[1] >= step - 2}
        if len(batch) < self._batch_size:
            self._ends.setdefault(epoch, step * self._batch_size + len(batch))
        elif is_here and isinstance(self._dataset, Stateful):
            self._keep(epoch, step + 1)
        return batch

    def _keep(self, epoch: int, done: int) -> None:
        """Keep the stream's state after so many steps, and the states of the two steps before."""
        assert isinstance(self._dataset, Stateful)
        kept = {key: state for key, state in self._states.items() if key[1] >= done - 2}
        self._states = {**kept, (epoch, done): deepcopy(self._dataset.state_dict())}

    def after(self, epoch: int, done: int) -> dict[str, Any]:
        """The stream's own state after so many steps, if it has one; the hash of what comes next.

        The hash is ``None`` if that sample was not read.
        """
        at = epoch, done
        return {"stream": self._states.get(at), "stream_next": self._marks.get(at)}

    def load(self, state: dict[str, Any] | None, epoch: int, done: int, mark: int | None) -> None:
        """Take a stream's state after so many steps, and the mark of the next sample.

        Raises:
            BalanceError: this stream takes no states.
        """
        if state is not None and not isinstance(self._dataset, Stateful):
            raise BalanceError(
                "the state has a position of the stream itself, and a "
                f"{type(self._dataset).__name__} has no load_state_dict. Go on with the stream "
                "that it was saved with."
            )
        self._states = {} if state is None else {(epoch, done): state}
        self._known = {} if mark is None else {(epoch, done): mark}

    def _check_alike(self, batch: list[Any]) -> None:
        """Check that all ranks read the same stream, by the first sample of a pass.

        Raises:
            BalanceError: they do not.
        """
        own = fingerprint(batch[0]) if batch else -1
        every = [int(each[0]) for each in self._group.gather([own])]
        if len(set(every)) > 1:
            other = next(rank for rank, each in enumerate(every) if each != every[0])
            raise BalanceError(
                f"{type(self._dataset).__name__} gives rank {other} another first sample than "
                "rank 0: every rank reads the whole stream, of which the balancer deals the "
                "shares. Do not cut it by ranks (split_dataset_by_node, RANK), and shuffle it "
                "with one seed on all ranks."
            )

    def _check_workers(self, batch: list[Any], num_workers: int) -> None:
        """Check that each worker reads a part of its own; samples come from them in turn.

        Raises:
            BalanceError: the first two workers give the same samples.
        """
        if num_workers < 2:
            return
        marks = [[fingerprint(each) for each in batch[k::num_workers]] for k in (0, 1)]
        if marks[0] == marks[1] and len(set(marks[0])) > 1:
            raise BalanceError(
                f"each of {num_workers} workers reads all of the {type(self._dataset).__name__}, "
                f"which would give every sample {num_workers} times. Let its __iter__ take every "
                "num_workers-th sample (torch.utils.data.get_worker_info), or give num_workers=1."
            )


def check_stream(
    dataset: IterableDataset[Any], *, shuffle: bool | None, lengths: Sequence[int] | None
) -> None:
    """Check options that a stream cannot have.

    Raises:
        BalanceError: one is asked for.
    """
    if shuffle:
        raise BalanceError(
            f"shuffle=True: {type(dataset).__name__} is a stream, whose order is its own. Leave "
            "shuffle out and shuffle in the stream, with one seed on all ranks."
        )
    if lengths is not None:
        raise BalanceError(
            f"lengths: {type(dataset).__name__} is a stream, whose samples have no lengths before "
            "they are read. Pack or cut them to equal lengths in the stream, or leave lengths out "
            "and give weigh() the count of each batch."
        )


def fingerprint(sample: Any) -> int:
    """A hash of a sample; only its numbers, texts and tensors count."""
    found = 0
    for leaf in pytree.tree_leaves(sample):
        if isinstance(leaf, Tensor):
            data = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        elif isinstance(leaf, np.ndarray | np.generic):
            data = leaf.tobytes()
        elif isinstance(leaf, bool | int | float | str | bytes):
            data = repr(leaf).encode()
        else:
            continue
        found = zlib.crc32(data, found)
    return found
