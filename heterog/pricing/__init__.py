"""Seconds and bytes of single tasks: what the simulator adds up.

- ``cost_model`` is the interface: ``roofline`` from data sheets, ``device_models`` from measured
  types, ``calibration`` from your own ``measurements`` (``op_fits``, ``link_fits``,
  ``calibration_files``). ``collectives`` prices messages.
- ``price_table`` keeps what was priced.
- ``intervals``, ``regimes`` and ``peak_errors`` say how sure predictions are, ``noise``
  what unsure speeds change.
"""
