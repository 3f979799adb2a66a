"""Are damaged and hostile files refused in one line, or valid?

python experiments/fuzz_inputs.py --cases 10000 --seed 0 --json

Makes a valid file of every kind that heterog reads, changes it (fields left out, doubled, renamed,
of other types; huge, negative and infinite numbers; texts with quotes and line ends; lists cut,
shuffled and lengthened; bytes cut off, garbled and packed; bombs) and reads it in a process of its
own with limits. A refusal must be one line. Accepted files are checked again by code that shares
nothing with the readers: indices, permutations, sums, simulated seconds. Calls of the command line
with outputs of all kinds are tested as well (``fuzzing/outputs.py``).

The worker is forked from a process that has imported everything, so a case takes milliseconds.
"""

import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from fuzzing.changes import change_file, packed_policy, packed_spaces
from fuzzing.outputs import Wrong
from fuzzing.valid import Kind, make_kinds
from rows import asked_of, finish, option, progress

from heterog.errors import HeterogError, HeterogWarning

LIMIT_S = 10.0
"""Of a case, in seconds of its processor; six times as long by the clock, for busy machines."""
LIMIT_BYTES = 2 * 2**30
CASES_PER_WORKER = 250
"""A worker's memory is that of all its cases: one that keeps a little from each is replaced."""
MOST_LINE = 5000


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Outcome of one case."""

    kind: str
    change: str
    outcome: str
    detail: str = ""


def judge(kind: Kind, path: Path, change: str) -> Verdict:
    """Read a file, and check what was accepted."""

    def verdict(outcome: str, detail: str = "") -> Verdict:
        return Verdict(kind=kind.name, change=change, outcome=outcome, detail=detail)

    later = ""
    try:
        read = kind.read(path)
        later = " later"
        kind.check(read)
    except Wrong as problem:
        return verdict("invalid", str(problem))
    except HeterogError as error:
        line = str(error)
        is_one_line = "\n" not in line and len(line) <= MOST_LINE and line.isprintable()
        return verdict(f"refused{later}" if is_one_line or later else "not one line", line[:300])
    except _TookTooLongError:
        return verdict("hang")
    except BaseException:
        return verdict("traceback", traceback.format_exc(limit=-6))
    return verdict("accepted")


def remove(path: Path) -> None:
    """Remove whatever is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


BEGUN = "begun"
_FORK = multiprocessing.get_context("fork")


class _TookTooLongError(BaseException):
    pass


def _too_long(number: int, frame: object) -> None:
    raise _TookTooLongError


def work(
    kinds: tuple[Kind, ...], cases: range, seed: int, folder: Path, verdicts: Connection
) -> None:
    """Judge some cases in this process; sends which it begins, and each verdict."""
    signal.signal(signal.SIGALRM, _too_long)
    signal.signal(signal.SIGPROF, _too_long)
    warnings.simplefilter("ignore", HeterogWarning)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    drawn = [kind for kind in kinds for _ in range(kind.weight)]
    for case in cases:
        rng = random.Random(f"{seed} {case}")
        random.seed(f"{seed} {case}")
        kind = rng.choice(drawn)
        path = folder / f"case{case}{kind.files[0].suffix}"
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        verdicts.send(Verdict(kind=kind.name, change=f"case {case}", outcome=BEGUN))
        try:
            change = change_file(rng, kind, path)
        except Exception:
            detail = traceback.format_exc()
            verdicts.send(Verdict(kind=kind.name, change="", outcome="not made", detail=detail))
            continue
        verdicts.send(Verdict(kind=kind.name, change=change, outcome=BEGUN))
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        signal.setitimer(signal.ITIMER_REAL, 6.0 * LIMIT_S)
        found = judge(kind, path, change)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if peak * 1024 > LIMIT_BYTES and peak > before:
            found = replace(found, outcome="over memory", detail=f"{peak // 1024} MiB")
        remove(path)
        verdicts.send(found)
        if found.outcome == "over memory":
            return


def run(cases: int, seed: int) -> list[Verdict]:
    """Judge all cases, in one worker after another."""
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="heterog-fuzz-") as name:
        folder = Path(name)
        (folder / "valid").mkdir()
        os.chdir(folder)
        kinds = make_kinds(folder / "valid")
        packed_spaces(200 * 2**20)  # here, not in every worker again
        packed_policy(100 * 2**20)
        for kind in kinds:
            for path in kind.files if kind.form not in ("lines", "call") else ():
                kind.check(kind.read(path))
        begin = 0
        while begin < cases:
            batch = range(begin, min(begin + CASES_PER_WORKER, cases))
            done = _run_worker(kinds, batch, seed, folder)
            verdicts += done
            begin += len(done)
            progress(f"{begin} of {cases}")
    return verdicts


def _run_worker(kinds: tuple[Kind, ...], cases: range, seed: int, folder: Path) -> list[Verdict]:
    """The verdicts of one worker, up to the case that it did not survive."""
    here, there = _FORK.Pipe(duplex=False)
    worker = _FORK.Process(target=work, args=(kinds, cases, seed, folder, there))
    worker.start()
    there.close()
    found: list[Verdict] = []
    outcome = "crash"
    with suppress(EOFError):
        while here.poll(10 * LIMIT_S):
            verdict = here.recv()
            if found and found[-1].outcome == BEGUN:
                found.pop()
            found.append(verdict)
        outcome = "hang"
        worker.kill()
    worker.join()
    if not found:
        raise SystemExit(f"a worker ended before its first case, with status {worker.exitcode}")
    if found[-1].outcome == BEGUN:
        detail = f"ended with status {worker.exitcode}"
        found[-1] = replace(found[-1], outcome=outcome, detail=detail)
    return found


GOOD = ("refused", "refused later", "accepted")


def main() -> None:
    """Judge many changed files and print the outcomes."""
    arguments = asked_of(
        __doc__,
        option("--cases", type=int, default=10_000),
        option("--seed", type=int, default=0),
        option("--show", type=int, default=10, help="failures of each kind in the answer"),
    )
    torch.set_num_threads(1)
    begin = time.perf_counter()
    verdicts = run(arguments.cases, arguments.seed)
    table = Counter((each.kind, each.outcome) for each in verdicts)
    outcomes = Counter(each.outcome for each in verdicts)
    failures = [each for each in verdicts if each.outcome not in GOOD]
    document = {
        "cases": len(verdicts),
        "seed": arguments.seed,
        "seconds": round(time.perf_counter() - begin, 1),
        "tracebacks": outcomes["traceback"] + outcomes["crash"],
        "hangs": outcomes["hang"],
        "over_memory": outcomes["over memory"],
        "not_one_line": outcomes["not one line"],
        "accepted_but_invalid": outcomes["invalid"],
        "refused": outcomes["refused"] + outcomes["refused later"],
        "accepted": outcomes["accepted"],
        "by_kind": {f"{kind}: {outcome}": n for (kind, outcome), n in sorted(table.items())},
        "failures": [
            [each.kind, each.change, each.outcome, each.detail]
            for each in failures[: arguments.show]
        ],
    }
    for each in failures[: arguments.show] if not arguments.json else ():
        print(each.kind, each.change, each.outcome, each.detail)
    finish(arguments, document)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
