"""Strategies and what they mean."""
