"""Model families beyond the zoo, each in small, for ``model_families.py``."""

from families import (  # noqa: F401 - fills the registry
    advised,
    found,
    graphs,
    held_out,
    kept_state,
    language,
    optimizers,
    plain,
    research,
    strangers,
    training,
    vision,
)
from families.family import FAMILIES, Family

__all__ = ["FAMILIES", "Family"]
