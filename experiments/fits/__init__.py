"""What device models are fitted to and held against.

``kernels`` fits products and streams; ``layer_times`` has the layers that were timed on eleven
types of GPUs, reads and prices them; ``boosting`` is the rival that learns from rows alone.
"""
