"""Scripts that show heterog in use."""
