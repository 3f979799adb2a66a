"""The best known step times for a list of pairs, by all methods with long budgets.

    python experiments/reference_plans.py --pairs experiments/pairs/test.jsonl --seeds 3

Runs ``auto`` for each budget (in seconds of this process), seed and pair, shortest budgets first,
and renews a JSON file after each: by pair the best step time, its method, and every run. Runs that
are in the file are not repeated.
"""

import json
import time
from pathlib import Path
from typing import Any

from portfolio_table import auto
from rows import asked_of, option, progress
from rows import run as run_script

from heterog.agents.benchmark.pair_lists import PairLine, read_pairs
from heterog.agents.planners import default_methods
from heterog.files import write_json
from heterog.methods.planner import Budget
from heterog.simulator.evaluator import Evaluator


def run(line: PairLine, graphs: Path | None, seconds: float, seed: int) -> dict[str, Any]:
    """One run of ``auto``, as the file has it."""
    evaluator = Evaluator(*line.load(graphs))
    begin = time.process_time()
    made = auto(default_methods(), (), 1.0, evaluator, seed, Budget(seconds=seconds))
    spent = {"cpu_s": round(time.process_time() - begin, 1)}
    return {"budget_s": seconds, "seed": seed} | made | spent


def with_run(known: dict[str, Any], pair: str, made: dict[str, Any]) -> None:
    """Add a run to what is known of a pair, whose best fitting one counts."""
    runs = [*known.get(pair, {}).get("runs", []), made]
    fitting = [each for each in runs if each["step_time_s"] is not None]
    best: dict[str, Any] = min(fitting, key=lambda each: each["step_time_s"], default={})
    known[pair] = {"step_time_s": best.get("step_time_s"), "method": best.get("method")}
    known[pair]["runs"] = runs


def main() -> None:
    """Make the runs that are missing."""
    asked = asked_of(
        __doc__,
        option("--pairs", type=Path, required=True),
        option("--budgets", default="30,120,600", help="CPU seconds with commas"),
        option("--seeds", type=int, default=3),
        option("--graphs", type=Path, help="folder that keeps captured graphs"),
        option("-o", "--output", type=Path, help="PAIRS_references.json by default"),
    )
    output = asked.output or asked.pairs.with_name(f"{asked.pairs.stem}_references.json")
    known = json.loads(output.read_text()) if output.is_file() else {}
    for seconds in map(float, asked.budgets.split(",")):
        for seed in range(asked.seeds):
            for line in read_pairs(asked.pairs):
                runs = known.get(line.pair, {}).get("runs", [])
                if any((each["budget_s"], each["seed"]) == (seconds, seed) for each in runs):
                    continue
                with_run(known, line.pair, run(line, asked.graphs, seconds, seed))
                write_json(output, known, indent=1)
                progress(f"{line.pair}: {known[line.pair]['runs'][-1]}")
    for pair, found in known.items():
        print(f"{pair}: {found['step_time_s']} s by {found['method']}, {len(found['runs'])} runs")


if __name__ == "__main__":
    run_script(main)
