"""``python -m heterog.cli``, for launchers that start modules."""

from heterog.cli import main

main()
