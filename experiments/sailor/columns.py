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
from itertools import product
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
    Sizes,
    Stage,
    Times,
    seconds_of,
)
from sailor.score import CHECK_BYTES, MOST_SLICES, STATE_BYTES, ring_s

NODE_GPUS = {"A100-40": 4, "V100-16": 4, "Titan-RTX": 8, "RTX-2080": 8, "RTX-3090": 8}
"""GPUs of a node: the most between which links were measured. Teams do not leave their node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """A kind of replica, with its tables.

    Attributes:
        replica: its card and number of GPUs.
        times: by micro-batch.
        sizes: of the layers.
        room_bytes: of the card, without what the runtime takes.
    """

    replica: Replica
    times: Mapping[int, Times]
    sizes: Sizes
    room_bytes: float


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
    def teams(self) -> tuple[Team, ...]:
        """Every kind of replica that was measured and that a node has room for."""
        return tuple(
            self._team(Replica(card=card, tensor=tensor))
            for card in self.cards
            for tensor in sorted(self.inputs.sizes)
            if tensor <= min(NODE_GPUS[card], self.num_gpus[card])
            and self.inputs.profiled(card, tensor)
        )

    def _team(self, replica: Replica) -> Team:
        measured = self.inputs.profiled(replica.card, replica.tensor)
        return Team(
            replica=replica,
            times={size: self.inputs.measured(replica, size) for size in measured},
            sizes=self.inputs.sizes[replica.tensor],
            room_bytes=CAPACITY_BYTES[replica.card] - CHECK_BYTES[replica.tensor > 1],
        )

    def most_samples(self, team: int, first_layer: int, end_layer: int, in_flight: int) -> float:
        """The largest micro-batch that a team has memory for; negative if none.

        Args:
            team: index of the team.
            first_layer: of its stage.
            end_layer: behind the last one.
            in_flight: micro-batches whose activations are kept.
        """
        each = self.teams[team]
        params = each.sizes.params[end_layer] - each.sizes.params[first_layer]
        activations = each.sizes.activations[end_layer] - each.sizes.activations[first_layer]
        return (each.room_bytes - STATE_BYTES * params) / (in_flight * FLOAT_BYTES * activations)

    @kept
    def send_s(self, sender: int, receiver: int, micro_batch: int) -> float:
        """One micro-batch of a block's outputs between two teams; infinite without a link.

        Only stages that begin with the head send anything else; searches leave those out.
        """
        one, other = (self.teams[index].replica for index in (sender, receiver))
        num_bytes = self.inputs.sizes[1].outputs[0] * FLOAT_BYTES * micro_batch
        try:
            link = self.inputs.link((one.card, one.tensor), (other.card, other.tensor))
            return seconds_of(link, num_bytes)
        except StrategyError:
            return inf

    def sync_s(self, teams: frozenset[int], first_layer: int, end_layer: int, count: int) -> float:
        """The ring of a stage whose replicas stand side by side by kind.

        Args:
            teams: kinds among them.
            first_layer: of the stage.
            end_layer: behind the last one.
            count: replicas.
        """
        if count < 2:
            return 0.0
        params = self.inputs.sizes[1].params
        slices = min(MOST_SLICES, min(self.teams[team].replica.tensor for team in teams))
        num_bytes = (params[end_layer] - params[first_layer]) * FLOAT_BYTES / slices
        cards = frozenset(self.teams[team].replica.card for team in teams)
        return self._ring_s(cards, num_bytes, count)

    @kept
    def _ring_s(self, cards: frozenset[str], num_bytes: float, count: int) -> float:
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
    """Sends and receives of every stage for one micro-batch, as ``score.sends_s`` counts."""
    ahead, back = [], []
    for index in range(columns.num_stages - 1):
        pairs = {(kind.teams[index], kind.teams[index + 1]) for kind in columns.kinds}
        ahead.append(max(tables.send_s(one, other, columns.micro_batch) for one, other in pairs))
        back.append(max(tables.send_s(other, one, columns.micro_batch) for one, other in pairs))
    return sends_of_stages(ahead, back)


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
    update = max(
        tables.teams[team].times[size].update_s for kind in columns.kinds for team in kind.teams
    )
    num_micro = ceil(BATCH / (size * columns.num_columns))
    return pipeline_s(compute, send, update, num_micro) + sync_of(columns, tables)


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
