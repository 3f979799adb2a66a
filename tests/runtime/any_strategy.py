"""Random strategies of every kind together, for any number of devices.

Pipelines of stages on shared or unlike devices, or replicas that are unlike (each with stages of
its own); in them teams of unlike sizes, orders and parts, rules along any axis, every
synchronisation, recomputation by group and block, micro-batches of one size, of several, or by a
table of devices, and schedules with caps, split backward passes or stated turns.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random

from heterog.errors import StrategyError
from heterog.graph.axis_plan import axis_plan
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.graph.placement import OpRules
from heterog.graph.sharding_rules import Special
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.division import micro_shares, split_evenly
from heterog.strategy.schedules import Pass, PipelineSchedule, Turn, device_chunks
from heterog.strategy.strategy import REPLICATED, Decision, Strategy, Sync
from heterog.strategy.tensor_parallel import shardings
from tests.runtime.cases import BATCH
from tests.runtime.grids import done_by_all, grid_cluster
from tests.simulator.builders import (
    random_composition,
    random_rules,
    with_random_blocks,
    with_random_scatters,
    within_samples,
)
from tests.strategy.merging import merge_rules

REFUSALS = {
    "cut parameters unlike each other": "ZeRO in teams that cut parameters unlike each other",
    "cuts across samples": "rules that cut across samples, on a part of the batch",
    "must either both have a rule": "rules of half of a BatchNorm",
    "wait for each other": "stated turns that wait for each other",
    "must be": "micro-batches whose table fits no group",
}
"""What the language refuses of the random draws: a part of the text, and what it means."""


@dataclass
class Draws:
    """Counts what was drawn.

    Attributes:
        refused: strategies that the language refuses, by what it means.
        said: features of those that it takes.
    """

    refused: Counter[str]
    said: Counter[str]


def new_draws() -> Draws:
    """Nothing drawn yet."""
    return Draws(Counter(), Counter())


def any_strategy(
    rng: Random, graph: OpGraph, num_devices: int, draws: Draws | None = None
) -> Strategy:
    """A random strategy that the language takes."""
    while True:
        try:
            strategy = _drawn(rng, graph, num_devices)
            strategy.check(graph, grid_cluster(num_devices))
            if strategy.schedule.turns:  # those that wait for each other show when they run
                _evaluator(graph, num_devices).evaluate(strategy, Order.FIFO)
        except StrategyError as error:
            (name, *_) = [name for part, name in REFUSALS.items() if part in str(error)]
            if draws is not None:
                draws.refused[name] += 1
            continue
        if draws is not None:
            draws.said.update(features(graph, strategy))
        return strategy


@lru_cache(maxsize=4)
def _evaluator(graph: OpGraph, num_devices: int) -> Evaluator:
    return Evaluator(graph, grid_cluster(num_devices))


def features(graph: OpGraph, strategy: Strategy) -> list[str]:
    """What a strategy makes use of, in words."""
    decisions, schedule = strategy.decisions, strategy.schedule
    plan = axis_plan(graph, strategy.op_rules)
    has = {
        "teams": any(len(each.teams) > 1 for each in decisions),
        "unlike teams": any(len({len(team) for team in each.teams}) > 1 for each in decisions),
        "stages": len({each.devices for each in decisions}) > 1,
        "rules": bool(strategy.op_rules),
        "sums added up in slices": bool(plan.scattered),
        "slices exchanged": bool(plan.exchanged),
        "numbers of rows gathered": Special.NUMBERS_OF_ROWS in plan.specials,
        "sharded parameters": bool(plan.sharded),
        "micro-batches": strategy.num_micro_batches > 1,
        "a table of micro-batches": sum(map(any, strategy.micro_batches)) > 1,
        "recomputation": any(each.recompute for each in decisions),
        "blocks": bool(strategy.blocks) and any(each.recompute for each in decisions),
        "caps": any(map(any, schedule.in_flight)),
        "split backward": schedule.splits_backward,
        "split backward of one micro-batch": schedule.splits_backward
        and strategy.num_micro_batches == 1,
        "stated turns": bool(schedule.turns),
        "gathered once": strategy.gathers_once
        and any(each.sync in (Sync.ZERO2, Sync.ZERO3) for each in decisions),
        "no samples": any(0 in each.shares for each in decisions),
        "no barrier": not strategy.step_barrier,
        **{sync.name.lower(): any(each.sync == sync for each in decisions) for sync in Sync},
    }
    found = [name for name, is_there in has.items() if is_there]
    all_at_once = {"teams", "stages", "rules", "micro-batches", "split backward"}
    return [*found, *(["all at once"] if all_at_once <= set(found) else [])]


def _drawn(rng: Random, graph: OpGraph, num_devices: int) -> Strategy:
    """Any strategy; the language may refuse it."""
    num_micro = rng.choice([1, 2, 2, 3, 4])
    sizes = split_evenly(BATCH, num_micro)
    if rng.random() < 0.4:
        sizes = tuple(count + 1 for count in random_composition(rng, BATCH - num_micro, num_micro))
    num_groups = group_ops(graph).num_groups
    divisions = (_replicas if rng.random() < 0.4 else _stages)(rng, num_groups, num_devices)
    made = {division: _decision(rng, division) for division in dict.fromkeys(divisions)}
    decisions = [
        replace(made[division], recompute=rng.random() < 0.3)
        if rng.random() < 0.3
        else made[division]
        for division in divisions
    ]
    rules = _rules(rng, graph, divisions)
    if num_micro > 1 or any(len(division) > 1 for division in divisions):
        rules = within_samples(graph, rules)
    sharded = axis_plan(graph, rules).sharded if rules else frozenset()
    group = group_ops(graph).group
    strategy = Strategy(
        graph=graph.fingerprint,
        cluster=grid_cluster(num_devices).fingerprint,
        decisions=tuple(decisions),
        homes=tuple(
            _home(rng, decisions[int(group[op])], num_devices)
            if parameter not in sharded
            else REPLICATED
            for op, parameter, _ in graph.updates
        ),
        bucket_bytes=rng.choice([0, 300, 10**6]),
        step_barrier=rng.random() < 0.6,
        op_rules=rules,
    )
    if strategy.bucket_bytes > 300:
        strategy = replace(strategy, first_bucket_bytes=200)
    if num_micro > 1:
        strategy = replace(strategy, micro_batches=_table(rng, strategy, sizes, num_devices))
    if rng.random() < 0.3:
        strategy = with_random_blocks(rng, strategy)
    if rng.random() < (0.7 if num_micro > 1 else 0.4):
        strategy = replace(strategy, schedule=_schedule(rng, strategy, num_devices))
    if rng.random() < 0.4:
        strategy = replace(strategy, schedule=replace(strategy.schedule, gathers_once=True))
    return strategy


# --- who does what ------------------------------------------------------------------------------

_Team = tuple[tuple[int, ...], int]
"""Members in their order, and samples of the batch."""
_Division = tuple[_Team, ...]


def _stages(rng: Random, num_groups: int, num_devices: int) -> list[_Division]:
    """Runs of groups, each on devices of its own or on any, in teams of its own."""
    devices = list(range(num_devices))
    num_stages = rng.choice([1, 2, 2, 3])
    starts = sorted(rng.sample(range(1, num_groups), num_stages - 1))
    own = rng.random() < 0.7 and num_stages <= num_devices
    teams_like = rng.choice([1, 2, 2, 3]) if rng.random() < 0.5 else 0
    samples = random_composition(rng, BATCH, teams_like) if teams_like else ()
    rng.shuffle(devices)
    found: list[_Division] = []
    for stage in range(num_stages):
        if own:
            members = devices[stage::num_stages]
        else:
            members = rng.sample(devices, rng.randint(1, num_devices))
        count = len(samples) or rng.randint(1, min(3, len(members)))
        if count > len(members):
            samples, count = (), 1
        shares = samples or random_composition(rng, BATCH, count)
        found.append(tuple(zip(_cut(rng, members, count), shares, strict=True)))
    if (
        1 < num_stages <= num_groups // 2 and rng.random() < 0.3
    ):  # stages that come back: several chunks of a device
        found, starts = found * 2, sorted(rng.sample(range(1, num_groups), 2 * num_stages - 1))
    return _along(found, starts, num_groups)


def _replicas(rng: Random, num_groups: int, num_devices: int) -> list[_Division]:
    """Replicas on devices of their own, each with its own samples and its own stages."""
    devices = list(range(num_devices))
    rng.shuffle(devices)
    count = min(rng.choice([2, 2, 3]), num_devices)
    samples = random_composition(rng, BATCH, count)
    lanes = []
    for members, own in zip(_cut(rng, devices, count), samples, strict=True):
        num_stages = rng.randint(1, min(2, len(members)))
        stages = [((team, own),) for team in _cut(rng, members, num_stages)]
        starts = sorted(rng.sample(range(1, num_groups), num_stages - 1))
        lanes.append(_along(stages, starts, num_groups))
    return [
        tuple(team for lane in together for team in lane) for together in zip(*lanes, strict=True)
    ]


def _along(stages: Sequence[_Division], starts: list[int], num_groups: int) -> list[_Division]:
    """The stage of each group."""
    ends = [*starts, num_groups]
    lengths = [end - begin for begin, end in zip([0, *starts], ends, strict=True)]
    return [stage for stage, length in zip(stages, lengths, strict=True) for _ in range(length)]


def _cut(rng: Random, devices: list[int] | tuple[int, ...], count: int) -> list[tuple[int, ...]]:
    """Devices cut into runs of at least one; often of one size, where that can be."""
    if len(devices) % count == 0 and rng.random() < 0.5:
        sizes = (len(devices) // count,) * count
    else:
        spare = random_composition(rng, len(devices) - count, count)
        sizes = tuple(size + 1 for size in spare)
    found, begin = [], 0
    for size in sizes:
        found.append(tuple(devices[begin : begin + size]))
        begin += size
    return found


def _decision(rng: Random, division: _Division) -> Decision:
    """Any decision of some teams."""
    share: dict[int, int] = {}
    part: dict[int, int] = {}
    for team, samples in division:
        share |= zip(team, random_composition(rng, samples, len(team)), strict=True)
        part |= {device: rng.choice([0, 1, 1, 2]) for device in team}
        part[rng.choice(team)] = 1
        if rng.random() < 0.5:
            part |= dict.fromkeys(team, 1)
    devices = tuple(sorted(share))
    sharded = [sync for sync in Sync if sync.is_sharded]
    sync = rng.choice([*Sync, *sharded, Sync.RING])
    has_slices = sync.takes_slices
    slices = tuple(rng.randint(0, 3) for _ in devices) if has_slices else ()
    return Decision(
        devices=devices,
        shares=tuple(share[device] for device in devices),
        sync=sync,
        slices=slices if any(slices) and rng.random() < 0.5 else (),
        recompute=rng.random() < 0.3,
        teams=tuple(team for team, _ in division)
        if len(division) > 1 or rng.random() < 0.5
        else (),
        parts=tuple(part[device] for device in devices) if rng.random() < 0.7 else (),
    )


def _home(rng: Random, decision: Decision, num_devices: int) -> int:
    may_move = len(decision.devices) == 1 and rng.random() < 0.3
    if decision.sync.is_served or may_move:
        return rng.randrange(num_devices)
    return REPLICATED


def _rules(rng: Random, graph: OpGraph, divisions: list[_Division]) -> OpRules:
    """Layers sharded stage by stage, ops done by all, any rule of any op, or none."""
    parts: list[OpRules] = []
    for division in dict.fromkeys(divisions):
        groups = [group for group, each in enumerate(divisions) if each == division]
        if rng.random() < 0.6:
            weights = [p for _, p, _ in graph.updates if len(graph.tensors[p].shape) > 1]
            for weight in rng.sample(weights, rng.randint(1, min(3, len(weights)))):
                if found := shardings(graph, groups, parameters=[weight]):
                    parts.append(rng.choice(found).op_rules)
        if rng.random() < 0.3:
            parts.append(done_by_all(graph, groups))
    if rng.random() < 0.2:
        parts.append(random_rules(rng, graph))
    return with_random_scatters(rng, graph, merge_rules(*parts))


# --- when ---------------------------------------------------------------------------------------


def _table(
    rng: Random, strategy: Strategy, sizes: tuple[int, ...], num_devices: int
) -> tuple[tuple[int, ...], ...]:
    """Micro-batches: their sizes alone, or what each device takes of each of them."""
    idle = (0,) * len(sizes)
    rows = {0: sizes}
    if rng.random() < 0.5:
        own: dict[int, tuple[int, ...]] = {}
        for decision in dict.fromkeys(strategy.decisions):
            if own.keys().isdisjoint(decision.devices):
                own |= zip(decision.devices, _columns(rng, decision.shares, sizes), strict=True)
        alike = all(
            sum(own.get(device, idle)) == share
            for decision in strategy.decisions
            for device, share in zip(decision.devices, decision.shares, strict=True)
        )
        # Of devices that have other shares in other groups the table can say no more than one.
        only = dict(zip(strategy.decisions[0].devices, own.values(), strict=False))
        rows = own if alike else only
    return tuple(rows.get(device, idle) for device in range(num_devices))


def _columns(
    rng: Random, shares: tuple[int, ...], sizes: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """What each device takes of each micro-batch: samples are dealt out as they come."""
    micro_of = [micro for micro, size in enumerate(sizes) for _ in range(size)]
    rng.shuffle(micro_of)
    found, begin = [], 0
    for share in shares:
        taken = Counter(micro_of[begin : begin + share])
        found.append(tuple(taken[micro] for micro in range(len(sizes))))
        begin += share
    return found


def _schedule(rng: Random, strategy: Strategy, num_devices: int) -> PipelineSchedule:
    """Caps, split backward passes, stated turns."""
    num_groups = len(strategy.decisions)
    starts = tuple(group for group in range(1, num_groups) if rng.random() < 0.1)
    devices = [decision.devices for decision in strategy.decisions]
    chunks = device_chunks(devices, num_devices, starts)
    splits = rng.random() < 0.6
    schedule = PipelineSchedule(splits_backward=splits, chunk_starts=starts)
    if rng.random() < 0.5:
        caps = tuple(tuple(rng.randint(0, 3) for _ in own) for own in chunks)
        return replace(schedule, in_flight=caps)
    busy = _busy(strategy, num_devices)
    in_turn = any(each.sync in (Sync.ZERO2, Sync.ZERO3) for each in strategy.decisions)
    order = _order_of_passes(rng, strategy.num_micro_batches, splits=splits, in_turn=in_turn)
    turns = []
    for device, own in enumerate(chunks):
        backwards = range(len(own))[::-1]
        stated = [
            Turn(micro, chunk, work)
            for micro, work in order
            if micro in busy[device]
            for chunk in (range(len(own)) if work == Pass.FORWARD else backwards)
        ]
        turns.append(tuple(stated if in_turn else _later_weights(rng, stated)))
    return replace(schedule, turns=tuple(turns))


def _order_of_passes(
    rng: Random, num_micro: int, *, splits: bool, in_turn: bool
) -> list[tuple[int, Pass]]:
    """The passes of all micro-batches, one after another, each behind what it waits for.

    Devices that all follow one sequence never wait for each other. Under ZeRO-2 and -3 a
    micro-batch begins when the gradients of the one before are scattered.
    """
    passes = list(Pass) if splits else [Pass.FORWARD, Pass.BACKWARD]
    left = {micro: list(passes) for micro in range(num_micro)}
    order = []
    while left:
        micro = min(left) if in_turn else rng.choice(list(left))
        order.append((micro, left[micro].pop(0)))
        if not left[micro]:
            del left[micro]
    return order


def _later_weights(rng: Random, turns: list[Turn]) -> list[Turn]:
    """Some weight gradients moved back: nothing but updates waits for them."""
    for turn in [turn for turn in turns if turn.work == Pass.WEIGHTS and rng.random() < 0.3]:
        place = turns.index(turn)
        turns.insert(rng.randint(place, len(turns) - 1), turns.pop(place))
    return turns


def _busy(strategy: Strategy, num_devices: int) -> list[set[int]]:
    """Micro-batches in which each device, or with rules its team, has samples."""
    busy = [set[int]() for _ in range(num_devices)]
    for decision in dict.fromkeys(strategy.decisions):
        rows = micro_shares(decision.division, strategy.micro_batches, strategy.micro_sizes)
        own = dict(zip(decision.devices, rows.T.tolist(), strict=True))
        for team in decision.division.all_teams:
            for device in team:
                members = team if strategy.op_rules else (device,)
                counts = zip(*(own[member] for member in members), strict=True)
                busy[device] |= {micro for micro, count in enumerate(counts) if any(count)}
    return busy
