"""Weight stashes (PipeDream).

``value``, the mode, phases of a step and their memory; ``paces`` and prices; ``method``, the
search; ``ranks``, in rehearsals too.
"""
