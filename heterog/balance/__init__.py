"""Unequal GPUs in the training loop you have: shares, a sampler and exact weights.

``Balancer`` is what a loop uses; the other names are its parts, for loops with special needs.

- ``balancer`` is for loops of PyTorch; ``for_trainer``, ``for_accelerate`` and ``for_lightning``
  are for frameworks, ``elastic`` lets ranks train alone and merges them.
- ``shares`` says how much of a batch each rank gets, in which parts, and what it begins with;
  ``dealing``, ``sampler`` (once ``loader``), ``tokens`` and ``streams`` deal the samples.
- ``weights`` make the update that of one process. ``updates`` notices where updates and steps end,
  ``replicas`` ranks whose weights differ or that deal other samples, ``batch_norms`` ranks with
  few samples.
- What a loss is a mean of, for frameworks: ``loss_means``, ``loss_probe`` and ``label_means``.
- ``speeds`` measures what a rank computes between its waits, and fits it; ``rebalancing`` decides
  when shares change, and changes them. ``group`` are the ranks of the job.
"""

from heterog.balance.balancer import Balancer
from heterog.balance.dealing import Deal, GlobalBatches, SampleBatches
from heterog.balance.elastic import ElasticAveraging
from heterog.balance.sampler import BalancedLoader, ShareSampler
from heterog.balance.shares import BalanceError, RankSpeed, best_shares, shares_from_speeds
from heterog.balance.tokens import TokenBatches

__all__ = [
    "BalanceError",
    "BalancedLoader",
    "Balancer",
    "Deal",
    "ElasticAveraging",
    "GlobalBatches",
    "RankSpeed",
    "SampleBatches",
    "ShareSampler",
    "TokenBatches",
    "best_shares",
    "shares_from_speeds",
]
