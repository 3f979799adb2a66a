"""One training step on a rank.

- ``rank_program`` is a rank's part of the program, ``step_order`` the sequence that all ranks
  follow; ``executor`` runs it: a first step op by op (``interpreter``), the others as functions
  that ``segments`` makes (``compiled``). ``values`` holds what a rank has (``recipes``),
  ``conversions`` and ``collectives`` exchange it (``under_way``), ``gradients`` and ``losses`` sum
  up, ``optimizer`` updates (``grouped_optimizer``, ``kept_state``, ``loss_scale``). ``feedback``
  keeps what encoded gradients leave out, ``recorder`` when things happened.
- One op on a share: ``local_op`` (``op_inputs``, ``attention``, ``causal_rows``, ``own_words``,
  ``windows``, ``random_stream``). Which samples and rows: ``spans``, ``placed``, ``row_sets``,
  ``halos``. What a rank holds: ``slices``, ``buffer_owners``; ``whole_model`` has its part, and
  brings all together.
- ``deploy_checks`` looks before a step is made, ``alike`` compares ranks and ``replicas`` their
  weights, ``unchanged`` a model with what was captured.
"""
