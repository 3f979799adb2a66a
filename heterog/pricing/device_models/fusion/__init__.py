"""The ops of a step that become one kernel where a compiler fuses, as ``torch.compile`` does.

``loops`` writes every op as the ``steps`` that inductor makes of it, ``kept`` finds what the
backward pass keeps of the forward pass and what it computes again, ``passes`` cuts the step in
two and long reductions in parts, and ``fused`` puts loops together into kernels and gives launches
and bytes of each op of a graph.
"""
