"""A board: makes the missing runs, keeps each run as a line of a file, and sums the lines up.

A line has pair, arm (a method, or whatever else is compared), seed, the referee's step time
(``null`` if nothing fits), CPU seconds and evaluations. Budget, the code that made it and wall
seconds follow; files from elsewhere may leave these out. ``other_s`` is the answer's step time by
another referee, if that can express the answer. ``curve`` has (evaluations, best step time so far)
for each improvement that the method reports. No run is made twice, also by several processes at
once, so a stopped board goes on, and files of several people may be joined.
"""

import errno
import fcntl
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, Self

import numpy as np

from heterog.agents.benchmark.pair_lists import PairLine
from heterog.agents.benchmark.sailor import sailor_s
from heterog.agents.benchmark.statistics import (
    CLOSE,
    Array,
    estimate,
    interquartile_mean,
    over_pairs,
    probability_of_improvement,
    ratios_of,
    scores_of,
)
from heterog.agents.benchmark.tiles import placed_s
from heterog.errors import InputFileError
from heterog.files import cannot_write, decoded
from heterog.garbage import give_back_memory, settled
from heterog.methods.planner import Budget, Planner, Problem
from heterog.search.judging import run_method
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.strategy import Strategy

Line = dict[str, Any]
Run = tuple[str, str, int]
"""Pair, arm and seed."""
FIELDS = ("pair", "arm", "seed", "step_time_s", "cpu_s", "evaluations")


@dataclass(frozen=True, slots=True)
class Entry:
    """An arm of a board.

    Attributes:
        name: Name of the arm in lines.
        run: Function of an evaluator whose kernels are loaded, a seed and a budget; returns
            ``step_time_s`` and ``evaluations`` of a line, and further fields to keep.
        code: Version of the package, or a digest of the method's file.
    """

    name: str
    run: Callable[[Evaluator, int, Budget], Line]
    code: str = ""


def judged(planner: Planner, evaluator: Evaluator, seed: int, budget: Budget) -> Line:
    """The referee's line for a method's answer; the method's preparations are not counted."""
    planner.prepare(evaluator)
    curve: list[tuple[int, float]] = []
    before = evaluator.num_evaluations

    def note(_: float, best_s: float) -> None:
        if best_s < (curve[-1][1] if curve else math.inf):
            curve.append((evaluator.num_evaluations - before, best_s))

    problem = Problem(
        evaluator=evaluator, budget=budget, seed=seed, clock=time.process_time, report=note
    )

    def run() -> Line:
        row = run_method(planner, problem)
        made: Line = {
            "step_time_s": row.step_time_s,
            "evaluations": row.num_evaluations,
            "curve": curve,
        }
        other = _other_s(evaluator, row.candidate.strategy) if row.candidate else None
        return made if other is None else made | {"other_s": other}

    return _timed(run)


def _other_s(evaluator: Evaluator, strategy: Strategy) -> float | None:
    """Step time by another referee: DOPPLER's for its own graphs, Sailor's for all others."""
    placed = placed_s(evaluator.graph, strategy)
    return sailor_s(evaluator, strategy) if placed is None else placed


def _timed(run: Callable[[], Line]) -> Line:
    """The line of a run, with measured seconds where the run states none."""
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    made = run()
    return {"cpu_s": time.process_time() - cpu_s, "wall_s": time.perf_counter() - wall_s} | made


def code_of(path: Path) -> str:
    """Digest of a method's file: runs of an older version of the file are made again."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """The runs of a benchmark: each arm on each pair with each seed.

    Attributes:
        pairs: Models and clusters.
        entries: Arms; the others are compared with the first.
        budget: Budget of each run; seconds are CPU seconds.
        seeds: Seeds of the runs; other seeds give the same board again, from other draws.
        results: File of JSON lines to which runs are appended.
        graphs: Folder that keeps captured graphs.
        references: Best known step times of pairs, beside the times in the board.
    """

    pairs: Sequence[PairLine]
    entries: Sequence[Entry]
    budget: Budget
    seeds: range
    results: Path
    graphs: Path | None = None
    references: Mapping[str, float] = field(default_factory=dict)

    def found(self, lines: Sequence[Line] | None = None) -> dict[Run, Line]:
        """The finished runs of this board, among lines or those of its file."""
        codes = {entry.name: entry.code for entry in self.entries}
        pairs, own = {pair.pair for pair in self.pairs}, str(self.budget)
        return {
            (line["pair"], line["arm"], line["seed"]): line
            for line in (read_results(self.results) if lines is None else lines)
            if line["pair"] in pairs
            and line["seed"] in self.seeds
            and line.get("code", codes.get(line["arm"])) == codes.get(line["arm"], ...)
            and line.get("budget", own) == own
        }

    def run(self, report: Callable[[Line], None]) -> None:
        """Make the missing runs, seed by seed; processes with one file of results share them.

        What other processes are making is left to them at first. In the end it is waited for, and
        made if they have not.
        """
        load = lru_cache(maxsize=1)(lambda pair: pair.load(self.graphs))
        asked = list(product(self.seeds, self.pairs, self.entries))
        done = self.found()
        if all((pair.pair, entry.name, seed) in done for seed, pair, entry in asked):
            return  # the file may be somebody else's
        with _Shared(self.results) as shared:
            done = self.found(shared.lines())
            for waits, (seed, pair, entry) in product((False, True), asked):
                run = (pair.pair, entry.name, seed)
                if run in done or not shared.claim(run, waits):
                    continue
                done = self.found(shared.lines())
                if run not in done:
                    graph, cluster = load(pair)
                    # On a copy of the graph: a run must not profit from tables of earlier runs.
                    line = self._line(entry, pair.pair, Evaluator(replace(graph), cluster), seed)
                    shared.append(line)
                    report(line)
                    give_back_memory()
                shared.release(run)

    @settled()
    def _line(self, entry: Entry, pair: str, evaluator: Evaluator, seed: int) -> Line:
        evaluator.warm_up()
        key = {"pair": pair, "arm": entry.name, "seed": seed}
        made = {"budget": str(self.budget), "code": entry.code}
        return key | _timed(lambda: entry.run(evaluator, seed, self.budget)) | made

    def scored(self) -> "Scored":
        """Runs and scores of the pairs and seeds that every arm has run."""
        found, names = self.found(), [entry.name for entry in self.entries]
        best = dict(self.references)
        for (pair, _, _), line in found.items():
            if line["step_time_s"] is not None:
                best[pair] = min(line["step_time_s"], best.get(pair, line["step_time_s"]))
        pairs, num_seeds = self._whole(found, best)
        runs = {
            name: [[found[pair, name, seed] for seed in self.seeds[:num_seeds]] for pair in pairs]
            for name in names
        }
        scores = {
            name: scores_of(
                [[line["step_time_s"] for line in row] for row in runs[name]],
                [best[pair] for pair in pairs],
            )
            for name in names
        }
        return Scored(pairs=tuple(pairs), num_seeds=num_seeds, runs=runs, scores=scores)

    def summary(self) -> list[Line]:
        """See ``Scored.summary``."""
        return self.scored().summary()

    def _whole(
        self, found: Mapping[tuple[str, str, int], Line], best: Mapping[str, float]
    ) -> tuple[list[str], int]:
        """(pairs, number of seeds) that every arm has run: most runs, then most pairs."""
        whole = {
            count: [
                pair.pair
                for pair in self.pairs
                if pair.pair in best
                and all(
                    (pair.pair, entry.name, seed) in found
                    for entry in self.entries
                    for seed in self.seeds[:count]
                )
            ]
            for count in range(1, len(self.seeds) + 1)
        }
        count = max(whole, key=lambda each: (each * len(whole[each]), len(whole[each])))
        return whole[count], count


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Runs and scores that are complete for all arms of a board.

    Attributes:
        pairs: Pairs that every arm has run.
        num_seeds: Number of seeds that every arm has run.
        runs: Lines of each arm, a row for each pair.
        scores: Scores of each arm.  # [pairs, seeds]
    """

    pairs: tuple[str, ...]
    num_seeds: int
    runs: Mapping[str, Sequence[Sequence[Line]]]
    scores: Mapping[str, Array]

    def summary(self) -> list[Line]:
        """A row for each arm, best first: quality with intervals beside time."""
        if not self.pairs:
            return []
        first = next(iter(self.scores.values()))
        table = [
            {"arm": name, "pairs": len(self.pairs), "seeds": self.num_seeds}
            | _compared(scores, first)
            | _spent([line for row in self.runs[name] for line in row])
            | self._by_other(name)
            for name, scores in self.scores.items()
        ]
        return sorted(table, key=lambda row: -row["quality"]["value"])

    def curve(self, name: str, most: int) -> Array | None:
        """Interquartile mean of an arm's best score so far; ``None`` if runs have no curves.

        Args:
            name: Name of the arm.
            most: Number of evaluations at the end of the curve.

        Returns:
            # [most + 1]
        """
        lines = [line for row in self.runs[name] for line in row]
        if not all(line.get("curve") for line in lines if line["step_time_s"] is not None):
            return None
        found = np.zeros((most + 1, len(lines), 1))
        for number, (line, score) in enumerate(
            zip(lines, self.scores[name].reshape(-1), strict=True)
        ):
            for evaluations, best_s in line.get("curve", ()):
                if score:  # best known step time = score * this run's step time
                    found[evaluations:, number] = score * line["step_time_s"] / best_s
        return interquartile_mean(found)

    def _by_other(self, name: str) -> Line:
        """Another referee's step times over its best one, for the runs that it can express."""
        seconds = {
            arm: np.array([[line.get("other_s", np.nan) for line in row] for row in rows])
            for arm, rows in self.runs.items()
        }
        known = np.concatenate(list(seconds.values()), axis=1)  # [pairs, arms x seeds]
        best = np.min(known, axis=1, initial=np.inf, where=~np.isnan(known))
        logs = np.log(seconds[name] / best[:, None])
        is_said = ~np.isnan(logs)
        if not is_said.any():
            return {}
        pairs = is_said.any(axis=1)
        means = np.mean(logs[pairs], axis=1, where=is_said[pairs])
        return {"over_other": asdict(over_pairs(np.exp(means))), "said": float(is_said.mean())}


def _compared(scores: Array, first: Array) -> Line:
    """Statistics of an arm; ``over_*`` are geometric means of ratios of step times."""
    over_best, over_first = ratios_of(scores), ratios_of(first)
    return {
        "quality": asdict(estimate(interquartile_mean, scores)),
        "beats_first": asdict(estimate(probability_of_improvement, scores, first)),
        "over_best": asdict(over_pairs(over_best)),
        "over_first": asdict(over_pairs(over_best / over_first)),
        "close": int((over_best <= CLOSE).sum()),
        "do_not_fit": int((scores == 0.0).sum()),
    }


def _spent(lines: Sequence[Line]) -> Line:
    """Mean seconds and evaluations of runs; CPU seconds replace missing wall seconds."""
    return {
        name: float(np.mean([line.get(name, line["cpu_s"]) for line in lines]))
        for name in ("cpu_s", "wall_s", "evaluations")
    }


def read_results(path: Path) -> list[Line]:
    """The runs of a file; none if there is no file. A last line that was cut off is left out.

    Raises:
        InputFileError: any other line is no run.
    """
    return _runs_of(path.read_bytes() if path.is_file() else b"", path)


def _runs_of(content: bytes, path: Path) -> list[Line]:
    found: list[Line] = []
    texts = decoded(content, str(path)).splitlines()
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            found.append(line | {name: line[name] for name in FIELDS})
        except (ValueError, KeyError, TypeError) as error:
            if number == len(texts):
                break
            raise InputFileError(
                f"{path}, line {number}: no run of a board ({error!r}); each line is an object "
                f"with {', '.join(FIELDS)}."
            ) from error
    return found


class _Shared:
    """A file of results of several processes, of which one makes a run.

    A process that makes a run locks a byte of the file that stands for it, far behind its end. The
    lock ends with the process, and as soon as the process closes *any* open file of that path, so
    everything goes through the one that is open here.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Self:
        try:
            self._file = self._path.open("a+b", buffering=0)
        except OSError as error:
            raise cannot_write(self._path, error, 0) from error
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def claim(self, run: Run, waits: bool) -> bool:
        """Lock a run, unless another process has the lock and is not waited for."""
        return self._lock(_byte_of(run), fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))

    def release(self, run: Run) -> None:
        """Let others look at a run."""
        self._lock(_byte_of(run), fcntl.LOCK_UN)

    def lines(self) -> list[Line]:
        """All runs that are there now."""
        return _runs_of(self._content(), self._path)

    def append(self, line: Line) -> None:
        """Add a run; a last line that a dead process did not finish is removed."""
        self._lock(0, fcntl.LOCK_EX)
        content = self._content()
        tail = content[content.rfind(b"\n") + 1 :]
        try:
            begin = b"\n" if tail and json.loads(tail) else b""
        except ValueError:
            self._file.truncate(len(content) - len(tail))
            begin = b""
        text = begin + json.dumps(line).encode() + b"\n"
        try:
            while text:  # a full disk takes a part, and refuses the next
                text = text[self._file.write(text) :]
        except OSError as error:
            raise cannot_write(self._path, error, len(text)) from error
        self._lock(0, fcntl.LOCK_UN)

    def _content(self) -> bytes:
        self._file.seek(0)
        return self._file.read()

    def _lock(self, byte: int, how: int) -> bool:
        try:
            fcntl.lockf(self._file, how, 1, byte)
        except OSError as error:
            # Where a file system knows no locks, each process makes all runs.
            return error.errno not in (errno.EACCES, errno.EAGAIN)
        return True


def _byte_of(run: Run) -> int:
    return 1 + int(hashlib.sha256(json.dumps(run).encode()).hexdigest()[:15], 16)
