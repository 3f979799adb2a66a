"""The operator graph of a training step."""
