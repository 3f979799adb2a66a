"""The effect of each ATen op on placements: the sharding rules along one mesh axis.

``propagate`` finds the rule for given placements, ``legal_rules`` lists all ways to run an op, and
``local_args`` rewrites the sizes among an op's arguments for one device. The rules use only shapes
and arguments, and no torch.

- ``table`` has the table ``RULES``, which ``rule`` fills, ``splits`` from the axes of an op, and
  ``mixes`` from the dimensions that are no axes; it chooses among the splits. ``legal`` has
  ``propagate``, ``legal_rules`` and the rules with halos, ``local`` has ``local_args``.
- One module per family of ops fills the table: ``indexing``, ``matmul`` (attention and
  sparse products, too), ``pointwise`` (and ops that create tensors), ``reduction`` (norms and
  losses, too), ``spatial``, ``view``.
"""

from heterog.graph.sharding_rules import indexing, matmul, pointwise, reduction, spatial, view  # noqa: F401 - importing fills the table
from heterog.graph.sharding_rules.legal import (
    RUNS_ON_WINDOWS,
    claims_checked,
    halo_rule,
    legal_rules,
    propagate,
)
from heterog.graph.sharding_rules.local import local_args, local_shape
from heterog.graph.sharding_rules.table import RULES, RuleResult, Special

__all__ = [
    "RULES",
    "RUNS_ON_WINDOWS",
    "RuleResult",
    "Special",
    "claims_checked",
    "halo_rule",
    "legal_rules",
    "local_args",
    "local_shape",
    "propagate",
]
