"""Synthesis of SPMD programs (HAP, Zhang et al., EuroSys 2024): theory, search, ratios.

``fold`` joins a forward op and its backward twins, ``forms`` are layouts of tensors, ``theory``
the legal steps and ``programs`` what they make; ``a_star`` searches (``segments`` share results of
repeated layers), ``ratios`` is the linear program of the shares, ``prices`` asks the evaluator.
"""
