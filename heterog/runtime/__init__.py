"""Runs plans on real devices.

- Starting: ``request`` says what to run, ``launch`` starts ranks (``forks`` forks them,
  ``watching`` watches them) at a ``place`` such as a ``testbed``, which limits their CPUs and
  links (``emulated_network``); ``rank`` is what one does. ``accelerators`` knows kinds of devices.
- A step: ``deploy`` makes it of a plan and a workload (``deploy_checks``), ``rank_program`` is a
  rank's part of the program, ``step_order`` the sequence that all ranks follow, ``executor`` runs
  it, most of it as generated code (``segments``, ``compiled``). ``values`` holds what a rank has
  (``recipes``), ``conversions`` and ``collectives`` exchange it (``under_way``), ``gradients`` and
  ``losses`` sum up, ``optimizer`` updates (``grouped_optimizer``, ``masters``, ``kept_state``,
  ``loss_scale``).
- One op on a share: ``local_op`` (``op_inputs``, ``attention``, ``causal_rows``, ``windows``,
  ``random_stream``). Which samples and rows: ``spans``, ``placed``, ``row_sets``, ``halos``,
  ``resized``. What a rank holds: ``model_part``, ``slices``, ``buffer_owners``; ``whole_model``
  brings it together.
- ``alike`` compares ranks and ``replicas`` their weights, ``unchanged`` a model with what was
  captured. ``rehearsal`` plays all ranks on shapes (``rehearsed_wire``). ``checkpoint`` keeps a
  step under any plan.
- ``feedback`` keeps what encoded gradients leave out. Beside a step: ``background`` jobs.
- Measuring: ``profiler`` (``op_profiler``, ``link_profiler``), ``recorder``, ``peak_memory``;
  ``detect`` describes a machine.
"""
