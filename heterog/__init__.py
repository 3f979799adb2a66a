"""Finds how to train a PyTorch model on unequal GPUs."""
