"""Seconds and bytes of teams in tables, for searches that ask a hundred thousand times.

Nothing here is a rule of its own: ``timing`` and ``memory`` say what is right, and every plan that
a search hands back is scored there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

from heterog.errors import StrategyError
from sailor.inputs import (
    CAPACITY_BYTES,
    FLOAT_BYTES,
    Inputs,
    Polynomial,
    Replica,
    Sizes,
    Times,
    seconds_of,
)
from sailor.score import CHECK_BYTES, STATE_BYTES
from sailor.timing import MOST_SLICES, ring_s

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
    """What a search looks up.

    Attributes:
        inputs: what was measured.
        num_gpus: of the cluster, by card.
    """

    inputs: Inputs
    num_gpus: Mapping[str, int]
    _sends: dict[tuple[int, int, int], float] = field(default_factory=dict)
    _rings: dict[tuple[frozenset[str], float, int], float] = field(default_factory=dict)

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

    def send_s(self, sender: int, receiver: int, micro_batch: int) -> float:
        """One micro-batch of a block's outputs between two teams; infinite without a link.

        Only stages that begin with the head send anything else; searches leave those out.
        """
        key = (sender, receiver, micro_batch)
        found = self._sends.get(key)
        if found is None:
            one, other = (self.teams[index].replica for index in (sender, receiver))
            num_bytes = self.inputs.sizes[1].outputs[0] * FLOAT_BYTES * micro_batch
            try:
                link = self.inputs.link((one.card, one.tensor), (other.card, other.tensor))
                found = seconds_of(link, num_bytes)
            except StrategyError:
                found = inf
            self._sends[key] = found
        return found

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
        key = (frozenset(self.teams[team].replica.card for team in teams), num_bytes, count)
        found = self._rings.get(key)
        if found is None:
            found = self._rings[key] = max(
                self._ring_s(link, num_bytes, count) for link in self._links(key[0])
            )
        return found

    def _links(self, cards: frozenset[str]) -> list[Polynomial | None]:
        """Between all pairs of cards, the larger of both directions by whoever comes first."""
        return [self.inputs.links.get(((one, 1), (other, 1))) for one in cards for other in cards]

    @staticmethod
    def _ring_s(link: Polynomial | None, num_bytes: float, count: int) -> float:
        try:
            return inf if link is None else ring_s(link, num_bytes, count)
        except StrategyError:
            return inf
