"""Averaging (local SGD, DiLoCo).

``value``, the mode and its buckets; ``passes`` over memory; its ``pricing``; ``method``, the
search; ``ranks`` and ``rehearsal``.
"""
