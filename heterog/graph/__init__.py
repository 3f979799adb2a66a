"""The operator graph of a training step: its capture, and the ways in which its ops may be split.

- ``workload`` is a model with its data, loss and optimizer, ``op_graph`` its graph, ``serialize``
  a graph's file (``graph_records`` is its schema, ``graph_reader`` makes a graph from records).
- ``capture`` traces a ``step`` on fake tensors. ``repeated_calls`` runs the step again after
  ``python_state`` has changed, and compares both by ``value_numbers``, which also know the values
  that depend on no input. Helpers of a capture: ``static_shapes`` (changes torch and its control
  flow meanwhile), ``sample_ops`` (replaces functions that mix samples only in memory),
  ``traced_constants`` (constants that all samples share, steps on one sample), ``guards`` and
  ``value_checks`` (conditions that only decide whether to raise an error).
- ``op_costs`` counts FLOPs and bytes. ``optimizer_probe`` finds the tensors that an optimizer
  reads, and the parameters that it steps with each set of options.
- ``placement`` says how a tensor is split along an axis, ``sharding_rules`` which splits each op
  allows. ``batch_plan`` splits the batch by these rules, and by what ``own_rows`` knows of the
  values of indices; ``axis_plan`` also splits ops along other axes, by rules of a strategy
  (``rule_checks`` checks them). ``sparse_pattern`` and ``sparse_product`` are for ops that read
  rows of neighbours, ``grouped_rows`` for rows that are multiplied by the matrix of their expert.
- ``grouping`` divides the ops into groups that share one decision.
"""
