"""Plans as columns of replicas: kinds of columns, how many of each, and what they take.

A column has one replica in every stage. Columns of one kind have the same teams, so a plan on a
hundred GPUs is a handful of numbers, and an evaluation costs what is different in it.
"""

from dataclasses import dataclass
from math import ceil, inf

from sailor.inputs import BATCH, Plan, Stage
from sailor.tables import Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Columns that are alike.

    Attributes:
        teams: index of the team of each stage.
        count: columns of this kind.
    """

    teams: tuple[int, ...]
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """A plan.

    Attributes:
        bounds: first layer of each stage, and the number of layers.
        kinds: of columns, in the order of the replicas.
        micro_batch: samples of each micro-batch.
    """

    bounds: tuple[int, ...]
    kinds: tuple[Kind, ...]
    micro_batch: int

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
    stages, size = columns.num_stages, columns.micro_batch
    return all(
        size in tables.teams[team].times
        and tables.most_samples(
            team, columns.bounds[index], columns.bounds[index + 1], stages - index
        )
        >= size
        for kind in columns.kinds
        for index, team in enumerate(kind.teams)
    )


def sends_of(columns: Columns, tables: Tables) -> list[float]:
    """Sends and receives of every stage for one micro-batch, as ``timing.sends_s`` counts."""
    count = columns.num_stages
    if count == 1:
        return [0.0]
    ahead, back = [], []
    for index in range(count - 1):
        pairs = {(kind.teams[index], kind.teams[index + 1]) for kind in columns.kinds}
        ahead.append(max(tables.send_s(one, other, columns.micro_batch) for one, other in pairs))
        back.append(max(tables.send_s(other, one, columns.micro_batch) for one, other in pairs))
    first = ahead[0] if count <= 3 else 2 * ahead[0]
    middle = [ahead[index] + back[index - 1] for index in range(1, count - 1)]
    return [first, *middle, 2 * back[-1]]


def compute_of(columns: Columns, tables: Tables, index: int) -> float:
    """Compute time of a stage's slowest replica for one micro-batch."""
    first, end = columns.bounds[index : index + 2]
    times = [tables.teams[kind.teams[index]].times[columns.micro_batch] for kind in columns.kinds]
    return max(each.compute_s[end] - each.compute_s[first] for each in times)


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


def time_of(columns: Columns, tables: Tables) -> float:
    """Seconds of an iteration; infinite where it is not possible."""
    if not is_possible(columns, tables):
        return inf
    size = columns.micro_batch
    compute = [compute_of(columns, tables, index) for index in range(columns.num_stages)]
    send = sends_of(columns, tables)
    straggler = max(c + p for c, p in zip(compute, send, strict=True))
    update = max(
        tables.teams[team].times[size].update_s for kind in columns.kinds for team in kind.teams
    )
    num_micro = ceil(BATCH / (size * columns.num_columns))
    filling = sum(compute) + sum(send)
    return (num_micro - 1) * straggler + filling + update + sync_of(columns, tables)


def plan_of(columns: Columns, tables: Tables) -> Plan:
    """Columns as a plan for the rules."""
    bounds = columns.bounds
    stages = tuple(
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
    return Plan(stages=stages, micro_batch=columns.micro_batch)
