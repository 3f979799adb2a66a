"""Learning to improve plans from the moves of searches.

``Recorder`` makes the moves of a search, at random or by a policy. Every few moves, it also tries
many others from the current point and records points, moves and gains (``Recorded``). ``imitate``
trains a network to tell moves that gain from the others:

    loss = - mean log p(gains or not) - 0.15 mean over points of sum w log softmax(score)

with w in proportion to the root of the gain. The second term ranks the best move of a point first;
being right on average is not enough.
"""

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from heterog.agents.improver import (
    GAIN,
    Improver,
    ImproverConfig,
    LedMoves,
    Points,
    tensor,
    with_neighbours,
)
from heterog.files import write_atomically
from heterog.lowering.program import FloatArray
from heterog.methods.local_search.move_features import Array, MoveFeatures
from heterog.methods.local_search.neighbours import State
from heterog.methods.local_search.plan_moves import PLAN_PART, PlanMoves, drawn_moves
from heterog.methods.local_search.planner import Search, cost_of

LIMIT = 1.02
"""Ratio to the step before a move above which its simulation is given up."""
_EVERY, _WIDTH = 8, 32  # see ``Recorder``
_LISTED = 0.15  # weight of the ranking term of the loss
_MOST_GAIN = 0.5  # largest logarithm of a gain that counts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recorded:
    """Points of a search of one pair, and the gains of moves from them.

    Attributes:
        groups: Features of groups.  # [num_points, num_groups, NUM_GROUP_FEATURES]
        whole: Features of points.  # [num_points, NUM_STATE_FEATURES]
        moves: Features of moves.  # [num_points, num_moves, NUM_MOVE_FEATURES]
        changed: Groups that each move changes.  # [num_points, num_moves, num_groups]
        gains: Logarithm of the seconds before over those after each move.  # [points, moves]
        edges: Groups that feed one another.  # [2, num_edges]
    """

    groups: Array
    whole: Array
    moves: Array
    changed: npt.NDArray[np.bool_]
    gains: Array
    edges: npt.NDArray[np.int32]

    def save(self, path: Path) -> None:
        """Write to a file of arrays."""
        buffer = io.BytesIO()
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        np.savez_compressed(buffer, **arrays)
        write_atomically(path, buffer.getvalue())

    @staticmethod
    def load(path: Path) -> "Recorded":
        """Read a file that ``save`` has written."""
        with np.load(path, allow_pickle=False) as arrays:
            return Recorded(**{field.name: arrays[field.name] for field in fields(Recorded)})


class Recorder:
    """Makes the moves of a search and records them; for a ``Lead`` of ``LocalSearch``.

    Args:
        search: The search.
        policy: Policy that chooses the moves, so that points on its way are recorded; random moves
            if ``None``.
        every: Number of moves of the search between two points.
        width: Number of moves that are tried from a point.
    """

    def __init__(
        self,
        search: Search,
        policy: Improver | None = None,
        *,
        every: int = _EVERY,
        width: int = _WIDTH,
    ) -> None:
        self._search, self._every, self._width = search, every, width
        self._led = None if policy is None else LedMoves(search, policy)
        self._features = MoveFeatures(search.evaluator, search.space)
        self._rng = np.random.default_rng([search.problem.seed, 2])
        self._plans = PlanMoves(search.neighbours)
        self._busy_s: FloatArray | None = None
        self._calls = 0
        self._rows: list[tuple[npt.NDArray[np.generic], ...]] = []

    def of(self, state: State) -> State:
        """A point to try from a point."""
        if self._calls % self._every == 0:
            self._record(state)
        self._calls += 1
        if self._led is not None:
            return self._led.of(state)
        near = self._search.neighbours
        if self._busy_s is None or near.rng.random() >= PLAN_PART:
            return near.of(state)
        return near.after(self._plans.move(state, self._busy_s))

    def _record(self, state: State) -> None:
        search = self._search
        looked = search.looked_at(state)
        if looked is None:
            return
        view, cost = self._features.view(state, *looked), cost_of(looked[0])
        kept, search.neighbours.rng = search.neighbours.rng, self._rng
        moves = drawn_moves(search.neighbours, self._plans, view, self._width)
        moves += moves[:1] * (self._width - len(moves))  # moves that change nothing are missing
        search.neighbours.rng, self._busy_s = kept, view.load_s
        features, changed = self._features.of(view, moves)
        made = [search.neighbours.after(move) for move in moves]
        gains = [
            0.0 if each.key == state.key
            else math.log(cost / cost_of(search.evaluated(each, LIMIT * cost)))
            for each in made
        ]  # fmt: skip
        self._rows.append(
            (view.groups, view.whole, features, changed, np.array(gains, np.float32))
        )

    def recorded(self) -> Recorded | None:
        """Everything recorded so far; ``None`` if nothing was."""
        if not self._rows:
            return None
        groups, whole, moves, changed, gains = map(np.stack, zip(*self._rows, strict=True))
        return Recorded(
            groups=groups,
            whole=whole,
            moves=moves,
            changed=changed,
            gains=gains,
            edges=self._features.edges,
        )


def points_of(items: Sequence[tuple[Recorded, int]]) -> tuple[Points, Tensor]:
    """A batch of points, and the gains of their moves."""
    parts: list[list[npt.NDArray[np.generic]]] = [[] for _ in range(8)]
    groups = moves = 0
    for number, (recorded, index) in enumerate(items):
        own = recorded.groups[index]
        move, group = np.nonzero(recorded.changed[index])
        arrays = (
            own,
            with_neighbours(recorded.edges, len(own)).T + groups,
            np.full(len(own), number),
            recorded.whole[index][None],
            recorded.moves[index],
            np.full(len(recorded.moves[index]), number),
            np.stack([move + moves, group + groups], axis=1),
            recorded.gains[index],
        )
        for part, array in zip(parts, arrays, strict=True):
            part.append(array)
        groups, moves = groups + len(own), moves + len(recorded.moves[index])
    joined = [tensor(np.concatenate(part)) for part in parts]
    points = Points(
        groups=joined[0],
        edges=joined[1].T,
        point=joined[2],
        whole=joined[3],
        moves=joined[4],
        of=joined[5],
        changed=joined[6].T,
    )
    return points, joined[7]


def loss_of(scores: Tensor, gains: Tensor, of: Tensor) -> Tensor:
    """The loss of moves' scores; see the module docstring.

    Args:
        scores: Score of each move.  # [num_moves]
        gains: Logarithm of what it gained.  # [num_moves]
        of: Point of each move.  # [num_moves]
    """
    told = nn.functional.binary_cross_entropy_with_logits(scores, (gains >= GAIN).float())
    count = int(of[-1]) + 1
    weight = torch.where(gains >= GAIN, gains.clamp(0.0, _MOST_GAIN).sqrt(), 0.0)
    total = torch.zeros(count).index_add(0, of, weight)
    log_sum = torch.zeros(count).index_add(0, of, scores.exp()).log()
    listed = weight / total.clamp(min=1e-6)[of] * (scores - log_sum[of])
    return told - _LISTED * listed.sum() / count


BATCH_SIZE = 24
"""Points of a step of ``imitate``."""


def imitate(
    recorded: Sequence[Recorded],
    *,
    config: ImproverConfig | None = None,
    num_steps: int = 1000,
    seed: int = 0,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> Improver:
    """Train a network on recorded moves.

    Args:
        recorded: Points and moves of some pairs, all points equally likely.
        config: Sizes of the network.
        num_steps: Number of steps of gradient descent.
        seed: Seed of everything random.
        report: Function called with each step's number and loss.
    """
    policy, rng = Improver.untrained(seed, config), np.random.default_rng(seed)
    items = [(each, index) for each in recorded for index in range(len(each.gains))]
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3, weight_decay=2e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps, 1e-4)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        policy.train()
        for step in range(num_steps):
            chosen = rng.integers(len(items), size=BATCH_SIZE)
            points, gains = points_of([items[number] for number in chosen])
            loss = loss_of(policy(points), gains, points.of)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            report(step, loss.item())
    return policy.eval()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """How often moves gain, as parts.

    Attributes:
        blind: Part of all random moves that gain.
        best: Part of points whose best scored move gains.
        possible: Part of points with some move that gains.
        num_points: Number of points.
    """

    blind: float
    best: float
    possible: float
    num_points: int


def gaining_shares(policy: Improver, recorded: Sequence[Recorded]) -> Shares:
    """How often moves gain if drawn at random, and if a policy chooses them."""
    found = []
    for each in recorded:
        for index in range(len(each.gains)):
            points, gains = points_of([(each, index)])
            with torch.inference_mode():
                best = int(policy(points).argmax())
            gaining = gains.numpy() >= GAIN
            found.append((gaining.mean(), gaining[best], gaining.any()))
    blind, best_share, possible = np.mean(found, axis=0).tolist()
    return Shares(blind=blind, best=best_share, possible=possible, num_points=len(found))
