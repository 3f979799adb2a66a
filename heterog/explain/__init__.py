"""Explanations of a plan: what it decides, what limits it, what would help.

- ``explanation`` has all facts of a plan: ``decided`` and ``lowered`` what it does, ``fit`` what
  would make it fit, ``what_if`` what a purchase would save, simulated on a ``changed_cluster``.
- ``differences`` compares two strategies.
- ``sentences``, ``decided_words`` and ``peak_words`` turn facts into words, ``wording`` numbers
  and lists.
"""
