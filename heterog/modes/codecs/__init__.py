"""Codecs, lossy encodings of messages.

``value`` is the mode, ``messages`` has its tasks, ``tensors`` the encodings, and ``method`` the
search.
"""
