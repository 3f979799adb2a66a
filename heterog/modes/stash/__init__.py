"""Weight stashes (PipeDream).

``value``, the mode; ``phases`` of a step and ``memory``; ``paces`` and ``pricing``; ``method``,
the search; ``ranks``, in rehearsals too.
"""
