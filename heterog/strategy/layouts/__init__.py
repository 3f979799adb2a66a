"""Layouts: today's uniform parallelism, in the terms of Megatron and FSDP, as strategies.

``layout`` is the description, ``files`` reads it from other programs' files (``fields`` is what
stands in one, ``megatron`` reads those of Megatron's family, ``shell`` the options of its
scripts), ``placed`` makes a strategy of it: ``stages`` cuts the groups, ``pipelines`` puts teams
beside and behind each other, ``tensor`` and ``experts`` are the rules inside teams.
"""
