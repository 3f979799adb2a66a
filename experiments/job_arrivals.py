"""PAC-ML's task: baselines and a learned policy beside the results of its authors.

    python experiments/job_arrivals.py --json
    python experiments/job_arrivals.py --learn 60000 --deadlines C --seeds 3 --json

Blocking rates are means over seeds; ``--learn`` trains a PPO policy for each seed on episodes of
its own and tests it on the episodes of the baselines.
"""

import statistics
from collections.abc import Callable
from functools import partial

from rows import asked_of, finish, option, progress

from heterog.agents.job_ppo import play, train_jobs
from heterog.envs.job_partition import JobPartitionEnv
from heterog.grouped import grouped
from heterog.search.arrivals.profiled import DEADLINES, EPISODE_S, RampCluster, draw_requests
from heterog.search.arrivals.queueing import (
    RULES,
    Rule,
    at_most,
    blocking_rate,
    rule_named,
    run_rule,
)

# Mean of three seeds, deadlines A to D: notebooks of cwfparsonson/ddls, commit 9e0b5ba.
RECORDED = {
    "pac_ml": (0.22089, 0.264069, 0.124653, 0.103674),
    "most": (0.262404, 0.263070, 0.267399, 0.263070),
    "fewest": (0.308691, 0.395604, 0.307359, 0.141858),
    "random": (0.517150, 0.601066, 0.505495, 0.465201),
}
LIMITS = (2, 4, 6, 8)


def rules(seed: int) -> dict[str, Rule]:
    """All rules that are compared, by name."""
    found = {name: rule_named(name, seed) for name in (*RULES, "random")}
    return found | {f"at_most_{limit}": at_most(limit) for limit in LIMITS}


def baseline_rows(cluster: RampCluster, deadlines: str, num_seeds: int) -> list[dict[str, object]]:
    """Blocking of each rule over the same episodes."""
    episodes = [(seed, draw_requests(cluster, deadlines, seed)) for seed in range(num_seeds)]
    rates = grouped(
        (name, blocking_rate(run_rule(cluster, requests, rule, end_s=EPISODE_S)))
        for seed, requests in episodes
        for name, rule in rules(seed).items()
    )
    return [_row(name, deadlines, found) for name, found in rates.items()]


def learned_row(
    make_env: Callable[[], JobPartitionEnv], deadlines: str, num_seeds: int, decisions: int
) -> dict[str, object]:
    """Blocking of a policy for each seed, on the baselines' episodes."""
    rates: list[float] = []
    for seed in range(num_seeds):

        def tell(done: int, accepted: float, seed: int = seed) -> None:
            if done % 8192 == 0:
                progress(f"seed {seed}: {done} decisions, {accepted:.3f} accepted")

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
    arguments = asked_of(
        __doc__,
        option("--deadlines", default=",".join(DEADLINES)),
        option("--seeds", type=int, default=3),
        option("--learn", type=int, default=0, help="decisions to learn from; 0: none"),
    )
    cluster = RampCluster()
    rows: list[dict[str, object]] = []
    for deadlines in arguments.deadlines.split(","):
        rows += baseline_rows(cluster, deadlines, arguments.seeds)
        if arguments.learn:
            make = partial(JobPartitionEnv, cluster, deadlines)
            rows.append(learned_row(make, deadlines, arguments.seeds, arguments.learn))
    finish(arguments, {"rows": rows, "recorded": RECORDED})


if __name__ == "__main__":
    main()
