"""Strategies as values, and their lowering to programs.

- ``strategy`` is the value: ``division`` cuts samples and units, ``sync`` is the table of
  synchronisations, ``rings`` says who sums what, ``schedules`` in what order, ``keeping`` what is
  made again, ``remaking`` what is made instead of sent. ``stepping`` says who updates which
  parameters, ``serialize`` is its file, ``space`` strategies as rows of
  integers.
- ``lowering`` makes a ``program`` of a strategy, on the graph's ``tables`` (``value_reads``,
  ``sparse_tables``) and the traffic of ``channels``; ``folding`` finds devices that do the same.
- Rules for teams: ``tensor_parallel`` and ``layer_shardings`` for layers and experts,
  ``spatial_split`` and ``sequence_split`` inside samples.
  ``layouts`` reads what people run today.
- ``kernels`` compiles (``kernel_compiler``, ``kernel_arguments``).
"""
