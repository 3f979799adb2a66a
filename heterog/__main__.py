"""``python -m heterog`` is the command ``heterog``."""

from heterog.cli import main

if __name__ == "__main__":
    main()
