"""Built-in workloads.

``registry`` is the table of them; ``vision``, ``language``, ``translation`` (and mixtures of
experts), ``volumes`` and ``graphs`` build the models.
"""

from heterog.zoo.registry import ZooEntry, build, entry, load_workload, names, register

__all__ = ["ZooEntry", "build", "entry", "load_workload", "names", "register"]
