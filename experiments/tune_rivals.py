"""Tunes settings of the board's rivals, with equally many trials for each.

    python experiments/tune_rivals.py --results experiments/measured/tuning.jsonl --json

A trial is a setting of a rival (the first one as its paper or library has it, the others drawn
without repetition) on every pair, with the same budget and seed; pairs are in no suite of the
board. The setting with the least geometric mean of step times over the best known ones is chosen.
Rivals with fewer settings than trials try all of them; rivals without settings stay as they are.
"""

import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from rows import asked_of, finish, option

from heterog.agents.benchmark.board import Board, Entry, judged
from heterog.agents.benchmark.pair_lists import PairLine
from heterog.agents.benchmark.rivals import RIVALS
from heterog.methods.planner import Budget

PAIRS = (("mobilenet_v2", "poplar_v100_t4"), ("resnet50", "paper_8gpu_net035"))


def settings_of(name: str, trials: int) -> list[dict[str, float]]:
    """Settings to try: what is written first, then draws."""
    choices = RIVALS[name].choices
    every = [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]
    order = np.random.default_rng(0).permutation(len(every) - 1) + 1
    return [every[0], *(every[index] for index in order[: trials - 1])]


def main() -> int:
    """Run missing trials, and print the best settings."""
    asked = asked_of(
        __doc__,
        option("--rivals", default=",".join(name for name in RIVALS if RIVALS[name].choices)),
        option("--budget", default="100e"),
        option("--trials", type=int, default=6),
        option("--results", type=Path, required=True, help="file of runs, which goes on"),
    )
    chosen: dict[str, Any] = {}
    for name in asked.rivals.split(","):
        tried = {
            f"{name} " + ",".join(f"{key}={value:g}" for key, value in settings.items()): settings
            for settings in settings_of(name, asked.trials)
        }

        board = Board(
            pairs=[PairLine(*names, " ".join(names)) for names in PAIRS],
            entries=[
                Entry(arm, partial(judged, RIVALS[name].method(name, settings)))
                for arm, settings in tried.items()
            ],
            budget=Budget.parse(asked.budget),
            seeds=range(1),
            results=asked.results,
            graphs=asked.results.with_suffix(".graphs"),
        )
        board.run(lambda line: print(line["arm"], line["step_time_s"], file=sys.stderr))
        rows = {row["arm"]: row["over_best"]["value"] for row in board.summary()}
        best = min(tried, key=lambda arm: rows[arm])  # the first of equals: as written
        chosen[name] = {"settings": tried[best], "over_best": rows}
    lines = [f"{name}: {found['settings']}" for name, found in chosen.items()]
    finish(asked, {"chosen": chosen}, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
