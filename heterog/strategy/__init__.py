"""Strategies, and their lowering to programs."""
