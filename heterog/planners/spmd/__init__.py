"""Synthesis of SPMD programs (HAP, Zhang et al., EuroSys 2024): theory, search, ratios."""
