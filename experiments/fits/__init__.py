"""Fits of device models.

``kernels`` fits products and streams; ``boosting`` is a baseline that learns from rows alone.
"""
