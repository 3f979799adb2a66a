"""Documented names of modules that moved can be imported for one release more."""

import subprocess
import sys


def test_old_names_are_the_new_modules_and_say_so() -> None:
    script = (
        "import warnings\n"
        "with warnings.catch_warnings(record=True) as told:\n"
        "    warnings.simplefilter('always')\n"
        "    from heterog.planners.planner import Planner\n"
        "    from heterog.planners import conformance\n"
        "from heterog.methods import planner\n"
        "from heterog.search import conformance as new\n"
        "assert Planner is planner.Planner and conformance is new\n"
        "print(*[each.message for each in told])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert "heterog.methods" in done.stdout
    assert "heterog.search" in done.stdout
