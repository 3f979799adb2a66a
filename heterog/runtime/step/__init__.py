"""One training step on a rank.

- ``rank_program`` is a rank's part of the program, ``step_order`` the sequence that all ranks
  follow; ``executor`` runs it: a first step op by op (``interpreter``), later steps as functions
  that ``segments`` makes (``compiled``, and replayed from CUDA graphs: ``replays``).
  ``rank_state`` is what it is run with. ``values`` holds a rank's values (and how ops read them:
  ``recipes``), ``conversions`` and ``collectives`` exchange values (``routes``, ``under_way``),
  ``gradients`` and ``losses`` sum, ``optimizer`` updates, large parameters in ``pieces``.
  ``gradients`` also keeps what codecs leave out; ``recorder`` records times.
- ``local_op`` runs one op on a share (``windows``, ``special_ops``). ``spans`` has the samples
  and rows of each device. ``slices`` has a rank's slices of parameters; ``whole_model`` has its
  part of the model.
- ``deploy_checks`` checks a plan before its step is made, and that the model is still as captured;
  ``alike`` compares ranks and their weights, ``late_ranks`` says who keeps the others waiting.
"""
