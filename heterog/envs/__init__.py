"""Gymnasium environments around the simulator."""
