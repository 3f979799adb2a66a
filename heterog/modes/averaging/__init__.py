"""Averaging (local SGD, DiLoCo).

``value`` is the mode with its buckets, passes over memory and prices, ``method`` the search, and
``ranks`` the work of a rank, also in rehearsals.
"""
