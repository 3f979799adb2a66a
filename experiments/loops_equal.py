"""Is a balanced loop equal to one process, in every kind of loop?

    python experiments/loops_equal.py --json
    python experiments/loops_equal.py --only "Lightning/ragged end"

Two ranks with shares of 14 and 2 samples train for ten batches over gloo: in plain loops with
DistributedDataParallel and ``fully_shard``, with the Trainer, Accelerate and Lightning. One
process trains with the whole batches in the same order, without this package: the stock Trainer
for the Trainer, a plain PyTorch loop for the others. ``samples`` says whether each update has the
same samples and learning rate, ``weights`` is the largest difference of weights after the last
one, relative to the largest weight. A row is equal if the first holds and the second is at most
1e-5.

``REFUSED`` lists rows that are not run, and why; ``MUST_REFUSE`` lists rows that must end in an
error, with words of the message. Any other row that raises an error has failed.
"""

import logging
import os
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from loops import accelerated, plain, with_lightning, with_trainer
from loops.cases import CASES, SHARES, Case, Record, Run
from rows import finish, option, progress, script_parser
from testbeds import results_of_forks

from heterog.errors import HeterogError
from heterog.runtime.launch import free_port

MOST_DIFFERENCE = 1e-5
LIMIT_S = 120

LOOPS: dict[str, tuple[Run, Run]] = {
    "DDP": (plain.alone, plain.on_ranks("ddp")),
    "FSDP2": (plain.alone, plain.on_ranks("fsdp")),
    "Trainer": (with_trainer.alone, with_trainer.on_ranks),
    "Accelerate": (plain.alone, accelerated.on_ranks),
    "Lightning": (plain.alone, with_lightning.on_ranks),
}
"""How each loop runs on one process, and on ranks."""

REFUSED = {
    ("Trainer", "two optimizers"): "a Trainer has one optimizer",
    ("Trainer", "stream"): "a BalancedTrainer takes no streams",
    ("Trainer", "stream with a position"): "a BalancedTrainer takes no streams",
}

MUST_REFUSE = {
    (
        loop,
        "unlike lengths without count",
    ): "a mean over elements of which samples have unlike numbers"
    for loop in LOOPS
    if loop != "Trainer"  # which measures what a loss is a mean over
}


class Row(NamedTuple):
    """One loop in one case; fields without a value are those of a row that did not run."""

    loop: str
    case: str
    equal: bool
    weights: float | None
    samples: bool | None
    refused: str | None
    failed: str | None


def main() -> int:
    """Run rows and print a table, or JSON."""
    parser = script_parser(
        __doc__, option("--only", default="", help="rows as LOOP/CASE, separated by commas")
    )
    options = parser.parse_args()
    every = [(loop, case) for loop in LOOPS for case in CASES]
    asked = [tuple(each.split("/", 1)) for each in options.only.split(",") if each]
    unknown = [each for each in asked if each not in every]
    if unknown:
        parser.error(f"no row is called {unknown}; loops are {list(LOOPS)}, cases {list(CASES)}")
    prepare()
    rows = []
    for loop, case in asked or every:
        begin = time.monotonic()
        rows.append(run_row(loop, case))
        progress(f"{rows[-1]} ({time.monotonic() - begin:.0f} s)")
    equal = sum(row.equal for row in rows)
    refused = sum(row.refused is not None for row in rows)
    finish(options, {"rows": [row._asdict() for row in rows], "equal": equal, "refused": refused})
    return 0 if equal + refused == len(rows) else 1


def prepare() -> None:
    """Set up this process, which all ranks are forked from: libraries are imported once."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")


def run_row(loop: str, case: str) -> Row:
    """Train on one process and on ranks, and compare."""
    refused = REFUSED.get((loop, case))
    if refused is not None:
        return Row(loop, case, False, None, None, refused, None)
    alone, on_ranks = LOOPS[loop]
    try:
        ((weights, updates),) = _run(alone, CASES[case], 1)
        ranks = _run(on_ranks, CASES[case], len(SHARES))
    except (HeterogError, RuntimeError) as error:
        said, reason = str(error).splitlines()[-1], MUST_REFUSE.get((loop, case))
        if reason is not None and reason in said:
            return Row(loop, case, False, None, None, said, None)
        return Row(loop, case, False, None, None, None, said)
    if (loop, case) in MUST_REFUSE:
        return Row(loop, case, False, None, None, None, "it was not refused")
    together = [
        [(parts[0].rate, sorted({index for part in parts for index in part.samples}))]
        for parts in zip(*(each for _, each in ranks), strict=False)
    ]
    expected = [[(update.rate, sorted(update.samples))] for update in updates]
    same = together == expected and all(len(each) == len(expected) for _, each in ranks)
    largest = max(float(each.abs().max()) for each in weights)
    apart = max(
        float((one - other).abs().max())
        for found, _ in ranks
        for one, other in zip(weights, found, strict=True)
    )
    is_equal = same and apart <= MOST_DIFFERENCE * largest
    return Row(loop, case, is_equal, apart / largest, same, None, None)


def _run(run: Run, case: Case, num_ranks: int) -> list[Any]:
    """Weights and updates of each rank.

    Raises:
        HeterogError: a rank raised it.
        RuntimeError: a rank failed otherwise, or took too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = run, case, num_ranks, str(free_port()), Path(folder)
        return results_of_forks(_be_rank, num_ranks, *given)


def _be_rank(
    rank: int, run: Run, case: Case, num_ranks: int, port: str, folder: Path
) -> tuple[Any, Any]:
    signal.alarm(LIMIT_S)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT), 2)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    if num_ranks > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, NODE_RANK="0")
    record = Record()
    return run(case, record, str(folder)), record.updates


if __name__ == "__main__":
    sys.exit(main())
