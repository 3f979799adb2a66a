"""Why a plan is what it is: what was decided, what limits it, what would help."""
