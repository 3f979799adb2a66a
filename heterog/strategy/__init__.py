"""Strategies as values: the decisions about a training step, independent of their lowering.

- ``strategy`` is the value, ``serialize`` its file. ``division`` divides samples and units among
  devices and finds the devices that sum a gradient. ``sync`` is the table of synchronisations.
  ``schedules`` has the orders of micro-batches. ``keeping`` finds
  the ops to recompute, to save memory or a transfer.
- Rules for teams: ``tensor_parallel`` and ``layer_shardings`` split layers and experts,
  ``spatial_split`` and ``sequence_split`` split inside samples.
- ``layouts`` reads the layouts of other programs.
"""
