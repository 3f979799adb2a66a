"""A benchmark of methods that search or learn how to train a model on a cluster.

``suites`` are lists of pairs of model and cluster (``pair_lists`` reads a file of them, ``tiles``
draws the graphs of one of them), ``rivals``, ``row_search`` and ``placers`` have methods that are
only there to be beaten, ``board`` runs what is missing and keeps every run, ``statistics`` sums
runs up with intervals, ``page`` shows them. Answers are judged by our referee, and by others where
these can say them: DOPPLER's in ``tiles``, Sailor's in ``sailor``.
"""
