"""What do reinforcement learning and each algorithm of stable-baselines3 add to imitation?

    python experiments/learning_curves.py --json

For each seed, a policy learns by imitation; then every algorithm goes on from that policy with as
many evaluations. A row has the policy's exact draws on pairs of other models and clusters while it
learns, scored op by op, over the best data parallelism: the likeliest one, the mean of 16, and the
best of 16. What agents add to draws (uniform rows, steady noise) hides what a policy learns.
``imitation`` and ``mixed`` search their pairs again, which counts as evaluations, too.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rows import finish, keep_row, option, progress, read_rows, run, script_parser

from heterog.agents.benchmark.statistics import over_pairs
from heterog.agents.config import Algorithm, PolicyConfig, TrainingConfig
from heterog.agents.learner import Task, learner_of
from heterog.agents.policy import Policy, draw, score_pairs
from heterog.agents.sources import PairSource, captured
from heterog.agents.training import FIRST_PAIR, NO_FIT
from heterog.envs.clusters import ClusterRange
from heterog.envs.pair import Pair
from heterog.runtime.accelerators import num_threads

ALGORITHMS = (
    *(Algorithm.IMITATION, Algorithm.REINFORCE, Algorithm.MIXED),
    *("sb3:A2C", "sb3:PPO", "sb3:DQN"),
    *("sb3_contrib:MaskablePPO", "sb3_contrib:QRDQN", "sb3_contrib:TRPO"),
)
LEARNED_FROM = ("vgg19", "mobilenet_v2", "bert_base", "transformer_6l")
VALIDATED_ON = ("regnet_4500", "gpt_neox_9139", "mixer_7963", "hourglass_4207")
CLUSTERS = ClusterRange(max_devices=12)
NUM_CHECKS = 2
NUM_DRAWS = 16
MEASURES = ("greedy", "mean", "best_of_16")
FIRST = TrainingConfig(
    num_pairs=40,
    search_evaluations=150,
    num_steps=150,
    pairs_per_step=4,
    samples_per_pair=8,
    num_validation=12,
)
"""Settings of the imitation that all algorithms begin from, and of what follows unless it says."""


def validated(policy: Policy, pairs: Sequence[Pair]) -> dict[str, float]:
    """Geometric means over pairs of steps over the best data parallelism."""
    logs = []
    for number, (pair, scores) in enumerate(
        zip(pairs, score_pairs(policy.eval(), pairs), strict=True)
    ):
        rng = np.random.default_rng(number)
        rows = [
            draw(scores, pair, 1, rng, greedy=True).rows,
            draw(scores, pair, NUM_DRAWS, rng).rows,
        ]
        found = [pair.score(row) for row in np.concatenate(rows)]
        seconds = [each.step_time_s / pair.baseline_s for each in found]
        fits = [each.overflow == 0.0 for each in found]
        likeliest, *others = np.log(np.where(fits, seconds, NO_FIT))
        logs.append((likeliest, np.mean(others), min(others)))
        pair.forget()
    return dict(zip(MEASURES, np.exp(np.mean(logs, axis=0)).tolist(), strict=True))


def begun(source: PairSource, seed: int) -> Policy:
    """A policy taught by imitation."""
    config = replace(FIRST, seed=seed)
    torch.manual_seed(seed)
    learner = learner_of(Algorithm.IMITATION)(
        Task(source=source, config=config, policy=Policy(PolicyConfig()))
    )
    for step in range(config.num_steps):
        learner.advance(step)
    return learner.kept


def settings(algorithm: str, seed: int, learning_rate: float, evaluations: int) -> TrainingConfig:
    """Settings with which an algorithm draws about so many strategies."""
    config = replace(FIRST, algorithm=algorithm, seed=seed, learning_rate=learning_rate)
    per_step = config.pairs_per_step * config.samples_per_pair
    return replace(config, num_steps=math.ceil(evaluations / per_step))


def curve(
    source: PairSource,
    pairs: Sequence[Pair],
    policy: Policy,
    config: TrainingConfig,
    before: dict[str, float],
) -> Iterator[dict[str, Any]]:
    """Points of a learner's curve; ``before`` is what the policy reaches where it begins."""
    yield {"evaluations": 0, "cpu_s": 0.0, **before}
    begin, spent, step = time.process_time(), 0.0, 0
    learner = learner_of(config.algorithm)(Task(source=source, config=config, policy=policy))
    for check in range(1, NUM_CHECKS + 1):
        while step * NUM_CHECKS < config.num_steps * check:
            learner.advance(step)
            step += 1
        spent += time.process_time() - begin
        yield {
            "evaluations": learner.num_evaluations,
            "cpu_s": spent,
            **validated(learner.kept, pairs),
        }
        begin = time.process_time()


def lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A table: draws at each check over those at the beginning, means over seeds with 95 %."""
    for name in dict.fromkeys(row["algorithm"] for row in rows):
        own = [row["points"] for row in rows if row["algorithm"] == name]
        for check in range(NUM_CHECKS + 1):
            for what in MEASURES:
                found = over_pairs(np.array([each[check][what] / each[0][what] for each in own]))
                yield (
                    f"{name:24} {own[0][check]['evaluations']:6} {what:11} {found.value:.3f} "
                    f"[{found.low:.3f}, {found.high:.3f}] of the beginning, {len(own)} seeds"
                )


def main() -> None:
    """Make the rows that are missing."""
    asked = script_parser(
        __doc__,
        option("--algorithms", default=",".join(ALGORITHMS)),
        option("--seeds", type=int, default=5),
        option("--evaluations", type=int, default=512, help="of each algorithm"),
        option("--learning-rate", type=float, default=1e-4, help="after the imitation"),
        option("--graphs", type=Path, help="folder that keeps captured graphs"),
        option("-o", "--output", type=Path, help="JSON lines, added to"),
    ).parse_args()
    drawn = Path(__file__).with_name("drawn_models.py")
    learned, unseen = (
        [captured(name, asked.graphs) for name in names]
        for names in (LEARNED_FROM, [f"{drawn}:{name}" for name in VALIDATED_ON])
    )
    rows = read_rows(asked.output)
    done = {(row["algorithm"], row["seed"]) for row in rows}
    with num_threads(1):
        others = PairSource(graphs=unseen, wanted=CLUSTERS, judged=True)
        pairs = [others.pair(FIRST_PAIR + number) for number in range(FIRST.num_validation)]
        for seed in range(asked.seeds):
            missing = [n for n in asked.algorithms.split(",") if (n, seed) not in done]
            if not missing:
                continue
            source = PairSource(graphs=learned, wanted=CLUSTERS, seed=seed)
            first = begun(source, seed)
            before = validated(first, pairs)
            for name in missing:
                config = settings(name, seed, asked.learning_rate, asked.evaluations)
                policy = Policy(first.config)
                policy.load_state_dict(first.state_dict())
                points = list(curve(source, pairs, policy, config, before))
                rows.append({"algorithm": name, "seed": seed, "points": points})
                keep_row(asked.output, rows[-1])
                progress(str(rows[-1]))
    finish(asked, {"rows": rows}, lines(rows))


if __name__ == "__main__":
    run(main)
