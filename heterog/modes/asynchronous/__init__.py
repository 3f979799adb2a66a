"""An asynchronous server.

``value``, the mode; ``paces``, its tapes and prices; ``method``, the search; ``ranks`` and the
``weight_server`` itself.
"""
