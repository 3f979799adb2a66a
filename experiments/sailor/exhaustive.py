"""Is there a faster plan that Sailor can say? All of them with few stages, by branch and bound.

A prefix of stages is left where what it takes at least is not below a limit: micro-batches at its
slowest stage, computation and sends so far, and its slowest ring. Within a stage, all replicas of
a card have teams of one size: larger ones beside them would wait for the smaller. Two things are
bounded from below instead of tried: replicas of unlike cards may meet across stages in any order,
and GPUs may be shared out among mixed stages in fractions. So a result of no plan is a proof, and
a plan that is found may be slower than its bound. Time grows with the number of layers to the
power of the number of stages: minutes with four.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import ceil

from sailor.plan import BATCH
from sailor.tables import Tables

Teams = tuple[int, ...]
"""Kinds of replicas of a stage, one for each card that it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The first stages of a plan.

    Attributes:
        bounds: of their layers.
        teams: of each stage.
        compute_s: of each stage.
        ahead_s: at least, for one micro-batch from each stage to the next.
        back_s: likewise, from each stage's successor back to it.
        sync_s: of the slowest ring.
    """

    bounds: tuple[int, ...] = (0,)
    teams: tuple[Teams, ...] = ()
    compute_s: tuple[float, ...] = ()
    ahead_s: tuple[float, ...] = ()
    back_s: tuple[float, ...] = ()
    sync_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivor:
    """A plan that may be faster than the limit.

    Attributes:
        bound_s: what it takes at least.
        stages: its layers and teams.
        num_replicas: of each stage.
        micro_batch: samples of each.
    """

    bound_s: float
    stages: Stages
    num_replicas: int
    micro_batch: int


def plans_below(tables: Tables, limit_s: float, most_stages: int) -> list[Survivor]:
    """All plans of at most so many stages whose bound is below a limit, the lowest first."""
    found: list[Survivor] = []
    gpus = sum(tables.num_gpus.values())
    sizes = sorted({size for team in tables.teams for size in team.sizes})
    for num_stages in range(1, most_stages + 1):
        for num_replicas in range(1, gpus // num_stages + 1):
            for micro_batch in sizes:
                found += _Branch(tables, limit_s, num_stages, num_replicas, micro_batch).found()
    return sorted(found, key=lambda each: each.bound_s)


class _Branch:
    """Plans with one number of stages, replicas and samples of a micro-batch."""

    def __init__(
        self, tables: Tables, limit_s: float, num_stages: int, num_replicas: int, micro_batch: int
    ) -> None:
        self._tables = tables
        self._limit_s = limit_s
        self._num_stages = num_stages
        self._replicas = num_replicas
        self._size = micro_batch
        self._rounds = ceil(BATCH / (micro_batch * num_replicas)) - 1
        self._weights = [
            (weight, sum(weight[card] * tables.num_gpus[card] for card in weight))
            for values in product((0, 1, 2, 4, 8), repeat=len(tables.cards))
            for weight in (dict(zip(tables.cards, values, strict=True)),)
        ]
        self._options = cache(lambda index, first: list(self._stages_from(index, first)))

    def found(self) -> Iterator[Survivor]:
        """All whose bound is below the limit."""
        return self._grown(Stages())

    def _grown(self, stages: Stages) -> Iterator[Survivor]:
        bound_s = self._bound_s(stages)
        if bound_s >= self._limit_s or not self._has_gpus(stages.teams):
            return
        if len(stages.teams) == self._num_stages:
            yield Survivor(
                bound_s=bound_s,
                stages=stages,
                num_replicas=self._replicas,
                micro_batch=self._size,
            )
            return
        before = stages.teams[-1:] if stages.teams else ()
        for end, teams, compute_s, sync_s in self._options(len(stages.teams), stages.bounds[-1]):
            yield from self._grown(
                Stages(
                    bounds=(*stages.bounds, end),
                    teams=(*stages.teams, teams),
                    compute_s=(*stages.compute_s, compute_s),
                    ahead_s=(*stages.ahead_s, *(self._send_s(one, teams) for one in before)),
                    back_s=(*stages.back_s, *(self._send_s(teams, one) for one in before)),
                    sync_s=max(stages.sync_s, sync_s),
                )
            )

    def _stages_from(self, index: int, first: int) -> Iterator[tuple[int, Teams, float, float]]:
        """Ends, teams, computation and ring of every stage that may begin with a layer."""
        tables, size = self._tables, self._size
        layers = tables.inputs.num_layers
        later = self._num_stages - 1 - index
        # As in the searches, the head is no stage of its own.
        ends = (
            range(first + 1, layers - later)
            if later
            else range(max(first + 1, layers), layers + 1)
        )
        for end in ends:
            if later == 0 and first == layers - 1:
                continue
            for teams in self._choices():
                if any(
                    size not in tables.teams[team].compute_s
                    or tables.most_samples(team, first, end, later + 1, 1.0) < size
                    for team in teams
                ):
                    continue
                sums = [tables.teams[team].compute_s[size] for team in teams]
                compute_s = max(each[end] - each[first] for each in sums)
                sync_s = tables.sync_s(frozenset(teams), first, end, self._replicas)
                if (self._rounds + 1) * compute_s + sync_s < self._limit_s:
                    yield end, teams, compute_s, sync_s

    def _choices(self) -> list[Teams]:
        """At most one kind of replica for each card, and not more kinds than replicas."""
        found: list[Teams] = [()]
        for card in self._tables.cards:
            own = [
                index for index, team in enumerate(self._tables.teams) if team.replica.card == card
            ]
            found += [(*teams, index) for teams in found for index in own]
        return [teams for teams in found if 0 < len(teams) <= self._replicas]

    def _send_s(self, senders: Teams, receivers: Teams) -> float:
        """The slowest sender, each to whom it reaches fastest."""
        return max(
            min(self._tables.send_s(one, other, self._size) for other in receivers)
            for one in senders
        )

    def _bound_s(self, stages: Stages) -> float:
        """What a plan takes at least that begins so; the update is left out."""
        ahead, back = stages.ahead_s, stages.back_s
        last = self._num_stages - 1
        twice = 1 if self._num_stages <= 3 else 2
        send = []
        for index in range(len(stages.teams)):
            out = ahead[index] if index < len(ahead) else 0.0
            if index == 0:
                send.append(twice * out)
            elif index < last:
                send.append(out + back[index - 1])
            else:
                send.append(2 * back[index - 1])
        both = [c + p for c, p in zip(stages.compute_s, send, strict=True)]
        return self._rounds * max(both, default=0.0) + sum(both) + stages.sync_s

    def _has_gpus(self, stages: tuple[Teams, ...]) -> bool:
        """Whether GPUs suffice if replicas could be shared out among cards in fractions.

        By duality: whatever a GPU of each card is worth, the cheapest way to fill the stages must
        not be worth more than all GPUs. Teams have 1, 2, 4 or 8, so that with two cards these
        weights are all that matter.
        """
        return all(
            sum(self._worth(teams, weight) for teams in stages) <= total + 1e-9
            for weight, total in self._weights
        )

    def _worth(self, teams: Teams, weight: Mapping[str, int]) -> int:
        replicas = [self._tables.teams[team].replica for team in teams]
        each = [weight[replica.card] * replica.tensor for replica in replicas]
        return sum(each) + (self._replicas - len(each)) * min(each)
