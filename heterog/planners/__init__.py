"""The old name of ``heterog.methods`` and ``heterog.search``, for one release more.

What was documented can be imported from here still, with a warning that names the new module.
"""

import sys
import warnings
from importlib import import_module

_MOVED = {
    "planner": "heterog.methods.planner",
    "registry": "heterog.methods.registry",
    "conformance": "heterog.search.conformance",
    "objective": "heterog.search.objective",
    "plan": "heterog.search.plan",
    "request": "heterog.search.request",
}

warnings.warn(
    "heterog.planners is heterog.methods (protocol and methods) and heterog.search (requests and "
    "plans) now; the old name goes with the next release.",
    FutureWarning,
    stacklevel=2,
)
for _old, _new in _MOVED.items():
    sys.modules[f"{__name__}.{_old}"] = import_module(_new)
