"""Device models: seconds of kernels from a few measured parameters of each GPU type.

``products`` and ``streams`` hold the formulas, ``parameters`` what was fitted (``fitted.yaml``,
with provenance and errors) and how a type without measurements gets its own from its data sheet,
``kernels`` the ops of a graph as kernels of a GPU, and ``model`` the cost model of all that.
"""
