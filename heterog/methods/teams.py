"""Teams inside machines: devices of one machine that divide every matrix product among them.

The sums inside layers stay on the fast links of a machine. Only traffic between teams crosses the
network: gradients of data parallelism, or activations for the next stage. Samples are divided
among teams, and units (heads, columns) inside a team, in proportion to speed. So a machine of four
fast devices and one of two slow ones can be replicas of each other.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import gcd

from heterog.cluster.topology import Cluster
from heterog.errors import StrategyError
from heterog.graph.axis_plan import axis_plan
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.lowering.channels import proportional_slices
from heterog.strategy.division import split_evenly, split_in_proportion
from heterog.strategy.layouts.layout import LayoutError
from heterog.strategy.layouts.tensor import TeamRules, team_rules
from heterog.strategy.strategy import REPLICATED, Decision, Strategy, Sync

Teams = tuple[tuple[int, ...], ...]
_RESOLUTION = 100
"""Parts of a team's fastest member: axes rarely have more units."""


@lru_cache(maxsize=16)
def rules_of_model(graph: OpGraph) -> TeamRules | None:
    """Rules by which a team divides any layer; ``None`` if there is nothing to divide.

    A team has a part of the batch, so rules that cut across samples have no meaning for it; a
    model with such rules has no teams either.
    """
    try:
        rules = team_rules(graph, tuple(range(group_ops(graph).num_groups)))
        crossing = axis_plan(graph, rules.op_rules).crossing
    except (LayoutError, StrategyError):
        return None
    return rules if crossing is None else None


def team_sizes(cluster: Cluster, rules: TeamRules | None) -> list[int]:
    """Sizes of teams worth trying: powers of two and whole hosts, the largest first.

    Empty if no host has two devices, or nothing can be split.
    """
    return [] if rules is None else host_sizes(cluster, rules.least_units)


def host_sizes(cluster: Cluster, most: int) -> list[int]:
    """Sizes of teams inside hosts up to ``most``: powers of two and the largest host."""
    largest = max(map(len, cluster.host_devices))
    most = min(largest, most)
    sizes = {1 << power for power in range(1, most.bit_length())} | {most}
    return sorted((size for size in sizes if 1 < size <= most), reverse=True)


def host_teams(cluster: Cluster, devices: Sequence[int], most: int) -> Teams:
    """Devices in teams of neighbours, none across hosts and none larger than ``most``.

    >>> host_teams(Cluster.load("paper_8gpu"), range(4), 2)
    ((0, 1), (2, 3))
    """
    teams: list[tuple[int, ...]] = []
    for host in dict.fromkeys(cluster.host_of[device] for device in devices):
        own = [device for device in devices if cluster.host_of[device] == host]
        bounds = accumulate(split_evenly(len(own), -(-len(own) // most)), initial=0)
        teams += [tuple(own[begin:end]) for begin, end in pairwise(bounds)]
    return tuple(teams)


def in_teams(
    decision: Decision, teams: Teams, speeds: Sequence[float], cluster: Cluster
) -> Decision:
    """A decision on the same devices in teams; samples and parts in proportion to speed.

    ZeRO becomes ``REDUCE_SCATTER_ALL_GATHER`` if teams cut parameters differently.
    """
    devices, batch = decision.devices, sum(decision.shares)
    if all(len(team) == 1 for team in teams):
        is_shared = any(len(team) > 1 for team in decision.teams)
        return _plain(decision, speeds) if is_shared else without_teams(decision)
    of_teams = split_in_proportion(batch, [sum(speeds[d] for d in team) for team in teams])
    shares, parts = dict.fromkeys(devices, 0), dict.fromkeys(devices, 1)
    for team, samples in zip(teams, of_teams, strict=True):
        own = [speeds[device] for device in team]
        shares.update(zip(team, split_in_proportion(samples, own), strict=True))
        parts.update(zip(team, parts_of(own), strict=True))
    made = replace(
        decision,
        shares=tuple(shares[device] for device in devices),
        slices=proportional_slices(cluster, devices) if decision.sync.takes_slices else (),
        slice_groups=(),
        teams=teams,
        parts=tuple(parts[device] for device in devices),
    )
    return made if has_one_owner(made) else replace(made, sync=Sync.REDUCE_SCATTER_ALL_GATHER)


def has_one_owner(decision: Decision) -> bool:
    """Whether a decision with ZeRO has one owner for every slice; true without ZeRO.

    With ZeRO, every slice has one owner if all teams cut parameters alike.
    """
    if not decision.sync.is_sharded or not decision.teams:
        return True
    parts = dict(zip(decision.devices, decision.parts or decision.shares, strict=True))
    return len({tuple(parts[device] for device in team) for team in decision.teams}) == 1


def _plain(decision: Decision, speeds: Sequence[float]) -> Decision:
    """The decision without teams, with samples in proportion to speed."""
    own = [speeds[device] for device in decision.devices]
    shares = split_in_proportion(sum(decision.shares), own)
    return replace(decision, shares=shares, teams=(), parts=())


def parts_of(speeds: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in proportion to speeds, and the smallest ones for equal speeds.

    >>> parts_of((2.0, 2.0)), parts_of((4.0, 2.0, 1.0)), parts_of((3.0, 2.0))
    ((1, 1), (4, 2, 1), (100, 67))
    """
    fastest = max(speeds)
    parts = [max(round(_RESOLUTION * speed / fastest), 1) for speed in speeds]
    common = gcd(*parts)
    return tuple(part // common for part in parts)


def apart(decision: Decision) -> Decision:
    """A decision with one team per device: data parallelism, whatever rules ops have."""
    if decision.teams or len(decision.devices) == 1:
        return decision
    return replace(decision, teams=tuple((device,) for device in decision.devices))


def without_teams(decision: Decision) -> Decision:
    """A decision without its teams; each device keeps its samples."""
    return replace(decision, teams=(), parts=()) if decision.teams else decision


def has_teams(decision: Decision) -> bool:
    """Whether several devices share the units of an op with a rule."""
    return any(len(team) > 1 for team in decision.teams or (decision.devices,))


def strategy_in_teams(
    graph: OpGraph,
    cluster: Cluster,
    strategy: Strategy,
    groups: Collection[int],
    size: int,
    speeds: Sequence[float],
) -> Strategy | None:
    """A strategy in which some groups run in teams of up to ``size`` devices inside hosts.

    Returns:
        ``None`` if there is nothing to divide, or ops already have rules other than those of
        teams.
    """
    rules = rules_of_model(graph)
    known = {} if rules is None else dict(rules.op_rules)
    if rules is None or any(known.get(op) != rule for op, rule in strategy.op_rules):
        return None
    decisions = []
    for group, decision in enumerate(strategy.decisions):
        if group in groups:
            decision = in_teams(
                decision, host_teams(cluster, decision.devices, size), speeds, cluster
            )
        decisions.append(apart(decision))
    made = strategy.with_decisions(tuple(decisions))
    homes = [
        REPLICATED if parameter in axis_plan(graph, rules.op_rules).sharded else home
        for (_, parameter, _), home in zip(graph.updates, strategy.homes, strict=True)
    ]
    made = replace(made, op_rules=rules.op_rules, homes=tuple(homes))
    return without_needless_rules(made)


def without_needless_rules(strategy: Strategy) -> Strategy:
    """Remove all rules if every device is its own team in all groups, where they have no effect.

    With rules in some groups only, values would be converted between these and the others.

    Args:
        strategy: Strategy whose decisions have teams wherever ops have rules.
    """
    # Sharded parameters have no home; without rules, a group with a server would need one.
    if not strategy.op_rules or any(
        has_teams(each) or each.sync.is_served for each in strategy.decisions
    ):
        return strategy
    decisions = tuple(map(without_teams, strategy.decisions))
    return replace(strategy.with_decisions(decisions), op_rules=())
