"""Accuracy of predictions: recorded runs beside the simulator's predictions of them.

``run_fit`` simulates recorded runs and fits a few parameters of the device models to them;
``comparison`` reads their table and has the statistics of the differences.
"""
