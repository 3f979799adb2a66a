"""What device models are fitted to and held against.

``kernels`` fits products and streams; ``layers`` are the layers that were timed on eleven types of
GPUs, ``layer_times`` reads and prices them; ``boosting`` is the rival that learns from rows alone.
"""
