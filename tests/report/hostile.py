"""Values that no reader would let in, for tests of what is written all the same."""

import copy
from typing import Any, TypeVar

T = TypeVar("T")


def forced(value: T, **changes: Any) -> T:
    """A copy of a frozen value with other attributes, past its own checks."""
    changed = copy.copy(value)
    for name, content in changes.items():
        object.__setattr__(changed, name, content)
    return changed
