"""Tables, pages and traces for people.

- ``answer`` is what ``heterog plan`` prints, ``words`` the explanation for a terminal, ``tables``
  and ``placement_table`` its tables.
- ``html`` is the page of a plan, ``side_by_side`` that of several: ``facts``, ``modules``,
  ``lanes`` and ``pictures`` compute what they show, ``markup`` escapes it.
- ``trace`` is a timeline for Perfetto.
"""
