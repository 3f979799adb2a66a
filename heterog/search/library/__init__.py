"""A library of solved plans, from which a search on a like model and cluster starts.

``store`` has it all: the folder, a plan of it and its distance to a case, and how its strategy is
carried over to another model or cluster.
"""
