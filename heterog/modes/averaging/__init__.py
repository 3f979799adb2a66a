"""Averaging (local SGD, DiLoCo).

``value``, the mode, its buckets, passes over memory and prices; ``method``, the search;
``ranks``, in rehearsals too.
"""
