"""Model families beyond the zoo, each in small, for ``model_families.py``."""

from families import (  # noqa: F401 - fills the registry
    found,
    graphs,
    held_out,
    language,
    plain,
    training,
    vision,
)
from families.family import FAMILIES, Family

__all__ = ["FAMILIES", "Family"]
