"""Seconds and bytes of single tasks: what the simulator adds up.

- ``cost_model`` is the interface of cost models, and has the alpha-beta model of messages. The
  cost models are ``roofline`` (from data sheets), ``device_models`` (from measured GPU types) and
  ``calibration`` (from the user's own measurements, fitted by ``op_fits``, and runs).
- ``price_table`` caches prices.
- ``intervals`` has the errors of predictions, and their effect on a schedule.
"""
