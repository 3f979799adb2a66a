"""Strategies as values: what may be decided about a step, and nothing of how it is done.

- ``strategy`` is the value: ``division`` cuts samples and units and says who sums what, ``sync``
  is the table of synchronisations, ``schedules`` (once ``pipeline_schedule``) says in what order,
  ``keeping`` what is made again, or instead of sent. ``serialize`` is its file.
- Rules for teams: ``tensor_parallel`` and ``layer_shardings`` for layers and experts,
  ``spatial_split`` and ``sequence_split`` inside samples.
  ``layouts`` reads what people run today.
"""
