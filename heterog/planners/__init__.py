"""Methods that propose strategies, one file each."""
