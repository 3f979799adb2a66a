"""Tables, pages and traces for people.

- ``answer`` is what ``heterog plan`` prints, ``tables`` the explanation for a terminal and its
  tables.
- ``html`` is the page of a plan, ``side_by_side`` that of several: ``facts``, ``modules``,
  ``lanes`` and ``pictures`` compute what they show; ``facts`` escapes it.
- ``lanes`` also makes a timeline for Perfetto.
"""
