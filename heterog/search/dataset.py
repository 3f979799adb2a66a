"""Solved pairs on disk: a file for each model and cluster, with the plans that are known for it.

A file (``.json.gz``) has ``schema_version``, ``graph`` (as ``save_graph`` writes it), ``cluster``
(its fields, as in a plan's ``cluster_description``) and ``plans``, fastest first, each with

- ``strategy`` and ``order``, as a plan file has them,
- ``step_time_s``, seconds of a step by the referee, of strategies that fit into memory alone,
- ``method``, ``seed``, ``budget`` and ``search_seconds``: who found it, and how long that took.

Whoever searches again adds plans to the file.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heterog.cluster.json_record import cluster_from_dict
from heterog.cluster.topology import Cluster
from heterog.errors import InputFileError
from heterog.files import read_json, write_json
from heterog.graph.op_graph import OpGraph
from heterog.graph.serialize import graph_from_dict, graph_to_dict
from heterog.methods.planner import MethodRow
from heterog.records import Record, parse_record
from heterog.strategy.serialize import strategy_from_dict, strategy_to_dict
from heterog.strategy.strategy import Strategy

SCHEMA_VERSION = 1


class _SolutionRecord(Record):
    method: str
    seed: int
    budget: str
    step_time_s: float
    search_seconds: float
    order: str
    strategy: dict[str, Any]


class _SolvedRecord(Record):
    schema_version: int
    graph: dict[str, Any]
    cluster: dict[str, Any]
    plans: list[_SolutionRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A plan of a pair, and how it was found; see the module docstring."""

    method: str
    seed: int
    budget: str
    step_time_s: float
    search_seconds: float
    order: str
    strategy: Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class SolvedPair:
    """A model, a cluster, and the plans that are known for them, fastest first."""

    graph: OpGraph
    cluster: Cluster
    plans: tuple[Solution, ...] = ()

    def adding(self, rows: Sequence[MethodRow], seed: int, budget: str) -> "SolvedPair":
        """The pair with what methods found that fits, in place of what they found so before."""
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
        """The pair's file in a folder: names, and what tells apart pairs of the same names."""
        name = re.sub(r"[^\w.-]+", "_", f"{self.graph.name}_on_{self.cluster.name}")
        return folder / f"{name[:80]}_{self.cluster.fingerprint()[:8]}.json.gz"

    def save(self, folder: Path) -> Path:
        """Write the pair's file."""
        plans = [
            {name: getattr(each, name) for name in _SolutionRecord.model_fields}
            | {"strategy": strategy_to_dict(each.strategy)}
            for each in self.plans
        ]
        document = {
            "schema_version": SCHEMA_VERSION,
            "graph": graph_to_dict(self.graph),
            "cluster": self.cluster.to_dict(),
            "plans": plans,
        }
        write_json(self.path(folder), document)
        return self.path(folder)


def load_solved(path: str | Path) -> SolvedPair:
    """Read a pair's file.

    Raises:
        InputFileError: it cannot be read, or is none.
    """
    where = f"solved pair {path}"
    record = parse_record(
        read_json(path, "solved pair"), _SolvedRecord, where, versions=(SCHEMA_VERSION,)
    )
    plans = [
        Solution(**each.model_dump() | {"strategy": strategy_from_dict(each.strategy)})
        for each in record.plans
    ]
    return SolvedPair(
        graph=graph_from_dict(record.graph, where),
        cluster=cluster_from_dict(record.cluster),
        plans=tuple(plans),
    )


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
