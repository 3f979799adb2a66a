"""Averaging (local SGD, DiLoCo).

``value``, the mode; ``passes`` over memory and ``buckets``; its ``pricing``; ``method``, the
search; ``ranks``, ``rehearsal`` and ``checkpoint``.
"""
