"""Runs what a board lacks, keeps each run as a line of a file, and sums the lines up.

A line says pair, method, seed, budget, the code that made it, the referee's step time (``null``
if nothing fits), CPU and wall seconds, and evaluations. Nothing that is there is run again, so a
board that was stopped goes on, and files of several people may be put together.
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from heterog.agents.benchmark.pair_lists import PairLine
from heterog.agents.benchmark.statistics import (
    estimate,
    interquartile_mean,
    probability_of_improvement,
    scores_of,
)
from heterog.errors import InputFileError
from heterog.files import write_atomically
from heterog.methods.planner import Budget, Planner, Problem
from heterog.search.judging import run_method
from heterog.simulator.evaluator import Evaluator

Line = dict[str, Any]
_FIELDS = ("pair", "method", "seed", "budget", "code", "step_time_s", "cpu_s", "wall_s")


@dataclass(frozen=True, slots=True)
class Entry:
    """A method on the board.

    Attributes:
        planner: The method.
        code: What made it: the version of the package, or a digest of its own file.
    """

    planner: Planner
    code: str


def code_of(path: Path) -> str:
    """Digest of a file with a method: runs of an older state of it are made again."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """What is to be run.

    Attributes:
        pairs: Models and clusters.
        entries: Methods; the others are compared with the first.
        budget: Of each run; seconds are those of the processor.
        num_seeds: Seeds from 0 on.
        results: File of JSON lines that is added to.
        graphs: Folder that keeps captured graphs.
    """

    pairs: Sequence[PairLine]
    entries: Sequence[Entry]
    budget: Budget
    num_seeds: int
    results: Path
    graphs: Path | None = None

    def lines(self) -> list[Line]:
        """The runs of this board that are there."""
        found = {_key(line): line for line in read_results(self.results)}
        return [found[key] for key in self._keys() if key in found]

    def run(self, report: Callable[[Line], None]) -> None:
        """Make the runs that are missing, seed by seed."""
        done = {_key(line) for line in self.lines()}
        _without_cut_line(self.results)
        for seed in range(self.num_seeds):
            for pair in self.pairs:
                missing = [e for e in self.entries if self._key(pair, e, seed) not in done]
                if not missing:
                    continue
                graph, cluster = pair.load(self.graphs)
                for entry in missing:
                    line = self._line(entry, pair.pair, Evaluator(graph, cluster), seed)
                    with self.results.open("a") as file:
                        file.write(json.dumps(line) + "\n")
                    report(line)

    def _key(self, pair: PairLine, entry: Entry, seed: int) -> tuple[Any, ...]:
        return pair.pair, entry.planner.name, seed, str(self.budget), entry.code

    def _keys(self) -> list[tuple[Any, ...]]:
        return [
            self._key(pair, entry, seed)
            for pair in self.pairs
            for entry in self.entries
            for seed in range(self.num_seeds)
        ]

    def _line(self, entry: Entry, pair: str, evaluator: Evaluator, seed: int) -> Line:
        evaluator.warm_up()
        entry.planner.prepare(evaluator)
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        row = run_method(
            entry.planner,
            Problem(evaluator=evaluator, budget=self.budget, seed=seed, clock=time.process_time),
        )
        return {
            "pair": pair,
            "method": entry.planner.name,
            "seed": seed,
            "budget": str(self.budget),
            "code": entry.code,
            "step_time_s": row.step_time_s,
            "cpu_s": time.process_time() - cpu_s,
            "wall_s": time.perf_counter() - wall_s,
            "evaluations": row.num_evaluations,
        }

    def summary(self) -> list[Line]:
        """A row for each method, best first: quality with intervals beside time."""
        found = {(line["pair"], line["method"], line["seed"]): line for line in self.lines()}
        names = [entry.planner.name for entry in self.entries]
        best: dict[str, float] = {}
        for (pair, _, _), line in found.items():
            if line["step_time_s"] is not None:
                best[pair] = min(line["step_time_s"], best.get(pair, line["step_time_s"]))
        seeds = range(self.num_seeds)
        whole = [
            pair
            for pair in best
            if all((pair, name, seed) in found for name in names for seed in seeds)
        ]
        if not whole:
            return []
        runs = {n: [[found[pair, n, s] for s in seeds] for pair in whole] for n in names}
        scores = {
            name: scores_of(
                [[line["step_time_s"] for line in row] for row in rows], [best[p] for p in whole]
            )
            for name, rows in runs.items()
        }
        table = []
        for name in names:
            lines = [line for row in runs[name] for line in row]
            table.append(
                {
                    "method": name,
                    "pairs": len(whole),
                    "seeds": self.num_seeds,
                    "quality": asdict(estimate(interquartile_mean, scores[name])),
                    "beats_first": asdict(
                        estimate(probability_of_improvement, scores[name], scores[names[0]])
                    ),
                    "do_not_fit": sum(line["step_time_s"] is None for line in lines),
                    "cpu_s": sum(line["cpu_s"] for line in lines) / len(lines),
                    "wall_s": sum(line["wall_s"] for line in lines) / len(lines),
                    "evaluations": sum(line["evaluations"] for line in lines) / len(lines),
                }
            )
        return sorted(table, key=lambda row: -row["quality"]["value"])


def _key(line: Line) -> tuple[Any, ...]:
    return tuple(line[name] for name in _FIELDS[:5])


def _without_cut_line(path: Path) -> None:
    """Take away a last line that was cut off, so that the next is whole."""
    content = path.read_bytes() if path.is_file() else b""
    if not content.endswith(b"\n") and content:
        write_atomically(path, content[: content.rfind(b"\n") + 1])


def read_results(path: Path) -> list[Line]:
    """The runs of a file; none if there is no file. A last line that was cut off is left out.

    Raises:
        InputFileError: another line is no run.
    """
    found: list[Line] = []
    texts = path.read_text().splitlines() if path.is_file() else []
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            found.append({name: line[name] for name in (*_FIELDS, "evaluations")})
        except (ValueError, KeyError, TypeError) as error:
            if number == len(texts):
                break
            raise InputFileError(
                f"{path}, line {number}: no run of a board ({error!r}); each line is an object "
                f"with {', '.join(_FIELDS)} and evaluations."
            ) from error
    return found
