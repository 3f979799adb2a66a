"""Built-in workloads.

``registry`` is the table of them; ``vision``, ``language`` (translation, too), ``moe``,
``volumes`` and ``graphs`` build the models.
"""

from heterog.zoo.registry import ZooEntry, build, entry, load_workload, names

__all__ = ["ZooEntry", "build", "entry", "load_workload", "names"]
