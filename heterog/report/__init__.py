"""Tables, pages and traces for people.

- ``tables`` are for a terminal: what ``heterog plan`` prints, the explanation, its tables.
- ``html`` is the page of a plan, ``side_by_side`` that of several: ``facts``, ``modules``,
  ``lanes`` and ``pictures`` compute what they show; ``facts`` escapes it.
- ``lanes`` also makes a timeline for Perfetto.
"""
