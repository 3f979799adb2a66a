"""Weight stashes (PipeDream).

``value`` is the mode with the passes of a step and their memory, ``paces`` has prices, ``method``
the search, and ``ranks`` the work of a rank, also in rehearsals.
"""
