"""Accuracy of predictions: recorded runs beside the simulator's predictions of them.

``recorded`` reads a table of runs, ``predicting`` simulates each, ``comparison`` has the
statistics of the differences, ``run_fit`` fits a few parameters of the device models to them.
"""
