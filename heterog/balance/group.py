"""The ranks of a job: this process's rank, and exchanges of a few numbers."""

import ctypes
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from heterog.runtime.accelerators import from_every_rank, wire_device


def keep_to_the_end(group: dist.ProcessGroup) -> None:
    """Keep a process group of DistributedDataParallel until this process ends.

    Otherwise a script may hang in its last line. After ``destroy_process_group`` the model is the
    last owner of the group. When Python frees it, Python holds the GIL and waits for gloo's thread
    to end, which may need the GIL to free the barrier that has just been passed (PyTorch's issue
    56297). This happens on busy CPUs, without a balancer too.
    """
    # A global list would free it with this module; gloo's thread then ends the process (SIGABRT).
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


class RankGroup:
    """The default process group, looked up at each call because launchers may make it late.

    Before it exists, torchrun's variables give the rank; without them, the job has one rank.
    """

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the job."""
        if dist.is_initialized():
            return dist.get_world_size()
        return int(os.environ.get("WORLD_SIZE", "1"))

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Gather equally many numbers from every rank, by rank. All ranks call it."""
        if not self._communicates():
            return [list(numbers)]
        own = torch.tensor(numbers, dtype=torch.float64, device=wire_device())
        return [each.tolist() for each in from_every_rank(own)]

    def add_up(self, value: Tensor) -> Tensor:
        """Sum a tensor over all ranks, on its own device. All ranks call it."""
        if not self._communicates():
            return value.clone()
        total = value.detach().to(wire_device(), copy=True)
        dist.all_reduce(total)
        return total.to(value.device)

    def join(self, value: Tensor, counts: Sequence[int]) -> Tensor:
        """The first rows of each rank's tensor, one after another, on its own device.

        Args:
            value: This rank's tensor; all have the same columns. One row stands for all of them.
            counts: Number of rows of each rank.
        """
        own = value[: counts[self.rank]].detach()
        if not self._communicates():
            return own
        padded = own.new_zeros((max(counts), *own.shape[1:]), device=wire_device())
        padded[: counts[self.rank]] = own
        every = zip(from_every_rank(padded), counts, strict=True)
        return torch.cat([part[:number] for part, number in every]).to(value.device)

    def broadcast(self, value: Tensor, rank: int) -> Tensor:
        """One rank's tensor, on this rank's device. All ranks call it, with equal shapes."""
        if not self._communicates():
            return value
        sent = value.detach().to(wire_device(), copy=True)
        dist.broadcast(sent, rank)
        return sent.to(value.device)

    def _communicates(self) -> bool:
        return dist.is_initialized() and dist.get_world_size() > 1
