"""A policy that improves plans: it scores the moves of a local search at a point.

The network reads the features of ``methods.local_search.move_features``. Groups, with facts of the
timeline, exchange messages along the edges of the graph. The features of a move are joined with
the embeddings of the groups that it changes. The output is the logit that the move gains.
``LedMoves`` draws many of the search's own random moves at each point and tries the best scored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv
from torch_geometric.utils import scatter

from heterog.agents.checkpoint import packed, unpacked
from heterog.agents.encoder import mlp, remove_written_code
from heterog.errors import InputFileError
from heterog.files import read_bytes, write_atomically
from heterog.methods.local_search.move_features import (
    NUM_GROUP_FEATURES,
    NUM_MOVE_FEATURES,
    NUM_STATE_FEATURES,
    TIMELINE,
    Array,
    MoveFeatures,
    View,
)
from heterog.methods.local_search.neighbours import Move, MoveKind, State, StateKey
from heterog.methods.local_search.plan_moves import PlanMoves, drawn_moves
from heterog.methods.local_search.planner import Lead, Search
from heterog.units import GIB

SHIPPED = "default"
_SHIPPED = resources.files("heterog.agents") / "improvers"
POOL = (32, 64)
"""Least and most moves that are drawn at once; the longer a simulation, the more."""
TASKS_PER_MOVE = 500
"""Simulated tasks that take about as long as drawing and scoring a move."""
TRIED = 8
"""Number of the best scored moves of a pool that are tried before others are drawn."""
_SPREAD = 0.5
"""Scale of the noise on scores: with more noise, moves with low scores are tried, too."""
BLIND, LEARNED = range(2)
LEAST_PART = 0.15
"""Least part of moves that the policy chooses, and of random (blind) moves."""
MOST_GAIN = 0.1
"""Largest logarithm of a gain that counts in the payoff."""
_PRIOR_GAIN, _PRIOR_COST = 0.02, 10.0  # first values of each arm, to which both decay
_FORGOTTEN = 0.99  # factor on earlier gains and costs after each move
_MOST_REPEATED = 12  # most proposals in a row that lead to known points
DROPOUT = 0.15  # in training only
GAIN = 1e-3
"""Least relative gain with which a move counts as gaining."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImproverConfig:
    """Sizes of the network.

    Attributes:
        width: Width of all embeddings.
        num_rounds: Rounds of messages between groups; 0 for none.
        sees_timeline: Whether facts of the timeline are read.
    """

    width: int = 32
    num_rounds: int = 2
    sees_timeline: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Points:
    """Some points and moves from each, as tensors.

    Attributes:
        groups: Features of all groups of all points.  # [num_groups, NUM_GROUP_FEATURES]
        edges: Groups that feed one another.  # [2, num_edges]
        point: Point of each group.  # [num_groups]
        whole: Features of each point.  # [num_points, NUM_STATE_FEATURES]
        moves: Features of all moves.  # [num_moves, NUM_MOVE_FEATURES]
        of: Point of each move.  # [num_moves]
        changed: (move, group) for each group that a move changes.  # [2, num_changes]
    """

    groups: Tensor
    edges: Tensor
    point: Tensor
    whole: Tensor
    moves: Tensor
    of: Tensor
    changed: Tensor


class _Round(nn.Module):
    """Messages along the edges and against them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.ahead = SAGEConv(width, width)
        self.back = SAGEConv(width, width, root_weight=False)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        normed = self.norm(x)
        told = self.ahead(normed, edges) + self.back(normed, edges.flip(0))
        return x + nn.functional.gelu(told)


class Improver(nn.Module):
    """Scores moves; see the module docstring."""

    groups_seen: Tensor
    whole_seen: Tensor
    moves_seen: Tensor

    def __init__(self, config: ImproverConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or ImproverConfig()
        width = config.width
        for name, size in (
            ("groups", NUM_GROUP_FEATURES),
            ("whole", NUM_STATE_FEATURES),
            ("moves", NUM_MOVE_FEATURES),
        ):
            mask = torch.ones(size)
            mask[list(TIMELINE[name])] = float(config.sees_timeline)
            self.register_buffer(f"{name}_seen", mask, persistent=False)
        self.groups = mlp(NUM_GROUP_FEATURES, width, width)
        self.rounds = nn.ModuleList(_Round(width) for _ in range(config.num_rounds))
        self.whole = mlp(NUM_STATE_FEATURES + width, width, width)
        self.moves = nn.Sequential(
            nn.Linear(NUM_MOVE_FEATURES + 2 * width, 2 * width),
            nn.GELU(),
            nn.Dropout(DROPOUT),
            nn.Linear(2 * width, 2 * width),
            nn.GELU(),
            nn.Dropout(DROPOUT),
            nn.Linear(2 * width, 1),
        )
        remove_written_code(self)

    @staticmethod
    def untrained(seed: int, config: ImproverConfig | None = None) -> "Improver":
        """A network with random weights."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return Improver(config).eval()

    def forward(self, points: Points) -> Tensor:
        """The logit that each move gains.  # [num_moves]"""
        x = self.groups(points.groups * self.groups_seen)
        for each in self.rounds:
            x = each(x, points.edges)
        means = scatter(x, points.point, 0, len(points.whole), "mean")
        whole = self.whole(torch.cat([points.whole * self.whole_seen, means], dim=1))
        move, group = points.changed
        places = scatter(x[group], move, 0, len(points.moves), "mean")
        seen = points.moves * self.moves_seen
        out: Tensor = self.moves(torch.cat([seen, places, whole[points.of]], dim=1))
        return out.squeeze(1)


def tensor(array: npt.NDArray[np.generic]) -> Tensor:
    """An array as a tensor."""
    return torch.from_numpy(np.ascontiguousarray(array))


def with_neighbours(edges: npt.NDArray[np.integer], num_groups: int) -> npt.NDArray[np.int64]:
    """Edges of the graph, and from each group to the next."""
    chain = np.arange(num_groups - 1)
    return np.concatenate([edges, np.stack([chain, chain + 1])], axis=1).astype(np.int64)


class SearchScores:
    """Scores moves of one search as ``Improver.forward`` does, but faster.

    The graph is fixed, so means over neighbours are products with a matrix. Products that all
    moves of a point share are computed once (``enter``).

    Args:
        policy: The network.
        edges: Groups that feed one another.  # [2, num_edges]
        num_groups: Number of groups.
    """

    def __init__(self, policy: Improver, edges: npt.NDArray[np.int64], num_groups: int) -> None:
        self._policy, width = policy, policy.config.width
        counts = np.zeros((2, num_groups, num_groups), np.float32)
        np.add.at(counts[0], (edges[1], edges[0]), 1.0)
        counts[1] = counts[0].T
        means = counts / np.maximum(counts.sum(axis=2, keepdims=True), 1.0)
        self._means = torch.from_numpy(means.reshape(-1, num_groups))
        with torch.inference_mode():
            self._rounds = []
            for each in policy.rounds:
                assert isinstance(each, _Round)
                ahead, back = each.ahead, each.back
                joined = [ahead.lin_l.weight, back.lin_l.weight, ahead.lin_r.weight]
                bias = ahead.lin_l.bias + back.lin_l.bias
                self._rounds.append((each.norm, torch.cat(joined, dim=1).T.contiguous(), bias))
            first = policy.moves[0]
            assert isinstance(first, nn.Linear)
            sizes = [NUM_MOVE_FEATURES, width, width]
            own, places, whole = torch.split(first.weight, sizes, dim=1)
            self._of_moves = (own * policy.moves_seen).T.contiguous()
            self._of_places, self._of_whole = places.T.contiguous(), whole.T.contiguous()
            self._bias, self._rest = first.bias.clone(), policy.moves[1:]

    @torch.inference_mode()
    def enter(self, view: View) -> tuple[Tensor, Tensor]:
        """Products that all moves from a point share: of its groups, and of the point."""
        policy, size = self._policy, len(view.groups)
        x = policy.groups(tensor(view.groups) * policy.groups_seen)
        for norm, weight, bias in self._rounds:
            normed = norm(x)
            told = self._means @ normed
            seen = torch.cat([told[:size], told[size:], normed], dim=1)
            x = x + nn.functional.gelu(torch.addmm(bias, seen, weight))
        whole = policy.whole(torch.cat([tensor(view.whole) * policy.whole_seen, x.mean(dim=0)]))
        return x @ self._of_places, torch.addmv(self._bias, self._of_whole.T, whole)

    @torch.inference_mode()
    def of(
        self, entered: tuple[Tensor, Tensor], features: Array, changed: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.float64]:
        """Scores of moves from a point.  # [num_moves]

        Args:
            entered: The point, from ``enter``.
            features: Features of the moves.  # [num_moves, NUM_MOVE_FEATURES]
            changed: Groups that each of them changes.  # [num_moves, num_groups]
        """
        groups, whole = entered
        weight = (changed / np.maximum(changed.sum(axis=1, keepdims=True), 1)).astype(np.float32)
        x = torch.addmm(whole, tensor(features), self._of_moves)
        x = self._rest(x.addmm_(torch.from_numpy(weight), groups))
        return np.asarray(x.squeeze(1).numpy(), np.float64)


class LedMoves:
    """Moves of a search: some chosen by a policy from many random ones, some blind.

    Small moves and whole-plan moves are drawn at a point and scored together. The best are tried
    from this point until one gains or none is left. Chosen and blind moves alternate in proportion
    to their recent gains per cost (``Payoff``), so a policy that does not help costs only
    ``LEAST_PART`` of the moves.

    Args:
        search: The search.
        policy: The network.
    """

    def __init__(self, search: Search, policy: Improver) -> None:
        self._search = search
        self._rng = np.random.default_rng([search.problem.seed, 1])
        self._features = MoveFeatures(search.evaluator, search.space)
        self._plans = PlanMoves(search.neighbours)
        edges = with_neighbours(self._features.edges, search.num_groups)
        self._scores = SearchScores(policy, edges, search.num_groups)
        self.view: View | None = None
        self._entered: tuple[Tensor, Tensor] | None = None
        self._queue: list[Move] = []
        self._proposed: set[StateKey] = set()
        self._payoff = Payoff(2)
        self._last: tuple[int, State, State] | None = None
        self._usual_tasks = 0.0

    def of(self, state: State) -> State:
        """A point to try from a point."""
        self._learn()
        arm = self._payoff.drawn(self._rng)
        found = self._chosen_from(state) if arm == LEARNED else None
        if found is None:
            arm, found = BLIND, self._search.neighbours.of(state)
        self._last = arm, state, found
        return found

    def _learn(self) -> None:
        """Record the gain of the last move, and its cost in simulated tasks, in the payoff."""
        if self._last is None:
            return
        arm, before, after = self._last
        gain = self._search.gain(before, after) or 0.0
        tasks = float(self._search.evaluator.num_tasks)
        self._usual_tasks = self._usual_tasks or max(tasks, 1.0)
        if arm == LEARNED:
            tasks += self._pool() / TRIED * TASKS_PER_MOVE
        gained = min(gain, MOST_GAIN) if gain >= GAIN else 0.0
        self._payoff.add(arm, gained, tasks / self._usual_tasks)

    def _chosen_from(self, state: State) -> State | None:
        """The best remaining move; ``None`` if the point cannot be simulated."""
        for _ in range(_MOST_REPEATED):
            if self._is_over(state):
                self._enter(state)
            if self.view is None:
                return None
            if not self._queue:
                self._queue = self._chosen(self.view)
            found = self._search.neighbours.after(self._queue.pop())
            if found.key not in self._proposed:
                break
        self._proposed.add(found.key)
        return found

    def _is_over(self, state: State) -> bool:
        """Whether to draw new moves, from another point than the last ones."""
        if self.view is None:
            return True
        if state.key == self.view.state.key:
            return False
        gain = self._search.gain(self.view.state, state)
        return gain is None or gain >= GAIN or not self._queue

    def _enter(self, state: State) -> None:
        self._proposed.add(state.key)
        looked = self._search.looked_at(state)
        self._queue = []
        self.view = None if looked is None else self._features.view(state, *looked)
        if self.view is not None:
            self._entered = self._scores.enter(self.view)

    def _pool(self) -> int:
        return int(np.clip(self._search.evaluator.num_tasks / TASKS_PER_MOVE, *POOL))

    def _chosen(self, view: View) -> list[Move]:
        """The moves to try, the best last."""
        moves = drawn_moves(self._search.neighbours, self._plans, view, self._pool())
        scores = self.scores(view, moves)
        noise = _SPREAD * self._rng.gumbel(size=len(moves))
        best = np.argsort(scores + noise)[-TRIED:]
        return [moves[number] for number in best.tolist()]

    def scores(self, view: View, moves: Sequence[Move]) -> npt.NDArray[np.float64]:
        """Scores of moves from the point of the last ``_enter``."""
        assert self._entered is not None
        return self._scores.of(self._entered, *self._features.of(view, moves))


class Payoff:
    """A bandit that draws arms in proportion to their recent gain per cost.

    Args:
        count: Number of arms.
    """

    def __init__(self, count: int) -> None:
        self._gain = np.full(count, _PRIOR_GAIN)
        self._cost = np.full(count, _PRIOR_COST)

    def drawn(self, rng: np.random.Generator) -> int:
        """Number of an arm; each has at least the probability ``LEAST_PART``."""
        rate = self._gain / self._cost
        part = LEAST_PART + (1.0 - len(rate) * LEAST_PART) * rate / rate.sum()
        return int(np.searchsorted(np.cumsum(part)[:-1], rng.random(), "right"))

    def add(self, arm: int, gain: float, cost: float) -> None:
        """Count a move of an arm."""
        self._gain *= _FORGOTTEN
        self._cost *= _FORGOTTEN
        self._gain += (1.0 - _FORGOTTEN) * _PRIOR_GAIN
        self._cost += (1.0 - _FORGOTTEN) * _PRIOR_COST
        self._gain[arm] += gain
        self._cost[arm] += cost


def led_by(policy: Improver) -> Lead:
    """A lead that lets a policy choose the moves of a search."""
    return lambda search: LedMoves(search, policy)


def save_improver(path: Path, policy: Improver, card: Mapping[str, Any]) -> None:
    """Write a policy and its card, whole or not at all."""
    record = {"config": asdict(policy.config), "weights": policy.state_dict(), "card": dict(card)}
    write_atomically(path, packed(record))


def of_today(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights for the current features; weights of version 0.2 lack those of op rules."""
    groups, moves = weights["groups.0.weight"], weights["moves.0.weight"]
    if groups.shape[1] != NUM_GROUP_FEATURES - 1:
        return dict(weights)
    kinds = len(MoveKind) - 1
    own = NUM_MOVE_FEATURES - 4
    parts = (moves[:, :kinds], moves.new_zeros(len(moves), 1), moves[:, kinds:own])
    widened = torch.cat([*parts, moves.new_zeros(len(moves), 3), moves[:, own:]], dim=1)
    groups = torch.cat([groups, groups.new_zeros(len(groups), 1)], dim=1)
    return {**weights, "groups.0.weight": groups, "moves.0.weight": widened}


@cache
def load_improver(source: str = SHIPPED) -> Improver:
    """Read a policy that improves plans.

    Args:
        source: Name of a shipped one, or a file.

    Raises:
        InputFileError: the file is missing, or is no such policy.
    """
    shipped = _SHIPPED / f"{source}.pt"
    data = shipped.read_bytes() if shipped.is_file() else read_bytes(Path(source), "policy", GIB)
    where = f"policy {source}"
    record = unpacked(data, where)
    try:
        policy = Improver(ImproverConfig(**record["config"]))
        policy.load_state_dict(of_today(record["weights"]))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise InputFileError(f"{where} improves no plans: {error}.") from error
    return policy.eval()
