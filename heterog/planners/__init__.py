"""The old name of ``heterog.methods`` and ``heterog.search``, for one release more.

What was documented can be imported from here still, with a warning that names the new module.
"""

import sys
import warnings
from importlib import import_module
from types import ModuleType
from typing import TypeVar

from heterog.methods.planner import Planner

_MOVED = {
    "registry": "heterog.methods.registry",
    "conformance": "heterog.search.conformance",
    "objective": "heterog.search.objective",
    "plan": "heterog.search.plan",
    "request": "heterog.search.request",
}

warnings.warn(
    "heterog.planners is heterog.methods (protocol and methods) and heterog.search (requests and "
    "plans) now; the old name goes with 0.4.0.",
    FutureWarning,
    stacklevel=2,
)
_Method = TypeVar("_Method", bound=Planner)


def _register(method: _Method) -> _Method:
    """What ``register`` was; methods are named by their files now."""
    warnings.warn(
        "register does nothing any more: name a method as FILE.py:NAME on the command line, or "
        "give it to heterog.methods.registry.Methods.having.",
        FutureWarning,
        stacklevel=2,
    )
    return method


for _old, _new in _MOVED.items():
    sys.modules[f"{__name__}.{_old}"] = import_module(_new)
_planner = ModuleType(f"{__name__}.planner")
vars(_planner).update(vars(import_module("heterog.methods.planner")), register=_register)
sys.modules[f"{__name__}.planner"] = _planner
