"""Finds how to train a PyTorch model on a cluster of unequal GPUs.

    import heterog
    workload = heterog.Workload(model, example_batch, loss, torch.optim.AdamW)
    cluster = heterog.Cluster.load("cluster.yaml")
    plan = heterog.plan(workload, cluster, budget="30s")
    plan.save("plan.json")
    step = heterog.deploy(workload, plan)        # on every rank, under torchrun
    for batch in loader: loss = step(batch)      # same loss, same weights as on one device

Names are loaded when they are first used, so that ``import heterog`` is quick. ARCHITECTURE.md
says how the packages hang together; the docstring of each package is a map of its modules. These
modules belong to no package:

- ``api`` has the entry points above; ``local_losses`` cuts a model into blocks, each with its own
  loss.
- ``errors``, ``units`` (conversions) and ``names`` (legal names) are used everywhere.
- ``files``, ``records`` and ``yaml_files`` read what comes from outside, ``user_code`` Python
  files.
- ``run`` is a rank under torchrun, ``heal`` a rank of a plan that heals, ``__main__`` the
  command ``heterog``.
- ``workers`` runs independent jobs in processes or on Ray, ``memo`` keeps results of methods,
  ``garbage`` limits Python's collector, ``grouped`` sorts values by keys.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heterog.api import layout, plan
    from heterog.balance.balancer import Balancer
    from heterog.cluster import Cluster
    from heterog.graph.capture import capture
    from heterog.graph.workload import Workload
    from heterog.local_losses import local_blocks
    from heterog.runtime.deploy import deploy
    from heterog.runtime.step.optimizer import LossScale
    from heterog.search.plan import Plan, load_plan
    from heterog.strategy.strategy import Strategy

__version__ = "0.5.0"
__all__ = [
    "Balancer",
    "Cluster",
    "LossScale",
    "Plan",
    "Strategy",
    "Workload",
    "capture",
    "deploy",
    "layout",
    "load_plan",
    "local_blocks",
    "plan",
]

_HOME = {
    "Balancer": "heterog.balance.balancer",
    "Cluster": "heterog.cluster",
    "LossScale": "heterog.runtime.step.optimizer",
    "Plan": "heterog.search.plan",
    "Strategy": "heterog.strategy.strategy",
    "Workload": "heterog.graph.workload",
    "capture": "heterog.graph.capture",
    "deploy": "heterog.runtime.deploy",
    "layout": "heterog.api",
    "load_plan": "heterog.search.plan",
    "local_blocks": "heterog.local_losses",
    "plan": "heterog.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'heterog' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
