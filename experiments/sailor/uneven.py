"""Plans whose stages have unlike numbers of replicas, with micro-batches of one size.

Every stage runs the whole batch on its own replicas, so that a stage may have one kind of GPU and
as many replicas as these make. Sailor's simulator would score such a plan with the number of
micro-batches of its first stage; here every stage has its own.
"""

from dataclasses import dataclass
from math import ceil, inf

from sailor.columns import Columns
from sailor.inputs import BATCH, Plan, Stage
from sailor.tables import Tables

Group = tuple[int, int]
"""Index of a team, and how many replicas of it a stage has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Uneven:
    """A plan.

    Attributes:
        bounds: first layer of each stage, and the number of layers.
        groups: of each stage, in the order of its replicas.
        micro_batch: samples of every micro-batch.
        is_zero1: optimizer states lie in slices.
    """

    bounds: tuple[int, ...]
    groups: tuple[tuple[Group, ...], ...]
    micro_batch: int
    is_zero1: bool = False

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.groups)


def of_columns(columns: Columns) -> Uneven:
    """The same replicas with micro-batches of the first kind's size; a start for a search."""
    return Uneven(
        bounds=columns.bounds,
        groups=tuple(
            tuple((kind.teams[index], kind.count) for kind in columns.kinds)
            for index in range(columns.num_stages)
        ),
        micro_batch=columns.kinds[0].micro_batch,
        is_zero1=columns.is_zero1,
    )


def gpus_of(uneven: Uneven, tables: Tables) -> dict[str, int]:
    """GPUs that a plan uses, by card."""
    used = dict.fromkeys(tables.cards, 0)
    for groups in uneven.groups:
        for team, count in groups:
            replica = tables.teams[team].replica
            used[replica.card] += replica.tensor * count
    return used


def is_possible(uneven: Uneven, tables: Tables) -> bool:
    """Whether there are GPUs enough, the size is known, and memory holds it."""
    used = gpus_of(uneven, tables)
    if any(used[card] > tables.num_gpus[card] for card in used):
        return False
    size, stages = uneven.micro_batch, uneven.num_stages
    for index, groups in enumerate(uneven.groups):
        share = 1.0 / sum(count for _, count in groups) if uneven.is_zero1 else 1.0
        first, end = uneven.bounds[index : index + 2]
        for team, _ in groups:
            if size not in tables.teams[team].compute_s:
                return False
            if tables.most_samples(team, first, end, stages - index, share) < size:
                return False
    return True


def time_of(uneven: Uneven, tables: Tables) -> float:
    """An iteration; where replicas are unlike, sends take the slowest pair of any two."""
    if not is_possible(uneven, tables):
        return inf
    bounds, size = uneven.bounds, uneven.micro_batch
    counts = [sum(count for _, count in groups) for groups in uneven.groups]
    compute = []
    for index, groups in enumerate(uneven.groups):
        sums = [tables.teams[team].compute_s[size] for team, _ in groups]
        compute.append(max(each[bounds[index + 1]] - each[bounds[index]] for each in sums))
    send = _sends_of(uneven, tables)
    steady = max(
        (ceil(BATCH / (size * count)) - 1) * (c + p)
        for count, c, p in zip(counts, compute, send, strict=True)
    )
    update = max(
        tables.teams[team].update_s[size] * (1.0 / count if uneven.is_zero1 else 1.0)
        for groups, count in zip(uneven.groups, counts, strict=True)
        for team, _ in groups
    )
    sync = max(
        tables.sync_s(
            frozenset(team for team, _ in groups), bounds[index], bounds[index + 1], counts[index]
        )
        for index, groups in enumerate(uneven.groups)
    )
    return steady + sum(compute) + sum(send) + update + sync


def _sends_of(uneven: Uneven, tables: Tables) -> list[float]:
    count, size = uneven.num_stages, uneven.micro_batch
    if count == 1:
        return [0.0]
    ahead, back = [], []
    for before, after in zip(uneven.groups, uneven.groups[1:], strict=False):
        pairs = [(one, other) for one, _ in before for other, _ in after]
        ahead.append(max(tables.send_s(one, other, size) for one, other in pairs))
        back.append(max(tables.send_s(other, one, size) for one, other in pairs))
    first = ahead[0] if count <= 3 else 2 * ahead[0]
    middle = [ahead[index] + back[index - 1] for index in range(1, count - 1)]
    return [first, *middle, 2 * back[-1]]


def plan_of(uneven: Uneven, tables: Tables) -> Plan:
    """As a plan for the rules."""
    stages = tuple(
        Stage(
            first_layer=uneven.bounds[index],
            num_layers=uneven.bounds[index + 1] - uneven.bounds[index],
            replicas=tuple(
                tables.teams[team].replica for team, count in groups for _ in range(count)
            ),
        )
        for index, groups in enumerate(uneven.groups)
    )
    return Plan(stages=stages, micro_batch=uneven.micro_batch, is_zero1=uneven.is_zero1)
