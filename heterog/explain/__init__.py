"""Explanations of a plan: what it decides, what limits it, what would help.

- ``explanation`` collects all facts of a plan. ``decided`` describes its decisions; ``what_if``
  simulates changes that make it fit, and purchases on a ``changed_cluster``.
- ``differences`` compares two strategies.
- ``sentences`` and ``wording`` turn facts into words.
"""
