"""Modes: ways to train whose numbers are not those of one device, a room for each.

- ``mode``: the protocol, and all that exact training knows of modes with ``on_ranks``, what a
  rank does around its steps.
- ``built_in``: the list of modes, which reads them from files and from what a person asks for.
- ``averaging``, ``asynchronous``, ``stash`` and ``codecs``: the rooms.
- ``islands``, teams that train alone, and ``search``, which two and three of the rooms share.
"""
