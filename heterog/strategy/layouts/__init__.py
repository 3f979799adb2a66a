"""Layouts: today's uniform parallelism, in the terms of Megatron and FSDP, as strategies.

``layout`` is the description. ``files`` reads it from files of other programs: ``fields`` checks
their fields, ``megatron`` reads those of Megatron's family, ``shell`` the options in its scripts,
and ``programs.yaml`` has names that other programs use. ``placed`` makes a strategy from it:
``stages`` assigns groups to stages, ``pipelines`` makes decisions for replicas and stages,
``tensor`` and ``experts`` have the rules inside teams.
"""
