"""Accuracy of predictions: recorded runs compared with the simulator's predictions.

``comparison`` reads a table of recorded runs and has the statistics of the errors; ``run_fit``
simulates recorded runs and fits a few parameters of the device models to them.
"""
