"""Documented names of modules that moved can be imported for one release more."""

import subprocess
import sys
from importlib import import_module

import pytest

from heterog.agents.learner import learner_of
from heterog.balance import BalancedLoader


def test_old_names_are_the_new_modules_and_say_so() -> None:
    script = (
        "import warnings\n"
        "with warnings.catch_warnings(record=True) as told:\n"
        "    warnings.simplefilter('always')\n"
        "    from heterog.planners.planner import Planner, register\n"
        "    register(None)\n"
        "    from heterog.planners import conformance\n"
        "    from heterog.strategy.pipeline_schedule import PipelineSchedule\n"
        "from heterog.methods import planner\n"
        "from heterog.search import conformance as new\n"
        "assert Planner is planner.Planner and conformance is new\n"
        "print(*[each.message for each in told])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    for new in ("heterog.methods", "heterog.search", "heterog.strategy.schedules", "FILE.py:NAME"):
        assert new in done.stdout


def test_old_words_do_what_the_new_ones_do() -> None:
    sys.modules.pop("heterog.balance.loader", None)
    with pytest.warns(FutureWarning, match=r"heterog\.balance\.sampler"):
        old = import_module("heterog.balance.loader")
    assert old.BalancedLoader is BalancedLoader
    with pytest.warns(FutureWarning, match="sb3:PPO"):
        assert callable(learner_of("ppo"))
