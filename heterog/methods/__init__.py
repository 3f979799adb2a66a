"""Methods: each proposes strategies for one graph and cluster, and has its own file or folder.

- ``planner`` has the protocol, budgets and results, ``built_in`` the table of methods;
  ``registry`` makes methods and finds them by name.
- ``data_parallel``, ``model_parallel``, ``tuned_uniform``, ``two_segment`` and ``megatron_grid``
  enumerate (``enumeration``), ``pipeline`` and ``islands`` cut the model into stages.
- ``local_search`` moves from neighbour to neighbour.
- ``hap``, ``poplar``, ``deeppool`` and ``pipette`` come from papers; ``dedication`` exchanges
  hosts of one kind (``host_order``: which hosts are near each other).
- ``unit_search`` cuts samples along space, nodes, features or positions.
- Several use ``changes`` of a strategy, ``repair`` of one that does not fit, ``recomputing``,
  ``teams``.

A method knows the evaluator, but neither the search that runs it nor folders of other methods.
"""
