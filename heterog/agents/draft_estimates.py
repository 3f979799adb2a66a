"""Step time of a draft by a closed form, before anything is simulated.

Let C_s be the seconds in which stage s computes the whole batch, R_s those of its gradients and
M_s those of the values that cross the cut after it. A pipeline with m micro-batches takes

    T = max_s max(C_s, M_s) + (sum_s C_s - max_s C_s + sum_s M_s) / m + max_s max(0, R_s - C_s / 3)

and segments of one pass T = max(sum_s C_s + sum_s M_s, f_1). f_s is the time at which gradients of
stage s and all later ones are summed, the last stage first: f_s = max(f_(s+1), b_s) + R_s, but not
before b_s + 2 C_s / 3, with b_s the time at which the backward pass of stage s begins. If a device
lacks a part x of its memory, T is multiplied by 1 + 10 x.
"""

from collections.abc import Sequence

import numpy as np

from heterog.agents.drafter import Drafter
from heterog.agents.drafts import Draft, Shard, Stage, before
from heterog.lowering.group_edges import moved_between_groups
from heterog.lowering.program import FloatArray
from heterog.memo import kept
from heterog.simulator.engine import Order
from heterog.strategy.layouts.stages import Caps
from heterog.strategy.strategy import Keeps, Sync
from heterog.strategy.sync import Sharded

BACKWARD = 2 / 3
"""Part of a stage's seconds that is its backward pass."""
_AGAIN = {Keeps.NOTHING: 1 / 3, Keeps.PRODUCTS: 0.15, Keeps.ALL_BUT_SCORES: 0.05}
_HELD = {Keeps.NOTHING: 0.15, Keeps.PRODUCTS: 0.4, Keeps.ALL_BUT_SCORES: 0.6}
"""For each kind of recomputation, its seconds as a part of a stage's, and the part of the
activations that is held."""
MISSING = 10.0
"""Factor on the missing part of a device's memory, which lengthens a step."""


class DraftEstimates:
    """Estimates drafts.

    Args:
        drafter: Drafter of the problem.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        evaluator, cluster = drafter.evaluator, drafter.cluster
        tables, self._num = evaluator.tables, drafter.num_groups
        self._batch = drafter.graph.batch_size
        self._hosts = np.array(cluster.host_of)
        self._nic = np.array(cluster.nic_bandwidth_bytes_per_s)
        self._intra = np.array([host.intra.bandwidth_bytes_per_s for host in cluster.hosts])
        self._room = np.array([each.usable_memory_bytes for each in cluster.devices], float)
        self._ratio = float(tables.state_ratio)
        own = np.bincount(tables.parameter_group, tables.gradient_bytes, self._num)
        self._gradient, self._state = before(own), before(evaluator.group_state_bytes)
        self._saved = before(evaluator.group_saved_bytes)
        self._crossing = self._crossed_bytes()
        whole = drafter.seconds[:, -1, -1][drafter.types]
        self.bound_s = float(1.0 / (1.0 / whole).sum())

    def _crossed_bytes(self) -> FloatArray:
        """Bytes that cross the place before each group.  # [num_groups + 1]"""
        maker, reader, moved = moved_between_groups(self._drafter.evaluator.tables)
        change = np.zeros(self._num + 1)
        np.add.at(change, np.minimum(maker, reader) + 1, moved)
        np.add.at(change, np.maximum(maker, reader) + 1, -moved)
        return np.maximum(np.cumsum(change), 0.0)

    @kept
    def _of_devices(self, devices: tuple[int, ...]) -> tuple[int, int, float, float, float]:
        """(hosts, most devices of a host, slowest NIC, slowest inner link, least room)."""
        own = list(devices)
        hosts, counts = np.unique(self._hosts[own], return_counts=True)
        return (
            len(hosts), int(counts.max()), float(self._nic[hosts].min()),
            float(self._intra[hosts].min()), float(self._room[own].min()),
        )  # fmt: skip

    def _gradient_seconds(self, stage: Stage, num_bytes: float, num_micro: int) -> float:
        """Seconds in which the replicas of a stage sum gradients and get parameters back."""
        size = len(stage.devices)
        hosts, on_host, nic, inner, _ = self._of_devices(stage.devices)
        replicas = size / min(stage.team, on_host)
        if replicas <= 1.0:
            return 0.0
        passes = 2.0 * (1.0 - 1.0 / replicas)
        if stage.sync.is_served:
            passes = 2.0 * on_host * (1.0 - 1.0 / max(hosts, 2))
        elif stage.sync.sharded == Sharded.PARAMETERS:
            passes *= 0.5 + num_micro
        elif stage.sync.sharded == Sharded.GRADIENTS:
            passes *= 0.5 + 0.5 * num_micro
        seconds = passes * num_bytes / (nic if hosts > 1 else inner)
        if hosts > 1 and on_host > 1 and stage.sync == Sync.HIERARCHICAL:
            return 2.0 * (1.0 - 1.0 / hosts) * num_bytes / nic + passes * num_bytes / inner
        return seconds

    def _costs(self, draft: Draft) -> FloatArray:
        """Seconds of compute, gradients and messages of each stage, and the part it fills.

        Returns:
            # [4, num_stages]
        """
        ends, summed = (*draft.starts[1:], self._num), self._summed(draft.shards)
        rows = []
        for place, stage in enumerate(draft.stages):
            first, last = draft.starts[place], ends[place]
            seconds = self._drafter.stage_seconds(stage, draft.num_micro)
            compute = float(seconds[last] - seconds[first])
            compute *= 1.0 + (_AGAIN[draft.keeps] if draft.keeps is not None else 0.0)
            compute += self._team_seconds(stage, first, last)
            size = float(summed[last] - summed[first])
            gradients = self._gradient_seconds(stage, size, draft.num_micro)
            message = 0.0
            if place + 1 < len(draft.stages):
                message = self._message_seconds(stage, draft.stages[place + 1], last)
            rows.append((compute, gradients, message, self._fill(draft, place, first, last)))
        return np.array(rows).T

    def _team_seconds(self, stage: Stage, first: int, last: int) -> float:
        """Seconds in which teams sum activations: a sixth of those saved, in both passes."""
        _, on_host, _, inner, _ = self._of_devices(stage.devices)
        team = min(stage.team, on_host)
        if team <= 1:
            return 0.0
        summed = float(self._saved[last] - self._saved[first]) / 6.0 * team / len(stage.devices)
        return 2.0 * (team - 1) / team * 2.0 * summed / inner

    def _message_seconds(self, stage: Stage, following: Stage, place: int) -> float:
        if stage.devices == following.devices:
            return 0.0
        hosts, _, nic, inner, _ = self._of_devices(stage.devices)
        next_hosts, _, next_nic, _, _ = self._of_devices(following.devices)
        if (
            hosts == next_hosts == 1
            and self._hosts[stage.devices[0]] == self._hosts[following.devices[0]]
        ):
            return float(self._crossing[place] / inner)
        return float(self._crossing[place] / min(hosts * nic, next_hosts * next_nic))

    def _fill(self, draft: Draft, place: int, first: int, last: int) -> float:
        """Part of the memory of a stage's fullest device that the stage takes."""
        stage = draft.stages[place]
        _, on_host, _, _, room = self._of_devices(stage.devices)
        team = min(stage.team, on_host)
        replicas, ratio = max(len(stage.devices) / team, 1.0), self._ratio
        sliced = {0: 0.0, 1: ratio, 2: ratio + 1.0, 3: ratio + 2.0}[int(stage.sync.sharded)]
        state = float(self._state[last] - self._state[first]) / team
        state *= 1.0 - sliced / (2.0 + ratio) * (1.0 - 1.0 / replicas)
        part = max(samples for _, samples in self._drafter.samples_by_type(stage)) / self._batch
        behind = len(draft.stages) - place
        under_way = draft.num_micro
        if draft.caps:
            hidden = draft.caps - Caps.ONE_F_ONE_B
            under_way = min(under_way, behind + hidden * (behind - 1))
        elif draft.num_micro > 1 and draft.order != Order.RANK:
            under_way = min(under_way, 2 * behind)
        held = 1.0 if draft.keeps is None else _HELD[draft.keeps]
        saved = float(self._saved[last] - self._saved[first]) * part * held
        return (state + saved * under_way / draft.num_micro) / room

    def estimate_s(self, draft: Draft) -> float:
        """Seconds of a step by the closed form."""
        compute, gradients, messages, fills = self._costs(draft)
        if draft.is_disjoint and (draft.num_micro > 1 or draft.splits_backward):
            fill = (compute.sum() - compute.max() + messages.sum()) / draft.num_micro
            late = np.maximum(gradients - compute / 3.0, 0.0).max()
            seconds = max(compute.max(), messages.max()) + fill + late
        else:
            passed = compute.sum() + messages.sum()
            begin = (1.0 - BACKWARD) * passed
            done = 0.0
            for own, summed in zip(compute[::-1], gradients[::-1], strict=True):
                end = begin + BACKWARD * own
                done = max(max(done, begin) + summed, end)
                begin = end
            seconds = max(passed, done)
        fullest = fills.max() if draft.is_disjoint else fills.sum()
        return float(seconds * (1.0 + MISSING * max(fullest - 1.0, 0.0)))

    def logarithms(self, drafts: Sequence[Draft]) -> FloatArray:
        """Logarithm of the closed form over the bound of compute.  # [num_drafts]"""
        seconds = map(self.estimate_s, drafts)
        found = np.array([np.log(each / self.bound_s) for each in seconds], np.float32)
        return found.astype(np.float64)

    @kept
    def _summed(self, shards: tuple[Shard, ...]) -> FloatArray:
        """Bytes of summed gradients of the groups before each group; sharded groups have none."""
        own = np.diff(self._gradient)
        for shard in shards:
            own[list(self._drafter.groups_of(shard.way))] = 0.0
        return before(own)
