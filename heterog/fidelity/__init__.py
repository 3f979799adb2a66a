"""Accuracy of predictions: recorded runs beside the simulator's predictions of them."""
