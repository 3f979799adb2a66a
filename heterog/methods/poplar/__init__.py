"""Poplar: ZeRO with unequal batches on unequal devices (Zhang et al., AAAI 2025).

``allocation`` shares the batch out exactly and turns that into strategies; ``planner`` finds the
limits and speeds of each device and tries them.
"""

from heterog.methods.poplar.allocation import STAGES, even_allocation, zero_strategy
from heterog.methods.poplar.planner import EvenZero, Poplar

__all__ = ["STAGES", "EvenZero", "Poplar", "even_allocation", "zero_strategy"]
