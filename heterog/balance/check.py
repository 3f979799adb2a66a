"""``heterog check``: does a loop with a balancer train alike, however its samples are divided?

The loop runs as it is, for a few updates on a few ranks of this machine: once with all samples of
each batch on rank 0, as one process has them, and once in unequal parts. What came out is compared
(``checked`` is a rank). A loop that takes something from a rank's own samples, in a way that no
other check knows of, gives unlike gradients.

**What counts as unlike.** The gradients of the first update come from the same weights, so only
rounding lies between them. Sums over samples are rounded in 32 bits: 4096 units in the last place,
more than cancellation in a sum of millions of terms leaves, are 0.0005 of a gradient's norm. Where
numbers have 16 bits, each is rounded by up to one of its own units, of which four count, too.
A parameter whose gradient is zero but for rounding (a bias before a softmax) differs by all of it;
so a difference must also exceed 64 and 2 such units of the norm of all gradients together.

After the first update weights differ by rounding. An optimizer that divides by the gradient's size
(Adam) would move an element whose gradient is rounding by a whole step in either direction; so
elements that are at most 64 and 2 units of the largest are set to 0 before each update. Where the
others are off by a part ``t``, a part ``t`` of them may later be 0 in one run only, or have other
signs, which is a difference of ``2 sqrt(t)`` in the norm of an update. That counts for later
gradients, and for how weights and buffers move. ``t`` is what the first gradients differ by (six
times that: later ones are other sums), not what they might.

If runs differ, the second is repeated with another order of each rank's samples, and other random
numbers. What differs there, too, is not due to the division.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from heterog.balance.checked import BESIDE, BUFFER, EPS, Noted, Task, least_part
from heterog.balance.kept_files import changed_files, times_of_files
from heterog.errors import HeterogError
from heterog.names import first_of
from heterog.runtime.launch import RANKS_OWN, run_commands, temporary_folder
from heterog.runtime.ranks.forks import rank_forks
from heterog.runtime.ranks.watching import LaunchError, Limits

LATER = 6.0
"""Factor by which later gradients may be rounded worse than the first ones."""
NOISE = 3.0
"""A difference counts if it exceeds what random numbers make by this factor."""

MOST_FILES = 5
"""Files that a note names."""

Run = Sequence[Noted]
"""What each rank has noted."""
Values = Mapping[str, Tensor]


class ScriptError(HeterogError):
    """A script that cannot be checked.

    Attributes:
        trace: Traceback, if it has failed.
    """

    def __init__(self, text: str, trace: str = "") -> None:
        super().__init__(text)
        self.trace = trace


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRequest:
    """What to check.

    Attributes:
        script: File of the script, or name of the module.
        arguments: Its arguments.
        is_module: Whether it is a module.
        num_ranks: Number of ranks.
        num_updates: Updates of each optimizer.
        shares: Divisions to compare, each in any unit: none, one to compare with one process, or
            both.
        timeout_s: Seconds that a run may take.
    """

    script: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    num_ranks: int = 2
    num_updates: int = 3
    shares: tuple[tuple[int, ...], ...] = ()
    timeout_s: float = 600.0

    def divisions(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The two divisions.

        Raises:
            HeterogError: more are given, or one does not fit the ranks.
        """
        number = self.num_ranks
        alone, unequal = (1, *[0] * (number - 1)), tuple(range(2 * number - 1, 0, -2))
        every = (alone, *(self.shares or (unequal,)))
        for each in every:
            if len(every) > 3 or len(each) != number or min(each) < 0 or not sum(each):
                raise HeterogError(
                    f"`shares` {_told(each)}: give a whole number for each of {number} ranks, 0 "
                    "or more, and at most two divisions."
                )
        return every[-2], every[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a check has found.

    Attributes:
        answer: ``equal``, ``differs`` or ``undecided``.
        text: The answer in a sentence.
        apart: Largest difference of a tensor that differs, or else of all first gradients.
        allowed: Difference that rounding explains.
        bound: Largest difference that was taken for rounding, at any place up to there.
        noise: Largest difference of two runs with the same division, if it was measured.
        names: Relative difference of each tensor that differs, largest first.
        advice: What usually causes this, and what to do.
        notes: What else is to be known.
    """

    answer: str
    text: str
    apart: float
    allowed: float
    bound: float
    noise: float | None
    names: dict[str, float]
    advice: str
    notes: list[str]


def check(request: CheckRequest, progress: Callable[[str], None] = lambda stage: None) -> Verdict:
    """Run a script with two divisions of its samples, and compare.

    Args:
        request: What to check.
        progress: Called with each stage.

    Raises:
        ScriptError: the script fails, or its runs cannot be compared; says why.
        LaunchError: a rank does not end.
    """
    divisions = request.divisions()
    if not request.is_module and not Path(request.script).is_file():
        raise HeterogError(f"there is no script '{request.script}'; -m runs a module.")
    began_s, before = time.time(), times_of_files(Path.cwd())
    with temporary_folder() as folder, rank_forks(RANKS_OWN):

        def run(name: str, shares: tuple[int, ...], again: bool = False) -> Run:
            progress(f"{name}: {_told(shares)} of each batch")
            (folder / name).mkdir()
            asked = request.num_updates, request.is_module, again, began_s
            return _run(request, Task(str(folder / name), shares, *asked))

        one, other = run("run 1", divisions[0]), run("run 2", divisions[1])
        _check_first_weights(one, other)
        deals = one[0].deals
        if deals == other[0].deals:
            raise ScriptError(
                f"both runs have divided batches of {sum(deals[0])} samples alike, "
                f"{_told(deals[0])}: give `shares` that differ, or larger batches."
            )
        found, noise = compare(one, other), None
        if found.names:
            again = run("run 3, as 2 in another order", divisions[1], again=True)
            apart = differences(other, again, _most_updates(one, other))[found.place]
            noise = max(
                (apart[name].relative for name in found.names if name in apart), default=0.0
            )
    every = (*one, *other)
    notes = list(dict.fromkeys(line for each in every for line in each.notes))
    doubts = list(dict.fromkeys(line for each in every for line in each.doubts))
    files = dict.fromkeys(file for each in every for file in each.files if Path(file).is_file())
    number = min(len(each.updates) for each in (*one, *other))
    if number < request.num_updates:
        notes.append(f"The script has ended after {number} of {request.num_updates} updates.")
    if files:
        notes.append(f"The script has left files: {_some_of(files)}.")
    if changed := list(map(str, changed_files(before))):
        notes.append(
            f"Files that were there have changed meanwhile: {_some_of(changed)}. The script uses "
            "a library that writes outside of Python (SQLite, HDF5), or others wrote them."
        )
    return _judged(request, found, noise, doubts, notes)


def _some_of(files: Iterable[str]) -> str:
    """The first few of some files, and the number of the others."""
    return first_of([os.path.relpath(each) for each in files], MOST_FILES)


def _check_first_weights(one: Run, other: Run) -> None:
    """Compare the weights before the first update, which no division changes.

    Raises:
        ScriptError: they differ.
    """
    first, second = (_joined([[each.before] for each in run]) for run in (one, other))
    for name in first:
        if name not in second or name.startswith(BUFFER):  # one may be made of a rank's samples
            continue
        values = first[name], second[name]
        if values[0].shape != values[1].shape or not torch.allclose(*values, equal_nan=True):
            raise ScriptError(
                f"the runs begin with different weights ({name}): the script takes up a "
                "checkpoint that the run before has written, or draws weights by a generator "
                "without a seed. Turn that off for the check, by an argument of the script, say."
            )


def _told(shares: Sequence[int]) -> str:
    return "/".join(map(str, shares))


def _run(request: CheckRequest, task: Task) -> Run:
    """Run the script once.

    Raises:
        ScriptError: it fails, or trains nothing with a balancer.
        LaunchError: a rank does not end.
    """
    folder = Path(task.folder)
    given = [json.dumps(task._asdict()), request.script, *request.arguments]
    try:
        run_commands(
            ["-m", "heterog.balance.checked", *given],
            request.num_ranks,
            limits=Limits(timeout_s=request.timeout_s),
        )
    except LaunchError as error:
        traces = sorted(folder.glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
        if not traces:
            raise
        text, trace = json.loads(traces[0].read_text())
        said = text or error.last_words.get(int(traces[0].stem)) or "it exits and says nothing"
        where = f"the script fails with {_told(task.shares)} of each batch on its ranks"
        raise ScriptError(f"{where}: {said}", trace) from error
    files = [folder / f"{rank}.pt" for rank in range(request.num_ranks)]
    for rank, file in enumerate(files):
        if not file.is_file():
            raise ScriptError(
                f"rank {rank} has ended without saying what it has done: the script leaves Python "
                "by os._exit(), or becomes another program."
            )
    noted = [Noted(*torch.load(file, weights_only=True)) for file in files]
    if not noted[0].updates:
        raise ScriptError(
            f"{request.script} has made no update with batches of a heterog.Balancer on its ranks "
            f"({len(noted[0].deals)} were taken): nothing can be compared."
        )
    return noted


class Apart(NamedTuple):
    """Two tensors of one name.

    Attributes:
        norm: Norm of their difference.
        scale: The larger of their norms.
    """

    norm: float
    scale: float

    @property
    def relative(self) -> float:
        """Norm of the difference, relative to the larger one; infinite if that is 0 or unknown."""
        return 0.0 if not self.norm else self.norm / self.scale if self.scale else math.inf


class Found(NamedTuple):
    """The first place in which two runs differ, or else the first gradients.

    Attributes:
        place: Number of the place; see ``differences``.
        is_last: Whether it is how weights and buffers have moved.
        apart: Largest relative difference there, or that of all first gradients together.
        allowed: Difference that rounding explains.
        bound: The largest such difference of all places that were compared.
        names: Relative difference of each tensor that differs, largest first.
    """

    place: int
    is_last: bool
    apart: float
    allowed: float
    bound: float
    names: dict[str, float]


def compare(one: Run, other: Run) -> Found:
    """Find the first place in which two runs differ by more than rounding."""
    eps = max(each.eps for each in (*one, *other))
    allowed, least = 4 * eps + 4096 * EPS, least_part(eps)
    places = differences(one, other, _most_updates(one, other))
    norms = [math.hypot(*(each.scale for each in apart.values())) for apart in places]
    first = [each.relative for each in places[0].values() if each.scale > least * norms[0]]
    part = min(LATER * max(first, default=math.inf), allowed)
    later = max(allowed, 2 * math.sqrt(part))
    for place, (aparts, whole) in enumerate(zip(places, norms, strict=True)):
        bound = later if place else allowed
        names = {
            name: each.relative
            for name, each in aparts.items()
            if not (each.relative <= bound or each.norm <= least * whole)
        }
        if names:
            ordered = dict(sorted(names.items(), key=lambda item: -item[1]))
            is_last = place == len(places) - 1
            return Found(place, is_last, max(names.values()), bound, bound, ordered)
    apart = math.hypot(*(each.norm for each in places[0].values())) / (norms[0] or 1.0)
    return Found(0, False, apart, allowed, later, {})


def _most_updates(one: Run, other: Run) -> int:
    return max(len(run[0].updates) for run in (one, other))


def differences(one: Run, other: Run, number: int) -> list[dict[str, Apart]]:
    """Differences of the gradients of each update, and of how weights and buffers have moved.

    Args:
        one: A run.
        other: Another one.
        number: Updates to compare; those that a run has not made count as 0.
    """
    pairs = zip(_places(one, number), _places(other, number), strict=True)
    return [
        {name: _apart(name, first, second) for name in {**first, **second}}
        for first, second in pairs
    ]


def _places(run: Run, number: int) -> list[Values]:
    """The tensors of all ranks, which hold copies or parts of them."""
    gradients = [_joined([each.updates[k : k + 1] for each in run]) for k in range(number)]
    before, after = (
        _joined([[each.before] for each in run]),
        _joined([[each.after] for each in run]),
    )
    moved = {name: after[name] - value for name, value in before.items() if name in after}
    return [*gradients, moved]


def _joined(ranks: Sequence[Sequence[Values]]) -> Values:
    every = [each for rank in ranks for each in rank]
    return {
        name: torch.cat([each[name].double() for each in every if name in each])
        for name in dict.fromkeys(name for each in every for name in each)
    }


def _apart(name: str, one: Values, other: Values) -> Apart:
    """Compare two tensors; one that is missing counts as 0.

    >>> one = {"a": torch.tensor([3.0, 4.0])}
    >>> _apart("a", one, {"a": torch.tensor([3.0, 4.5])}), _apart("a", {}, one)
    (Apart(norm=0.5, scale=5.408...), Apart(norm=5.0, scale=5.0))
    """
    nothing = torch.zeros_like(one[name] if name in one else other[name])
    first, second = one.get(name, nothing), other.get(name, nothing)
    if first.shape != second.shape or not (first.isfinite().all() and second.isfinite().all()):
        return Apart(math.inf, 0.0)
    return Apart(float((first - second).norm()), max(float(first.norm()), float(second.norm())))


_OWN = (
    "Something is computed of a rank's own samples: advantages, weights or thresholds normalised "
    "over them, samples mixed or compared with each other, a factor by .item(), a sum where a "
    "mean is weighed, a hook that clips. Compute it of the samples of all ranks (all-reduced "
    "sums, balancer.mean_loss()), weigh means, and clip after the backward pass."
)
_KEPT = (
    "The updates before are equal, so something that is kept from step to step is computed of a "
    "rank's own samples: a running statistic, a queue, a loss that a schedule follows or that "
    "decides about an update. Compute it of the samples of all ranks (balancer.mean_loss())."
)
_MOVED = (
    "All gradients are equal, so something else changes weights by a rank's own samples: a "
    "learning rate, a weight decay, an update beside the optimizer. Compute it of the samples of "
    "all ranks."
)
_BUFFERS = (
    "The model computes these of a rank's own samples (a codebook, centers, a moving average). "
    "Average over ranks what it writes there."
)
_BESIDE = (
    "These parameters are in no model of a balancer, so nothing averages their gradients over "
    "ranks. Put them into one module with the model, wrap that, and give it to Balancer."
)
_INFINITE = (
    "A value is infinite or NaN. A rank without samples runs one sample of another rank with "
    "weight 0, and 0 times NaN is NaN: one sample has no deviation. "
)
_RANDOM = (
    "The loop draws random numbers that cannot be made alike in both divisions (by generators of "
    "its own, or an order of the batch), or pairs neighbours in a batch. Turn that off for the "
    "check, by an argument of the script, say."
)


_DOUBT = (
    "Ranks take something from their own samples, and that may change weights by less than can "
    "be told from rounding here. Do as the warning says. (Less is taken for rounding where a "
    "script computes in 32 bits, without autocast.)"
)


def _judged(
    request: CheckRequest, found: Found, noise: float | None, doubts: list[str], notes: list[str]
) -> Verdict:
    """Put into words what was found.

    Args:
        request: What was checked.
        found: First place in which runs differ.
        noise: Largest difference of the same tensors between two runs with one division.
        doubts: Warnings by which ranks take something from their own samples.
        notes: What else is to be known.
    """
    apart = found.apart
    runs = " and ".join(map(_told, request.divisions()))
    what = "weights and buffers" if found.is_last else f"gradients of update {found.place + 1}"
    seen = (
        f"the first gradients differ by {apart:.1e} of their norm, where rounding may make "
        f"{found.allowed:.1e}; in later ones, weights and buffers, differences below "
        f"{found.bound:.2%} cannot be told from rounding."
    )
    if noise is None and doubts:
        answer, advice = "undecided", _DOUBT
        text = f"with {runs} of each batch on the ranks {seen} But a balancer has warned."
    elif noise is None:
        answer, advice = "equal", ""
        text = (
            f"{request.script} makes the same updates with {runs} of each batch on its ranks: "
            f"{seen}"
        )
    elif apart > NOISE * noise:
        answer, advice = "differs", _advice(found)
        text = (
            f"{request.script} trains otherwise if its samples are divided otherwise, {runs} of "
            f"each batch: {what} differ by {_percent(apart)} of their norm, and rounding may make "
            f"{found.allowed:.2%}."
        )
    else:
        answer, advice = "undecided", _RANDOM if math.isfinite(noise) else _INFINITE
        text = (
            f"{what} differ by {_percent(apart)} with {runs} of each batch on the ranks, and by "
            f"{_percent(noise)} with one division and other random numbers."
        )
    return Verdict(
        answer=answer,
        text=text,
        apart=apart,
        allowed=found.allowed,
        bound=found.bound,
        noise=noise,
        names=found.names,
        advice=advice,
        notes=[*doubts, *notes],
    )


def _percent(part: float) -> str:
    return f"{part:.1%}" if math.isfinite(part) else "an infinite part"


def _advice(found: Found) -> str:
    """What usually causes a difference, and what to do."""
    if all(name.startswith(BESIDE) for name in found.names):
        return _BESIDE
    usual = _MOVED if found.is_last else _KEPT if found.place else _OWN
    if found.is_last and all(name.startswith(BUFFER) for name in found.names):
        usual = _BUFFERS
    return _INFINITE + usual if math.inf in found.names.values() else usual
