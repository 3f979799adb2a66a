"""Times of ops and links, memory, and what a machine is.

``profiler`` measures a cluster (``op_profiler``, ``link_profiler``), ``peak_memory`` what a step
fills, ``detect`` describes a machine, ``detect_hosts`` those of Ray, torchrun or Slurm.
``rehearsal`` plays all ranks on shapes.
"""
