"""A benchmark of methods that search or learn how to train a model on a cluster.

``suites`` has lists of pairs of model and cluster (``pair_lists`` reads such a list from a file,
``tiles`` draws the graphs of one suite). ``rivals``, ``row_search`` and ``placers`` have methods
for comparison only. ``board`` makes the missing runs and keeps every run, ``statistics`` sums runs
up with intervals, ``page`` shows them. Our referee judges all answers. Two others judge the
answers that they can express: DOPPLER's in ``tiles``, Sailor's in ``sailor``.
"""
