"""A library of solved plans, from which a search on a like model and cluster starts."""
