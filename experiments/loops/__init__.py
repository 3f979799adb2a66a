"""Training loops for ``loops_equal.py``: what is trained, on one process and on ranks."""
