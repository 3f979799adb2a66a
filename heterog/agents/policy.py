"""The policy: scores of (block, candidate) with transitions, exact probabilities, samples.

The decoder is a first-order Markov chain over the blocks in the order of the forward pass:

    p(a) = prod_g softmax_c( unary[g, c] + pair[a_{g-1}, c] + cut_g overlap[a_{g-1}, c]
                             + stay_g [c = a_{g-1}] )

so log-probabilities are exact, one pass of the network serves any number of samples, and a draw
costs a table look-up per block. Candidates that cannot hold a block are masked; in sampling, so
are candidates whose devices have no memory left.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from heterog.agents.config import PolicyConfig
from heterog.agents.encoder import make_encoder, mlp
from heterog.agents.graph_data import PairBatch
from heterog.envs.filling import NEVER, Logits
from heterog.envs.observation import NUM_PAIR_FEATURES, PAIR_SLOWER
from heterog.envs.pair import CUT_WEIGHTS, Pair, RunningMemory, RunningStages
from heterog.lowering.program import IntArray
from heterog.runtime.accelerators import num_threads

FloatArray32 = npt.NDArray[np.float32]
STAGE_LIMITS = 1.0, 8.0
"""Limits on a stage's compute time, in units of the least time of all devices together."""
_HALVINGS = 5  # bisections of each row's limit on a stage's seconds
_PAIR_WIDTH = 16  # hidden units of the scores of blocks with candidates
_MASKED = -1e9  # score of a masked candidate: its probability is 0


@dataclass(frozen=True, slots=True)
class Scores:
    """A policy's scores for a batch of pairs, padded as ``PairBatch``."""

    unary: Tensor  # [B, G, C], masked
    pair: Tensor  # [B, C, C]
    overlap: Tensor  # [B, C, C]
    cut: Tensor  # [B, G]
    stay: Tensor  # [B, G]
    value: Tensor  # [B]
    block_mask: Tensor  # [B, G]

    def transition(self, which: Tensor, block: Tensor, before: Tensor) -> Tensor:
        """Part of the logits that depends on the candidate of the block before.

        Args:
            which: Pair of each decision.  # [...]
            block: Block that is decided, after the first.  # [...]
            before: Candidate of the block before.  # [...]

        Returns:
            # [..., C]
        """
        chain = self.cut[which, block, None] * self.overlap[which, before]
        chain = self.pair[which, before] + chain
        return chain.scatter_add(-1, before[..., None], self.stay[which, block][..., None])

    def of(self, index: int, pair: Pair) -> "PairScores":
        """The scores of one pair without padding, for sampling."""
        blocks, candidates = pair.num_blocks, pair.num_candidates

        def cut(tensor: Tensor, *sizes: int) -> FloatArray32:
            part = tensor[index][tuple(slice(size) for size in sizes)]
            return part.detach().numpy().astype(np.float32)

        return PairScores(
            unary=cut(self.unary, blocks, candidates),
            pair=cut(self.pair, candidates, candidates),
            overlap=cut(self.overlap, candidates, candidates),
            cut=cut(self.cut, blocks),
            stay=cut(self.stay, blocks),
        )


@dataclass(frozen=True, slots=True)
class PairScores:
    """Scores of one pair in numpy."""

    unary: FloatArray32  # [G, C]
    pair: FloatArray32  # [C, C]
    overlap: FloatArray32  # [C, C]
    cut: FloatArray32  # [G]
    stay: FloatArray32  # [G]

    @property
    def arrays(self) -> Logits:
        """Copies for kernels, of which each array is contiguous and may be written."""
        parts = self.unary, self.pair, self.overlap, self.cut, self.stay
        return Logits(*(np.array(part, np.float32, order="C") for part in parts))

    def logits(self, block: int, previous: IntArray | None, num_rows: int) -> FloatArray32:
        """Logits of a block given the candidates of the block before.  # [num_rows, C]"""
        if previous is None:
            return np.repeat(self.unary[block : block + 1], num_rows, axis=0)
        logits = self.unary[block] + self.pair[previous]
        logits += self.cut[block] * self.overlap[previous]
        logits[np.arange(num_rows), previous] += self.stay[block]
        return np.asarray(logits, np.float32)


class Policy(nn.Module):
    """Network and decoder; see the module docstring.

    Args:
        config: Sizes of the network.
    """

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.encoder = make_encoder(config)
        self.block_norm, self.candidate_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.from_block = nn.Linear(width, _PAIR_WIDTH)
        self.from_candidate = nn.Linear(width, _PAIR_WIDTH, bias=False)
        self.from_pair = nn.Linear(NUM_PAIR_FEATURES, _PAIR_WIDTH, bias=False)
        self.to_score = nn.Linear(_PAIR_WIDTH, 1)
        # An untrained policy prefers analytically fast candidates; training corrects this.
        self.prior = nn.Parameter(torch.tensor([1.0, 2.0, 2.0]))
        self.value = mlp(width, width, 1)
        self.transition = config.rank > 0
        if self.transition:
            self.before = nn.Linear(width, config.rank, bias=False)
            self.after = nn.Linear(width, config.rank, bias=False)
            self.chain = nn.Linear(width, 2)
            nn.init.zeros_(self.chain.weight)
            with torch.no_grad():
                self.chain.bias.copy_(torch.tensor([0.0, config.stay_bias]))

    def forward(self, batch: PairBatch) -> Scores:
        """Score every block and candidate of a batch of pairs."""
        blocks, candidates = self.encoder(batch.graphs)
        blocks, candidates = self.block_norm(blocks), self.candidate_norm(candidates)
        unary = self.query(blocks) @ self.key(candidates).mT / self.config.width**0.5
        hidden = (
            self.from_pair(batch.pairs)
            + self.from_block(blocks)[:, :, None]
            + self.from_candidate(candidates)[:, None]
        )
        unary = unary + self.to_score(nn.functional.gelu(hidden)).squeeze(3)
        promise = (batch.promise * self.prior[1:]).sum(dim=2)[:, None]
        unary = unary - self.prior[0] * batch.pairs[..., PAIR_SLOWER] - promise
        unary = unary.masked_fill(~batch.allowed, _MASKED)
        real = batch.block_mask[:, :, None]
        mean = (blocks * real).sum(dim=1) / real.sum(dim=1)
        if self.transition:
            pair = self.before(candidates) @ self.after(candidates).mT / self.config.rank**0.5
            cut, stay = self.chain(blocks).unbind(dim=2)
            overlap = batch.overlap
        else:
            pair = torch.zeros_like(batch.overlap)
            overlap = pair
            cut = stay = torch.zeros(unary.shape[:2])
        return Scores(
            unary=unary,
            pair=pair,
            overlap=overlap,
            cut=cut,
            stay=stay,
            value=self.value(mean).squeeze(1),
            block_mask=batch.block_mask,
        )


def log_probabilities(
    scores: Scores, which: Tensor, actions: Tensor, masks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Exact log-probabilities of whole strategies, and entropies along them.

    Args:
        scores: Scores of a batch of pairs.
        which: Pair of each strategy.  # [N]
        actions: Candidate of each block, padded with 0.  # [N, G]
        masks: Candidates that could be chosen when each action was drawn; the static mask if
            ``None``. A chosen action is never masked.  # [N, G, C] bool

    Returns:
        Sum over blocks of log p and of the entropy of each block's choice.  # [N], [N]
    """
    previous = actions[:, :-1]
    blocks = torch.arange(1, actions.shape[1]).expand_as(previous)
    chain = scores.transition(which[:, None].expand_as(previous), blocks, previous)
    unary = scores.unary[which]
    logits = torch.cat([unary[:, :1], unary[:, 1:] + chain], dim=1)  # nothing before the first
    if masks is not None:
        chosen = torch.zeros_like(masks).scatter_(2, actions[:, :, None], value=True)
        logits = logits.masked_fill(~(masks | chosen), _MASKED)
    log_p = logits.log_softmax(dim=2)
    real = scores.block_mask[which]
    taken = log_p.gather(2, actions[:, :, None]).squeeze(2)
    entropy = -(log_p.exp() * log_p.clamp_min(-50.0)).sum(dim=2)
    return (taken * real).sum(dim=1), (entropy * real).sum(dim=1)


@dataclass(frozen=True, slots=True)
class Samples:
    """Strategies drawn from a policy for one pair.

    Attributes:
        rows: Candidate of each block.  # [num_rows, G]
        masks: Candidates possible at each step; empty unless asked for.  # [num_rows, G, C] bool
    """

    rows: IntArray
    masks: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variety:
    """Differences of draws from exact draws of a policy.

    Attributes:
        num_steady: Number of first rows in which a candidate has the same noise at all blocks.
            These are not exact draws: if the policy hesitates between two candidates, all blocks
            take the same one (perturb-and-MAP: Papandreou and Yuille, ICCV 2011).
        num_changes: How often each row changes its candidate, if memory allows; draws are exact
            given that number. Not fixed if ``None``, and in pipelines.  # [num_rows]
        temperature: Divisor of the logits; 1 for the policy's own distribution.
        recompute: Whether to count memory as if every block recomputed.
    """

    num_steady: int = 0
    num_changes: IntArray | None = None
    temperature: float = 1.0
    recompute: bool = False


EXACT = Variety()


def draw(
    scores: PairScores,
    pair: Pair,
    num_rows: int,
    rng: np.random.Generator,
    variety: Variety = EXACT,
    *,
    greedy: bool = False,
    keep_masks: bool = False,
) -> Samples:
    """Draw strategies block by block, within the memory that is left.

    Rows of a pair with micro-batches are pipelines. The policy draws the candidate of each next
    stage; a stage ends when its time reaches a limit, the smallest with which the row reaches its
    last block (see ``RunningStages``). The weights of bytes that cross cuts alternate over rows
    (``CUT_WEIGHTS``).

    Args:
        scores: Scores of the pair.
        pair: The pair itself.
        num_rows: Number of strategies.
        rng: Generator for the draws.
        variety: How draws differ from exact ones.
        greedy: Whether to take the best candidate at each block instead of drawing.
        keep_masks: Whether to return possible candidates, for exact log-probabilities.
    """
    if num_rows == 0:
        empty = np.zeros((0, pair.num_blocks), np.int32)
        return Samples(rows=empty, masks=np.zeros((0, *scores.unary.shape), np.bool_))
    noise = None
    if not greedy:
        noise = variety.temperature * _noise(pair, num_rows, variety.num_steady, rng)
    if pair.num_micro == 1:
        memory = RunningMemory(pair, num_rows, recompute=variety.recompute)
        if variety.num_changes is not None:
            changes = _Changes(scores, variety.num_changes)
            return _decode(scores, noise, memory, changes, keep_masks=keep_masks)
        if noise is None:
            noise = np.zeros((pair.num_blocks, num_rows, pair.num_candidates), np.float32)
        return Samples(*memory.draw(scores.arrays, noise, keep_masks=keep_masks))
    low, high = (np.full(num_rows, limit) for limit in STAGE_LIMITS)
    cut_weights = np.resize(CUT_WEIGHTS, num_rows)
    # Bisection of each row's limit: rows are decoded repeatedly with the same noise, finally with
    # the smallest limit under which the row reached its last block.
    for halving in range(_HALVINGS + 1):
        limits = high if halving == _HALVINGS else np.sqrt(low * high)
        memory = RunningMemory(pair, num_rows, recompute=variety.recompute)
        stages = RunningStages(memory, pair, limits, cut_weights)
        samples = _decode(scores, noise, stages, keep_masks=keep_masks)
        low = np.where(stages.is_late, limits, low)
        high = np.where(stages.is_late, high, limits)
    return samples


def _noise(pair: Pair, num_rows: int, num_steady: int, rng: np.random.Generator) -> FloatArray32:
    """Gumbel noise: the argmax of logits plus noise is a draw from their softmax.

    Returns:
        # [G, num_rows, C]
    """
    blocks, candidates = pair.num_blocks, pair.num_candidates
    noise = np.empty((blocks, num_rows, candidates), np.float32)
    noise[:, :num_steady] = rng.gumbel(size=(1, num_steady, candidates))
    noise[:, num_steady:] = rng.gumbel(size=(blocks, num_rows - num_steady, candidates))
    return noise


def _decode(
    scores: PairScores,
    noise: FloatArray32 | None,
    running: RunningMemory | RunningStages,
    changes: "_Changes | None" = None,
    *,
    keep_masks: bool,
) -> Samples:
    """The rows with the largest logits plus noise at each block; greedy without noise."""
    num_rows, (num_blocks, num_candidates) = running.num_rows, scores.unary.shape
    rows = np.zeros((num_rows, num_blocks), np.int32)
    masks = np.zeros((num_rows, num_blocks, num_candidates) if keep_masks else (0, 0, 0), np.bool_)
    for block in range(num_blocks):
        logits = scores.logits(block, rows[:, block - 1] if block else None, num_rows)
        if changes is not None:
            logits = changes.given(logits)
        fits = running.fits()
        logits = np.where(fits, logits, NEVER)
        if noise is not None:
            logits = logits + noise[block]
        rows[:, block] = logits.argmax(axis=1)
        if keep_masks:
            masks[:, block] = fits
        running.add(rows[:, block])
        if changes is not None:
            changes.add(rows[:, block])
    return Samples(rows=rows, masks=masks)


class _Changes:
    """Conditions draws on how often a row changes its candidate (backward filtering).

    Args:
        scores: Scores of the pair.
        num_changes: Number of changes of each row.  # [num_rows]
    """

    def __init__(self, scores: PairScores, num_changes: IntArray) -> None:
        num_blocks, num_candidates = scores.unary.shape
        every = np.arange(num_candidates)
        # For each candidate of a block, log p that K changes follow it.  # [G, C, K]
        self._ahead = np.full((num_blocks, num_candidates, num_changes.max() + 1), _MASKED)
        self._ahead[-1, :, 0] = 0.0
        for block in range(num_blocks - 1, 0, -1):
            log_p = _log_softmax(scores.logits(block, every.astype(np.int32), num_candidates))
            after, before = self._ahead[block], self._ahead[block - 1]
            stays = log_p[every, every]
            before[:] = stays[:, None] + after
            goes = np.exp(log_p)
            goes[every, every] = 0.0
            most = after.max(axis=0)
            goes = np.log(np.maximum(goes @ np.exp(after - most), 1e-300)) + most
            before[:, 1:] = np.logaddexp(before[:, 1:], goes[:, :-1])
        self._left = num_changes.astype(np.int64)
        self._previous: IntArray | None = None
        self._block = 0

    def given(self, logits: FloatArray32) -> FloatArray32:
        """Logits of the next block's candidates, given each row's remaining changes."""
        left = np.repeat(self._left[:, None], logits.shape[1], axis=1)
        if self._previous is not None:
            left -= np.arange(logits.shape[1]) != self._previous[:, None]
        ahead = self._ahead[self._block][np.arange(logits.shape[1]), np.maximum(left, 0)]
        return np.asarray(_log_softmax(logits) + np.where(left < 0, _MASKED, ahead), np.float32)

    def add(self, candidates: IntArray) -> None:
        """Record the next block of every row; memory may force more changes than wanted."""
        if self._previous is not None:
            self._left = np.maximum(self._left - (candidates != self._previous), 0)
        self._previous = candidates.copy()
        self._block += 1


def _log_softmax(logits: FloatArray32) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def rule_of_thumb(pair: Pair) -> PairScores:
    """Scores without a network, to start searches: analytic times, and a bonus for staying."""
    observation = pair.observation
    slower = observation.pairs[:, :, PAIR_SLOWER]
    unary = np.where(observation.fits, -2.0 * slower, np.float32(_MASKED))
    zeros = np.zeros(pair.num_blocks, np.float32)
    return PairScores(
        unary=unary.astype(np.float32),
        pair=np.zeros_like(observation.overlap),
        overlap=observation.overlap,
        cut=zeros + 1.0,
        stay=zeros + 7.0,
    )


@torch.no_grad()
def score_pairs(policy: Policy, pairs: Sequence[Pair]) -> list[PairScores]:
    """Scores of some pairs by one pass of the network, without gradients."""
    # The matrices are small: threads that share cores with other work would wait for each other
    # longer than they compute.
    with num_threads(1):
        scores = policy(PairBatch([pair.observation for pair in pairs]))
    return [scores.of(index, pair) for index, pair in enumerate(pairs)]
