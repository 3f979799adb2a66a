"""The operator graph of a training step: how it is captured, and how its ops may be cut.

- ``workload`` is what is trained, ``op_graph`` its graph, ``serialize`` a graph's file
  (``graph_records`` is its schema, ``graph_reader`` makes a graph of it).
- ``capture`` traces a ``step`` on fake tensors, again with other ``python_state``
  (``repeated_calls``, compared by ``value_numbers``), and notices what has changed since. Its
  helpers: ``known_values`` (those that no input has a part in), ``static_shapes`` (what torch and
  its control flow do otherwise meanwhile), ``traced_constants`` (constants that all samples share,
  steps on one sample), ``guards`` and ``value_checks`` (questions about values that only guard).
  ``op_costs`` counts FLOPs and bytes; ``optimizer_probe`` finds out what an optimizer looks at,
  and which parameters it steps with which options.
- ``placement`` says how a tensor lies along an axis, ``sharding_rules`` what each op allows.
  ``batch_plan`` cuts the batch with them, ``axis_plan`` also ops with rules of their own (held to
  what each op allows by ``rule_checks``). ``sparse_pattern``
  and ``sparse_product`` are for ops that read rows of neighbours.
- ``grouping`` cuts the ops into groups that share one decision.
"""
