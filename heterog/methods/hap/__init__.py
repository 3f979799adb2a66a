"""Synthesis of SPMD programs (HAP, Zhang et al., EuroSys 2024): theory, search, ratios.

``segments`` joins a forward op and its backward twins, and shares results of repeated layers;
``forms`` are layouts of tensors, ``theory`` the legal steps, ``programs`` what they make and cost;
``a_star`` searches, ``ratios`` is the linear program of the shares.
"""
