"""Predicts step time and memory of a program.

- ``evaluator`` tells planners whether a strategy can run, its step time and its memory; ``runs``
  lowers and simulates it, and folds devices that do the same into one. ``space`` has strategies
  as rows of integers.
- ``engine`` simulates inside a search (with ``task_seconds``, ``successors``, ``timings`` and
  ``heaps``); ``referee`` predicts the numbers that are reported.
- ``memory`` and ``memory_breakdown`` predict the memory of devices. ``timeline`` and
  ``critical_path`` show where time is spent; ``place_facts`` does so in one fast pass.
  ``lower_bound`` bounds the step time of all strategies.
- ``unequal_updates`` has closed forms for modes; ``multiplex`` runs a second job in the gaps.
- ``compile_kernels`` compiles the kernels before they are needed.
"""

from heterog.names import refuse_link

refuse_link(__name__, "heterog.simulator")
