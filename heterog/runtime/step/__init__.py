"""One training step on a rank.

- ``rank_program`` is a rank's part of the program, ``step_order`` the sequence that all ranks
  follow; ``executor`` runs it: a first step op by op (``interpreter``), the others as functions
  that ``segments`` makes (``compiled``). ``values`` holds what a rank has (``recipes``),
  ``conversions`` and ``collectives`` exchange it (``under_way``), ``gradients`` and ``losses`` sum
  up, ``optimizer`` updates. ``gradients`` also
  keeps what codecs leave out, ``recorder`` when things happened.
- One op on a share: ``local_op`` (``op_inputs``, ``windows``, ``special_ops``). Which samples and
  rows: ``spans``, and how they travel: ``halos``. What a rank holds: ``slices``; ``whole_model``
  has its part, and brings all together.
- ``deploy_checks`` looks before a step is made, and whether a model is what was captured;
  ``alike`` compares ranks and their weights.
"""
