"""Drawn pairs to learn from and to be judged on.

``families`` has what they are drawn with, ``modules`` a grammar of own models, ``architectures``
those of ``transformers``, ``clusters`` hosts and links from the whole catalogue.
"""
