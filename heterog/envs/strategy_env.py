"""The two environments: a whole strategy in one action, and one block a step."""

import itertools
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from heterog.cluster import Cluster
from heterog.envs.pair import Pair, RunningMemory
from heterog.envs.reward import RewardFunction, reward_of
from heterog.envs.spaces import LIMIT, Padded, Padding, pad_pair, pair_space, read_action
from heterog.envs.toy import chain_graph, toy_cluster

Info = dict[str, Any]
Action = npt.NDArray[np.int64]


class _StrategyEnv(gym.Env[Padded, Any]):
    """Base of both environments: pairs, padding, the end of an episode."""

    metadata = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012  (as Gymnasium declares it)
    observation_space: gym.Space[Any]

    def __init__(
        self,
        pairs: Sequence[Pair] | None = None,
        padding: Padding | None = None,
        reward: RewardFunction = reward_of,
        render_mode: str | None = None,
    ) -> None:
        self._reward, self.render_mode = reward, render_mode
        self._shown: tuple[list[int], Info] = [], {}
        self.pairs = [pair.judged() for pair in pairs or [Pair(chain_graph(), toy_cluster())]]
        self.padding = padding or Padding.of(self.pairs)
        self.padding.check(self.pairs)
        self._number = 0
        self._make_spaces()

    def _make_spaces(self) -> None:
        """Set ``observation_space`` and ``action_space`` from the padding."""
        raise NotImplementedError

    @property
    def pair(self) -> Pair:
        """The pair of the current episode."""
        return self.pairs[self._number]

    def render(self) -> str | None:
        """The blocks decided so far, a line for each run of equal ones; ``None`` if not asked."""
        if self.render_mode is None:
            return None
        row, found = self._shown
        lines = [self.pair.name]
        for choice, run in itertools.groupby(range(len(row)), key=row.__getitem__):
            blocks = list(run)
            taken = self.pair.table[choice]
            names = [self.pair.cluster.devices[device].name for device in taken.devices]
            parts = ", ".join(f"{n} {s}" for n, s in zip(names, taken.shares, strict=True))
            which = f"{blocks[0] + 1} to {blocks[-1] + 1} of {self.pair.num_blocks}"
            lines.append(f"block {which}: {parts} by {taken.sync.name.lower()}")
        if found:
            seconds, speedup = found["step_time_s"], found["speedup"]
            lines.append(f"{seconds:.6f} s a step, {speedup:.2f}x of data parallelism")
        return "\n".join(lines)

    def _static(self) -> Padded:
        """New arrays of the pair, which the caller owns.

        They are made on demand: the arrays of all pairs for 16 environments would take gigabytes.
        """
        return pad_pair(self.pair, self._number, self.padding)

    def _choose(self, options: Info | None) -> None:
        wanted = (options or {}).get("pair")
        number = self.np_random.integers(len(self.pairs)) if wanted is None else wanted
        self._number = int(number)

    def _finish(self, row: npt.ArrayLike, masked: int) -> tuple[float, Info]:
        """Reward of a whole row, and its terms."""
        found = self._reward(self.pair, self.pair.score(row))
        self.pair.forget()
        return found.reward, {
            "reward": found.reward,
            "step_time_s": found.step_time_s,
            "baseline_s": self.pair.baseline_s,
            "speedup": found.speedup,
            "overflow": found.overflow,
            "is_ok": found.overflow == 0.0,
            "masked_actions": masked,
            "row": np.asarray(row, np.int32),
        }


class StrategyOneShotEnv(_StrategyEnv):
    """Decide a whole training strategy in one action, as HeteroG does (section 4.1).

    ## Description
    A *pair* is a captured training step and a cluster. The step's groups of ops are joined into at
    most 48 *blocks* in the order of the forward pass. An action names for each block one row of
    the pair's candidate table: a device set, shares of the batch on it, and a synchronisation of
    gradients. The simulator answers, op by op, with the seconds of a step.

    ## Action space
    ``MultiDiscrete([C] * G)``, both padded to the largest pair. Entries of blocks that the pair
    lacks are ignored. A masked entry (``action_mask`` is 0) is a no-op: the block takes the
    candidate of the block before it, the first block its first legal candidate;
    ``info["masked_actions"]`` counts these entries.

    ## Observation space
    A ``Dict`` of padded arrays, all ratios (see ``heterog.envs.observation``):

    | key | shape | what |
    |---|---|---|
    | pair | 1 | number of the pair among the environment's own, not a feature |
    | blocks, block_mask | G x 18, G | compute, parameters, traffic, memory, place, kinds of ops |
    | edges, edge_time, edge_mask | 2 x E, E x 1, E | blocks that feed one another |
    | devices, device_mask | D x 8, D | speed, memory, NIC |
    | links | D x 3D | to each device: rate, latency, same host |
    | block_devices | G x 2D | predicted seconds of each block on each device |
    | candidates, candidate_mask | C x 17, C | reach, compute, synchronisation, memory of rows |
    | shares | C x D | part of the batch on each device |
    | action_mask | G x C | rows that can hold a block if it were alone |

    ## Reward
    Log of the speed-up over the best data-parallel baseline, scored op by op; if memory does not
    suffice, a value below -1.5, graded by the overrun. See ``heterog.envs.reward``; the terms are
    in ``info``.

    ## Episode
    ``reset`` draws a pair (or takes ``options={"pair": number}``); one step ends it.

    ## Arguments
    ``pairs``: what to draw from; a toy if none is given. ``padding``: sizes to pad to. ``reward``:
    another function of pair and score. ``render_mode="ansi"``: ``render`` gives a text.

    ## Version
    v1: observation version 2; one communicator runs one operation at a time (one of each kind in
    v0).
    """

    def _make_spaces(self) -> None:
        padding = self.padding
        self.observation_space = gym.spaces.Dict(pair_space(padding))
        self.action_space = gym.spaces.MultiDiscrete([padding.candidates] * padding.blocks)

    def reset(
        self, *, seed: int | None = None, options: Info | None = None
    ) -> tuple[Padded, Info]:
        """Draw a pair."""
        super().reset(seed=seed)
        self._choose(options)
        self._shown = [], {}
        return self._static(), {}

    def step(self, action: Action) -> tuple[Padded, float, bool, bool, Info]:
        """Score the whole strategy."""
        row, masked = read_action(self.pair, action)
        reward, info = self._finish(row, masked)
        self._shown = row.tolist(), info
        return self._static(), reward, True, False, info

    def action_masks(self) -> npt.NDArray[np.bool_]:
        """Legal entries of an action, block by block, as ``MaskablePPO`` reads it.  # [G * C]

        All entries of blocks that the pair lacks are legal, because they are ignored.
        """
        masks = self._static()["action_mask"].astype(bool)
        masks[self.pair.num_blocks :] = True
        return masks.reshape(-1)


class StrategyEnv(_StrategyEnv):
    """Decide a training strategy block by block, seeing what has been decided so far.

    ## Description
    Like ``heterog/StrategyOneShot-v1``, one block at a time in the order of the forward pass.

    ## Action space
    ``Discrete(C)``: the row of the candidate table that the current block takes. A masked action
    (``action_mask[block]`` is 0) is a no-op: nothing is decided, the step counts, and
    ``info["masked_actions"]`` grows.

    ## Observation space
    Like ``heterog/StrategyOneShot-v1``. The mask of the current block also excludes candidates
    that no longer fit beside the decided blocks. Further arrays:

    | key | shape | what |
    |---|---|---|
    | block | 1 | the block to decide now |
    | chosen | G | row of each decided block plus 1, else 0 |
    | used | D | part of each device's memory that is taken, by a running estimate |
    | estimate | 3 | analytic compute and synchronisation of the decided blocks over the compute \
bound, and the part of the batch that changed devices |

    ## Reward
    0 until the last block is decided, then the reward of ``heterog/StrategyOneShot-v1``.

    ## Episode
    It ends when every block is decided, and is truncated after four steps per block.

    ## Arguments
    ``pairs``: what to draw from; a toy if none is given. ``padding``: sizes to pad to. ``reward``:
    another function of pair and score. ``render_mode="ansi"``: ``render`` gives a text.

    ## Version
    v1: observation version 2; one communicator runs one operation at a time (one of each kind in
    v0).
    """

    def _make_spaces(self) -> None:
        blocks, candidates = self.padding.blocks, self.padding.candidates
        self.observation_space = gym.spaces.Dict(
            pair_space(self.padding)
            | {
                "block": gym.spaces.Box(0, blocks, (1,), np.int64),
                "chosen": gym.spaces.Box(0, candidates, (blocks,), np.int64),
                "used": gym.spaces.Box(0.0, LIMIT, (self.padding.devices,), np.float32),
                "estimate": gym.spaces.Box(0.0, LIMIT, (3,), np.float32),
            }
        )
        self.action_space = gym.spaces.Discrete(candidates)

    def reset(
        self, *, seed: int | None = None, options: Info | None = None
    ) -> tuple[Padded, Info]:
        """Draw a pair and decide nothing."""
        super().reset(seed=seed)
        self._choose(options)
        self._memory = RunningMemory(self.pair, 1)
        self._row: list[int] = []
        self._find_fits()
        self._steps = self._masked = 0
        self._estimate = np.zeros(3)
        self._shown = self._row, {}
        return self._observe(), {"masked_actions": 0}

    def step(self, action: int | np.int64) -> tuple[Padded, float, bool, bool, Info]:
        """Decide the current block, if the action is legal.

        Raises:
            ResetNeeded: the episode is over.
        """
        pair, block, wanted = self.pair, len(self._row), int(action)
        if block == pair.num_blocks:
            raise gym.error.ResetNeeded("all blocks are decided; call reset for another episode.")
        self._steps += 1
        if 0 <= wanted < pair.num_candidates and self._fits[wanted]:
            seen = pair.observation
            # Features hold half the logarithm of seconds x G / T0.
            times = np.exp(2.0 * seen.pairs[block, wanted, :2]) / pair.num_blocks
            moved = 1.0 - seen.overlap[self._row[-1], wanted] if self._row else 0.0
            self._estimate += (*times, moved)
            self._row.append(wanted)
            self._memory.add([wanted])
            self._find_fits()
        else:
            self._masked += 1
        info: Info = {"masked_actions": self._masked}
        reward, done = 0.0, len(self._row) == pair.num_blocks
        if done:
            reward, info = self._finish(np.array(self._row), self._masked)
            self._shown = self._row, info
        truncated = not done and self._steps >= 4 * pair.num_blocks
        return self._observe(), reward, done, truncated, info

    def action_masks(self) -> npt.NDArray[np.bool_]:
        """Legal actions for the current block, as ``MaskablePPO`` reads them.  # [C]

        All are legal once the episode is over: Gymnasium's vectors read masks before a reset.
        """
        return self._fits.copy()

    def _find_fits(self) -> None:
        """Find what the current block may take."""
        self._fits = np.ones(self.padding.candidates, bool)
        if len(self._row) < self.pair.num_blocks:
            self._fits[self.pair.num_candidates :] = False
            self._fits[: self.pair.num_candidates] = self._memory.fits()[0]

    def _observe(self) -> Any:
        pair, padding, block = self.pair, self.padding, len(self._row)
        padded = self._static()
        if block < pair.num_blocks:
            padded["action_mask"][block] = self._fits.astype(np.int8)
        used = np.zeros(padding.devices, np.float32)
        used[: pair.cluster.num_devices] = np.minimum(self._memory.used[0], LIMIT)
        chosen = np.zeros(padding.blocks, np.int64)
        chosen[:block] = np.array(self._row, np.int64) + 1
        return padded | {
            "block": np.array([block], np.int64),
            "chosen": chosen,
            "used": used,
            "estimate": np.minimum(self._estimate, LIMIT).astype(np.float32),
        }


def strategy_env_of_names(
    models: Sequence[str], clusters: Sequence[str], **options: Any
) -> StrategyEnv:
    """``heterog/StrategyZoo-v1``: every model on every cluster.

    Args:
        models: Names of built-in models, or ``file.py:function``.
        clusters: Names of built-in clusters, or files.
        options: Further arguments of ``StrategyEnv``.

    Raises:
        HeterogError: there is no such model or cluster.
    """
    from heterog.graph.capture import capture
    from heterog.zoo import load_workload

    found = [Cluster.load(name) for name in clusters]
    graphs = [capture(load_workload(name)) for name in models]
    return StrategyEnv([Pair(graph, each) for graph in graphs for each in found], **options)
