"""Methods: each proposes strategies for one graph and cluster, and is a file or a room of its own.

- ``planner`` is the protocol and the budgets, ``built_in`` the table of methods; ``registry``
  makes them and finds them by name.
- ``data_parallel``, ``best_ddp``, ``model_parallel``, ``tuned_uniform``, ``two_segment`` and
  ``megatron_grid`` enumerate (``enumeration``), ``pipeline`` and ``islands`` cut the model into
  stages. ``given`` is a person's own layout.
- ``local_search`` moves from neighbour to neighbour.
- ``hap``, ``poplar``, ``deeppool`` and ``pipette`` are others' methods; ``dedication`` moves alike
  hosts (``host_kinds``, ``host_order``).
- ``spatial`` and ``sequences`` cut samples (``unit_search``).
- Several use points that were ``tried``, ``changes`` of a strategy, ``repair`` of what does not
  fit, ``recomputing``, ``teams``, and ``communities`` of near hosts.

A method knows the evaluator, and neither the search that runs it nor other methods' rooms.
"""
