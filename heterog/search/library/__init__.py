"""A library of solved plans, from which a search on a like model and cluster starts.

``store`` reads and writes the folder, ``entry`` is one plan, its distance to a case,
and how its strategy is carried over to another model or cluster.
"""
