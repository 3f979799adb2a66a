"""An asynchronous server.

``value``, the mode; ``method``, its prices and the search; ``ranks`` and the ``weight_server``
itself.
"""
