"""A library of solved plans, from which a search on a like model and cluster starts.

``store`` reads and writes the folder, ``entry`` is one plan and its distance to a case,
``adapting`` carries a strategy over to another model or cluster.
"""
