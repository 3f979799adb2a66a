"""See the docs."""
