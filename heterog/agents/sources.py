"""Sources of training pairs: graphs, captured once, and clusters, drawn or given."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from heterog.cluster import Cluster
from heterog.envs.clusters import ClusterRange, random_cluster
from heterog.envs.pair import Pair
from heterog.graph.op_graph import OpGraph
from heterog.graph.serialize import load_graph, save_graph

PIPELINED_PART = 1 / 3
"""Part of the pairs on which the shipped policies learned pipelines."""
GENERATED = "generated"
"""Name in a list of clusters for one that is drawn anew for each pair."""


def captured(model: str, folder: Path | None, batch_size: int | None = None) -> OpGraph:
    """The graph of a model, from ``folder`` if it was captured before.

    Args:
        model: Zoo name, ``file.py:function``, or a saved graph.
        folder: Folder of captured graphs; ``None`` for none.
        batch_size: Batch size; the workload's own if ``None``.
    """
    if model.endswith((".json", ".json.gz")):
        return load_graph(model)
    from heterog.zoo import load_workload

    workload = load_workload(model, batch_size)
    kept = None
    if folder is not None:
        path = Path(model.rpartition(":")[0])
        content = path.read_bytes() if path.is_file() else b""
        key = hashlib.sha256(f"{model}|{batch_size}".encode() + content).hexdigest()[:10]
        kept = folder / f"{workload.name}_{key}.json.gz"
        if kept.is_file():
            return load_graph(kept)
    from heterog.graph import capture as capturing

    graph = capturing.capture(workload)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        save_graph(graph, kept)
    return graph


@dataclass(frozen=True, kw_only=True, eq=False)
class PairSource:
    """Draws pairs of model and cluster; pair ``i`` of a seed is always the same.

    Attributes:
        graphs: Models, all equally likely.
        clusters: Clusters to use besides generated ones.
        generated: Probability that a cluster is generated; 1 if none is given.
        pipelined: Probability that rows are pipelines, if the batch is large enough.
        wanted: Range from which generated clusters are drawn.
        judged: Whether rows are scored op by op; see ``Pair.judged``.
        seed: Seed of everything.
    """

    graphs: Sequence[OpGraph]
    clusters: Sequence[Cluster] = ()
    generated: float = 1.0
    pipelined: float = 0.0
    wanted: ClusterRange = field(default_factory=ClusterRange)
    judged: bool = False
    seed: int = 0

    def rng(self, index: int) -> np.random.Generator:
        """Generator that belongs to a pair."""
        return np.random.default_rng([self.seed, index])

    def pair(self, index: int) -> Pair:
        """Draw a pair."""
        rng = self.rng(index)
        pair = self._drawn(rng)
        if self.pipelined > 0.0 and rng.random() < self.pipelined:
            pair = pair.pipelined() or pair
        return pair.judged() if self.judged else pair

    def _drawn(self, rng: np.random.Generator) -> Pair:
        graph = self.graphs[int(rng.integers(len(self.graphs)))]
        fitting = [c for c in self.clusters if c.num_devices <= graph.batch_size]
        if fitting and rng.random() >= self.generated:
            return Pair(graph, fitting[int(rng.integers(len(fitting)))])
        return Pair(graph, random_cluster(rng, graph, self.wanted))


def parse_clusters(names: Sequence[str]) -> tuple[list[Cluster], float]:
    """(clusters by name or file, probability of a generated one) for a list of names."""
    given = [Cluster.load(name) for name in names if name != GENERATED]
    if GENERATED not in names:
        return given, 0.0
    return given, 1.0 if not given else 0.6
