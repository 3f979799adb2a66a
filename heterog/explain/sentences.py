"""The words of an explanation: each function turns facts into one paragraph.

A sentence is left out if it would say nothing: limits that do not exist, changes that were not
asked for.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from heterog.explain.what_if import Change, Remedy, RemedyKind
from heterog.explain.wording import (
    SMALL,
    decided_words,
    listed,
    names_of,
    near_limit,
    percent,
    seconds_of,
    types_in_words,
)
from heterog.grouped import grouped
from heterog.search.request import GIVEN
from heterog.simulator.critical_path import Limit, PathPiece, Purpose, merge_blocks
from heterog.simulator.memory_breakdown import DeviceMemory, MemoryKind
from heterog.strategy.division import split_in_proportion
from heterog.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from heterog.explain.explanation import Explanation
_MOST_PLACES = 4
_NOTHING = 0.005
"""Part of a step below which a saving counts as nothing."""
_NEAR_BOUND = 0.10

_METHODS = {
    "ev_ps": "even shares, parameter servers",
    "ev_ar": "even shares, all-reduce",
    "cp_ps": "shares in proportion to speed, parameter servers",
    "cp_ar": "shares in proportion to speed, all-reduce",
    "ddp": "even shares, all-reduce in buckets",
    "ddp_accumulate": "even shares, all-reduce in buckets, gradient accumulation",
    "best_ddp": "the best shares, synchronisation and buckets on the best hosts",
    "tuned_uniform": "shares in proportion to speed, reduce-scatter and all-gather, best hosts",
}
_MOVED = {
    Purpose.GRADIENTS: "to exchange gradients",
    Purpose.PARAMETERS: "to fetch parameters",
    Purpose.ACTIVATIONS: "to move activations",
}


def paragraphs(facts: "Explanation") -> tuple[str, ...]:
    """All paragraphs, those about the plan first."""
    found = (
        " ".join((decided_words(facts), *_left_out_machines(facts))),
        _limits(facts),
        _memory(facts),
        _quality(facts),
        _given(facts),
        _bound(facts),
        _changes(facts.changes),
    )
    return tuple(filter(None, found))


def _beside(simple_s: float, step_s: float) -> str:
    """Time of good enough data parallelism compared with the plan's, in words.

    >>> _beside(0.2, 0.2), _beside(0.201, 0.2), _beside(0.1, 0.2)
    ('takes as long', 'takes only 0.5 % longer', 'takes 50 % less time')
    """
    longer = simple_s / step_s - 1.0
    if longer < -5e-4:
        return f"takes {percent(-longer)} less time"
    return "takes as long" if longer < 5e-4 else f"takes only {percent(longer)} longer"


def recommendation(facts: "Explanation") -> str:
    """The advice."""
    quality = facts.quality
    if not facts.fit.is_ok:
        found_s = facts.changes[0].before_s if facts.changes else None
        words = _remedy_advice(facts.remedies)
        if found_s is not None:
            words += " Or plan again with a larger budget: a quick search on the same cluster "
            words += f"found a plan that fits and takes {format_seconds(found_s)}."
        return words
    if facts.plan.step_time_s is None:
        return "Plan again with other methods, or another batch: this plan does not run."
    if not facts.plan.objective.is_time:
        late = facts.plan.objective.missed_s(facts.plan.step_time_s) > 0.0
        which = "nothing that was found ends before the deadline, and it is late the least"
        return f"Run this plan: {which if late else 'it is the cheapest that was found'}."
    if facts.plan.cluster.num_devices == 1:
        words = "Run this plan."
    elif quality.suffices:
        assert quality.data_parallel_s is not None
        same = _beside(quality.data_parallel_s, facts.step_time_s)
        words = f"Use plain data parallelism, {quality.data_parallel} "
        words += f"({_METHODS[quality.data_parallel]}): it {same} and is simpler to run."
    elif facts.quickly_found_s is not None:
        words = "Plan again with a larger budget before running this plan: a quick search on the "
        words += f"same cluster already found {format_seconds(facts.quickly_found_s)}."
    elif (simple_s := facts.faster_reference_s) is not None:
        words = f"Plan with {quality.data_parallel} as well ({_METHODS[quality.data_parallel]}): "
        words += f"it {_beside(simple_s, facts.step_time_s)}."
    else:  # what is idle need not be reserved: exports for Slurm and Kubernetes leave it out
        unused = types_in_words(facts.plan.cluster, facts.decided.idle)
        words = f"Run this plan{f'; {unused} not used' if unused else ''}."
    if facts.changes and facts.changes[0].saving >= 0.05:
        change = facts.changes[0]
        words += f" If something is to be bought, {change.what} would save most "
        words += f"({percent(change.saving)} of the step)."
    return words


def _left_out_machines(facts: "Explanation") -> list[str]:
    """One sentence for all machines of a kind that would cost the same."""
    cluster = facts.plan.cluster
    alike = grouped(
        (
            (
                *(cluster.devices[device].type.name for device in left.devices),
                "" if left.step_time_s is None else format_seconds(left.step_time_s),
            ),
            left,
        )
        for left in facts.left_out
    )
    words = []
    for first, *others in alike.values():
        said = _left_out(facts, first.devices, first.step_time_s)
        names = [cluster.hosts[cluster.host_of[left.devices[0]]].name for left in others]
        words.append(f"{said} The same holds for {listed(names)}." if names else said)
    return words


def _left_out(facts: "Explanation", devices: tuple[int, ...], with_s: float | None) -> str:
    cluster = facts.plan.cluster
    kinds = dict.fromkeys(cluster.devices[device].type.name for device in devices)
    who = f"{names_of([cluster.devices[d].name for d in devices])} ({', '.join(kinds)})"
    verb = "is" if len(devices) == 1 else "are"
    if with_s is None:
        return f"{who} {verb} left out: with work there, nothing that was tried fits into memory."
    more = with_s / facts.step_time_s - 1.0
    them = "it" if len(devices) == 1 else "them"
    if more < 0.0:
        return (
            f"{who} {verb} left out, although a plan that gives {them} work takes only "
            f"{format_seconds(with_s)}."
        )
    longer = f"{percent(more)} longer" if more < 1.0 else f"{1.0 + more:.0f} times as long"
    return (
        f"{who} {verb} left out: giving {them} work as well takes {format_seconds(with_s)} at "
        f"best ({longer})."
    )


# --- what limits the step -----------------------------------------------------------------------


def _limits(facts: "Explanation") -> str:
    by_limit = {limit: [p for p in facts.pieces if p.limit == limit] for limit in Limit}
    # Rounded so that they add up to 100.
    parts = split_in_proportion(100, tuple(seconds_of(some) for some in by_limit.values()))
    percent = dict(zip(by_limit, parts, strict=True))

    def on_devices(limit: Limit) -> str:
        return _on_devices(facts, by_limit[limit])

    words: dict[Limit, Callable[[], str]] = {
        Limit.COMPUTE: lambda: f"is compute{on_devices(Limit.COMPUTE)}",
        Limit.HOST: lambda: f"waits for the host to issue kernels{on_devices(Limit.HOST)}",
        Limit.LINK: lambda: f"waits for links{_for_links(facts, by_limit[Limit.LINK])}",
        Limit.LATENCY: lambda: "is latency, which bandwidth does not shorten",
        Limit.WAIT: lambda: "is spent waiting without a cause in the schedule",
    }
    said = [f"{percent[limit]} % {tell()}" for limit, tell in words.items() if percent[limit]]
    step = (
        f"A step takes {format_seconds(facts.step_time_s)}. On the chain of tasks that decides "
        f"this, {'; '.join(said)}."
    )
    return " ".join(filter(None, [step, *_queued(facts), _busy(facts)]))


def _queued(facts: "Explanation") -> list[str]:
    """Sentences about collectives that wait for one another, if that matters."""
    return [
        f"{percent(each.seconds / facts.step_time_s)} of the step is spent in collectives that "
        f"waited for the communicator of "
        f"{names_of([facts.plan.cluster.devices[device].name for device in each.devices])}, which "
        "runs one at a time."
        for each in facts.queued
        if each.seconds >= SMALL * facts.step_time_s
    ]


def _on_devices(facts: "Explanation", pieces: Sequence[PathPiece]) -> str:
    places = _grouped(pieces, lambda piece: piece.place)
    cluster = facts.plan.cluster
    words = []
    shown = _largest(places, facts.step_time_s)
    rest = _rest(facts, places, shown, "on other devices")
    if len(shown) == 1 and not rest:
        return f" on {shown[0][0]}{_mostly(shown[0][1])}"
    for place, some in shown:
        kind = cluster.devices[cluster.device_index(place)].type.name
        part = percent(seconds_of(some) / facts.step_time_s)
        words.append(f"{part} on {place} ({kind}){_mostly(some)}")
    return f": {', '.join([*words, *rest])}"


def _for_links(facts: "Explanation", pieces: Sequence[PathPiece]) -> str:
    places = _grouped(pieces, lambda piece: f"for the {piece.place} {_MOVED[piece.purpose]}")
    shown = _largest(places, facts.step_time_s)
    rest = _rest(facts, places, shown, "for other links")
    if len(shown) == 1 and not rest:
        return f", {shown[0][0]}"
    words = [f"{percent(seconds_of(some) / facts.step_time_s)} {place}" for place, some in shown]
    return f": {', '.join([*words, *rest])}"


def _grouped(
    pieces: Iterable[PathPiece], key: Callable[[PathPiece], str]
) -> dict[str, list[PathPiece]]:
    """Pieces by a key, keys with most seconds first."""
    groups = grouped((key(piece), piece) for piece in pieces)
    return dict(sorted(groups.items(), key=lambda entry: (-seconds_of(entry[1]), entry[0])))


def _largest(
    places: Mapping[str, list[PathPiece]], whole: float
) -> list[tuple[str, list[PathPiece]]]:
    """The few groups that matter, at least one."""
    first = list(places.items())[:_MOST_PLACES]
    return [entry for entry in first if seconds_of(entry[1]) >= SMALL * whole] or first[:1]


def _rest(
    facts: "Explanation",
    places: Mapping[str, list[PathPiece]],
    shown: Sequence[tuple[str, list[PathPiece]]],
    where: str,
) -> list[str]:
    left = list(places.values())[len(shown) :]
    part = sum(seconds_of(some) for some in left) / facts.step_time_s
    return [f"{percent(part)} {where}"] if part >= _NOTHING else []


def _mostly(pieces: Sequence[PathPiece]) -> str:
    """The family of modules (``encoder.layer.3-7``) with most of the seconds, if one has many."""
    families = _grouped(pieces, lambda piece: _family(piece.block))
    family, some = next(iter(families.items()))
    part = seconds_of(some) / seconds_of(pieces)
    blocks = merge_blocks(piece.block for piece in some)
    # If all modules are numbered children of the root, their family is the whole model.
    if part < 0.3 or not family:
        return ""
    name = blocks[0] if len(blocks) == 1 else f"{family}*"
    return f" in {name}" if part > 0.95 else f", mostly in {name} ({percent(part)} of that)"


def _family(block: str) -> str:
    """The common part of blocks' paths: before the number, or the first part of the path."""
    stem = block.rstrip("0123456789")
    return stem if stem != block else block.partition(".")[0]


def _busy(facts: "Explanation") -> str:
    """How much of the time each device computes; empty for a single device."""
    devices = facts.plan.cluster.devices
    if len(devices) == 1:
        return ""
    mean = sum(facts.busy) / len(facts.busy)
    most = max(range(len(devices)), key=lambda d: facts.busy[d])
    least = min(range(len(devices)), key=lambda d: facts.busy[d])
    if facts.busy[most] - facts.busy[least] < 0.1:
        return f"All devices are about equally busy, {percent(mean)} of the step on average."
    return (
        f"On average the devices are busy for {percent(mean)} of the step, {devices[most].name} "
        f"most ({percent(facts.busy[most])}), {devices[least].name} least "
        f"({percent(facts.busy[least])})."
    )


# --- memory, quality, bound, changes ------------------------------------------------------------


def _memory(facts: "Explanation") -> str:
    fullest = facts.fit.fullest
    what = _parts(fullest)
    known = _how_well_known(facts)
    if facts.fit.is_ok:
        part = fullest.peak_bytes / fullest.usable_bytes
        return (
            f"Memory suffices. {fullest.device} ({fullest.device_type}) is the fullest: "
            f"{format_bytes(fullest.peak_bytes)} of {format_bytes(fullest.usable_bytes)} "
            f"({percent(part)}), most of it {what}.{known}"
        )
    short = [d for d in facts.fit.devices if d.lacking_bytes]
    others = f" So do {len(short) - 1} other devices, by less." if len(short) > 1 else ""
    return (
        f"The plan does not fit: {fullest.device} ({fullest.device_type}) needs "
        f"{format_bytes(fullest.peak_bytes)} and has {format_bytes(fullest.usable_bytes)}; it "
        f"lacks {format_bytes(fullest.lacking_bytes)}.{others} On {fullest.device}, at its "
        f"fullest, are {what}.{known}"
    )


def _how_well_known(facts: "Explanation") -> str:
    """The interval of the fullest device's peak, and whether the limit lies in it."""
    errors, fullest = facts.plan.peak_errors, facts.fit.fullest
    if errors is None:
        return ""
    low, high = errors.interval(fullest.peak_bytes)
    near = near_limit(errors, facts.fit.peaks)
    return (
        f" Its measured peak is expected between {format_bytes(low)} and {format_bytes(high)}, "
        f"four times out of five, by the errors of {errors.num_runs} runs on "
        f"{errors.measured_on}." + (f" {near}." if near else "")
    )


def _parts(device: DeviceMemory) -> str:
    names = {
        MemoryKind.BACKWARD: "values of the backward pass",
        MemoryKind.COMMUNICATION: "communication buffers",
        MemoryKind.BATCH: "the batch",
        MemoryKind.CONSTANTS: "constants",
        MemoryKind.WORKSPACE: "workspace of kernels",
        MemoryKind.MARGIN: "safety margin",
    }
    ranked = sorted(device.parts, key=lambda part: -part[1])
    shown = [part for part in ranked if part[1] >= 0.05 * device.peak_bytes]
    return listed([f"{names.get(kind, kind)} ({format_bytes(size)})" for kind, size in shown])


_REMEDIES = {
    RemedyKind.RECOMPUTE: "compute {remedy.keeps.words} again instead of keeping them",
    RemedyKind.MICRO_BATCHES: "cut the batch into {remedy.amount} micro-batches",
    RemedyKind.BATCH_SIZE: "train with a batch of {remedy.amount}",
}


def _remedy_advice(found: Sequence[Remedy]) -> str:
    words = [
        f"{_REMEDIES[remedy.kind].format(remedy=remedy)} "
        f"({format_seconds(remedy.step_time_s)} per step)"
        for remedy in found
        if remedy.step_time_s is not None
    ]
    memory = [
        f"{format_bytes(remedy.amount)} usable on every {remedy.device_type}"
        for remedy in found
        if remedy.kind == RemedyKind.MEMORY
    ]
    if memory:
        words.append(f"have {listed(memory)}")
    return f"This plan does not fit; to make it fit, {', or '.join(words)}."


def _quality(facts: "Explanation") -> str:
    quality = facts.quality
    if not facts.fit.is_ok or facts.plan.cluster.num_devices == 1:
        return ""
    if quality.data_parallel_s is None:
        return "No form of data parallelism fits into memory."
    seconds = format_seconds(quality.data_parallel_s)
    if quality.suffices:
        return (
            f"Data parallelism ({quality.data_parallel}) takes {seconds}: there is nothing to "
            "gain from anything else that was tried."
        )
    return (
        f"The plan is {quality.data_parallel_s / facts.step_time_s:.2f} times as fast as the "
        f"best data parallelism ({quality.data_parallel}: {_METHODS[quality.data_parallel]}; "
        f"{seconds})."
    )


def _given(facts: "Explanation") -> str:
    """The person's own layout compared with the plan, and what the plan does differently."""
    given = facts.given
    if given is None:
        return ""
    words = f"Your layout ({given.said.rstrip('.')}) "
    if given.step_time_s is None:
        words += f"cannot run: {given.shortage or given.outcome.replace('_', ' ')}."
    else:
        words += f"takes {format_seconds(given.step_time_s)} per step"
        if facts.plan.method == GIVEN:
            words += "; no method found anything faster." * (len(facts.plan.rows) > 1) or "."
        else:
            faster = given.gain.speedup if given.gain is not None else 0.0
            words += f"; the plan is {faster:.2f} times as fast." if faster else "."
    if given.differences:
        listed = "; ".join(
            f"{each.what}: {each.ours}, not {each.given}" for each in given.differences
        )
        words += f" What the plan does differently: {listed}."
    return words


def _bound(facts: "Explanation") -> str:
    if not facts.fit.is_ok:
        return ""
    left = facts.left_to_gain
    by_path = facts.decided.step_barrier and facts.bound.path_s > facts.bound.compute_s
    why = (
        "the longest chain of operators takes that long even on the fastest device"
        if by_path
        else "the compute of the step takes that long even if all devices share it perfectly and "
        "nothing ever waits"
    )
    bound = format_seconds(facts.bound_s)
    # The bound without rules of single ops does not hold for plans with some.
    which = "plan" if facts.bound.with_op_rules else "plan without rules for single ops"
    if left <= _NEAR_BOUND:
        return (
            f"At most {percent(left)} is left to gain on this cluster: no {which} takes less "
            f"than {bound}, as {why}."
        )
    return (
        f"No {which} on this cluster can take less than {bound}, as {why}. That leaves at most "
        f"{percent(left)} to gain, but the limit counts no communication, so part of it is out "
        "of reach."
    )


def _changes(changes: Sequence[Change]) -> str:
    if not changes:
        return ""
    helpful = [each for each in changes if each.saving >= _NOTHING]
    useless = [_bought(each) for each in changes if each.saving < _NOTHING]
    most = max(each.num_evaluations for each in changes)
    words = []
    if helpful:
        said = "; ".join(_saved(each) for each in helpful)
        words.append(f"What would help (planned anew with up to {most} simulations each): {said}.")
    if useless and helpful:
        words.append(f"Next to nothing would come of {listed(useless)}.")
    elif useless:
        words.append(
            f"Nothing that was tried would save as much as half a percent: {listed(useless)}."
        )
    return " ".join(words)


def _bought(change: Change) -> str:
    where = f" {change.where}" if change.where and not change.what.startswith("one more") else ""
    return f"{change.what}{where}"


def _saved(change: Change) -> str:
    where = f" {change.where}" if change.where else ""
    assert change.after_s is not None
    if change.before_s is None:
        return f"with {change.what}{where} it fits and takes {format_seconds(change.after_s)}"
    return (
        f"{change.what}{where} would save {percent(change.saving)} "
        f"({format_seconds(change.before_s)} -> {format_seconds(change.after_s)})"
    )
