"""Captures the models of ``cases`` where it is imported: in the process that ranks are forked off.

Otherwise each rank of each group captures them for itself, half a second a model: fifteen ranks
of both processes that run the tests. What no test asks for is captured in vain, so only a run of
many tests imports this (``conftest.py``).
"""

import torch

from heterog.cluster import Cluster
from heterog.simulator.compile_kernels import smallest_graph
from heterog.simulator.evaluator import Evaluator
from tests.runtime.cases import EVERY, SGD, capture_case, workload_of

# Autograd has threads of its own where there is an accelerator, and no fork of them works.
if not torch.accelerator.is_available():
    Evaluator(smallest_graph(), Cluster.load("paper_8gpu")).warm_up()  # reads the kernels
    for name in EVERY:
        capture_case(workload_of(name, SGD.optimizer))
