"""Measures times and memory, and describes machines.

``profiler`` measures a cluster: ops and the memory of a step (``op_profiler``) and links
(``link_profiler``). ``detect`` describes this machine, ``detect_hosts`` the machines of Ray,
torchrun or Slurm. ``rehearsal`` plays all ranks on shapes.
"""
