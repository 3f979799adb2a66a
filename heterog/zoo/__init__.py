"""Built-in workloads."""

from heterog.zoo.registry import ZooEntry, build, entry, load_workload, names, register

__all__ = ["ZooEntry", "build", "entry", "load_workload", "names", "register"]
