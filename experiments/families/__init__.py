"""Model families beyond the zoo, each in small, for ``model_families.py``."""

from families import graphs, language, plain, training, vision  # noqa: F401 - fills the registry
from families.family import FAMILIES, Family

__all__ = ["FAMILIES", "Family"]
