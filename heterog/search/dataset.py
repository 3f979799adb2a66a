"""Solved pairs on disk: one file for each model and cluster, with the plans known for it.

A file (``.json.gz``) has ``schema_version``, ``graph`` (as ``save_graph`` writes it), ``cluster``
(its fields, as in a plan's ``cluster_description``) and ``plans``, fastest first, each with

- ``strategy`` and ``order``, as a plan file has them,
- ``step_time_s``, seconds of a step by the referee (only strategies that fit are kept),
- ``method``, ``seed``, ``budget`` and ``search_seconds``: how the plan was found.

A later search adds its plans to the file.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

from heterog.cluster.spec import cluster_from_dict
from heterog.cluster.topology import Cluster
from heterog.errors import InputFileError
from heterog.files import read_json, write_json
from heterog.graph.op_graph import OpGraph
from heterog.graph.serialize import graph_from_dict, graph_to_dict
from heterog.records import VALUE, MadeBy, Seconds, Series, Word, parse_record, within
from heterog.search.rows import MethodRow
from heterog.strategy.serialize import strategy_from_dict, strategy_to_dict
from heterog.strategy.strategy import Strategy

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A plan of a pair, and how it was found; see the module docstring.

    Attributes:
        method: Name of the method.
        seed: Seed of its random numbers.
        budget: Budget of the method, as a user types it.
        step_time_s: Seconds of a step by the referee.
        search_seconds: Seconds that the method took.
        order: Order of the tasks.
        strategy: Strategy that the method found.
    """

    __pydantic_config__: ClassVar = VALUE

    method: Word
    seed: Annotated[int, within(0, 2**63 - 1)]
    budget: Word
    step_time_s: Seconds
    search_seconds: Seconds
    order: Word
    strategy: Annotated[Strategy, MadeBy(strategy_from_dict)]

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON."""
        told = {field.name: getattr(self, field.name) for field in fields(self)}
        return told | {"strategy": strategy_to_dict(self.strategy)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedPair:
    """A model, a cluster, and the plans that are known for them.

    Attributes:
        graph: One training step of the model.
        cluster: Devices and links.
        plans: What methods found, fastest first.
    """

    __pydantic_config__: ClassVar = VALUE

    graph: Annotated[OpGraph, MadeBy(partial(graph_from_dict, where="its graph"))]
    cluster: Annotated[Cluster, MadeBy(cluster_from_dict)]
    plans: Series[Solution] = ()

    def adding(self, rows: Sequence[MethodRow], seed: int, budget: str) -> "SolvedPair":
        """The pair with the rows that fit; they replace plans of equal method, seed and budget."""
        new = [
            Solution(
                method=row.method,
                seed=seed,
                budget=budget,
                step_time_s=row.step_time_s,
                search_seconds=row.search_seconds,
                order=row.order,
                strategy=row.candidate.strategy,
            )
            for row in rows
            if row.step_time_s is not None and row.candidate is not None
        ]
        again = {(each.method, seed, budget) for each in new}
        kept = [each for each in self.plans if (each.method, each.seed, each.budget) not in again]
        plans = sorted([*kept, *new], key=lambda each: each.step_time_s)
        return SolvedPair(graph=self.graph, cluster=self.cluster, plans=tuple(plans))

    def path(self, folder: Path) -> Path:
        """The pair's file in a folder: both names, and a fingerprint of the cluster."""
        name = re.sub(r"[^\w.-]+", "_", f"{self.graph.name}_on_{self.cluster.name}")
        return folder / f"{name[:80]}_{self.cluster.fingerprint[:8]}.json.gz"

    def save(self, folder: Path) -> Path:
        """Write the pair's file."""
        document = {
            "schema_version": SCHEMA_VERSION,
            "graph": graph_to_dict(self.graph),
            "cluster": self.cluster.to_dict(),
            "plans": [each.to_dict() for each in self.plans],
        }
        write_json(self.path(folder), document)
        return self.path(folder)


def load_solved(path: str | Path) -> SolvedPair:
    """Read a pair's file.

    Raises:
        InputFileError: the file cannot be read, or holds no solved pair.
    """
    document = read_json(path, "solved pair")
    return parse_record(document, SolvedPair, f"solved pair {path}", versions=(SCHEMA_VERSION,))


def solved_before(pair: SolvedPair, folder: Path) -> SolvedPair:
    """The pair with the plans that its file has, if there is one.

    Raises:
        InputFileError: the file is of another graph.
    """
    path = pair.path(folder)
    if not path.is_file():
        return pair
    known = load_solved(path)
    if graph_to_dict(known.graph) != graph_to_dict(pair.graph):
        raise InputFileError(f"{path} holds another graph of that name; use another folder.")
    return known
