"""Averaging (local SGD, DiLoCo).

``value``, the mode, its buckets and passes over memory; its ``pricing``; ``method``, the search;
``ranks``, in rehearsals too.
"""
