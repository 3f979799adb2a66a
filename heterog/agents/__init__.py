"""Planners that learn."""
