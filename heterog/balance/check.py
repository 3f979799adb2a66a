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
so a difference must also exceed 64 and 2 such units of the norm of all gradients together, and
such a parameter is not compared later.

After the first update weights differ by rounding, and an optimizer that divides by the gradient's
size (Adam) moves an element whose gradient's sign is rounding by two steps. If rounding is a part
``t`` of the norm, a part ``t`` of the elements may be so, which is a difference of ``2 sqrt(t)``
in the norm of the update. That counts for later gradients, for parameters and for buffers.

If runs differ, the second is repeated with another order of each rank's samples, and other random
numbers. What differs there, too, is not due to the division.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from heterog.balance.checked import BESIDE, Noted, Task
from heterog.errors import HeterogError
from heterog.runtime.launch import RANKS_OWN, run_commands, temporary_folder
from heterog.runtime.ranks.forks import rank_forks
from heterog.runtime.ranks.watching import LaunchError, Limits

EPS = torch.finfo(torch.float32).eps
NOISE = 3.0
"""A difference counts if it exceeds what random numbers make by this factor."""

Values = Mapping[str, Tensor]


class ScriptError(HeterogError):
    """A script that has failed.

    Attributes:
        trace: The end of its traceback.
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
            HeterogError: there are others than two, or one does not fit the ranks.
        """
        number = self.num_ranks
        alone = (1, *(0 for _ in range(number - 1)))
        unequal = tuple(range(2 * number - 1, 0, -2))
        given = self.shares or (unequal,)
        first, second = (alone, *given)[-2:]
        if number < 2 or len(given) > 2:
            raise HeterogError(f"{number} ranks and {len(given)} divisions; give 2 ranks or more.")
        for each in (first, second):
            if len(each) != number or min(each) < 0 or not sum(each):
                raise HeterogError(
                    f"`shares` {_told(each)}: give a whole number for each of {number} ranks, 0 "
                    "or more."
                )
        return first, second


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a check has found.

    Attributes:
        answer: ``equal``, ``differs`` or ``undecided``.
        text: The answer in a sentence.
        what: What differs, if something does: the gradients of an update, say.
        apart: Largest difference, relative to the norm of what differs.
        allowed: Difference that rounding explains.
        names: Relative difference of each parameter that differs, largest first.
        noise: Difference of two runs with the same division, if that was measured.
        advice: What usually causes this, and what to do.
        notes: What else is to be known.
    """

    answer: str
    text: str
    what: str = ""
    apart: float
    allowed: float
    names: dict[str, float]
    noise: float | None = None
    advice: str = ""
    notes: tuple[str, ...] = ()


def check(request: CheckRequest, progress: Callable[[str], None] = lambda stage: None) -> Verdict:
    """Run a script with two divisions of its samples, and compare.

    Args:
        request: What to check.
        progress: Called with each stage.

    Raises:
        ScriptError: the script fails, or the two runs cannot be compared; says why.
        LaunchError: a rank does not end.
    """
    first, second = request.divisions()
    if not request.is_module and not Path(request.script).is_file():
        raise HeterogError(f"there is no script '{request.script}'; -m runs a module.")
    began_s = time.time()
    with temporary_folder() as folder, rank_forks(RANKS_OWN):

        def run(name: str, shares: tuple[int, ...], again: bool = False) -> list[Noted]:
            progress(f"{name}: {_told(shares)} of each batch")
            (folder / name).mkdir()
            asked = request.num_updates, request.is_module, again, began_s
            return _run(request, Task(str(folder / name), shares, *asked))

        one, other = run("run 1", first), run("run 2", second)
        _check_comparable(request, one, other)
        found = compare(one, other)
        noise = None
        if found.names:
            again = run("run 3, as 2 in another order", second, again=True)
            noise = same_place(found, other, again)
    return judge(request, found, noise, one, other)


def _told(shares: Sequence[int]) -> str:
    return "/".join(map(str, shares))


def _run(request: CheckRequest, task: Task) -> list[Noted]:
    """Run the script once; what each rank has noted.

    Raises:
        ScriptError: it fails.
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
        told = json.loads(traces[0].read_text())
        where = f"the script fails with {_told(task.shares)} of each batch on its ranks"
        raise ScriptError(f"{where}: {told['text']}", told["trace"]) from error
    return [
        Noted(*torch.load(folder / f"{rank}.pt", weights_only=True))
        for rank in range(request.num_ranks)
    ]


def _check_comparable(request: CheckRequest, one: list[Noted], other: list[Noted]) -> None:
    """Check that both runs have trained, on the same batches, divided in two ways.

    Raises:
        ScriptError: they have not.
    """
    deals, others = one[0].deals, other[0].deals
    if not deals or not others:
        raise ScriptError(
            f"{request.script} has taken no batch from a heterog.Balancer on its ranks: give its "
            "loop balancer.loader(dataset)."
        )
    if not one[0].updates or not other[0].updates:
        raise ScriptError(
            f"{request.script} has ended after {len(deals)} batches without an update by an "
            "optimizer of PyTorch, so that nothing can be compared."
        )
    if deals == others:
        raise ScriptError(
            f"both runs have divided batches of {sum(deals[0])} samples alike, {_told(deals[0])}: "
            "give `shares` that differ in such batches, or larger batches."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The first place in which two runs differ, or the largest difference of gradients.

    Attributes:
        what: Kind of what differs, and the number of the update.
        apart: Norm of the difference, relative to that of the larger values.
        allowed: Difference that rounding explains.
        names: Relative difference of each tensor that differs.
    """

    what: tuple[str, int]
    apart: float
    allowed: float
    names: dict[str, float]


GRADIENTS, PARAMETERS, BUFFERS, NUMBER = "gradients", "parameters", "buffers", "number of updates"


def compare(one: list[Noted], other: list[Noted]) -> Found:
    """Find the first place in which two runs differ by more than rounding."""
    eps = max(each.eps for each in (*one, *other))
    allowed, least = 4 * eps + 4096 * EPS, 2 * eps + 64 * EPS
    later = 2 * math.sqrt(allowed)
    worst = Found(what=(GRADIENTS, 1), apart=0.0, allowed=allowed, names={})
    numbers = len(one[0].updates), len(other[0].updates)
    for index in range(min(numbers)):
        bound = later if index else allowed
        first, second = (_joined([each.updates[index] for each in run]) for run in (one, other))
        apart, names = unlike(first, second, bound, least)
        if names or (not index and apart > worst.apart):
            worst = Found(what=(GRADIENTS, index + 1), apart=apart, allowed=bound, names=names)
        if names:
            return worst
    if numbers[0] != numbers[1]:
        names = {f"{numbers[0]} and {numbers[1]}": math.inf}
        return Found(what=(NUMBER, min(numbers)), apart=math.inf, allowed=0.0, names=names)
    without = _without_gradients(one, least)
    for what, moved in ((PARAMETERS, _moved), (BUFFERS, _moved_buffers)):
        apart, names = unlike(moved(one), moved(other), later, least)
        names = {name: each for name, each in names.items() if name not in without}
        if names:
            return Found(what=(what, numbers[0]), apart=apart, allowed=later, names=names)
    return worst


def same_place(found: Found, one: list[Noted], other: list[Noted]) -> dict[str, float]:
    """Relative differences of two runs in the place and the tensors of ``found``."""
    what, index = found.what
    if what == NUMBER:
        return {}
    if what == GRADIENTS:
        values = [
            _joined([each.updates[index - 1] for each in run if len(each.updates) >= index])
            for run in (one, other)
        ]
    else:
        values = [(_moved if what == PARAMETERS else _moved_buffers)(run) for run in (one, other)]
    return {name: _apart(name, *values)[2] for name in found.names}


def _joined(ranks: Sequence[Values]) -> Values:
    """The tensors of all ranks, which may hold parts or copies."""
    names = dict.fromkeys(name for each in ranks for name in each)
    return {
        name: torch.cat([each[name].double() for each in ranks if name in each]) for name in names
    }


def _without_gradients(run: list[Noted], least: float) -> set[str]:
    """Parameters whose gradients are rounding, so that Adam moves them at random."""
    known, found = set[str](), set[str]()
    for index in range(len(run[0].updates)):
        norms = {
            name: float(each.norm())
            for name, each in _joined([each.updates[index] for each in run]).items()
        }
        known |= set(norms)
        whole = math.hypot(*norms.values())
        found |= {name for name, norm in norms.items() if norm > least * whole}
    return known - found


def _moved(run: list[Noted]) -> Values:
    """How far each parameter has moved."""
    before, after = _joined([each.before for each in run]), _joined([each.after for each in run])
    return {name: after[name] - before[name] for name in before if name in after}


def _moved_buffers(run: list[Noted]) -> Values:
    """How far each buffer of rank 0, which DistributedDataParallel gives to others, has moved."""
    first = run[0]
    return {
        name: value.double() - first.buffers_before[name].double()
        for name, value in first.buffers_after.items()
        if name in first.buffers_before
    }


def unlike(
    one: Values, other: Values, allowed: float, least: float
) -> tuple[float, dict[str, float]]:
    """The relative difference of all tensors together, and of those that differ.

    >>> one = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.0])}
    >>> unlike(one, {"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([1e-9])}, 0.01, 1e-6)
    (0.0924..., {'a': 0.0924...})
    """
    told = {name: _apart(name, one, other) for name in {**one, **other}}
    whole = math.hypot(*(scale for _, scale, _ in told.values()))
    apart = math.hypot(*(each for each, _, _ in told.values()))
    found = {
        name: relative
        for name, (each, _, relative) in told.items()
        if not (relative <= allowed or each <= least * whole)
    }
    ordered = sorted(found, key=lambda name: -found[name])
    return apart / whole if whole else 0.0, {name: found[name] for name in ordered}


def _apart(name: str, one: Values, other: Values) -> tuple[float, float, float]:
    """Norm of a difference, the larger norm, and their quotient; what is missing counts as 0."""
    nothing = torch.zeros_like(one[name] if name in one else other[name])
    first, second = one.get(name, nothing), other.get(name, nothing)
    if first.shape != second.shape or not (first.isfinite().all() and second.isfinite().all()):
        return math.inf, 0.0, math.inf
    apart = float((first - second).norm())
    scale = max(float(first.norm()), float(second.norm()))
    return apart, scale, apart / scale if scale else 0.0


_OWN = (
    "Something is computed of a rank's own samples: advantages, weights or thresholds normalised "
    "over them, samples mixed or compared with each other, a factor by .item(), a sum where a "
    "mean is weighed, a hook that clips. Compute it of the samples of all ranks (all-reduced "
    "sums, balancer.mean_loss()), weigh means, and clip after the backward pass."
)
_KEPT = (
    "The updates before are equal, so something that is kept from step to step is computed of a "
    "rank's own samples: a running statistic, a queue, a loss that a schedule or curriculum "
    "follows, the first update of a second optimizer. Compute it of the samples of all ranks."
)
_ADVICE = {
    PARAMETERS: "All gradients are equal, so something else changes weights by a rank's own "
    "samples: a learning rate, a weight decay, an update beside the optimizer. Compute it of the "
    "samples of all ranks.",
    BUFFERS: "The model computes these of a rank's own samples (a codebook, centers, a moving "
    "average). Average over ranks what it writes there.",
    NUMBER: "A rank's own samples decide whether an update is made. Decide by "
    "balancer.mean_loss(), which is alike on all ranks.",
}
_BESIDE = (
    "These parameters are in no model of a balancer, so nothing averages their gradients over "
    "ranks. Put them into one module with the model, wrap that, and give it to Balancer."
)
_INFINITE = (
    "A value is infinite or NaN in one division. A rank without samples runs one sample of "
    "another rank with weight 0, and 0 times NaN is NaN: a deviation of one sample is none. "
)
_STATISTICS = (
    "BatchNorm without running statistics normalises by a rank's own samples, as in any data "
    "parallelism. SyncBatchNorm, or another norm, trains as one process does."
)
_FROZEN = (
    "BatchNorm was left out: it normalised by running statistics here. In training it takes those "
    "of a rank's own samples, as in any data parallelism; SyncBatchNorm takes those of all."
)
_RANDOM = (
    "The loop draws random numbers that cannot be made alike in both divisions (by generators of "
    "its own, or an order of the batch), or pairs neighbours in a batch. Turn that off for the "
    "check, by an argument of the script, say."
)


def judge(
    request: CheckRequest,
    found: Found,
    noise: Mapping[str, float] | None,
    one: list[Noted],
    other: list[Noted],
) -> Verdict:
    """Put into words what was found.

    Args:
        request: What was checked.
        found: First place in which runs differ.
        noise: Differences of the same tensors between two runs with one division.
        one: What the ranks of the first run have noted.
        other: Those of the second.
    """
    known = noise or {}
    names = {
        name: apart
        for name, apart in found.names.items()
        if not known.get(name, 0.0) * NOISE >= apart
    }
    runs = " and ".join(map(_told, request.divisions()))
    what, number = found.what
    place = f"the {what} of update {number}" if what == GRADIENTS else f"the {what}"
    largest = max((names or found.names).values(), default=found.apart)
    measured = max(known.values(), default=0.0)
    if not found.names:
        answer, advice = "equal", ""
        text = (
            f"{request.script} makes the same updates with {runs} of each batch on its ranks: "
            f"gradients differ by {largest:.1e} of their norm, and rounding may make "
            f"{found.allowed:.1e}."
        )
    elif not names:
        answer, advice = "undecided", _RANDOM
        text = (
            f"{place} differ by {largest:.1%} with {runs} of each batch on the ranks, and by "
            f"{measured:.1%} with one division and other random numbers."
        )
    else:
        answer, advice = "differs", _advice(found, names, [*one, *other])
        text = (
            f"{request.script} trains otherwise if its samples are divided otherwise, {runs} of "
            f"each batch: {place} differ by {largest:.1%} of their norm, and rounding may make "
            f"{found.allowed:.2%}."
        )
    return Verdict(
        answer=answer,
        text=text,
        what=what if found.names else "",
        apart=largest,
        allowed=found.allowed,
        names=names or found.names,
        noise=None if noise is None else measured,
        advice=advice,
        notes=_notes(request, one, other),
    )


def _advice(found: Found, names: Mapping[str, float], noted: Sequence[Noted]) -> str:
    """What usually causes a difference, and what to do."""
    what, number = found.what
    if any(each.has_statistics for each in noted):
        return _STATISTICS
    if what != NUMBER and all(name.startswith(BESIDE) for name in names):
        return _BESIDE
    usual = _ADVICE.get(what) or (_OWN if number == 1 else _KEPT)
    return _INFINITE + usual if what != NUMBER and math.inf in names.values() else usual


def _notes(request: CheckRequest, one: list[Noted], other: list[Noted]) -> tuple[str, ...]:
    """What else is to be known of two runs."""
    notes = [_FROZEN] if any(each.is_frozen for each in (*one, *other)) else []
    number = min(len(one[0].updates), len(other[0].updates))
    if number < request.num_updates:
        notes.append(f"The script has ended after {number} of {request.num_updates} updates.")
    told = dict.fromkeys(line for each in (*one, *other) for line in each.warnings)
    return (*notes, *(f"The balancer warned: {line}" for line in told))
