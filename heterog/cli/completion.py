"""Completions for shells: built-in names and files. Nothing slow is imported."""

from collections.abc import Callable, Iterable
from importlib import resources
from pathlib import Path

TARGETS = (
    *("ddp", "torchrun", "slurm", "kubernetes", "deepspeed"),
    *("accelerate", "torchtitan", "skypilot", "ray"),
)
"""Targets of ``heterog export``, which cannot be imported fast enough for a shell."""
ORDERS = ("best", "fifo", "rank", "program")
"""Orders in which waiting tasks run."""

Completer = Callable[[str], list[str]]


def models(incomplete: str) -> list[str]:
    """Models of the zoo, Python files and saved graphs."""
    from heterog.zoo import names

    return _starting(names(), incomplete) + _files(incomplete, (".py", ".json", ".json.gz"))


def clusters(incomplete: str) -> list[str]:
    """Presets, testbeds and YAML files."""
    from heterog.cluster import preset_names
    from heterog.runtime.ranks.testbed import shipped_testbeds

    names = (*preset_names(), *shipped_testbeds())
    return _starting(names, incomplete) + _files(incomplete, (".yaml", ".yml"))


def testbeds(incomplete: str) -> list[str]:
    """Testbeds and YAML files."""
    from heterog.runtime.ranks.testbed import shipped_testbeds

    return _starting(shipped_testbeds(), incomplete) + _files(incomplete, (".yaml", ".yml"))


def methods(incomplete: str) -> list[str]:
    """Methods, and Python files that hold one."""
    from heterog.methods.built_in import METHODS

    names = _starting((method.name for method in METHODS), incomplete)
    return names + (_files(incomplete, (".py",)) if incomplete else [])


def policies(incomplete: str) -> list[str]:
    """Shipped policies and files."""
    shipped = sorted(
        entry.name.removesuffix(".pt")
        for entry in (resources.files("heterog.agents") / "policies").iterdir()
        if entry.name.endswith(".pt")
    )
    return _starting(shipped, incomplete) + _files(incomplete, (".pt",))


def among(words: Iterable[str]) -> Completer:
    """Completion of one of a few words."""
    return lambda incomplete: _starting(words, incomplete)


def plans(incomplete: str) -> list[str]:
    """Plan files."""
    return _files(incomplete, (".json", ".json.gz"))


def several(completer: Completer) -> Completer:
    """Completion of names with commas between them: the last one is completed."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        chosen = set(before.split(","))
        return [before + comma + name for name in completer(last) if name not in chosen]

    return complete


def _starting(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _files(incomplete: str, suffixes: tuple[str, ...]) -> list[str]:
    """Files with these endings, and folders to continue in."""
    folder, slash, stem = incomplete.rpartition("/")
    try:
        entries = sorted(Path(folder + slash or ".").iterdir())
    except OSError:
        return []
    return [
        f"{folder}{slash}{entry.name}{'/' if entry.is_dir() else ''}"
        for entry in entries
        if entry.name.startswith(stem)
        and (stem.startswith(".") or not entry.name.startswith("."))
        and (entry.name.endswith(suffixes) or entry.is_dir())
    ]
