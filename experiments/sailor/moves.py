"""Random columns, and small changes to columns, for a search.

Random plans with unlike numbers of replicas, and small changes to them.
"""

from collections.abc import Callable
from dataclasses import replace
from random import Random

from sailor.columns import Columns, Kind, gpus_of
from sailor.tables import Tables
from sailor.uneven import Group, Uneven
from sailor.uneven import gpus_of as gpus_of_uneven

MOST_STAGES = 8
"""More stages have never been near the best: each sends twice and fills the pipeline."""
MOST_KINDS = 4
"""Columns of more kinds than cards and one more have not been better."""


class Moves:
    """Makes random columns and changes them.

    Args:
        tables: for teams and numbers of GPUs.
        random: where chance comes from.
        is_uniform: all columns have micro-batches of one size, as in Sailor's plans.
        is_zero1: optimizer states lie in slices.
    """

    def __init__(
        self, tables: Tables, random: Random, *, is_uniform: bool, is_zero1: bool
    ) -> None:
        self._tables = tables
        self._random = random
        self._is_uniform = is_uniform
        self._is_zero1 = is_zero1
        self._sizes = sorted({size for team in tables.teams for size in team.sizes})
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
            if not self._is_uniform:
                size = random.choice(self._sizes[:4])
            kinds.append(Kind(teams=teams, micro_batch=size, count=1))
        made = Columns(bounds=(0, *inner, layers), kinds=tuple(kinds), is_zero1=self._is_zero1)
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
        index = self._random.randrange(len(columns.kinds))
        kind = columns.kinds[index]
        place = self._sizes.index(kind.micro_batch) + self._random.choice((-1, 1))
        if not 0 <= place < len(self._sizes):
            return None
        size = self._sizes[place]
        if self._is_uniform:
            kinds = tuple(replace(each, micro_batch=size) for each in columns.kinds)
            return replace(columns, kinds=kinds)
        return _with_kind(columns, index, replace(kind, micro_batch=size))

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


MOST_GROUPS = 2
"""Kinds of replicas in one stage; more would wait for the slowest."""


class UnevenMoves:
    """Makes random plans and changes them.

    Args:
        tables: for teams and numbers of GPUs.
        random: where chance comes from.
        is_zero1: optimizer states lie in slices.
    """

    def __init__(self, tables: Tables, random: Random, *, is_zero1: bool) -> None:
        self._tables = tables
        self._random = random
        self._is_zero1 = is_zero1
        self._sizes = sorted({size for team in tables.teams for size in team.sizes})
        self._every: tuple[Callable[[Uneven], Uneven | None], ...] = (
            self._shift_bound,
            self._shift_bound,
            self._change_team,
            self._resize,
            self._recount,
            self._recount,
            self._exchange,
            self._exchange,
            self._add_group,
            self._drop_group,
            self._split_stage,
            self._join_stages,
        )

    def start(self, num_stages: int) -> Uneven:
        """A random plan of so many stages."""
        random, tables = self._random, self._tables
        layers = tables.inputs.num_layers
        inner = sorted(random.sample(range(1, layers - 1), num_stages - 1))
        groups = tuple(((random.randrange(len(tables.teams)), 1),) for _ in range(num_stages))
        return self._fitted(
            Uneven(
                bounds=(0, *inner, layers),
                groups=groups,
                micro_batch=random.choice(self._sizes[:4]),
                is_zero1=self._is_zero1,
            )
        )

    def change(self, uneven: Uneven) -> Uneven | None:
        """One change by chance, or ``None`` where it does not apply."""
        changed = self._random.choice(self._every)(uneven)
        return None if changed is None else self._fitted(changed)

    def _fitted(self, uneven: Uneven) -> Uneven:
        """Fewer replicas until there are GPUs enough, then as many as there is room for."""
        counts = {
            (stage, index): count
            for stage, groups in enumerate(uneven.groups)
            for index, (_, count) in enumerate(groups)
        }
        used = gpus_of_uneven(uneven, self._tables)
        for card in self._tables.cards:
            sizes = {
                (stage, index): self._tables.teams[uneven.groups[stage][index][0]].replica.tensor
                for stage, index in counts
                if self._tables.teams[uneven.groups[stage][index][0]].replica.card == card
            }
            self._fit(counts, sizes, self._tables.num_gpus[card] - used[card])
        return replace(
            uneven,
            groups=tuple(
                tuple((team, counts[stage, index]) for index, (team, _) in enumerate(groups))
                for stage, groups in enumerate(uneven.groups)
            ),
        )

    def _fit(
        self, counts: dict[tuple[int, int], int], sizes: dict[tuple[int, int], int], free: int
    ) -> None:
        """Change the counts of one card's groups, whose teams have these sizes."""
        while free < 0:
            large = [place for place in sizes if counts[place] > 1]
            if not large:
                return
            place = self._random.choice(large)
            counts[place] -= 1
            free += sizes[place]
        own = list(sizes)
        while own:
            place = self._random.choice(own)
            if sizes[place] > free:
                own.remove(place)
                continue
            # Half of the room, so that few draws fill a large cluster.
            more = max(free // sizes[place] // 2, 1)
            counts[place] += more
            free -= sizes[place] * more

    def _shift_bound(self, uneven: Uneven) -> Uneven | None:
        if uneven.num_stages == 1:
            return None
        index = self._random.randint(1, uneven.num_stages - 1)
        moved = uneven.bounds[index] + self._random.choice((-2, -1, 1, 2))
        is_last = index + 1 == uneven.num_stages
        if not uneven.bounds[index - 1] < moved < uneven.bounds[index + 1] - is_last:
            return None
        bounds = (*uneven.bounds[:index], moved, *uneven.bounds[index + 1 :])
        return replace(uneven, bounds=bounds)

    def _place(self, uneven: Uneven) -> tuple[int, int]:
        stage = self._random.randrange(uneven.num_stages)
        return stage, self._random.randrange(len(uneven.groups[stage]))

    def _change_team(self, uneven: Uneven) -> Uneven | None:
        """Another team, with as many GPUs as before or fewer."""
        stage, index = self._place(uneven)
        old, count = uneven.groups[stage][index]
        new = self._random.randrange(len(self._tables.teams))
        was, now = (self._tables.teams[team].replica.tensor for team in (old, new))
        return _with_group(uneven, stage, index, (new, max(count * was // now, 1)))

    def _resize(self, uneven: Uneven) -> Uneven | None:
        place = self._sizes.index(uneven.micro_batch) + self._random.choice((-1, 1))
        if not 0 <= place < len(self._sizes):
            return None
        return replace(uneven, micro_batch=self._sizes[place])

    def _recount(self, uneven: Uneven) -> Uneven | None:
        stage, index = self._place(uneven)
        team, count = uneven.groups[stage][index]
        more = count + self._random.choice((-8, -4, -2, -1, 1, 2, 4))
        return None if more < 1 else _with_group(uneven, stage, index, (team, more))

    def _exchange(self, uneven: Uneven) -> Uneven | None:
        """GPUs of one stage for another."""
        (one, first), (other, second) = self._place(uneven), self._place(uneven)
        moved = self._random.randint(1, 4)
        team, count = uneven.groups[one][first]
        if (one, first) == (other, second) or count <= moved:
            return None
        less = _with_group(uneven, one, first, (team, count - moved))
        team, count = less.groups[other][second]
        return _with_group(less, other, second, (team, count + moved))

    def _add_group(self, uneven: Uneven) -> Uneven | None:
        stage = self._random.randrange(uneven.num_stages)
        groups = uneven.groups[stage]
        if len(groups) >= MOST_GROUPS:
            return None
        added = (*groups, (self._random.randrange(len(self._tables.teams)), 1))
        return _with_groups(uneven, stage, added)

    def _drop_group(self, uneven: Uneven) -> Uneven | None:
        stage, index = self._place(uneven)
        groups = uneven.groups[stage]
        if len(groups) < 2:
            return None
        return _with_groups(uneven, stage, (*groups[:index], *groups[index + 1 :]))

    def _split_stage(self, uneven: Uneven) -> Uneven | None:
        stage = self._random.randrange(uneven.num_stages)
        first, end = uneven.bounds[stage : stage + 2]
        last = end - (stage + 1 == uneven.num_stages)
        if uneven.num_stages >= MOST_STAGES or last - first < 2:
            return None
        bound = self._random.randint(first + 1, last - 1)
        halves = tuple((team, max(count // 2, 1)) for team, count in uneven.groups[stage])
        return replace(
            uneven,
            bounds=(*uneven.bounds[: stage + 1], bound, *uneven.bounds[stage + 1 :]),
            groups=(*uneven.groups[:stage], halves, halves, *uneven.groups[stage + 1 :]),
        )

    def _join_stages(self, uneven: Uneven) -> Uneven | None:
        if uneven.num_stages == 1:
            return None
        stage = self._random.randint(1, uneven.num_stages - 1)
        dropped = stage - self._random.randint(0, 1)
        return replace(
            uneven,
            bounds=(*uneven.bounds[:stage], *uneven.bounds[stage + 1 :]),
            groups=(*uneven.groups[:dropped], *uneven.groups[dropped + 1 :]),
        )


def _with_group(uneven: Uneven, stage: int, index: int, group: Group) -> Uneven:
    groups = uneven.groups[stage]
    return _with_groups(uneven, stage, (*groups[:index], group, *groups[index + 1 :]))


def _with_groups(uneven: Uneven, stage: int, groups: tuple[Group, ...]) -> Uneven:
    return replace(uneven, groups=(*uneven.groups[:stage], groups, *uneven.groups[stage + 1 :]))
