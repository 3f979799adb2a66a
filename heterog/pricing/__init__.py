"""Seconds and bytes of single tasks: what the simulator adds up.

- ``cost_model`` is the interface, and prices messages: ``roofline`` from data sheets,
  ``device_models`` from measured types, ``calibration`` from your own measurements (``op_fits``)
  and runs.
- ``price_table`` keeps what was priced.
- ``intervals`` says how sure predictions are, and what unsure speeds change.
"""
