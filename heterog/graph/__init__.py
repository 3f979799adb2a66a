"""The operator graph of a training step: how it is captured, and how its ops may be cut.

- ``workload`` is what is trained, ``op_graph`` its graph, ``serialize`` a graph's file
  (``graph_records`` is the file's schema, ``graph_reader`` makes a graph from its records).
- ``capture`` traces a ``step`` on fake tensors. ``repeated_calls`` runs the step again after
  ``python_state`` has changed, and compares both by ``value_numbers``. Helpers of a capture:
  ``static_shapes`` (changes torch and its control flow meanwhile), ``traced_constants``
  (constants that all samples share, steps on one sample), ``guards`` and ``value_checks``
  (conditions on values that only decide whether to raise an error).
  ``op_costs`` counts FLOPs and bytes; ``optimizer_probe`` finds out what an optimizer looks at,
  and which parameters it steps with which options.
- ``placement`` says how a tensor lies along an axis, ``sharding_rules`` what each op allows.
  ``batch_plan`` cuts the batch with these rules; ``axis_plan`` also cuts ops along other axes, by
  rules of a strategy (``rule_checks`` checks them). ``sparse_pattern`` and ``sparse_product`` are
  for ops that read rows of neighbours.
- ``grouping`` cuts the ops into groups that share one decision.
"""
