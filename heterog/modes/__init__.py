"""Modes: ways to train whose numbers differ from those of one device; each has a room.

- ``mode``: the protocol; ``on_ranks``: its part on a rank. Exact training knows no more of modes.
- ``built_in``: the list of modes, which finds a mode by its word.
- ``averaging``, ``asynchronous``, ``stash`` and ``codecs``: the rooms.
- ``islands``, teams that train alone, and ``search``: shared by two and three of the rooms.
"""
