"""An asynchronous server.

``value`` is the mode, ``method`` has prices and the search, ``ranks`` the work of a rank, and
``weight_server`` the server.
"""
