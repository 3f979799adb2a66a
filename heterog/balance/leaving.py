"""Ends the wait for a rank that has left its loop alone.

A rank that stops by its own loss, or catches an error that others do not have, makes no further
step. Others wait for its gradients then, until the timeout of the process group: half an hour. So
a rank whose pass ends early says in which step, in the store of the process group. A thread of
each rank looks there every second. If this rank goes on although another has left, its next step
is an error; if it is stuck in a step, its process ends with one line.
"""

import atexit
import itertools
import json
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn
from weakref import WeakSet, ref

import torch.distributed as dist

from heterog.balance.group import RankGroup
from heterog.balance.sampler import ShareSampler
from heterog.balance.shares import BalanceError

LOOK_S = 1.0
"""Seconds between looks; NCCL's watchdog asks the store as often."""

_STORE_IS_GONE = RuntimeError, ValueError
"""Errors of a store whose rank has ended, and of a process group that has been destroyed."""
_PACKAGE = Path(__file__).parents[1]
_num_made = itertools.count()
_ENDS = threading.Event()
_THREADS: "WeakSet[threading.Thread]" = WeakSet()


class Leaving:
    """Notices that another rank has left a pass that this rank goes on with.

    Args:
        group: The ranks.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._key = f"heterog/left/{next(_num_made)}"
        self._num_passes = 0  # in which a loss was weighed for training
        # Of each open pass: its number, and the step that the loop is in or waits for.
        self._open: dict[ShareSampler, tuple[int, int]] = {}
        self._num_ended = 0  # steps
        self._told = ""
        self._told_after = 0
        self._thread: threading.Thread | None = None

    def train(self, sampler: ShareSampler, step: int) -> None:
        """Note that this step of a pass trains."""
        if not dist.is_initialized() or self._group.num_ranks < 2:
            return
        if sampler not in self._open:
            self._num_passes += 1
            self._open[sampler] = self._num_passes, step
        if self._thread is None or not self._thread.is_alive():  # it may be a forked process
            self._thread = threading.Thread(target=_look_often, args=(ref(self),), daemon=True)
            self._thread.start()
            _THREADS.add(self._thread)

    def end_step(self, sampler: ShareSampler) -> None:
        """Note that the loop asks for the next step.

        Raises:
            BalanceError: another rank has left the pass in this step or before.
        """
        if sampler in self._open:
            self._open[sampler] = self._open[sampler][0], sampler.num_done
        self._num_ended += 1
        if self._told:
            raise BalanceError(self._told)

    def end_pass(self, sampler: ShareSampler) -> None:
        """Note that a pass ends; if steps of it are left, tell the others."""
        number, _ = self._open.pop(sampler, (0, 0))
        if not number or not sampler.is_inside or not dist.is_initialized():
            return
        step = sampler.num_done - 1
        said = (
            f"rank {self._group.rank} left its loop in step {step} of epoch {sampler.epoch}"
            f"{_place_of_loop()}"
        )
        with suppress(*_STORE_IS_GONE):
            _store().set(self._key, json.dumps({"pass": number, "step": step, "said": said}))

    def look(self) -> None:
        """Look whether a rank has left a pass that this rank is in; end a wait for it."""
        if self._told:
            if self._num_ended == self._told_after:
                end_process(self._group.rank, self._told)
            return
        store = _store()
        if not store.check([self._key]):
            return
        left = json.loads(store.get(self._key))
        places = [each for each in list(self._open.values()) if each[0] == left["pass"]]
        if any(step > left["step"] for _, step in places):
            self._told_after = self._num_ended
            self._told = (
                f"{left['said']}, and rank {self._group.rank} went on: it would wait for the "
                "other's gradients. Let all ranks stop alike, by balancer.mean_loss() or another "
                "number that all of them have."
            )


def end_process(rank: int, told: str) -> NoReturn:
    """End this process with a line; its loop is stuck in a call that no exception reaches."""
    print(f"heterog: rank {rank}: {told}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(2)


def _store() -> dist.Store:  # type: ignore[name-defined]
    return dist.distributed_c10d._get_default_store()


def _look_often(held: "ref[Leaving]") -> None:
    """Look every second, as long as the balancer and the process group exist."""
    while not _ENDS.wait(LOOK_S):
        leaving = held()
        if leaving is None or not dist.is_initialized():
            return
        try:
            leaving.look()
        except _STORE_IS_GONE:
            return
        del leaving


@atexit.register
def _end_looks() -> None:
    """End the threads: one that returned from the store later would abort the process."""
    _ENDS.set()
    for thread in list(_THREADS):
        thread.join(LOOK_S)


def _place_of_loop() -> str:
    """File and line where the loop was left, in brackets; none if no code of the user is found."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "site-packages" not in path.parts and _PACKAGE not in path.parents:
            return f" ({path.name}:{frame.f_lineno})"
        frame = frame.f_back
    return ""
