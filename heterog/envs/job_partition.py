"""The environment of arriving jobs: how many devices each job gets."""

from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from heterog.envs.spaces import Padded
from heterog.errors import HeterogError, experimental
from heterog.search.arrivals.profiled import (
    DEADLINES,
    EPISODE_S,
    SPACING_S,
    RampCluster,
    draw_requests,
)
from heterog.search.arrivals.queueing import (
    JobCluster,
    JobFeatures,
    JobQueueing,
    JobRequest,
    blocking_rate,
    causes,
)

NUM_JOB_FEATURES = 15
_MOST_ACTIONS = 4096
_MOST_SHOWN = 64.0
"""Most actions of an agent, and the clip of a deadline's factor in observations."""


@experimental
class JobPartitionEnv(gym.Env[Padded, Any]):
    """Decide for each arriving job how many devices it gets, as PAC-ML does.

    ## Description
    Jobs arrive one by one. Each job gets devices at once or is blocked: rejected, without room, or
    too slow for the time that its user accepts. By default, an episode is the paper's: five
    profiled models in equal numbers, 1001 arrivals at a spacing of 1000 s, on 32 workers of a RAMP
    network, with perfect splits. Perfect splits leave a problem of queueing; with
    ``heterog.search.arrivals.evaluated.EvaluatedCluster`` a job is as fast as heterog's evaluator
    predicts on the devices that it gets.

    ## Action space
    ``Discrete(A + 1)``, A is 16 by default: 0 rejects the job, others are the largest number of
    parts of an op (the number of devices, with an ``EvaluatedCluster``). An illegal action
    (``action_mask`` is 0) rejects the job; ``info["masked_actions"]`` counts these actions.

    ## Observation space
    A ``Dict`` of arrays:

    | key | shape | what |
    |---|---|---|
    | job | 15 | ops, edges, time alone, acceptable time, its factor, the same factor unscaled, \
memory, edge bytes, steps, mean and median of compute, memory and edges |
    | cluster | 2 | part of the devices that are taken; jobs that run over devices |
    | action_mask | A + 1 | degrees that are no more than the free devices |
    | has_room | A + 1 | degrees for which this job has a place now |

    Features of jobs are scaled to 0 to 1 between the least and the most in the episode. Unlike in
    the paper, single ops have no features, and ``has_room`` is new.

    ## Reward
    1 for a job that is accepted, -1 for one that is blocked.

    ## Episode
    ``reset`` draws the arrivals from its seed; the episode ends when all jobs are decided. The
    last ``info`` has ``blocking_rate`` and ``causes``.

    ## Arguments
    ``cluster``: where jobs run, the paper's by default. ``deadlines``: ``A`` to ``D``, even,
    tight, medium, loose. ``spacing_s`` and ``episode_s``: spacing and span of arrivals.
    ``counts_unfinished``: whether jobs that still run at the end count as blocked in
    ``blocking_rate``, as in the paper.
    ``render_mode="ansi"``: ``render`` gives a line.

    ## Version
    v0
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012  (Gymnasium's way)

    def __init__(
        self,
        cluster: JobCluster | None = None,
        deadlines: str = "C",
        *,
        spacing_s: float = SPACING_S,
        episode_s: float = EPISODE_S,
        counts_unfinished: bool = True,
        render_mode: str | None = None,
    ) -> None:
        self.render_mode = render_mode
        self.cluster: JobCluster = cluster or RampCluster()
        self.deadlines = deadlines
        self._spacing_s, self._episode_s = spacing_s, episode_s
        self._end_s = episode_s if counts_unfinished else float("inf")
        if deadlines not in DEADLINES:
            raise HeterogError(f"deadlines are one of {', '.join(DEADLINES)}, not {deadlines!r}.")
        num_actions = self.cluster.degrees[-1] + 1
        if num_actions > _MOST_ACTIONS:
            raise HeterogError(
                f"{num_actions} actions; at most {_MOST_ACTIONS} are learned. Divide the cluster."
            )
        self.action_space = gym.spaces.Discrete(num_actions)
        self.observation_space: gym.Space[Any] = gym.spaces.Dict(
            {
                "job": gym.spaces.Box(0.0, _MOST_SHOWN, (NUM_JOB_FEATURES,), np.float32),
                "cluster": gym.spaces.Box(0.0, 1.0, (2,), np.float32),
                "action_mask": gym.spaces.Box(0, 1, (num_actions,), np.int8),
                "has_room": gym.spaces.Box(0, 1, (num_actions,), np.int8),
            }
        )
        self._features = {
            kind: _numbers(self.cluster.features(kind)) for kind in self.cluster.kinds
        }

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Padded, dict[str, Any]]:
        """Draw the arrivals of an episode; ``options={"episode": number}`` chooses them."""
        super().reset(seed=seed)
        episode = (options or {}).get("episode")
        drawn = self.np_random.integers(2**31) if episode is None else episode
        requests = draw_requests(
            self.cluster,
            self.deadlines,
            int(drawn),
            spacing_s=self._spacing_s,
            episode_s=self._episode_s,
        )
        self.queueing = JobQueueing(self.cluster, requests, end_s=self._end_s)
        self._masked = 0
        self._scale(requests)
        return self._observe(), {"masked_actions": 0}

    def step(self, action: int | np.int64) -> tuple[Padded, float, bool, bool, dict[str, Any]]:
        """Decide about the job at hand."""
        degree = int(action)
        if degree and degree not in self.queueing.legal():
            degree, self._masked = 0, self._masked + 1
        verdict = self.queueing.decide(degree)
        assert verdict is not None  # jobs do not wait here
        is_over = self.queueing.request is None
        info: dict[str, Any] = {"masked_actions": self._masked, "outcome": str(verdict.outcome)}
        if is_over:
            final = self.queueing.final()
            info |= {"blocking_rate": blocking_rate(final), "causes": causes(final)}
        return self._observe(), 1.0 if verdict.is_accepted else -1.0, is_over, False, info

    def action_masks(self) -> npt.NDArray[np.bool_]:
        """Legal degrees of the job at hand, as ``MaskablePPO`` reads them.  # [A + 1]"""
        return self._observe()["action_mask"].astype(bool)

    def render(self) -> str | None:
        """The job at hand and the devices that are free, in a line; ``None`` if not asked."""
        if self.render_mode is None:
            return None
        state = self.queueing
        job = "all jobs are decided" if state.request is None else f"job {state.request.name}"
        return f"{job}: {state.num_free} of {state.cluster.num_devices} devices are free"

    def _scale(self, requests: list[JobRequest]) -> None:
        """Store the least and the range of each feature in the episode."""
        rows = np.array([self._raw(request) for request in requests])
        self._low = rows.min(axis=0)
        self._range = np.maximum(rows.max(axis=0) - self._low, 1e-12)

    def _raw(self, request: JobRequest) -> list[float]:
        alone_s = self.cluster.alone_s(request.kind)
        factor = min(request.acceptable_s / alone_s, _MOST_SHOWN)
        num_ops, num_edges, *others = self._features[request.kind]
        return [num_ops, num_edges, alone_s, factor * alone_s, factor, factor, *others]

    def _observe(self) -> Padded:
        state = self.queueing
        num_actions = self.cluster.degrees[-1] + 1
        mask, room = np.zeros(num_actions, np.int8), np.zeros(num_actions, np.int8)
        job = np.zeros(NUM_JOB_FEATURES, np.float32)
        mask[0] = room[0] = 1
        if state.request is not None:
            raw = np.array(self._raw(state.request))
            scaled = np.clip((raw - self._low) / self._range, 0.0, 1.0)
            scaled[5] = raw[5]  # the factor itself
            job[:] = scaled
            for degree in state.legal():
                mask[degree] = 1
                room[degree] = state.place(degree) is not None
        taken = np.array([state.cluster.num_devices - state.num_free, state.num_running])
        return {
            "job": job,
            "cluster": np.minimum(taken / state.cluster.num_devices, 1.0).astype(np.float32),
            "action_mask": mask,
            "has_room": room,
        }


def _numbers(seen: JobFeatures) -> list[float]:
    return [
        seen.num_ops, seen.num_edges, seen.memory_bytes, seen.edge_bytes, seen.num_steps,
        seen.compute_mean, seen.compute_median, seen.memory_mean, seen.memory_median,
        seen.edge_mean, seen.edge_median,
    ]  # fmt: skip
