"""Synthesis of SPMD programs (HAP, Zhang et al., EuroSys 2024): theory, search, ratios.

``forms`` are placements of tensors along an axis, ``theory`` the legal triples of each op,
``programs`` their prices and the strategy of a program. ``segments`` orders forward and backward
ops together, so that repeated layers share results; ``a_star`` searches this order. ``ratios`` is
the linear program of the shares. ``planner`` is the method.
"""
