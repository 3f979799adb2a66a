"""Says in one line which rank keeps the others waiting, and where its loop is.

A rank that leaves out a batch by itself (its samples are NaN, say), or ends its loop, makes fewer
steps than the others. They wait for its gradients then, until the timeout of the process group:
half an hour. So a thread of each rank looks, once its loop has stood in one place for ten seconds,
how many steps all ranks have begun. It ends nothing: a rank that is late may only be slow.
"""

import sys
import threading

from heterog.runtime.lookout import NUM_LOOKS, Lookout, users_line
from heterog.runtime.step.alike import BatchShapes


class LateRanks:
    """Notices that ranks stand in different steps; entered while the loop calls the step.

    Args:
        shapes: Knows how many steps each rank has begun.
        rank: This rank.
    """

    def __init__(self, shapes: BatchShapes, rank: int) -> None:
        self._shapes, self._rank = shapes, rank
        self._loops_in = threading.get_ident()
        self._at = object()  # another one whenever the loop moves
        self._is_inside = False
        self._seen: object = None
        self._num_seen = 0
        self._told: object = None
        self._patience = NUM_LOOKS  # each line doubles it
        self._lookout: Lookout | None = None

    def start(self) -> None:
        """Look from now on, in a thread."""
        self._lookout = Lookout(self)

    def close(self) -> None:
        """End the looks."""
        if self._lookout is not None:
            self._lookout.close()

    def __enter__(self) -> None:
        """Note that the loop has called the step."""
        self._loops_in, self._is_inside, self._at = threading.get_ident(), True, object()

    def __exit__(self, *_: object) -> None:
        """Note that the step has returned."""
        self._is_inside, self._at = False, object()

    def look(self) -> None:
        """Print a line if the loop stands, and another rank has begun fewer or more steps."""
        at = self._at
        if at is not self._seen:
            self._seen, self._num_seen = at, 0
        self._num_seen += 1
        if self._num_seen != self._patience or at is self._told:
            return
        begun = self._shapes.steps_begun()
        own, most = begun[self._rank], max(begun)
        late = [rank for rank, number in enumerate(begun) if number < most]
        if self._is_inside and own == most and late and begun.index(most) == self._rank:
            said = f"rank {self._rank} waits in step {own} for {_ranks(late)}, which "
            said += f"{'have' if len(late) > 1 else 'has'} not begun it"
        elif not self._is_inside and own < most:
            said = f"rank {self._rank} has not begun step {own + 1}, in which others wait for it; "
            line = users_line(sys._current_frames().get(self._loops_in))
            said += f"it is at {line}" if line else "it is outside of its loop"
        else:
            return
        self._told, self._patience = at, self._patience * 2
        print(
            f"heterog: {said}. If it goes on later it was only slow; a rank that leaves out a "
            "batch, or ends its loop, by something that the others do not see makes them wait "
            "until the timeout of the process group.",
            file=sys.stderr,
            flush=True,
        )


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {' and '.join(map(str, numbers))}"
