"""Unequal GPUs in the training loop you have: shares, a sampler and exact weights.

``Balancer`` is what a loop uses; the other names are its parts, for loops with special needs.

- ``balancer`` is for loops of PyTorch; ``for_trainer``, ``for_accelerate`` and ``for_lightning``
  are for frameworks; ``elastic`` lets ranks train alone and merges their models.
- ``shares`` has the first and the best shares, and cuts a global batch among the ranks and a
  rank's batch into parts; ``sampler``, ``tokens`` and ``streams`` deal the samples.
- ``weights`` make the update that of one process. ``updates`` finds where updates and steps end,
  ``replicas`` finds ranks with other weights or other samples, ``passes`` losses that are not
  weighed and models that are not updated, ``leaving`` a rank that has left its loop alone;
  ``batch_norms`` is for ranks with few samples.
- ``loss_means``, ``loss_probe`` and ``label_means`` find what a loss is a mean of,
  ``loss_graph`` whether it takes statistics over samples, and the factors of what it adds up.
- ``speeds`` measures the compute time of a rank between its waits, and fits it; ``rebalancing``
  decides when shares change, and changes them. ``group`` has the ranks of the job.
- ``check`` runs a script with its samples divided in two ways and compares what comes out;
  ``checked`` is a rank of such a run, and ``kept_files`` keeps the user's files meanwhile.
"""

from heterog.balance.balancer import Balancer
from heterog.balance.elastic import ElasticAveraging
from heterog.balance.sampler import BalancedLoader, ShareSampler
from heterog.balance.shares import (
    BalanceError,
    Deal,
    GlobalBatches,
    RankSpeed,
    SampleBatches,
    best_shares,
    shares_from_speeds,
)
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
