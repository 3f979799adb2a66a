"""Codecs, lossy encodings of messages.

``value``, the mode; ``messages``, its tasks; ``tensors``, the encodings themselves; ``method``,
the search.
"""
