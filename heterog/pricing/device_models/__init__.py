"""Device models: seconds of kernels from a few measured parameters of each GPU type.

``laws`` holds the formulas of products, streams, and messages inside a host, ``parameters`` what
was fitted (``fitted.yaml``, with provenance and errors) and how a type without measurements gets
its own from its data sheet, ``kernels`` the ops of a graph as kernels of a GPU, ``torch_kernels``
what PyTorch's own do beyond one pass over their bytes, ``fusion`` what a compiler joins, and
``model`` the cost model of all that.
"""
