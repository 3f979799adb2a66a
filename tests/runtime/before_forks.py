"""Reads kernels, and imports what plans need, where it is imported: before ranks are forked."""

import gc
import tempfile

from heterog.cluster import Cluster
from heterog.search.plan import load_plan
from heterog.simulator.compile_kernels import smallest_graph
from tests.search.asking import make_plan

gc.set_threshold(200_000, 10, 10)  # see tests/conftest.py
_plan = make_plan(smallest_graph(), Cluster.load("paper_8gpu"), methods=["cp_ar"], budget="1e")
with tempfile.TemporaryDirectory() as _folder:
    _plan.save(f"{_folder}/plan.json")
    load_plan(f"{_folder}/plan.json")
