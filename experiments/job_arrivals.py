"""PAC-ML's task: baselines and a learned policy beside the results of its authors.

    python experiments/job_arrivals.py --json
    python experiments/job_arrivals.py --learn 60000 --deadlines C --seeds 3 --json
    python experiments/job_arrivals.py --cluster mixed_16 --models resnet50,bert_base --json

With ``--cluster`` jobs run on unequal GPUs with step times of the evaluator, and arrive 1.2 times
as often as a cluster of equally many of its fastest device could serve them one by one. Blocking
rates are means over seeds; ``--learn`` trains a PPO policy for each seed on episodes of its own
and tests it on the episodes of the baselines.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rows import asked_of, finish, option, progress

from heterog.agents.job_ppo import play, train_jobs
from heterog.cluster import Cluster
from heterog.envs.job_partition import JobPartitionEnv
from heterog.graph.capture import capture
from heterog.grouped import grouped
from heterog.search.arrivals.evaluated import EvaluatedCluster, TrainingJob
from heterog.search.arrivals.profiled import (
    DEADLINES,
    EPISODE_S,
    SPACING_S,
    RampCluster,
    draw_requests,
)
from heterog.search.arrivals.queueing import (
    RULES,
    JobCluster,
    JobRequest,
    Rule,
    at_most,
    blocking_rate,
    rule_named,
    run_rule,
)
from heterog.zoo import load_workload

# Mean of three seeds, deadlines A to D: notebooks of cwfparsonson/ddls, commit 9e0b5ba.
RECORDED = {
    "pac_ml": (0.22089, 0.264069, 0.124653, 0.103674),
    "most": (0.262404, 0.263070, 0.267399, 0.263070),
    "fewest": (0.308691, 0.395604, 0.307359, 0.141858),
    "random": (0.517150, 0.601066, 0.505495, 0.465201),
}
LIMITS = (2, 4, 6, 8)
LOAD, NUM_ARRIVALS = 1.2, 300
"""Load (arriving work over capacity) with ``--cluster``, and jobs of an episode."""


def rules(seed: int) -> dict[str, Rule]:
    """All rules that are compared, by name."""
    found = {name: rule_named(name, seed) for name in (*RULES, "random")}
    return found | {f"at_most_{limit}": at_most(limit) for limit in LIMITS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where jobs run and how often they come.

    Attributes:
        cluster: where.
        spacing_s: Seconds between arrivals.
        episode_s: Time of the last one.
    """

    cluster: JobCluster
    spacing_s: float
    episode_s: float

    def requests(self, deadlines: str, seed: int) -> list[JobRequest]:
        """The arrivals of an episode."""
        return draw_requests(
            self.cluster, deadlines, seed, spacing_s=self.spacing_s, episode_s=self.episode_s
        )

    def make_env(self, deadlines: str) -> JobPartitionEnv:
        """The same as an environment."""
        return JobPartitionEnv(
            self.cluster, deadlines, spacing_s=self.spacing_s, episode_s=self.episode_s
        )


def unequal(cluster: str, models: str) -> Setting:
    """Jobs of 2000 steps of some zoo models on a preset or a cluster file."""
    jobs = {
        name: TrainingJob(graph=capture(load_workload(name)), num_steps=2000)
        for name in models.split(",")
    }
    where = EvaluatedCluster(Cluster.load(cluster), jobs)
    mean_s = statistics.fmean(where.alone_s(kind) for kind in jobs)
    spacing_s = mean_s / where.num_devices / LOAD
    return Setting(cluster=where, spacing_s=spacing_s, episode_s=NUM_ARRIVALS * spacing_s)


def baseline_rows(setting: Setting, deadlines: str, num_seeds: int) -> list[dict[str, object]]:
    """Blocking of each rule over the same episodes."""
    episodes = [(seed, setting.requests(deadlines, seed)) for seed in range(num_seeds)]
    rates = grouped(
        (name, blocking_rate(run_rule(setting.cluster, requests, rule, end_s=setting.episode_s)))
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
        option("--cluster", default="", help="preset or file; RAMP by default"),
        option("--models", default="resnet50,bert_base"),
    )
    setting = Setting(cluster=RampCluster(), spacing_s=SPACING_S, episode_s=EPISODE_S)
    if arguments.cluster:
        setting = unequal(arguments.cluster, arguments.models)
    rows: list[dict[str, object]] = []
    for deadlines in arguments.deadlines.split(","):
        rows += baseline_rows(setting, deadlines, arguments.seeds)
        if arguments.learn:
            make = partial(setting.make_env, deadlines)
            rows.append(learned_row(make, deadlines, arguments.seeds, arguments.learn))
    if arguments.cluster:  # nothing was recorded there
        rows = [{**row, "recorded": None} for row in rows]
    finish(arguments, {"rows": rows, "recorded": RECORDED})


if __name__ == "__main__":
    main()
