"""PPO learns to share a cluster among arriving jobs; three seeds, a fixed number of decisions."""

import numpy as np
import pytest

from heterog.agents.job_ppo import play, train_jobs
from heterog.envs.job_partition import JobPartitionEnv
from heterog.search.arrivals.deadlines import EPISODE_S, draw_requests
from heterog.search.arrivals.profiled import RampCluster
from heterog.search.arrivals.queueing import blocking_rate
from heterog.search.arrivals.rules import most_devices, run_rule
from tests.thorough import THOROUGH

CLUSTER = RampCluster()


@THOROUGH
@pytest.mark.parametrize("seed", range(3))
def test_ppo_blocks_fewer_than_maximum_partitioning_on_medium_deadlines(seed: int) -> None:
    model = train_jobs(
        lambda: JobPartitionEnv(CLUSTER, "C", episode_s=3e5), num_decisions=8192, seed=seed
    )
    requests = draw_requests(CLUSTER, "C", 0)
    most = blocking_rate(run_rule(CLUSTER, requests, most_devices, end_s=EPISODE_S))
    assert play(model, JobPartitionEnv(CLUSTER, "C"), 0)[0] < most


def test_the_policy_rejects_only_what_has_no_room_and_a_seed_gives_the_same_policy() -> None:
    def make() -> JobPartitionEnv:
        return JobPartitionEnv(CLUSTER, "C", episode_s=5e4)

    told: list[tuple[int, float]] = []
    models = [
        train_jobs(make, num_decisions=64, seed=4, report=lambda *row: told.append(row))
        for _ in range(2)
    ]
    assert told[0] == told[1]
    assert 0.0 < told[0][1] < 1.0
    env = make()
    seen, _ = env.reset(options={"episode": 1})
    is_over = False
    while not is_over:
        actions = [int(model.predict(seen, deterministic=True)[0]) for model in models]
        assert actions[0] == actions[1]
        with_room = np.flatnonzero(seen["has_room"]).tolist()
        assert actions[0] in (with_room[1:] or [0])
        seen, _, is_over, _, _ = env.step(actions[0])
