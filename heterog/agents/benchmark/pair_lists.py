"""Lists of pairs of model and cluster, one pair a line.

A line has a model (a zoo name, ``file.py:function`` or a captured graph) and a cluster (a name or
a file): ``{"model": "vgg19", "cluster": "paper_8gpu"}``, or the two words alone. Files are sought
in the list's folder, then in the working folder. Graphs are captured once and kept.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from heterog.agents.sources import captured
from heterog.cluster import Cluster
from heterog.errors import InputFileError
from heterog.graph.op_graph import OpGraph


@dataclass(frozen=True, slots=True)
class PairLine:
    """A pair as a list names it.

    Attributes:
        model: Argument of ``captured``.
        cluster: Argument of ``Cluster.load``.
        pair: Both names as in the list: the pair's name in rows.
        batch_size: Samples of a batch; the workload's own if ``None``.
    """

    model: str
    cluster: str
    pair: str
    batch_size: int | None = None

    def load(self, graphs: Path | None) -> tuple[OpGraph, Cluster]:
        """Graph and cluster; captured graphs are kept in a folder."""
        return captured(self.model, graphs, self.batch_size), Cluster.load(self.cluster)


def read_pairs(path: Path) -> list[PairLine]:
    """The pairs of a list.

    Raises:
        InputFileError: there is no such file, or a line has no model or no cluster.
    """
    if not path.is_file():
        raise InputFileError(
            f"there is no list of pairs '{path}'; a line is a model and a cluster."
        )
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        model, cluster = _words(line, f"{path}, line {number}")
        found.append(PairLine(_beside(model, path), _beside(cluster, path), f"{model} {cluster}"))
    return found


def _words(line: str, where: str) -> tuple[str, str]:
    """The two names of a line."""
    try:
        record = json.loads(line)
    except ValueError:
        record = line.replace(",", " ").split()
    if isinstance(record, dict):
        record = [record.get("model", record.get("graph")), record.get("cluster")]
    if not (isinstance(record, list) and len(record) == 2 and all(map(_is_name, record))):
        raise InputFileError(f'{where}: write {{"model": "vgg19", "cluster": "paper_8gpu"}}.')
    return record[0], record[1]


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _beside(name: str, path: Path) -> str:
    """The path of a file in the list's folder if it exists, else the name unchanged."""
    file, colon, function = name.partition(":")
    own = path.parent / file
    return f"{own.resolve()}{colon}{function}" if own.is_file() else name
