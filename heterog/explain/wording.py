"""Words for answers, explanations and reports.

Numbers and lists, how well a peak of memory is known, and what a plan decides: ranges of devices,
micro-batches, sums of gradients.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from heterog.cluster.topology import Cluster
from heterog.explain.decided import (
    ALONE,
    ELSEWHERE,
    IN_SLICES,
    MADE_WHOLE,
    SAMPLES,
    WHOLE,
    AggregatedParameters,
    Decided,
    Range,
    Split,
)
from heterog.grouped import grouped
from heterog.pricing.intervals import PeakErrors
from heterog.simulator.critical_path import PathPiece
from heterog.strategy.schedules import PipelineSchedule
from heterog.units import format_bytes, format_bytes_range

if TYPE_CHECKING:
    from heterog.explain.explanation import Explanation


def seconds_of(pieces: Iterable[PathPiece]) -> float:
    """Seconds of some pieces together."""
    return sum(piece.seconds for piece in pieces)


def groups_of(count: int) -> str:
    """``"1 group"`` or ``"3 groups"``."""
    return "1 group" if count == 1 else f"{count} groups"


def percent(part: float) -> str:
    """Whole percent, with a decimal for small parts.

    >>> percent(0.416), percent(0.0163), percent(0.0)
    ('42 %', '1.6 %', '0.0 %')
    """
    return f"{100 * part:.1f} %" if part < 0.0995 else f"{100 * part:.0f} %"


def names_of(names: Sequence[str]) -> str:
    """Some names in full, many as their number and the ends."""
    if len(names) > 4:
        return f"{len(names)} devices, {names[0]} to {names[-1]}"
    return listed(names)


def types_in_words(cluster: Cluster, devices: Iterable[int]) -> str:
    """``"2 T4, 1 P100"``: some devices by type, in their order."""
    counts = Counter(cluster.devices[device].type.name for device in sorted(devices))
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def listed(words: Sequence[str]) -> str:
    """``"a, b and c"``."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def size_with_interval(errors: PeakErrors | None, peak_bytes: int) -> str:
    """A peak, and in brackets the range of four of five measured peaks.

    >>> errors = PeakErrors(spread=0.05, num_runs=4, measured_on="GH200")
    >>> size_with_interval(errors, 10 * 1024**3)
    '10.0 GiB (9.1 to 11.0)'
    """
    if errors is None:
        return format_bytes(peak_bytes)
    low, high = errors.interval(peak_bytes)
    return f"{format_bytes(peak_bytes)} ({format_bytes_range(low, high, around=peak_bytes)})"


def near_limit(errors: PeakErrors | None, peaks: Iterable[tuple[int, int]]) -> str:
    """Distance of a plan from the limit if that is within the model's error; else empty.

    Args:
        errors: Errors of the memory model; ``None`` if they are not known.
        peaks: (predicted, usable) bytes of each device.

    >>> errors = PeakErrors(spread=0.05, num_runs=4, measured_on="GH200")
    >>> near_limit(errors, [(97, 100), (1, 100)])
    "3 % below the limit is within the model's error (chance to fit 69 %)"
    >>> near_limit(errors, [(105, 100)])
    "5 % above the limit is within the model's error (chance to fit 22 %)"
    >>> near_limit(errors, [(50, 100)])
    ''
    """
    if errors is None:
        return ""
    peak, usable = max(peaks, key=lambda pair: pair[0] / pair[1])
    interval = errors.interval(peak)
    if not interval.low <= usable <= interval.high:
        return ""
    side = "above" if peak > usable else "below"
    away = 100.0 * abs(peak / usable - 1.0)
    chance = errors.fit_probability([(peak, usable)])
    return (
        f"{away:.{0 if away >= 1.0 else 1}f} % {side} the limit is within the model's error "
        f"({chance_to_fit(chance)})"
    )


def chance_to_fit(probability: float) -> str:
    """Chance that a plan fits, in whole percent: the errors of four runs allow no more digits.

    >>> chance_to_fit(0.612), chance_to_fit(0.9996), chance_to_fit(0.002)
    ('chance to fit 61 %', 'chance to fit over 99 %', 'chance to fit under 1 %')
    """
    if probability > 0.99:
        return "chance to fit over 99 %"
    if probability < 0.01:
        return "chance to fit under 1 %"
    return f"chance to fit {100.0 * probability:.0f} %"


def provenance(errors: PeakErrors) -> str:
    """One sentence on the meaning and the source of an interval.

    >>> provenance(PeakErrors(spread=0.05, num_runs=4, measured_on="GH200"))
    'Four of five measured peaks are expected in their interval, by the errors of 4 runs on GH200.'
    """
    return (
        "Four of five measured peaks are expected in their interval, by the errors of "
        f"{errors.num_runs} runs on {errors.measured_on}."
    )


_MOST_RANGES = 8
SMALL = 0.02
"""Pieces that take a smaller part of a step are summed up."""

_ORDERS = {  # first come, first served is the usual order
    "rank": "Of several tasks that wait, the one with the longest way to the end goes first.",
    "program": "Of several tasks that wait, the one that comes first in the program goes first.",
}
_NO_BARRIER = (
    "There is no step barrier: a forward op of the next step begins when its own parameters are "
    "new, not when all are."
)


def decided_words(facts: "Explanation") -> str:
    """The paragraph about the plan's decisions."""
    decided, cluster = facts.decided, facts.plan.cluster
    batch = facts.plan.graph.batch_size
    said = [
        _ranges(decided, cluster, batch),
        _micro_batches(decided, batch),
        *(mode.sentence(facts.plan.strategy) for mode in facts.plan.strategy.modes),
        *_aggregation(decided, cluster),
        _recomputing(decided),
        "" if decided.step_barrier else _NO_BARRIER,
        _ORDERS.get(facts.plan.order, ""),
    ]
    return " ".join(filter(None, said))


def _ranges(decided: Decided, cluster: Cluster, batch: int) -> str:
    if len(decided.ranges) == 1:
        return f"The whole model runs on {_placed(decided.ranges[0], cluster, batch)}."
    shown = sorted(decided.ranges, key=lambda r: -r.num_groups)[:_MOST_RANGES]
    words = [
        f"{_span(each)} on {_placed(each, cluster, batch)}"
        for each in decided.ranges
        if each in shown
    ]
    rest = len(decided.ranges) - len(shown)
    more = f"; and {rest} shorter ranges" if rest else ""
    return (
        f"The model's {decided.num_groups} groups of modules run in {len(decided.ranges)} ranges: "
        f"{'; '.join(words)}{more}."
    )


def _span(each: Range) -> str:
    if each.num_groups == 1:
        return each.first
    return f"{each.first} to {each.last} ({groups_of(each.num_groups)})"


def _placed(each: Range, cluster: Cluster, batch: int) -> str:
    """Devices with their shares: ``"A:0 and A:1 (V100-16GB, 15 of 48 samples each)"``.

    If rules split ops along other axes, the text names the axis with most work, and its part.
    """
    if len(each.devices) == 1:
        device = cluster.devices[each.devices[0]]
        return f"{device.name} ({device.type.name})"
    if not each.splits:
        return _shared(each.devices, each.shares, f" of {batch} samples", cluster)
    first = each.splits[0]
    unit = "samples" if first.axis == SAMPLES else "units"
    of = "" if first.axis == WHOLE else f" of {first.units} {unit}"
    where = _shared(each.devices, first.shares, of, cluster)
    if len(each.splits) == 1 and first.axis == SAMPLES:
        return where
    others = [split for split in each.splits[1:] if split.work >= SMALL]
    rest = [f"{percent(split.work)} {_axis(split)}" for split in others]
    part = f", {percent(first.work)} of the FLOPs" if len(each.splits) > 1 else ""
    more = f" ({', '.join(rest)})" if rest else ""
    return f"{where} {_axis(first)}{part}{more}"


def _shared(devices: Sequence[int], shares: Sequence[int], of: str, cluster: Cluster) -> str:
    """Devices by type and share; those that take part in undivided work have no number."""
    alike = grouped(
        ((cluster.devices[index].type.name, share), cluster.devices[index].name)
        for index, share in zip(devices, shares, strict=True)
    )
    words: list[str] = []
    for (kind, share), names in alike.items():
        total = "" if words else of
        amount = f", {share}{total}{' each' * (len(names) > 1)}" if of or not share else ""
        words.append(f"{names_of(names)} ({kind}{amount})")
    return listed(words)


def _axis(split: Split) -> str:
    """The axis along which ops are divided: ``"by columns and rows"``."""
    return "whole on each" if split.axis == WHOLE else f"by {split.axis}"


def _micro_batches(decided: Decided, batch: int) -> str:
    if decided.num_micro_batches == 1:
        late = _late_weights(decided.schedule)  # the rest of a schedule needs several
        return f"The batch goes through in one piece.{late}" if late else ""
    sizes = sorted(set(decided.micro_batch_sizes))
    about = " or ".join(str(size) for size in sizes)
    if len(sizes) > 3:
        about = f"{sizes[0]} to {sizes[-1]}"
    return (
        f"The batch of {batch} is cut into {decided.num_micro_batches} micro-batches of {about} "
        f"samples.{_schedule(decided.schedule)}"
    )


def _schedule(schedule: PipelineSchedule) -> str:
    """Sentences about the order of micro-batches, with a space before each."""
    caps = sorted({cap for caps in schedule.in_flight for cap in caps if cap})
    said = ""
    if caps:
        most = f"{caps[0]}" if len(caps) == 1 else f"{caps[0]} to {caps[-1]}"
        said += f" A device holds at most {most} of them at a time, by its place in the pipeline."
    if schedule.turns:
        said += " Each device takes up their passes in an order of its own that the plan states."
    if schedule.gathers_once:
        said += " What is kept in slices is gathered and reduced once for all of them."
    return said + _late_weights(schedule)


def _late_weights(schedule: PipelineSchedule) -> str:
    """A sentence about when gradients of weights are made, with a space before it."""
    if not schedule.splits_backward:
        return ""
    return " Gradients of weights are computed when a device would otherwise wait."


def _aggregation(decided: Decided, cluster: Cluster) -> list[str]:
    """Sentences about the aggregation of gradients, and those that need none."""
    found = {each.way: each for each in decided.aggregations}
    said = []
    by_way = [each for each in decided.aggregations if each.is_aggregated]
    if by_way:
        how = listed([_way(each, cluster, alone=len(by_way) == 1) for each in by_way])
        said.append(f"Gradients are aggregated by {how}.")
    elif set(found) == {ALONE} and len(decided.ranges) > 1:
        said.append("Every parameter is on one device, so no gradients are aggregated.")
    if each := found.get(IN_SLICES):
        said.append(
            f"{_parameters(each)} {_live(each)} in slices, each on one device: their gradients "
            "are not aggregated."
        )
    if each := found.get(MADE_WHOLE):
        said.append(f"Each replica gets the gradients of {_parameters(each)} whole, from values.")
    if each := found.get(ELSEWHERE):
        servers = names_of([cluster.devices[device].name for device in each.servers])
        said.append(
            f"{_parameters(each)} {_live(each, 'is', 'are')} updated on another device than "
            f"where {_live(each, 'it is', 'they are')} used ({servers})."
        )
    return said


def _way(each: AggregatedParameters, cluster: Cluster, *, alone: bool) -> str:
    """One aggregation with its servers or buckets, and its groups if there are others."""
    if each.servers:
        how = f" on {names_of([cluster.devices[device].name for device in each.servers])}"
    elif each.num_buckets < each.num_parameters:
        largest = format_bytes(each.largest_bucket_bytes)
        how = f" in {each.num_buckets} bucket{'s' * (each.num_buckets > 1)} of up to {largest}"
    else:
        how = " tensor by tensor"
    groups = "" if alone else f" ({groups_of(each.num_groups)})"
    return f"{each.way}{groups}{how}"


def _parameters(each: AggregatedParameters) -> str:
    some = f"{each.num_parameters} parameter{'s' * (each.num_parameters > 1)}"
    return f"{some} ({format_bytes(each.num_bytes)})"


def _live(each: AggregatedParameters, one: str = "lives", several: str = "live") -> str:
    return one if each.num_parameters == 1 else several


def _recomputing(decided: Decided) -> str:
    if decided.num_recomputing == 0:
        return ""
    whole = decided.num_recomputing == decided.num_groups
    who = (
        "All groups" if whole else f"{groups_of(decided.num_recomputing)} of {decided.num_groups}"
    )
    verb = "computes" if decided.num_recomputing == 1 and not whole else "compute"
    return (
        f"{who} {verb} {decided.recomputed} again for the backward pass instead of keeping them, "
        "which saves memory."
    )
