"""Predicts step time and memory of a program."""
