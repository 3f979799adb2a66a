"""Predicts step time and memory of a program.

- ``evaluator`` is what planners ask, an ``evaluation`` the answer: ``runs`` lowers and simulates
  (``folded``: alike devices once), ``price_table`` and ``rule_sets`` keep what was priced,
  ``feasibility`` says what can run, ``floor`` what is not worth a simulation.
- ``engine`` simulates inside a search (``timings``, ``heaps``), ``referee`` judges what is
  reported. ``memory`` and ``memory_breakdown`` say what fills a device, ``timeline`` and
  ``critical_path`` what takes time, ``lower_bound`` what nothing can beat, ``noise`` what unsure
  speeds change.
- ``cost_model`` is the interface of prices: ``roofline`` from data sheets, ``device_models`` from
  measured types, ``calibration`` from your own ``measurements`` (``op_fits``, ``link_fits``,
  ``calibration_files``). ``collectives`` prices messages, ``sparse_work`` sparse products.
  ``intervals``, ``regimes`` and ``peak_errors`` say how sure predictions are.
- For modes: ``small_tape`` writes messages that are no step, ``unequal_updates`` has closed forms.
  ``multiplex`` runs a second job in the gaps.
- ``compile_kernels`` compiles the kernels before they are needed.
"""

from heterog.names import refuse_link

refuse_link(__name__, "heterog.simulator")
