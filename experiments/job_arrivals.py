"""PAC-ML's question: baselines and a learned policy beside what its authors recorded.

    python experiments/job_arrivals.py --json
    python experiments/job_arrivals.py --learn 60000 --deadlines C --seeds 3 --json

Blocking rates are means over seeds; ``--learn`` trains a policy of PPO for each seed on episodes
of its own and tests it on the episodes of the baselines.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable

from heterog.agents.job_ppo import play, train_jobs
from heterog.envs.job_partition import JobPartitionEnv
from heterog.planners.arrivals.deadlines import DEADLINES, EPISODE_S, draw_requests
from heterog.planners.arrivals.profiled import RampCluster
from heterog.planners.arrivals.queueing import JobCluster, blocking_rate
from heterog.planners.arrivals.rules import RULES, Rule, at_most, rule_named, run_rule

# Mean of three seeds, deadlines A to D: notebooks of cwfparsonson/ddls, commit 9e0b5ba.
RECORDED = {
    "pac_ml": (0.22089, 0.264069, 0.124653, 0.103674),
    "most": (0.262404, 0.263070, 0.267399, 0.263070),
    "fewest": (0.308691, 0.395604, 0.307359, 0.141858),
    "random": (0.517150, 0.601066, 0.505495, 0.465201),
}
LIMITS = (2, 4, 6, 8)


def rules(seed: int) -> dict[str, Rule]:
    """Everything that is compared, by name."""
    found = {name: rule_named(name, seed) for name in (*RULES, "random")}
    return found | {f"at_most_{limit}": at_most(limit) for limit in LIMITS}


def baseline_rows(cluster: JobCluster, deadlines: str, num_seeds: int) -> list[dict[str, object]]:
    """Blocking of each rule over the same episodes."""
    rates: dict[str, list[float]] = {}
    for seed in range(num_seeds):
        requests = draw_requests(cluster, deadlines, seed)
        for name, rule in rules(seed).items():
            verdicts = run_rule(cluster, requests, rule, end_s=EPISODE_S)
            rates.setdefault(name, []).append(blocking_rate(verdicts))
    return [_row(name, deadlines, found) for name, found in rates.items()]


def learned_row(
    make_env: Callable[[], JobPartitionEnv], deadlines: str, num_seeds: int, decisions: int
) -> dict[str, object]:
    """Blocking of a policy for each seed, on the baselines' episodes."""
    rates: list[float] = []
    for seed in range(num_seeds):

        def tell(done: int, accepted: float, seed: int = seed) -> None:
            if done % 8192 == 0:
                print(f"seed {seed}: {done} decisions, {accepted:.3f} accepted", file=sys.stderr)

        # Environments draw episodes from 0 to 2^31 by the seed; the tests are 0, 1, 2, ...
        model = train_jobs(make_env, decisions, seed=seed, report=tell)
        rates += [
            statistics.fmean(play(model, make_env(), episode)[0] for episode in range(num_seeds))
        ]
    return _row("ppo", deadlines, rates)


def _row(name: str, deadlines: str, rates: list[float]) -> dict[str, object]:
    recorded = RECORDED.get("pac_ml" if name == "ppo" else name)
    return {
        "method": name,
        "deadlines": deadlines,
        "blocking_rate": statistics.fmean(rates),
        "of_each_seed": rates,
        "recorded": None if recorded is None else recorded[DEADLINES.index(deadlines)],
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--deadlines", default=",".join(DEADLINES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--learn", type=int, default=0, help="decisions to learn from; 0: none")
    arguments = parser.parse_args()
    cluster = RampCluster()
    rows: list[dict[str, object]] = []
    for deadlines in arguments.deadlines.split(","):
        rows += baseline_rows(cluster, deadlines, arguments.seeds)
        if arguments.learn:

            def make(deadlines: str = deadlines) -> JobPartitionEnv:
                return JobPartitionEnv(cluster, deadlines)

            rows.append(learned_row(make, deadlines, arguments.seeds, arguments.learn))
    if arguments.json:
        print(json.dumps({"rows": rows, "recorded": RECORDED}, indent=2))
        return
    for row in rows:
        recorded = f"{row['recorded']:.4f}" if row["recorded"] is not None else "-"
        print(f"{row['deadlines']} {row['method']:12} {row['blocking_rate']:.4f} {recorded}")


if __name__ == "__main__":
    main()
