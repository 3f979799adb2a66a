"""The environment of plans improved move by move."""

import math
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from heterog.cluster.topology import Cluster
from heterog.envs.spaces import LIMIT, Padded
from heterog.envs.toy import chain_graph, toy_cluster
from heterog.errors import experimental
from heterog.graph.op_graph import OpGraph
from heterog.methods.local_search.move_features import (
    NUM_GROUP_FEATURES,
    NUM_MOVE_FEATURES,
    NUM_STATE_FEATURES,
    MoveFeatures,
)
from heterog.methods.local_search.neighbours import Move, MoveKind, State
from heterog.methods.local_search.plan_moves import PlanMoves, drawn_moves
from heterog.methods.local_search.planner import Search, cost_of
from heterog.methods.planner import Budget, Problem
from heterog.simulator.evaluator import Evaluator

_evaluators: WeakValueDictionary[tuple[int, int], Evaluator] = WeakValueDictionary()
_ENDLESS = Budget(evaluations=2**62)
_MOST_CANDIDATES = 20_000
"""Distinct decisions after which a pair's search begins anew, because each takes memory."""


@experimental
class ImproveEnv(gym.Env[Padded, np.int64]):
    """Improve a training plan move by move, seeing where its simulated step spends its seconds.

    ## Description
    An episode has a model on a cluster, and begins with the same decision for all of its ops. At
    each step random moves are drawn, one per action: other devices or shares for some groups of
    ops, cuts between stages, synchronisation and ZeRO, teams, rules of ops, micro-batches and
    schedules, recomputation, buckets, the order. Some moves change a whole plan
    (``methods.local_search.plan_moves``). The action chooses the move to make.

    ## Action space
    ``Discrete(num_moves)``. A masked action (``action_mask`` is 0) changes nothing.

    ## Observation space
    A ``Dict`` of arrays, padded to the largest pair, all ratios
    (``methods.local_search.move_features``):

    | key | shape | what |
    |---|---|---|
    | groups, group_mask | G x 31, G | each group of ops: timeline, costs, what is decided |
    | edges, edge_mask | 2 x E, E | groups that feed one another |
    | whole | 24 | the critical path by purpose, memory, sizes |
    | moves | K x 105 | each move: its kind, the timeline at its place, what it changes |
    | changed | K x G | the groups that each move changes |
    | action_mask | K | moves that lead elsewhere |

    ## Reward
    Logarithm of the step time before the move over the step time after it, by the referee, not
    clipped; an episode's sum is the logarithm of its whole gain. A step that does not fit counts
    at least tenfold, so that fitting is a gain.

    ## Episode
    ``reset`` draws a pair (or takes ``options={"pair": number}``) and a decision for all groups.
    It is truncated after ``num_steps`` moves. ``info`` has ``step_time_s``, and ``cost`` and
    ``best``, which include the charge for overflow.

    ## Arguments
    ``pairs``: models and clusters to draw from; a toy by default. ``num_moves``: K. ``num_steps``:
    length of an episode. ``render_mode="ansi"``: ``render`` gives a line.

    ## Version
    v0.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012  (Gymnasium's way)

    def __init__(
        self,
        pairs: Sequence[tuple[OpGraph, Cluster]] | None = None,
        num_moves: int = 32,
        num_steps: int = 32,
        render_mode: str | None = None,
    ) -> None:
        self.render_mode = render_mode
        self._num_moves, self._num_steps = num_moves, num_steps
        self._pairs = list(pairs or [(chain_graph(), toy_cluster())])
        self._searches: dict[int, tuple[Search, MoveFeatures, PlanMoves]] = {}
        self._evaluators: dict[int, Evaluator] = {}
        made = [self._of(number)[1] for number in range(len(self._pairs))]
        groups = max(search.num_groups for search, *_ in self._searches.values())
        edges = max(1, *(features.edges.shape[1] for features in made))

        def box(*shape: int) -> gym.spaces.Box:
            return gym.spaces.Box(-LIMIT, LIMIT, shape, np.float32)

        self.action_space = gym.spaces.Discrete(num_moves)
        self._arrays = gym.spaces.Dict({
            "groups": box(groups, NUM_GROUP_FEATURES),
            "group_mask": gym.spaces.MultiBinary(groups),
            "edges": gym.spaces.Box(0, groups, (2, edges), np.int64),
            "edge_mask": gym.spaces.MultiBinary(edges),
            "whole": box(NUM_STATE_FEATURES),
            "moves": box(num_moves, NUM_MOVE_FEATURES),
            "changed": gym.spaces.MultiBinary([num_moves, groups]),
            "action_mask": gym.spaces.MultiBinary(num_moves),
        })  # fmt: skip
        self.observation_space: gym.Space[Any] = self._arrays

    def _of(self, number: int) -> tuple[Search, MoveFeatures, PlanMoves]:
        """A pair's search, for moves and evaluations, with features and plan moves."""
        known = self._searches.get(number)
        if known is None or len(known[0].space.candidates) > _MOST_CANDIDATES:
            if number not in self._evaluators:
                self._evaluators[number] = _evaluator_of(*self._pairs[number])
            evaluator = self._evaluators[number]
            search = Search(Problem(evaluator=evaluator, budget=_ENDLESS))
            search.neighbours.may_team = bool(search.rules.team_sizes)
            search.neighbours.may_shard = bool(search.rules.layers)
            features = MoveFeatures(evaluator, search.space)
            known = self._searches[number] = search, features, PlanMoves(search.neighbours)
        return known

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Padded, dict[str, Any]]:
        """Draw a pair and a decision for all of its groups."""
        super().reset(seed=seed)
        wanted = (options or {}).get("pair")
        drawn = int(self.np_random.integers(len(self._pairs)))
        self._search, self._features, self._plans = self._of(
            drawn if wanted is None else int(wanted)
        )
        self._search.neighbours.rng = self.np_random
        self._taken = 0
        named, self._cost = self._search.neighbours.num_named, math.inf
        while not math.isfinite(self._cost):  # a decision is far too large or cannot run
            self._enter(self._search.everywhere(int(self.np_random.integers(named))))
        self._best = self._cost
        return self._observation(), self._info()

    def step(self, action: np.int64) -> tuple[Padded, float, bool, bool, dict[str, Any]]:
        """Make a move."""
        before = self._cost
        self._enter(self._search.neighbours.after(self._moves[int(action)]))
        self._taken += 1
        self._best = min(self._best, self._cost)
        reward, is_over = math.log(before / self._cost), self._taken >= self._num_steps
        return self._observation(), reward, False, is_over, self._info()

    def action_masks(self) -> npt.NDArray[np.bool_]:
        """Moves that lead elsewhere, as ``MaskablePPO`` reads them.  # [num_moves]"""
        return self._masks.copy()

    def render(self) -> str | None:
        """Seconds of the plan and of the best one so far, in a line; ``None`` if not asked."""
        if self.render_mode is None:
            return None
        return (
            f"{self._taken} moves: {self._view.step_s:.6f} s a step, cost {self._cost:.6f}, best "
            f"{self._best:.6f}"
        )

    def _enter(self, state: State) -> None:
        """Make a point the current one, if it can be simulated."""
        looked = self._search.looked_at(state, by_referee=True)
        if looked is not None and math.isfinite(cost_of(looked[0])):
            self._cost = cost_of(looked[0])
            self._view = self._features.view(state, *looked)

    def _info(self) -> dict[str, Any]:
        return {"step_time_s": self._view.step_s, "cost": self._cost, "best": self._best}

    def _observation(self) -> Padded:
        """The current point with newly drawn moves, padded."""
        search, features, view = self._search, self._features, self._view
        moves = drawn_moves(search.neighbours, self._plans, view, self._num_moves)
        moves += [Move(MoveKind.ORDER, view.state)] * (self._num_moves - len(moves))
        self._moves = moves
        own = view.state.key
        self._masks = np.array([move.state.key != own for move in moves])
        if not self._masks.any():
            self._masks[0] = True
        edges, (described, changed) = features.edges, features.of(view, moves)
        found: dict[str, npt.NDArray[Any]] = {
            "groups": view.groups,
            "group_mask": np.ones(len(view.groups)),
            "edges": edges,
            "edge_mask": np.ones(edges.shape[1]),
            "whole": view.whole,
            "moves": described,
            "changed": changed,
            "action_mask": self._masks,
        }
        return {key: _padded(value, self._arrays[key]) for key, value in found.items()}


def _evaluator_of(graph: OpGraph, cluster: Cluster) -> Evaluator:
    """An evaluator that shares prices with the last one for the same objects.

    Environments side by side meet the same shares.
    """
    key = id(graph), id(cluster)
    beside = _evaluators.get(key)
    if beside is not None and not (beside.graph is graph and beside.cluster is cluster):
        beside = None
    model = beside.cost_model if beside else None
    _evaluators[key] = found = Evaluator(graph, cluster, model, beside)
    return found


def _padded(array: npt.NDArray[Any], space: gym.Space[Any]) -> npt.NDArray[np.generic]:
    """An array with zeros up to the shape of a space."""
    assert space.shape is not None
    padded = np.zeros(space.shape, space.dtype)
    padded[tuple(slice(size) for size in array.shape)] = (
        np.clip(array, -LIMIT, LIMIT) if (array.dtype.kind == "f") else array
    )
    return padded
