"""The oldest versions that ``pyproject.toml`` allows, as constraints for pip; of torch, none.

python tests/oldest.py > constraints.txt
"""

import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def oldest_versions(text: str) -> list[str]:
    """A constraint for each dependency with a least version.

    >>> oldest_versions('project.dependencies = ["torch>=2.11", "numpy>=2.0", "rich"]')
    ['numpy==2.0']
    """
    project = tomllib.loads(text)["project"]
    extras = project.get("optional-dependencies", {})
    needed = project["dependencies"] + [
        each for extra in ("zoo", "contrib") for each in extras.get(extra, [])
    ]
    floors = [re.fullmatch(r"([\w-]+)>=([\w.]+)", each) for each in needed]
    return [f"{each[1]}=={each[2]}" for each in floors if each and each[1] != "torch"]


if __name__ == "__main__":
    print("\n".join(oldest_versions(PROJECT.read_text())))
