"""Damaged files for ``fuzz_inputs.py``: valid ones, how they change, what must hold then."""
