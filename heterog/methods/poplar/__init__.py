"""Poplar: ZeRO with unequal batches on unequal devices (Zhang et al., AAAI 2025).

``curves`` has the limits and speeds of each device, ``allocation`` shares the batch out exactly,
``zero`` turns that into strategies, ``planner`` tries them.
"""

from heterog.methods.poplar.planner import EvenZero, Poplar
from heterog.methods.poplar.zero import STAGES, even_allocation, zero_strategy

__all__ = ["STAGES", "EvenZero", "Poplar", "even_allocation", "zero_strategy"]
