"""Drawn pairs for training and tests.

``families`` has the families and their random draws, ``modules`` a grammar of own models,
``architectures`` models of ``transformers``, ``clusters`` hosts and links from the whole
catalogue.
"""
