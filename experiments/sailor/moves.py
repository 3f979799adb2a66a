"""Random columns, and small changes to columns, for a search."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

from sailor.columns import Columns, Kind, gpus_of
from sailor.tables import Tables

MOST_STAGES = 8
"""More stages have never been near the best: each sends twice and fills the pipeline."""
MOST_KINDS = 4
"""Columns of more kinds than cards and one more have not been better."""


class Moves:
    """Makes random columns and changes them.

    Args:
        tables: for teams and numbers of GPUs.
        random: where chance comes from.
    """

    def __init__(self, tables: Tables, random: Random) -> None:
        self._tables = tables
        self._random = random
        self._sizes = sorted({size for team in tables.teams for size in team.times})
        self._every: tuple[Callable[[Columns], Columns | None], ...] = (
            self._shift_bound,
            self._shift_bound,
            self._change_team,
            self._change_team,
            self._resize,
            self._recount,
            self._recount,
            self._exchange,
            self._add_kind,
            self._drop_kind,
            self._split_stage,
            self._join_stages,
        )

    def start(self, num_stages: int) -> Columns:
        """Random columns of so many stages, on as many GPUs as they can use."""
        random, tables = self._random, self._tables
        layers = tables.inputs.num_layers
        # The head is never a stage of its own: its gradients to the stage before are logits.
        inner = sorted(random.sample(range(1, layers - 1), num_stages - 1))
        size = random.choice(self._sizes[:4])
        kinds = []
        for _ in range(random.randint(1, len(tables.cards) + 1)):
            cards = random.sample(tables.cards, random.randint(1, len(tables.cards)))
            fitting = [
                index for index, team in enumerate(tables.teams) if team.replica.card in cards
            ]
            teams = tuple(random.choice(fitting) for _ in range(num_stages))
            if random.random() < 0.5:  # most good columns have like teams
                teams = (teams[0],) * num_stages
            kinds.append(Kind(teams=teams, count=1))
        made = Columns(bounds=(0, *inner, layers), kinds=tuple(kinds), micro_batch=size)
        return self._filled(made)

    def change(self, columns: Columns) -> Columns | None:
        """One change by chance, or ``None`` where it does not apply."""
        changed = self._random.choice(self._every)(columns)
        if changed is None:
            return None
        return self._filled(changed) if self._random.random() < 0.7 else self._shrunk(changed)

    def _shrunk(self, columns: Columns) -> Columns | None:
        """Fewer columns, until there are GPUs enough."""
        tables = self._tables
        while True:
            used = gpus_of(columns, tables)
            over = {card for card in used if used[card] > tables.num_gpus[card]}
            if not over:
                return columns
            users = [
                index
                for index, kind in enumerate(columns.kinds)
                if any(tables.teams[team].replica.card in over for team in kind.teams)
            ]
            columns = _counted(columns, self._random.choice(users), -1)
            if not columns.kinds:
                return None

    def _filled(self, columns: Columns) -> Columns:
        """As many columns as there are GPUs for, of kinds in random order."""
        shrunk = self._shrunk(columns)
        if shrunk is None:
            return columns
        tables = self._tables
        used = gpus_of(shrunk, tables)
        order = list(range(len(shrunk.kinds)))
        self._random.shuffle(order)
        for index in order:
            needs = dict.fromkeys(tables.cards, 0)
            for team in shrunk.kinds[index].teams:
                needs[tables.teams[team].replica.card] += tables.teams[team].replica.tensor
            more = min(
                (tables.num_gpus[card] - used[card]) // count
                for card, count in needs.items()
                if count
            )
            shrunk = _counted(shrunk, index, more)
            used = {card: used[card] + more * needs[card] for card in used}
        return shrunk

    def _shift_bound(self, columns: Columns) -> Columns | None:
        if columns.num_stages == 1:
            return None
        index = self._random.randint(1, columns.num_stages - 1)
        moved = columns.bounds[index] + self._random.choice((-2, -1, 1, 2))
        last = (
            columns.bounds[-1] - 1
            if index + 1 == columns.num_stages
            else columns.bounds[index + 1]
        )
        if not columns.bounds[index - 1] < moved < last:
            return None
        bounds = (*columns.bounds[:index], moved, *columns.bounds[index + 1 :])
        return replace(columns, bounds=bounds)

    def _change_team(self, columns: Columns) -> Columns | None:
        index = self._random.randrange(len(columns.kinds))
        kind = columns.kinds[index]
        team = self._random.randrange(len(self._tables.teams))
        stage = self._random.randrange(columns.num_stages)
        teams = (*kind.teams[:stage], team, *kind.teams[stage + 1 :])
        if self._random.random() < 0.3:
            teams = tuple(team if each == kind.teams[stage] else each for each in kind.teams)
        return _with_kind(columns, index, replace(kind, teams=teams))

    def _resize(self, columns: Columns) -> Columns | None:
        place = self._sizes.index(columns.micro_batch) + self._random.choice((-1, 1))
        if not 0 <= place < len(self._sizes):
            return None
        return replace(columns, micro_batch=self._sizes[place])

    def _recount(self, columns: Columns) -> Columns | None:
        index = self._random.randrange(len(columns.kinds))
        changed = _counted(columns, index, self._random.choice((-4, -2, -1, 1, 2, 4)))
        return changed if changed.kinds else None

    def _exchange(self, columns: Columns) -> Columns | None:
        """Fewer of one kind, more of another."""
        if len(columns.kinds) < 2:
            return None
        one, other = self._random.sample(range(len(columns.kinds)), 2)
        more = _counted(columns, one, self._random.randint(1, 4))
        return _counted(more, other, -self._random.randint(1, 4))

    def _add_kind(self, columns: Columns) -> Columns | None:
        if len(columns.kinds) >= MOST_KINDS:
            return None
        kind = self._random.choice(columns.kinds)
        added = replace(columns, kinds=(*columns.kinds, replace(kind, count=1)))
        stage = self._random.randrange(columns.num_stages)
        team = self._random.randrange(len(self._tables.teams))
        teams = (*kind.teams[:stage], team, *kind.teams[stage + 1 :])
        if self._random.random() < 0.5:
            teams = (team,) * columns.num_stages
        return _with_kind(added, len(columns.kinds), replace(kind, teams=teams, count=1))

    def _drop_kind(self, columns: Columns) -> Columns | None:
        if len(columns.kinds) < 2:
            return None
        index = self._random.randrange(len(columns.kinds))
        return _counted(columns, index, -columns.kinds[index].count)

    def _split_stage(self, columns: Columns) -> Columns | None:
        stages = columns.num_stages
        stage = self._random.randrange(stages)
        first, end = columns.bounds[stage : stage + 2]
        last = end - 1 if stage + 1 == stages else end
        if stages >= MOST_STAGES or last - first < 2:
            return None
        bound = self._random.randint(first + 1, last - 1)
        bounds = (*columns.bounds[: stage + 1], bound, *columns.bounds[stage + 1 :])
        kinds = tuple(
            replace(
                kind,
                teams=(*kind.teams[:stage], kind.teams[stage], *kind.teams[stage:]),
                count=max(kind.count * stages // (stages + 1), 1),
            )
            for kind in columns.kinds
        )
        return replace(columns, bounds=bounds, kinds=kinds)

    def _join_stages(self, columns: Columns) -> Columns | None:
        if columns.num_stages == 1:
            return None
        stage = self._random.randint(1, columns.num_stages - 1)
        dropped = stage - self._random.randint(0, 1)
        bounds = (*columns.bounds[:stage], *columns.bounds[stage + 1 :])
        kinds = tuple(
            replace(kind, teams=(*kind.teams[:dropped], *kind.teams[dropped + 1 :]))
            for kind in columns.kinds
        )
        return replace(columns, bounds=bounds, kinds=kinds)


def _with_kind(columns: Columns, index: int, kind: Kind) -> Columns:
    kinds = (*columns.kinds[:index], kind, *columns.kinds[index + 1 :])
    return replace(columns, kinds=kinds)


def _counted(columns: Columns, index: int, more: int) -> Columns:
    """More columns of a kind, or fewer; a kind without columns is left out."""
    kind = columns.kinds[index]
    if kind.count + more > 0:
        return _with_kind(columns, index, replace(kind, count=kind.count + more))
    return replace(columns, kinds=(*columns.kinds[:index], *columns.kinds[index + 1 :]))
