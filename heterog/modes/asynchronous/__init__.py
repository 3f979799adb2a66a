"""An asynchronous server.

``value``, the mode; ``exchange``, its tapes; ``paces`` and ``pricing``; ``method``, the search;
``ranks`` and the ``weight_server`` itself.
"""
