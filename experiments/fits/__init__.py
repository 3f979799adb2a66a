"""Data that device models are fitted to and tested on, and the fits.

``kernels`` fits products and streams; ``layer_times`` has the layers that were timed on eleven
types of GPUs, reads and prices them; ``boosting`` is a baseline that learns from rows alone.
"""
