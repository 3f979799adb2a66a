"""Files for ``fuzz_inputs.py``: valid ones, their changes, and checks of accepted files."""
