"""Plans as columns of replicas: kinds of columns, their numbers, and their costs.

A column has one replica in every stage. Columns of one kind have the same teams, so a plan on a
hundred GPUs is a handful of numbers, and the cost of an evaluation grows with the number of kinds
only.

Their seconds and bytes are in tables, because a search needs them a hundred thousand times. The
rules are in ``score``, which also scores every plan that is returned.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from math import ceil, inf

from heterog.agents.benchmark.sailor import pipeline_s, sends_of_stages
from heterog.errors import StrategyError
from heterog.memo import kept
from sailor.inputs import (
    BATCH,
    CAPACITY_BYTES,
    FLOAT_BYTES,
    Inputs,
    Plan,
    Replica,
    Stage,
    Times,
    seconds_of,
)
from sailor.score import CHECK_BYTES, MOST_SLICES, held_bytes, ring_s

NODE_GPUS = {"A100-40": 4, "V100-16": 4, "Titan-RTX": 8, "RTX-2080": 8, "RTX-3090": 8}
"""GPUs of a node: the most between which links were measured. Teams do not leave their node."""


@dataclass(frozen=True, kw_only=True)
class Tables:
    """Tables in which a search looks up costs.

    Attributes:
        inputs: what was measured.
        num_gpus: of the cluster, by card.
    """

    inputs: Inputs
    num_gpus: Mapping[str, int]

    @cached_property
    def cards(self) -> tuple[str, ...]:
        """Types of GPUs that the cluster has."""
        return tuple(sorted(card for card, count in self.num_gpus.items() if count))

    @cached_property
    def teams(self) -> tuple[Replica, ...]:
        """Every kind of replica that was measured and that a node has room for."""
        return tuple(
            Replica(card=card, tensor=tensor)
            for card in self.cards
            for tensor in sorted(self.inputs.sizes)
            if tensor <= min(NODE_GPUS[card], self.num_gpus[card])
            and self.inputs.profiled(card, tensor)
        )

    def times(self, team: Replica, micro_batch: int) -> Times | None:
        """Seconds of a team at a size of micro-batches; ``None`` if it was not measured."""
        return self.inputs.times[team.card].get(micro_batch, {}).get(team.tensor)

    @kept
    def send_s(self, one: Replica, other: Replica, micro_batch: int) -> float:
        """One micro-batch of a block's outputs between two teams; infinite without a link.

        Only stages that begin with the head send anything else; searches leave those out.
        """
        num_bytes = self.inputs.sizes[1].outputs[0] * FLOAT_BYTES * micro_batch
        try:
            link = self.inputs.link((one.card, one.tensor), (other.card, other.tensor))
            return seconds_of(link, num_bytes)
        except StrategyError:
            return inf

    @kept
    def ring_s(self, cards: frozenset[str], num_bytes: float, count: int) -> float:
        """Over the slowest link of all pairs of cards; infinite if one has none."""
        try:
            links = [self.inputs.link((a, 1), (b, 1)) for a, b in product(cards, repeat=2)]
            return max(ring_s(link, num_bytes, count) for link in links)
        except StrategyError:
            return inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Columns that are alike.

    Attributes:
        teams: replica of each stage.
        count: columns of this kind.
    """

    teams: tuple[Replica, ...]
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
            used[team.card] += team.tensor * kind.count
    return used


def is_possible(columns: Columns, tables: Tables) -> bool:
    """Whether there are GPUs enough, the sizes are known, and memory holds them."""
    used = gpus_of(columns, tables)
    if any(used[card] > tables.num_gpus[card] for card in used):
        return False
    return all(
        tables.times(team, columns.micro_batch) is not None
        and held_bytes(
            tables.inputs,
            tensor=team.tensor,
            first_layer=columns.bounds[index],
            end_layer=columns.bounds[index + 1],
            in_flight=columns.num_stages - index,
            micro_batch=columns.micro_batch,
        )
        + CHECK_BYTES[team.tensor > 1]
        <= CAPACITY_BYTES[team.card]
        for kind in columns.kinds
        for index, team in enumerate(kind.teams)
    )


def time_of(columns: Columns, tables: Tables) -> float:
    """Seconds of an iteration, as ``score`` counts; infinite where it is not possible."""
    if not is_possible(columns, tables):
        return inf
    size, count, bounds = columns.micro_batch, columns.num_columns, columns.bounds
    params = tables.inputs.sizes[1].params
    stages = [{kind.teams[index] for kind in columns.kinds} for index in range(len(bounds) - 1)]
    compute, sync, updates = [], [], []
    for teams, (first, end) in zip(stages, pairwise(bounds), strict=True):
        measured = [found for team in teams if (found := tables.times(team, size))]
        compute.append(max(each.compute_s[end] - each.compute_s[first] for each in measured))
        updates += [each.update_s for each in measured]
        slices = min(MOST_SLICES, min(team.tensor for team in teams))
        num_bytes = (params[end] - params[first]) * FLOAT_BYTES / slices
        cards = frozenset(team.card for team in teams)
        sync.append(tables.ring_s(cards, num_bytes, count) if count > 1 else 0.0)
    ahead, back = [], []
    for index in range(len(stages) - 1):
        pairs = {kind.teams[index : index + 2] for kind in columns.kinds}
        ahead.append(max(tables.send_s(one, other, size) for one, other in pairs))
        back.append(max(tables.send_s(other, one, size) for one, other in pairs))
    send, num_micro = sends_of_stages(ahead, back), ceil(BATCH / (size * count))
    return pipeline_s(compute, send, max(updates), num_micro) + max(sync)


def plan_of(columns: Columns) -> Plan:
    """Columns as a plan for the rules."""
    bounds = columns.bounds
    stages = tuple(
        Stage(
            first_layer=first,
            num_layers=end - first,
            replicas=tuple(kind.teams[index] for kind in columns.kinds for _ in range(kind.count)),
        )
        for index, (first, end) in enumerate(pairwise(bounds))
    )
    return Plan(stages=stages, micro_batch=columns.micro_batch)
