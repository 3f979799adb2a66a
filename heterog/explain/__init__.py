"""Explanations of a plan: what it decides, what limits it, what would help."""
