"""Training scripts as people write them."""
