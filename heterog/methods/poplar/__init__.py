"""Poplar: ZeRO with unequal batches on unequal devices (Zhang et al., AAAI 2025).

``allocation`` divides the batch by exact search, and makes strategies of the result; ``planner``
finds the limits and speeds of each device, and simulates allocations.
"""

from heterog.methods.poplar.allocation import STAGES, even_allocation, zero_strategy
from heterog.methods.poplar.planner import EvenZero, Poplar

__all__ = ["STAGES", "EvenZero", "Poplar", "even_allocation", "zero_strategy"]
