"""Predicts step time and memory of a program.

- ``evaluator`` is what planners ask, and its answer: whether a strategy can run, and how long;
  ``runs`` lowers and simulates, alike devices once.
- ``engine`` simulates inside a search (``timings``, ``heaps``), ``referee`` judges what is
  reported. ``memory`` and ``memory_breakdown`` say what fills a device, ``timeline`` and
  ``critical_path`` what takes time (``place_facts``: where, in one pass), ``lower_bound`` what
  nothing can beat.
- For modes: ``unequal_updates`` has closed forms.
  ``multiplex`` runs a second job in the gaps.
- ``compile_kernels`` compiles the kernels before they are needed.
"""

from heterog.names import refuse_link

refuse_link(__name__, "heterog.simulator")
