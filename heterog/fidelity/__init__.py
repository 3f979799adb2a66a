"""Accuracy of predictions: recorded runs beside the simulator's predictions of them.

``recorded`` reads a table of runs, ``run_fit`` simulates each, and fits a few parameters of the
device models to them; ``comparison`` has the statistics of the differences.
"""
