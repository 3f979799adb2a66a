"""Do plans of model families beyond the zoo run, and do they equal plain PyTorch?

    python experiments/model_families.py --json
    python experiments/model_families.py --only gpt2,clip
    python experiments/model_families.py -o rows.jsonl      # goes on where it was stopped

Every family is captured, planned, and trained for five steps on three ranks with uneven shares:
under parameter servers, a pipeline with micro-batches, ZeRO-3, op rules, and the plan that
``heterog plan`` finds for three unlike GPUs. Losses and all weights are compared with the same
steps on one device; see ``families/running.py`` for BatchNorm and random numbers.
"""

import sys
import time
from pathlib import Path

import torch
from families import FAMILIES
from families.running import Row, run_family
from rows import finish, in_words, keep_row, option, progress, read_rows, script_parser

from heterog.simulator.compile_kernels import main as compile_kernels


def main() -> int:
    """Run families and print a table, or JSON."""
    parser = script_parser(
        __doc__,
        option("--only", default="", help="names of families, separated by commas"),
        option("--quick", action="store_true", help="those of the test suite only"),
        option("--no-search", action="store_true", help="leave out the plan searched for"),
        option("--limit-s", type=float, default=180.0, help="seconds between answers"),
        option("-o", "--output", type=Path, help="JSON lines, added to; none is made again"),
    )
    options = parser.parse_args()
    every = [name for name, family in FAMILIES.items() if family.is_quick or not options.quick]
    names = options.only.split(",") if options.only else every
    unknown = [name for name in names if name not in FAMILIES]
    if unknown:
        parser.error(f"no family is called {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    torch.set_num_threads(1)
    compile_kernels()
    searches = not options.no_search
    kept = {
        row["family"]: Row(**{field: row[field] for field in Row._fields})
        for row in read_rows(options.output)
        if row["searches"] == searches
    }
    rows = []
    for number, name in enumerate(names):
        begin = time.monotonic()
        row = kept.get(name) or run_family(FAMILIES[name], options.limit_s, searches=searches)
        if name not in kept:
            keep_row(options.output, row._asdict() | {"searches": searches})
        rows.append(row)
        seconds = time.monotonic() - begin
        progress(f"{number + 1}/{len(names)} in {seconds:.0f} s: {in_words(row._asdict())}")
    equal = sum(row.equal for row in rows)
    record = {"rows": [row._asdict() for row in rows], "equal": equal, "families": len(rows)}
    finish(options, record)
    return 0 if equal == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
