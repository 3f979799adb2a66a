"""The differences between two strategies of the same graph, subject by subject."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

from heterog.cluster.topology import Cluster
from heterog.explain.wording import types_in_words
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.strategy.keeping import recomputed_words
from heterog.strategy.strategy import Strategy

_MOST_NAMED = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One subject on which two strategies differ.

    Attributes:
        what: Subject: ``"stages"``, ``"shares"``, ...
        given: What the first strategy does, in words.
        ours: What the second strategy does, in words.
    """

    what: str
    given: str
    ours: str


def differences(
    given: Strategy, ours: Strategy, graph: OpGraph, cluster: Cluster
) -> tuple[Difference, ...]:
    """The subjects on which a plan differs from a given strategy, most telling first."""
    subjects: tuple[tuple[str, Callable[[Strategy], str]], ...] = (
        ("devices", lambda each: _devices(each, cluster)),
        ("stages", lambda each: _stages(each, graph)),
        ("teams", _teams),
        ("samples", lambda each: _samples(each, cluster)),
        ("single ops", _rules),
        ("micro-batches", _micro_batches),
        ("order of passes", _schedule),
        ("gradients", _syncs),
        ("recomputation", _recomputed),
    )
    found = (Difference(what=what, given=say(given), ours=say(ours)) for what, say in subjects)
    return tuple(each for each in found if each.given != each.ours)


def _devices(strategy: Strategy, cluster: Cluster) -> str:
    used: set[int] = set()
    for decision in dict.fromkeys(strategy.decisions):
        share = dict(zip(decision.devices, decision.shares, strict=True))
        for team in decision.division.all_teams:
            # With rules, a member without samples of its own works on those of its team.
            together = strategy.op_rules and any(share[device] for device in team)
            used |= {device for device in team if together or share[device]}
    if len(used) == cluster.num_devices:
        return f"all {len(used)}"
    return f"{len(used)} of {cluster.num_devices} ({types_in_words(cluster, used)})"


def _stages(strategy: Strategy, graph: OpGraph) -> str:
    """Runs of groups on the same devices, by the modules at which they begin."""
    names = group_ops(graph).names
    runs = [
        next(run)[0]
        for _, run in groupby(enumerate(strategy.decisions), key=lambda pair: pair[1].devices)
    ]
    if len(runs) == 1:
        return "one, the whole model"
    begins = [names[group] or "(root)" for group in runs[1:]]
    shown = ", ".join(begins[:_MOST_NAMED]) + ", ..." * (len(begins) > _MOST_NAMED)
    return f"{len(runs)}, the later ones from {shown}"


def _teams(strategy: Strategy) -> str:
    """The number of devices that run ops with rules together."""
    if not strategy.op_rules:
        return "none"
    teams = [team for decision in strategy.decisions for team in decision.division.all_teams]
    sizes = sorted({len(team) for team in teams})
    return f"of {sizes[0]}" if len(sizes) == 1 else f"of {sizes[0]} to {sizes[-1]}"


def _samples(strategy: Strategy, cluster: Cluster) -> str:
    """The different ways in which groups share the batch, the most common first."""
    ways = Counter(
        (decision.devices, decision.shares)
        for decision in strategy.decisions
        if len(decision.devices) > 1
    )
    if not ways:
        return "no device shares a batch with another"
    of_teams = [
        {
            sum(d.shares[d.devices.index(device)] for device in team)
            for team in d.division.all_teams
        }
        for d in dict.fromkeys(strategy.decisions)
    ]
    if all(len(set(shares)) == 1 for _, shares in ways):
        return "even"
    if strategy.op_rules and all(len(samples) == 1 for samples in of_teams):
        return "even"
    (devices, shares), _ = ways.most_common(1)[0]
    by_kind = Counter(
        (cluster.devices[device].type.name, share)
        for device, share in zip(devices, shares, strict=True)
    )
    listed = [f"{share} on {count} {kind}" for (kind, share), count in by_kind.items()]
    more = f" (and {len(ways) - 1} other ways)" if len(ways) > 1 else ""
    return ", ".join(listed[:_MOST_NAMED]) + ", ..." * (len(listed) > _MOST_NAMED) + more


def _rules(strategy: Strategy) -> str:
    if not strategy.op_rules:
        return "follow the batch"
    return f"{len(strategy.op_rules)} run by rules of their own (columns, rows, heads, whole)"


def _micro_batches(strategy: Strategy) -> str:
    count = strategy.num_micro_batches
    if count == 1:
        return "none"
    sizes = sorted(set(strategy.micro_sizes))
    span = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    return f"{count} of {span} samples on all devices"


def _schedule(strategy: Strategy) -> str:
    schedule = strategy.schedule
    if schedule.turns:
        words = "every pass has its turn"
    elif any(map(any, schedule.in_flight)):
        most = max(max(caps) for caps in schedule.in_flight if caps)
        words = f"at most {most} micro-batches under way on a device"
    else:
        words = "as they come"
    words += ", slices gathered and reduced once" * schedule.gathers_once
    return words + ", weight gradients in the gaps" * schedule.splits_backward


def _syncs(strategy: Strategy) -> str:
    kinds = Counter(
        decision.sync.words
        + f", {len(decision.slice_groups)} copies" * (len(decision.slice_groups) > 1)
        for decision in strategy.decisions
        if len(decision.devices) > 1
    )
    return " and ".join(kind for kind, _ in kinds.most_common()) or "stay on their device"


def _recomputed(strategy: Strategy) -> str:
    again = [decision.keeps for decision in strategy.decisions if decision.recompute]
    if not again:
        return "none"
    return (
        f"{len(again)} of {len(strategy.decisions)} groups"
        + f" ({recomputed_words(again)})" * any(again)
    )
