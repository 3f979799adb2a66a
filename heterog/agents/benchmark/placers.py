"""Agents of three papers, which learn on the problem itself from weights drawn with a seed.

``heterog_agent`` (Yi et al., CoNEXT 2020), ``placeto`` (Addanki et al., arXiv 1906.08879) and
``gdp`` (Zhou et al., arXiv 1910.01578). Each agent decides blocks with a small network; an
evaluation simulates one row, and the best rows are the answer. A page of the documentation lists
the sources and the changes. Step times are divided by the time of one decision for all devices,
so that rewards are near one.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch_geometric.nn import GATConv, SAGEConv

from heterog.agents.benchmark.row_search import Row, Rows
from heterog.agents.encoder import remove_written_code
from heterog.envs.pair import Pair
from heterog.strategy.strategy import Sync

SLOWEST = 30.0
"""Ratio to the first decision's step time at which slowdowns are clipped; rows that cannot run
have it, too."""
WIDTH, HEADS, LAYERS = 32, 4, 2
"""Sizes of all networks; smaller than in the papers, which use GPUs."""
ROUNDS, REMEMBERED = 8, 10
"""Placeto's message rounds, and the episodes of its mean return (both from its repository)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Hyperparameters that may be tuned.

    Attributes:
        rate: Learning rate of Adam.
        entropy: Weight of the entropy of a decision, in nats.
        draws: Rows between two updates; ``Placeto`` ignores it and learns after each episode.
        passes: Passes over each set of draws; ``Gdp`` only.
    """

    rate: float = 3e-3
    entropy: float = 1e-2
    draws: int = 4
    passes: int = 4


def all_devices(pair: Pair) -> list[int]:
    """Candidates on the most devices, proportional shares first."""
    most = max(len(decision.devices) for decision in pair.table)
    return [n for n, decision in enumerate(pair.table) if len(decision.devices) == most]


def heterog_actions(pair: Pair) -> list[int]:
    """HeteroG's ``M + 4``: each device, and all of them by {EV, CP} x {PS, AllReduce}."""
    found: dict[tuple[tuple[int, ...], bool], int] = {}
    for number in all_devices(pair):
        decision = pair.table[number]
        found.setdefault((decision.shares, decision.sync == Sync.PARAMETER_SERVER), number)
    singles = [n for n, decision in enumerate(pair.table) if len(decision.devices) == 1]
    return [*singles, *list(found.values())[:4]]


def features_of(pair: Pair) -> Tensor:
    """Features of each block, and its seconds on each device.  # [G, F]"""
    seen = pair.observation
    per_device = seen.block_devices.reshape(pair.num_blocks, -1)
    return torch.from_numpy(np.concatenate([seen.blocks, per_device], axis=1))


def choice_of(logits: Tensor) -> Any:
    """The categorical distribution of logits; torch gives it no type."""
    return Categorical(logits=logits)


class Placer(ABC):
    """An agent on the rows of a problem.

    Args:
        rows: Rows of a problem.
        settings: Hyperparameters.
    """

    def __init__(self, rows: Rows, settings: Settings) -> None:
        torch.manual_seed(2000 + rows.problem.seed)
        self.rows, self.pair, self.settings = rows, rows.pair, settings
        self.features = features_of(rows.pair)
        self.edges = torch.from_numpy(rows.pair.observation.edges.copy())
        self.first = (all_devices(rows.pair)[0],) * rows.pair.num_blocks
        found = rows.tried(self.first)
        self._first_s = found.step_time_s if found else 1.0
        self.network = self.make()
        self.optimizer = torch.optim.Adam(self.network.parameters(), settings.rate)

    @abstractmethod
    def make(self) -> nn.Module:
        """The network."""

    @abstractmethod
    def learn(self) -> None:
        """Try rows and learn once from them."""

    def slowdown(self, row: Row) -> tuple[float, bool]:
        """(step time over the first row's step time, whether the row fits)."""
        found = self.rows.tried(row)
        if found is None:
            return SLOWEST, False
        return min(found.step_time_s / self._first_s, SLOWEST), found.is_ok

    def follow(self, loss: Tensor) -> None:
        """One optimizer step on a loss."""
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()


class _OneShot(nn.Module):
    """Logits of all blocks at once: an encoder of the graph, attention over blocks, a choice."""

    def __init__(self, encoder: nn.ModuleList, num_features: int, num_actions: int) -> None:
        super().__init__()
        self.into, self.encoder = nn.Linear(num_features, WIDTH), encoder
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.choice = nn.Linear(WIDTH, num_actions)
        remove_written_code(self)

    def forward(self, features: Tensor, edges: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits.  # [G, A]"""
        x = self.into(features)
        for layer in self.encoder:
            x = x + torch.relu(layer(x, edges))
        logits: Tensor = self.choice(self.blocks(x[None], mask)[0])
        return logits


class HeterogAgent(Placer):
    """GAT, a causal transformer over groups, REINFORCE with a running mean as baseline.

    Rewards are ``-sqrt(T)``, times ten where memory runs out. Unlike in the paper, there are two
    layers instead of twelve and eight, and blocks are the environment's.
    """

    def make(self) -> nn.Module:
        """See ``Placer``."""
        self.actions = heterog_actions(self.pair)
        gat = nn.ModuleList(GATConv(WIDTH, WIDTH // HEADS, HEADS) for _ in range(LAYERS))
        count = self.pair.num_blocks
        self.mask = torch.triu(torch.full((count, count), -torch.inf), 1)
        self.mean: float | None = None
        return _OneShot(gat, self.features.shape[1], len(self.actions))

    def reward(self, slowdown: float, fits: bool) -> float:
        """The reward of section 4.1.3."""
        return -math.sqrt(slowdown) * (1.0 if fits else 10.0)

    def learn(self) -> None:
        """See ``Placer``."""
        choice = choice_of(self.network(self.features, self.edges, self.mask))
        drawn = [choice.sample() for _ in range(self.settings.draws)]
        rewards = [
            self.reward(*self.slowdown(tuple(self.actions[a] for a in each.tolist())))
            for each in drawn
        ]
        mean = float(np.mean(rewards))
        self.mean = mean if self.mean is None else (self.mean + mean) / 2.0
        gains = [reward - self.mean for reward in rewards]
        terms = [
            gain * choice.log_prob(each).sum() for gain, each in zip(gains, drawn, strict=True)
        ]
        self.follow(-sum(terms) / len(terms) - self.settings.entropy * choice.entropy().sum())


class Gdp(Placer):
    """GraphSAGE with max pooling, attention without positions, PPO with the mean as baseline.

    Rewards are ``-sqrt(T)``, and -10 for invalid rows. As in GDP-one, it learns on one graph,
    without the superposition layer. Unlike in the paper, actions are candidates, not devices.
    """

    CLIP, INVALID = 0.2, -10.0

    def make(self) -> nn.Module:
        """See ``Placer``."""
        sage = nn.ModuleList(
            SAGEConv(WIDTH, WIDTH, aggr="max", project=True) for _ in range(LAYERS)
        )
        self.rewards: list[float] = []
        return _OneShot(sage, self.features.shape[1], self.pair.num_candidates)

    def learn(self) -> None:
        """See ``Placer``."""
        with torch.no_grad():
            before = choice_of(self.network(self.features, self.edges))
        drawn = torch.stack([before.sample() for _ in range(self.settings.draws)])
        found = []
        for each in drawn.tolist():
            slowdown, fits = self.slowdown(tuple(each))
            found.append(-math.sqrt(slowdown) if fits else self.INVALID)
        self.rewards += found
        gains = torch.tensor(found) - float(np.mean(self.rewards))
        for _ in range(self.settings.passes):
            now = choice_of(self.network(self.features, self.edges))
            ratio = (now.log_prob(drawn) - before.log_prob(drawn)).exp()
            loss = -clipped(ratio, gains[:, None], self.CLIP).mean()
            self.follow(loss - self.settings.entropy * now.entropy().mean())


def clipped(ratio: Tensor, gain: Tensor, clip: float) -> Tensor:
    """PPO's objective: no gain beyond a ratio of ``1 + clip``, or below ``1 - clip``.

    >>> clipped(torch.tensor([1.5, 0.5]), torch.tensor([2.0, -2.0]), 0.2).tolist()
    [2.4000000953674316, -1.600000023841858]
    """
    return torch.minimum(ratio * gain, ratio.clamp(1.0 - clip, 1.0 + clip) * gain)


class _Messages(nn.Module):
    """Placeto's network: messages down and up the graph, pools of blocks before, after, beside."""

    def __init__(
        self, num_features: int, edges: Tensor, num_blocks: int, num_actions: int
    ) -> None:
        super().__init__()
        self.into = nn.Linear(num_features, WIDTH)
        self.sent = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.taken = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.choice = nn.Sequential(
            nn.Linear(5 * WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, num_actions)
        )
        feeds = torch.zeros(num_blocks, num_blocks)
        feeds[edges[1], edges[0]] = 1.0  # row: who reads, column: whose value
        self.feeds = feeds
        reach = ((torch.eye(num_blocks) + feeds).matrix_power(num_blocks) > 0).float()
        self.before = reach - torch.eye(num_blocks)
        beside = 1.0 - torch.clamp(reach + reach.T, max=1.0)
        self.pools = torch.stack([self.before, self.before.T, beside])  # [3, G, G]

    def forward(self, features: Tensor, blocks: Tensor) -> Tensor:
        """Logits of one block in each of several states.

        Args:
            features: Features of all blocks in each state.  # [N, G, F]
            blocks: The block to decide in each state.  # [N]

        Returns:
            # [N, A]
        """
        start = torch.relu(self.into(features))
        ways = []
        for way, matrix in enumerate((self.feeds, self.feeds.T)):
            x = start
            for _ in range(ROUNDS):
                x = start + torch.relu(self.taken[way](matrix @ torch.relu(self.sent[way](x))))
            ways.append(x)
        both, states = ways[0] + ways[1], torch.arange(len(blocks))
        own = torch.cat([start[states, blocks], both[states, blocks]], dim=1)
        pools = torch.einsum("png,ngw->npw", self.pools[:, blocks], both) / both.shape[1]
        logits: Tensor = self.choice(torch.cat([own, pools.flatten(1)], dim=1))
        return logits


class Placeto(Placer):
    """An episode visits each block once and may decide it anew; each decision is rewarded.

    The reward is the reduction of the step time, so that an episode's rewards sum up to its gain.
    REINFORCE, with the mean return of each position in the last episodes as baseline. Unlike in
    the paper, actions are candidates, not devices; an episode begins from one decision for all
    devices; and all blocks that neither feed a block nor are fed by it count as beside it,
    whenever they run.
    """

    def make(self) -> nn.Module:
        """See ``Placer``."""
        count, actions = self.pair.num_blocks, self.pair.num_candidates
        self.returns: list[np.ndarray[tuple[int], np.dtype[np.float64]]] = []
        return _Messages(self.features.shape[1] + actions + 2, self.edges, count, actions)

    def cost(self, row: Row) -> float:
        """The slowdown, plus ``SLOWEST`` where memory runs out."""
        slowdown, fits = self.slowdown(row)
        return slowdown + (0.0 if fits else SLOWEST)

    def learn(self) -> None:
        """See ``Placer``."""
        count, row = self.pair.num_blocks, list(self.first)
        blocks, costs = torch.arange(count), [self.cost(self.first)]
        states, actions = [], []
        for block in range(count):
            states.append(self.seen(row, block))
            with torch.no_grad():
                logits = self.network(states[-1][None], blocks[block : block + 1])
            actions.append(choice_of(logits).sample())
            row[block] = int(actions[-1])
            costs.append(self.cost(tuple(row)))
        returns = np.cumsum(-np.diff(costs)[::-1])[::-1]
        self.returns.append(returns)
        if len(self.returns) == 1:
            return  # there is no earlier episode as baseline
        gains = torch.from_numpy(returns - np.mean(self.returns[-REMEMBERED:], axis=0)).float()
        choice = choice_of(self.network(torch.stack(states), blocks))
        loss = -(gains * choice.log_prob(torch.cat(actions))).mean()
        self.follow(loss - self.settings.entropy * choice.entropy().mean())

    def seen(self, row: list[int], block: int) -> Tensor:
        """Features, each block's decision, marks of the current and earlier blocks.  # [G, F]"""
        count = self.pair.num_blocks
        decided = torch.zeros(count, self.pair.num_candidates)
        decided[range(count), row] = 1.0
        place = torch.zeros(count, 2)
        place[block, 0], place[:block, 1] = 1.0, 1.0
        return torch.cat([self.features, decided, place], dim=1)


def learn_by(kind: type[Placer], rows: Rows, **settings: float) -> None:
    """Learn until the budget is over."""
    placer = kind(rows, Settings(**settings))  # type: ignore[arg-type]
    while True:
        placer.learn()
