"""Device models: seconds of kernels from a few measured parameters of each GPU type.

- ``laws``: formulas of matrix products, streams, and collectives inside a host.
- ``parameters``: fitted values (``fitted.yaml``, with provenance and errors), and how a type
  without measurements gets its parameters from its data sheet.
- ``kernels``: the GPU kernels of a graph's ops.
- ``torch_kernels``: costs of PyTorch's kernels beyond one pass over their bytes.
- ``fusion``: ops that a compiler fuses.
- ``model``: the cost model.
"""
