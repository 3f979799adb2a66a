"""Which ops of a step become one kernel where a compiler fuses them, as ``torch.compile`` does.

``loops`` writes every op as the loops that inductor makes of it, ``kept`` finds what the backward
pass keeps of the forward pass and what it computes again, ``scheduling`` puts loops together into
kernels, and ``fused`` says what that comes to for each op of a graph.
"""
