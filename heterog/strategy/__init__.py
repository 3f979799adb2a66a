"""Strategies as values: what may be decided about a step, but not how it is done.

- ``strategy`` is the value. ``division`` divides samples and units among devices and finds the
  devices that sum a gradient, ``sync`` is the table of synchronisations, ``schedules`` (once
  ``pipeline_schedule``) has the orders of micro-batches, ``keeping`` finds what is recomputed, for
  memory or instead of a transfer. ``serialize`` is the strategy's file.
- Rules for teams: ``tensor_parallel`` and ``layer_shardings`` for layers and experts,
  ``spatial_split`` and ``sequence_split`` inside samples.
  ``layouts`` reads the layouts of other programs.
"""
