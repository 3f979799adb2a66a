"""Methods: each proposes strategies for one graph and cluster, and is a file or a room of its own.

- ``planner`` is the protocol and the budgets, ``built_in`` the table of methods; ``registry``
  makes them and finds them by name.
- ``data_parallel``, ``model_parallel``, ``tuned_uniform``, ``two_segment`` and ``megatron_grid``
  enumerate (``enumeration``), ``pipeline`` and ``islands`` cut the model into stages.
- ``local_search`` moves from neighbour to neighbour.
- ``hap``, ``poplar``, ``deeppool`` and ``pipette`` are others' methods; ``dedication`` moves alike
  hosts (``host_order``: what near hosts are).
- ``unit_search`` cuts samples along space, nodes, features or positions.
- Several use ``changes`` of a strategy, ``repair`` of what does not fit, ``recomputing``,
  ``teams``.

A method knows the evaluator, and neither the search that runs it nor other methods' rooms.
"""
