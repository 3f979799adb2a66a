"""Explanations of a plan: what it decides, what limits it, what would help.

- ``explanation`` has all facts of a plan: ``decided`` what it does, ``what_if`` what would make it
  fit and what a purchase would save, simulated on a ``changed_cluster``.
- ``differences`` compares two strategies.
- ``sentences`` and ``wording`` turn facts into words.
"""
