"""Unequal GPUs in the training loop you have: shares, a sampler and exact weights.

``Balancer`` is what a loop uses; the other names are its parts, for loops with special needs.
"""

from heterog.balance.balancer import Balancer
from heterog.balance.dealing import Deal, GlobalBatches, SampleBatches
from heterog.balance.elastic import ElasticAveraging
from heterog.balance.loader import BalancedLoader
from heterog.balance.sampler import ShareSampler
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
