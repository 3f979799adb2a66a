"""Says which rank has left its loop alone, on the ranks that wait for it.

A rank that stops by its own loss, or catches an error that others do not have, makes no further
step. Others wait for its gradients then, until the timeout of the process group: half an hour. So
a rank whose pass ends early says where, in the store of the process group. A thread of each rank
looks there if its loop has not moved for ten seconds, and prints one line if it waits for such a
rank. It ends nothing: that a process waits in vain is likely then, but not certain.
"""

import itertools
import json
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from heterog.balance.group import RankGroup
from heterog.balance.sampler import ShareSampler
from heterog.runtime.lookout import HETEROG, NUM_LOOKS, STORE_IS_GONE, Lookout, users_line

_TORCH = Path(torch.__file__).parent
_NO_EXCEPTION = None, (None, None, None)  # the latter before Python 3.12
_num_made = itertools.count()


class Place(NamedTuple):
    """Where the loop of a rank is.

    Attributes:
        number: Of the pass, among those that train; 0 before the first loss of a pass.
        step: The step that the loop is in or waits for.
        is_weighed: Whether a loss of that step has been weighed.
    """

    number: int
    step: int
    is_weighed: bool


class Leaving:
    """Notices that this rank waits for another, which has left the pass.

    Args:
        group: The ranks.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._key = f"heterog/left/{next(_num_made)}"
        self._num_passes = 0  # in which a loss was weighed for training
        self._open: WeakKeyDictionary[ShareSampler, Place] = WeakKeyDictionary()
        self._at: Place | None = None  # in a pass that trains; read by the thread
        self._loops_in = 0  # identifier of the thread that the loop runs in
        self._seen: object = None
        self._num_seen = 0  # looks in a row that saw that
        self._told = 0  # number of the pass that a line was printed for
        self._lookout: Lookout | None = None

    def begin_pass(self, sampler: ShareSampler | None) -> None:
        """Note that the loop of a loader begins; without one, its end would not be known."""
        self._at = None
        if sampler is not None:
            self._open[sampler] = Place(0, sampler.start, is_weighed=False)

    def train(self, sampler: ShareSampler, step: int) -> None:
        """Note that a loss of this step is weighed for training."""
        if sampler not in self._open or not dist.is_initialized() or self._group.num_ranks < 2:
            return
        number = self._open[sampler].number
        if not number:
            self._num_passes = number = self._num_passes + 1
        self._loops_in = threading.get_ident()
        self._at = self._open[sampler] = Place(number, step, is_weighed=True)
        if self._lookout is None or not self._lookout.is_alive:
            self._lookout = Lookout(self)

    def end_step(self, sampler: ShareSampler) -> None:
        """Note that the loop asks for the next step."""
        if sampler in self._open and (number := self._open[sampler].number):
            self._at = self._open[sampler] = Place(number, sampler.num_done, is_weighed=False)

    def end_pass(self, sampler: ShareSampler) -> None:
        """Note that a pass ends; if steps of it are left, tell the others."""
        self._at = None
        place = self._open.pop(sampler, None)
        if place is None or not place.number or not sampler.is_inside or not dist.is_initialized():
            return
        line = users_line(sys._getframe())
        said = f"rank {self._group.rank} left its loop in step {place.step} of epoch "
        said += f"{sampler.epoch} ({line})" if line else str(sampler.epoch)
        with suppress(*STORE_IS_GONE):  # the first rank that leaves a pass is the reason
            _store().compare_set(f"{self._key}/{place.number}", "", json.dumps([*place, said]))

    def look(self) -> None:
        """Print a line, once in a pass, if this rank waits for one that has left it."""
        at = self._at
        seen = None if at is None else self._stands_at(at)
        if at is None or seen is None or seen != self._seen:
            self._seen, self._num_seen = seen, 0
        self._num_seen += 1
        if at is None or seen is None or self._num_seen < NUM_LOOKS or self._told == at.number:
            return
        store, key = _store(), f"{self._key}/{at.number}"
        if not store.check([key]):
            return
        *left, said = json.loads(store.get(key))
        if at > tuple(left) and at is self._at:
            self._told = at.number
            print(
                f"heterog: {said}, and rank {self._group.rank} stands in step {at.step} since: it "
                "seems to wait for the other's gradients, until the timeout of the process group. "
                "Let all ranks stop alike, by balancer.mean_loss() or another number that all of "
                "them have.",
                file=sys.stderr,
                flush=True,
            )

    def _stands_at(self, at: Place) -> object:
        """The call that the loop is in; none if it does something else than to wait for ranks.

        A loop that handles an error, to save its model say, has got out of its wait. Between its
        steps, a loop may also do what other ranks do not: draw one more batch, to show it.
        """
        frame = sys._current_frames().get(self._loops_in)
        handled: object = sys._current_exceptions().get(self._loops_in)
        if frame is None or handled not in _NO_EXCEPTION:
            return None
        path = Path(frame.f_code.co_filename)
        if not at.is_weighed and not {_TORCH, HETEROG} & set(path.parents):
            return None
        return at, id(frame), frame.f_lasti


def _store() -> dist.Store:  # type: ignore[name-defined]
    return dist.distributed_c10d._get_default_store()
