"""Watches the ranks of a job until they are done, or one of them fails or stands still.

The job ends if a rank has died, is stopped, or takes too long for a step. Ranks may run anywhere:
``launch`` watches processes of this machine, ``ranks.on_ray`` those of Ray's nodes.
"""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from heterog.errors import HeterogError

COMPILING = "compiling the step"
"""Beginning of the stage of a rank that compiles; others may wait for it in a step."""
POLL_S = 0.05
SILENCE_S = 0.5
"""Seconds after which it is said that a rank does not answer; it may be lost, or busy."""
_GRACE_S = 2.0  # the first rank seen to fail may not be the first that did: wait for the others
_KILLED_GRACE_S = 0.5  # a killed rank is the cause; others may have been killed at the same time
_LEAST_GRACE_S = 0.1  # of links that are cut at once, one counts as cut a look later than another
_STOPPED_S = 1.0  # a debugger or a suspended container stops a process for a moment only


class LaunchError(HeterogError):
    """Error of a rank that failed, died or did not end in time; the others were ended too.

    Attributes:
        last_words: Last line of output of each rank that had ended by itself, by rank.
        lost: Ranks whose process was killed or frozen from outside, for no fault of the job.
    """

    def __init__(
        self, text: str, last_words: Mapping[int, str] | None = None, *, lost: Sequence[int] = ()
    ) -> None:
        super().__init__(text)
        self.last_words = dict(last_words or {})
        self.lost = tuple(lost)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds after which ranks are given up.

    Attributes:
        timeout_s: Seconds that the whole job may take, besides compiling.
        step_timeout_s: Seconds that a step may take. The default is longer than the slowest step
            that we know of; PyTorch's own limit for gloo is 30 minutes.
    """

    timeout_s: float = 300.0
    step_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if not (self.timeout_s > 0 and self.step_timeout_s > 0):
            raise HeterogError(
                f"ranks are given up after {self.timeout_s:g} s, or {self.step_timeout_s:g} s "
                "in a step; give more than 0."
            )


DEFAULT_LIMITS = Limits()


class Watched(Protocol):
    """A rank, wherever it runs; ``note`` keeps its attributes up to date.

    Attributes:
        stage: Its current stage, in words.
        since_s: Time at which the stage began, by the monotonic clock.
        stopped_since_s: Time at which a signal stopped its process; ``None`` if it runs.
        silent_s: Seconds for which it has not answered; 0 if it need not be asked.
    """

    stage: str
    since_s: float
    stopped_since_s: float | None

    @property
    def silent_s(self) -> float:
        """See above."""

    @property
    def pid(self) -> int:
        """Id of its process on its machine."""

    def poll(self) -> int | None:
        """Exit code, negative for a signal; ``None`` while it runs."""

    def look(self, now_s: float) -> None:
        """Bring the attributes up to date."""

    def last_words(self) -> str:
        """Its error line, or the last line that it printed."""

    def note(self, stage: str, now_s: float, *, is_stopped: bool) -> None:
        """Note its stage, unless that is empty, and whether its process is stopped."""
        if stage and stage != self.stage:
            self.stage, self.since_s = stage, now_s
        if not is_stopped:
            self.stopped_since_s = None
        elif self.stopped_since_s is None:
            self.stopped_since_s = now_s


def wait_for_ranks(
    ranks: Sequence[Watched],
    limits: Limits,
    progress: Callable[[str], None],
    in_silence: Callable[[], None] = lambda: None,
    *,
    counts_steps: bool = True,
) -> None:
    """Wait until all ranks are done, one fails or stands still, or the time is over.

    Args:
        ranks: All ranks of the job, in order.
        limits: Seconds after which they are given up.
        progress: Called with the stage of rank 0, whenever that changes.
        in_silence: Called again and again while a rank does not answer.
        counts_steps: Whether steps count for the time of the whole job; each has its own limit.

    Raises:
        LaunchError: a rank failed or the time is over; names the rank and its last words.
    """
    now_s = time.monotonic()
    deadline_s = now_s + limits.timeout_s
    told = ""
    while True:
        codes = [rank.poll() for rank in ranks]
        if all(code == 0 for code in codes):
            return
        failed = [number for number, code in enumerate(codes) if code not in (None, 0)]
        if failed:
            is_killed = any(_is_killed(codes[number]) for number in failed)
            grace_s = _KILLED_GRACE_S if is_killed else _GRACE_S
            has_waited = any(ranks[number].silent_s > grace_s for number in failed)
            _wait_for_all(ranks, _LEAST_GRACE_S if has_waited else grace_s)
            for rank in ranks:
                rank.look(time.monotonic())
            raise _failure(ranks, failed)
        before_s, now_s = now_s, time.monotonic()
        for rank in ranks:
            rank.look(now_s)
        if _compile(ranks) or (told.startswith("step ") and not counts_steps):
            deadline_s += now_s - before_s
        if ranks[0].stage != told:
            told = ranks[0].stage
            progress(told)
        if any(rank.silent_s > SILENCE_S for rank in ranks):
            in_silence()
        _check_alive(ranks, now_s, limits.step_timeout_s)
        if now_s > deadline_s:
            waiting = [number for number, code in enumerate(codes) if code is None]
            raise LaunchError(
                f"ranks {waiting} did not end within {limits.timeout_s:g} s ({_where(ranks)}); "
                "all ranks were ended. Raise `timeout_s` if the steps take that long."
            )
        time.sleep(POLL_S)


def _wait_for_all(ranks: Sequence[Watched], limit_s: float) -> None:
    """Wait until all ranks have ended by themselves, or the limit is over."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        if all(rank.poll() is not None for rank in ranks):
            return
        time.sleep(POLL_S)


def _check_alive(ranks: Sequence[Watched], now_s: float, step_timeout_s: float) -> None:
    """Check that no rank is stopped, or in the same step for too long.

    Raises:
        LaunchError: says which rank, and where all are.
    """
    for number, rank in enumerate(ranks):
        if rank.stopped_since_s is not None and now_s - rank.stopped_since_s > _STOPPED_S:
            raise LaunchError(
                f"rank {number} is frozen: its process {rank.pid} was stopped by a signal "
                f"at {rank.stage or 'its start'}; all ranks were ended.",
                lost=[number],
            )
    if _compile(ranks):
        for rank in ranks:  # the others wait in a step for a rank that compiles
            rank.since_s = now_s
        return
    slow = any(
        rank.poll() is None
        and rank.stage.startswith("step ")
        and now_s - rank.since_s > step_timeout_s
        for rank in ranks
    )
    if slow:
        # Not the rank that exceeded it first: all entered the step within moments of each other.
        # They differ in where each one is.
        raise LaunchError(
            f"a step has taken more than {step_timeout_s:g} s ({_where(ranks)}); all ranks were "
            "ended. Raise `step_timeout_s` if a step takes that long."
        )


def _compile(ranks: Sequence[Watched]) -> bool:
    """Whether any rank compiles, so that others may wait in a step."""
    return any(rank.stage.startswith(COMPILING) and rank.poll() is None for rank in ranks)


def _where(ranks: Sequence[Watched]) -> str:
    """The stage of every rank, ranks of one stage together."""
    doing: dict[str, list[int]] = {}
    for number, rank in enumerate(ranks):
        stage = rank.stage or "its start"
        doing.setdefault(stage if rank.poll() is None else "its end", []).append(number)
    return ", ".join(
        f"rank{'s' * (len(members) > 1)} {' and '.join(map(str, members))} at {stage}"
        for stage, members in doing.items()
    )


def _failure(ranks: Sequence[Watched], first: Sequence[int]) -> LaunchError:
    """Make the error that names the rank that most likely failed by itself.

    Ranks that were killed, or whose error is not about a connection, come before ranks that lost
    their connection to them; among equals, those seen to fail first.
    """
    codes = {number: rank.poll() for number, rank in enumerate(ranks)}
    last = {number: ranks[number].last_words() for number, code in codes.items() if code}

    def follows(number: int) -> tuple[bool, bool, int]:
        # gloo aborts a process (SIGABRT) when another one is gone.
        killed = _is_killed(codes[number])
        own = bool(last[number]) and "onnection" not in last[number]
        return not (killed or own), number not in first, number

    number = min(last, key=follows)
    code = codes[number]
    assert code is not None
    how = f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
    where = f" at {ranks[number].stage}" if code < 0 and ranks[number].stage else ""
    said = last[number].removeprefix("heterog: ").removeprefix(f"rank {number}: ")
    text = f"rank {number} {how}{where}; the others were ended. {said}".strip()
    return LaunchError(text, last, lost=[each for each in sorted(last) if _is_killed(codes[each])])


def _is_killed(code: int | None) -> bool:
    """Whether a process ended by a signal that gloo does not send itself."""
    return code in (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS)
