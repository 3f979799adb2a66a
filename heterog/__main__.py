"""``python -m heterog`` is the command ``heterog``."""

import sys

try:
    from heterog.cli import main
except KeyboardInterrupt:  # while it imports all commands, which takes a moment
    print("heterog: interrupted", file=sys.stderr)
    sys.exit(130)

if __name__ == "__main__":
    main()
