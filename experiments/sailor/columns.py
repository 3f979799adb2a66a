"""Plans as columns of replicas: kinds of columns, how many of each, and what they take.

A column has one replica in every stage. Columns of one kind have the same teams, so a plan on a
hundred GPUs is a handful of numbers, and an evaluation costs what is different in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

from sailor.inputs import BATCH, Plan, Stage
from sailor.tables import Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Columns that are alike.

    Attributes:
        teams: index of the team of each stage.
        micro_batch: samples of its micro-batches, the last one perhaps fewer.
        count: columns of this kind.
    """

    teams: tuple[int, ...]
    micro_batch: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """A plan.

    Attributes:
        bounds: first layer of each stage, and the number of layers.
        kinds: of columns, in the order of the replicas.
        is_zero1: optimizer states lie in slices.
    """

    bounds: tuple[int, ...]
    kinds: tuple[Kind, ...]
    is_zero1: bool = False

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.bounds) - 1

    @property
    def num_columns(self) -> int:
        """How many columns there are."""
        return sum(kind.count for kind in self.kinds)


def gpus_of(columns: Columns, tables: Tables) -> dict[str, int]:
    """GPUs that columns use, by card."""
    used = dict.fromkeys(tables.cards, 0)
    for kind in columns.kinds:
        for team in kind.teams:
            replica = tables.teams[team].replica
            used[replica.card] += replica.tensor * kind.count
    return used


def is_possible(columns: Columns, tables: Tables) -> bool:
    """Whether there are GPUs enough, the sizes are known, and memory holds them."""
    used = gpus_of(columns, tables)
    if any(used[card] > tables.num_gpus[card] for card in used):
        return False
    share = 1.0 / columns.num_columns if columns.is_zero1 else 1.0
    stages = columns.num_stages
    return all(
        tables.teams[team].sizes[0] <= kind.micro_batch <= tables.teams[team].sizes[-1]
        and kind.micro_batch in tables.teams[team].compute_s
        and tables.most_samples(
            team, columns.bounds[index], columns.bounds[index + 1], stages - index, share
        )
        >= kind.micro_batch
        for kind in columns.kinds
        for index, team in enumerate(kind.teams)
    )


def sends_of(columns: Columns, tables: Tables, micro_batch: int) -> list[float]:
    """Sends and receives of every stage for one micro-batch, as ``timing.sends_s`` counts."""
    count = columns.num_stages
    if count == 1:
        return [0.0]
    ahead, back = [], []
    for index in range(count - 1):
        pairs = {(kind.teams[index], kind.teams[index + 1]) for kind in columns.kinds}
        ahead.append(max(tables.send_s(one, other, micro_batch) for one, other in pairs))
        back.append(max(tables.send_s(other, one, micro_batch) for one, other in pairs))
    first = ahead[0] if count <= 3 else 2 * ahead[0]
    middle = [ahead[index] + back[index - 1] for index in range(1, count - 1)]
    return [first, *middle, 2 * back[-1]]


def compute_of(columns: Columns, tables: Tables, kind: Kind, micro_batch: int) -> list[float]:
    """Compute time of a column's replicas for one micro-batch."""
    bounds = columns.bounds
    found = []
    for index, team in enumerate(kind.teams):
        sums = tables.teams[team].compute_s[micro_batch]
        found.append(sums[bounds[index + 1]] - sums[bounds[index]])
    return found


def sync_of(columns: Columns, tables: Tables) -> float:
    """The slowest ring."""
    bounds, count = columns.bounds, columns.num_columns
    return max(
        tables.sync_s(
            frozenset(kind.teams[index] for kind in columns.kinds),
            bounds[index],
            bounds[index + 1],
            count,
        )
        for index in range(columns.num_stages)
    )


def _update_of(columns: Columns, tables: Tables, *, is_uniform: bool) -> float:
    """The slowest update; with lists, of any size that may be in one."""
    share = 1.0 / columns.num_columns if columns.is_zero1 else 1.0
    teams = tables.teams
    return share * max(
        (teams[team].update_s if is_uniform else teams[team].slowest_update_s)[kind.micro_batch]
        for kind in columns.kinds
        for team in kind.teams
    )


def sailors_time_s(columns: Columns, tables: Tables) -> float:
    """An iteration where all columns run as many micro-batches of one size; Sailor's plans."""
    if not is_possible(columns, tables):
        return inf
    size = columns.kinds[0].micro_batch
    num_micro = ceil(BATCH / (size * columns.num_columns))
    by_kind = [compute_of(columns, tables, kind, size) for kind in columns.kinds]
    compute: list[float] = [max(each) for each in zip(*by_kind, strict=True)]
    send = sends_of(columns, tables, size)
    straggler = max(c + p for c, p in zip(compute, send, strict=True))
    filling = sum(compute) + sum(send)
    rest = _update_of(columns, tables, is_uniform=True) + sync_of(columns, tables)
    return (num_micro - 1) * straggler + filling + rest


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast a column takes up samples.

    Attributes:
        micro_batch: samples of a full micro-batch.
        seconds: of the slowest stage for one of each number of samples, from none to full.
        is_free: one full micro-batch costs nothing: it fills the pipeline and is counted there.
    """

    micro_batch: int
    seconds: tuple[float, ...]
    is_free: bool

    def samples_in(self, time_s: float) -> int:
        """Samples that a column can take up within a time."""
        slack = time_s + 1e-12
        full = int(slack / self.seconds[-1])
        left = slack - full * self.seconds[-1]
        rest = self.micro_batch - 1
        while rest and self.seconds[rest] > left:
            rest -= 1
        return (full + self.is_free) * self.micro_batch + rest

    def next_s(self, time_s: float) -> float:
        """The first time after a given one at which it has taken up more."""
        full = int((time_s + 1e-12) / self.seconds[-1])
        base = full * self.seconds[-1]
        return min(base + each for each in self.seconds[1:] if base + each > time_s + 1e-12)


def paces(columns: Columns, tables: Tables) -> list[Pace]:
    """Of every kind, with the slowest stage at each size."""
    sizes = {kind.micro_batch for kind in columns.kinds}
    send = {size: sends_of(columns, tables, size) for size in range(1, max(sizes) + 1)}
    found = []
    for kind in columns.kinds:
        seconds = [0.0]
        for size in range(1, kind.micro_batch + 1):
            if any(size not in tables.teams[team].compute_s for team in kind.teams):
                seconds.append(inf)
                continue
            compute = compute_of(columns, tables, kind, size)
            seconds.append(max(c + p for c, p in zip(compute, send[size], strict=True)))
        found.append(
            Pace(
                micro_batch=kind.micro_batch,
                seconds=tuple(seconds),
                is_free=columns.num_stages > 1,
            )
        )
    return found


def time_for(found: Sequence[Pace], counts: Sequence[int], samples: int) -> float:
    """The shortest time in which columns together take up so many samples."""
    rate = sum(
        count * pace.micro_batch / pace.seconds[-1]
        for pace, count in zip(found, counts, strict=True)
    )
    free = sum(
        (pace.is_free + 1) * pace.micro_batch * count
        for pace, count in zip(found, counts, strict=True)
    )
    time_s = max((samples - free) / rate, 0.0)
    while True:
        done = sum(
            count * pace.samples_in(time_s) for pace, count in zip(found, counts, strict=True)
        )
        if done >= samples:
            return time_s
        time_s = min(pace.next_s(time_s) for pace in found)


def time_of(columns: Columns, tables: Tables) -> float:
    """An iteration where every column runs a list of micro-batches of its own."""
    if not is_possible(columns, tables):
        return inf
    send_most = sends_of(columns, tables, max(kind.micro_batch for kind in columns.kinds))
    if inf in send_most:
        return inf
    counts = [kind.count for kind in columns.kinds]
    seconds = time_for(paces(columns, tables), counts, BATCH)
    if columns.num_stages > 1:
        largest = [compute_of(columns, tables, kind, kind.micro_batch) for kind in columns.kinds]
        seconds += sum(map(max, zip(*largest, strict=True))) + sum(send_most)
    update_s = _update_of(columns, tables, is_uniform=False)
    return seconds + update_s + sync_of(columns, tables)


def sailors_plan(columns: Columns, tables: Tables) -> Plan:
    """Columns as a plan that Sailor can say."""
    return Plan(stages=_stages(columns, tables), micro_batch=columns.kinds[0].micro_batch)


def plan_of(columns: Columns, tables: Tables) -> Plan:
    """Columns as a plan with lists, whose samples are exactly the batch."""
    found = paces(columns, tables)
    counts = [kind.count for kind in columns.kinds]
    time_s = time_for(found, counts, BATCH)
    shares = [
        pace.samples_in(time_s)
        for pace, count in zip(found, counts, strict=True)
        for _ in range(count)
    ]
    sizes = [kind.micro_batch for kind in columns.kinds for _ in range(kind.count)]
    over = sum(shares) - BATCH
    column = 0
    while over:  # whoever has fewer samples is done earlier
        less = min(over, shares[column], -(-over // len(shares)))
        shares[column] -= less
        over -= less
        column = (column + 1) % len(shares)
    return Plan(
        stages=_stages(columns, tables),
        micro_batch=max(sizes),
        lists=tuple(
            (size,) * (share // size) + ((share % size,) if share % size else ())
            for size, share in zip(sizes, shares, strict=True)
        ),
        is_zero1=columns.is_zero1,
    )


def _stages(columns: Columns, tables: Tables) -> tuple[Stage, ...]:
    bounds = columns.bounds
    return tuple(
        Stage(
            first_layer=bounds[index],
            num_layers=bounds[index + 1] - bounds[index],
            replicas=tuple(
                tables.teams[kind.teams[index]].replica
                for kind in columns.kinds
                for _ in range(kind.count)
            ),
        )
        for index in range(columns.num_stages)
    )
