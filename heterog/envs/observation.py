"""Observations of a model on a cluster for policies: ratios only, in numpy.

Every time is divided by T0, the harmonic compute bound of the pair (all devices busy all the time
with the whole model), and a block's times are multiplied by the number of blocks; every amount of
memory is divided by memory. Logarithms are halved and clipped. There are no ids, absolute units or
sizes, so weights trained on some models and clusters can be used for any others.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt

from heterog.cluster.topology import Cluster
from heterog.envs.candidates import ModelMemory
from heterog.envs.coarse import CoarseEvaluator
from heterog.envs.merging import sums
from heterog.lowering.channels import ChannelKind
from heterog.lowering.group_edges import group_edges, moved_bytes
from heterog.lowering.program import IntArray
from heterog.strategy.division import split_evenly
from heterog.strategy.strategy import Decision, Sync

OBSERVATION_VERSION = 2
"""Version of the features' meaning; checkpoints of other versions are refused."""

Array = npt.NDArray[np.float32]

NUM_BLOCK_FEATURES = 18
NUM_DEVICE_FEATURES = 8
NUM_LINK_FEATURES = 3
NUM_BLOCK_DEVICE_FEATURES = 2
NUM_CANDIDATE_FEATURES = 17
NUM_PAIR_FEATURES = 6
NUM_SYNCS = 4
WHOLE_SLOWER, WHOLE_SUM = 5, 6
"""Columns of ``candidates``: larger of the whole model's compute and synchronisation; the sum."""
WHOLE_OVERFLOWS = 8
"""Column of ``candidates``: 1 if some device cannot hold its part of the whole model."""
PAIR_SLOWER = 4
"""Column of ``pairs``: the larger of a block's compute and synchronisation times."""

_KINDS = (
    ("mm", "addmm", "bmm", "baddbmm", "linear"),
    ("convolution", "conv"),
    ("attention", "_softmax", "_log_softmax", "scaled_dot_product"),
    ("native_layer_norm", "native_batch_norm", "native_group_norm", "mean", "rsqrt", "var"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The static part of an observation: a pair of model and cluster.

    Attributes:
        blocks: Compute, parameters, traffic and memory of each block of ops, its place in the
            graph, the mix of its ops, and the number of micro-batches.  # [G, 18]
        edges: Pairs of blocks; the first feeds the second.  # [2, E]
        edge_time: Seconds that the edge's bytes take on an average NIC.  # [E, 1]
        devices: Speed, memory and NIC of each device.  # [D, 8]
        links: Rate, latency, and whether two devices share a host.  # [D, D, 3]
        block_devices: Seconds of each block on each device.  # [G, D, 2]
        candidates: Devices, compute, synchronisation, memory, if all blocks take it.  # [C, 17]
        shares: Part of the batch on each device.  # [C, D]
        pairs: Compute, synchronisation and memory of each block under each candidate.  # [G, C, 6]
        overlap: Part of the batch on the same devices under two candidates.  # [C, C]
        fits: Whether a block would fit under a candidate if it were alone.  # [G, C] bool
    """

    blocks: Array
    edges: npt.NDArray[np.int64]
    edge_time: Array
    devices: Array
    links: Array
    block_devices: Array
    candidates: Array
    shares: Array
    pairs: Array
    overlap: Array
    fits: npt.NDArray[np.bool_]

    def __post_init__(self) -> None:
        for field in fields(self):
            getattr(self, field.name).flags.writeable = False


@cache
def _family(kind: str) -> int:
    """Place of an op's kind in ``_KINDS``; kinds that are not there come last."""
    return next((n for n, names in enumerate(_KINDS) if kind.startswith(names)), len(_KINDS))


def _log(ratio: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Half the logarithm of a ratio, clipped at 1/20,000 and 20,000."""
    return np.asarray(0.5 * np.log(np.clip(np.asarray(ratio, np.float64), 5e-5, 2e4)))


class Observer:
    """Makes the observation of a pair.

    Args:
        evaluator: Evaluator of the graph and cluster.
        memory: Memory of the graph's blocks.
        table: The candidate decisions.

    Attributes:
        bound_s: Compute seconds of the whole model on all devices together, each at full speed.
    """

    def __init__(
        self, evaluator: CoarseEvaluator, memory: ModelMemory, table: tuple[Decision, ...]
    ) -> None:
        self.evaluator, self.memory, self.table = evaluator, memory, table
        cluster, tables = evaluator.cluster, evaluator.tables
        self.cluster: Cluster = cluster
        self.batch = evaluator.graph.batch_size
        self.num_blocks = tables.num_groups
        self.num_devices = cluster.num_devices
        self.type_of = np.array(cluster.type_index)
        self.counts = np.zeros((len(table), cluster.num_devices), np.int64)
        self.member = np.zeros((len(table), cluster.num_devices), np.bool_)
        self.state_of = np.zeros((len(table), cluster.num_devices))
        for number, decision in enumerate(table):
            self.counts[number, list(decision.devices)] = decision.shares
            self.member[number, list(decision.devices)] = True
            # Served state counts on every device, because policies were trained with that.
            part = 1.0 if decision.sync.is_served else memory.state_part(decision)
            self.state_of[number, list(decision.devices)] = part
        # Devices with equal columns are equal under every candidate; one of each is enough.
        kinds = [self.type_of, memory.usable_bytes]
        columns = np.ascontiguousarray(np.concatenate([self.counts, self.state_of, kinds]).T)
        first = {column.tobytes(): len(columns) - 1 - n for n, column in enumerate(columns[::-1])}
        self._different = np.array(sorted(first.values()))
        self.whole = np.stack(
            [
                self._block_seconds(type_number, self.batch)
                for type_number in range(len(cluster.device_types))
            ]
        )[self.type_of]  # seconds of each block with the whole batch  # [D, G]
        self.bound_s = 1.0 / (1.0 / self.whole.sum(axis=1)).sum()
        self.nic = np.array([
            cluster.nic_bandwidth_bytes_per_s[host] if cluster.num_hosts > 1
            else cluster.hosts[host].intra.bandwidth_bytes_per_s
            for host in range(cluster.num_hosts)
        ])  # fmt: skip
        self.mean_rate = float(np.exp(np.log(self.nic).mean()))

    def _block_seconds(self, kind: int, samples: int) -> npt.NDArray[np.float64]:
        group = self.evaluator.tables.op_group
        seconds = self.evaluator.prices.op_seconds(kind, samples)
        return sums(group[group >= 0], seconds[group >= 0], self.num_blocks)

    def observe(self, num_micro: int = 1) -> Observation:
        """The observation.

        Args:
            num_micro: Number of micro-batches that the batch is cut into.
        """
        if num_micro == 1:
            return self._plain
        blocks = self._plain.blocks.copy()
        blocks[:, -1] = _log(num_micro)
        return replace(self._plain, blocks=blocks, fits=self._fits(num_micro))

    @cached_property
    def _plain(self) -> Observation:
        """The observation with one micro-batch; others change only a column and ``fits``."""
        edges, edge_bytes = group_edges(self.evaluator.tables)
        pairs, candidates = self._candidates()
        scale = self.num_blocks / self.bound_s
        return Observation(
            blocks=self._blocks(edges, edge_bytes).astype(np.float32),
            edges=edges.astype(np.int64),
            edge_time=_log(edge_bytes / self.mean_rate * scale).astype(np.float32)[:, None],
            devices=self._devices().astype(np.float32),
            links=self._links().astype(np.float32),
            block_devices=np.stack(
                [
                    _log(self.whole.T * scale),
                    _log(self.whole.T / np.maximum(self.whole.T.min(1, keepdims=True), 1e-12)),
                ],
                axis=2,
            ).astype(np.float32),
            candidates=candidates.astype(np.float32),
            shares=(self.counts / self.batch).astype(np.float32),
            pairs=pairs.astype(np.float32),
            overlap=self._overlap().astype(np.float32),
            fits=self._fits(1),
        )

    def _blocks(
        self, edges: IntArray, edge_bytes: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        memory, num = self.memory, self.num_blocks
        compute = (1.0 / (1.0 / np.maximum(self.whole, 1e-15)).sum(axis=0)) / self.bound_s
        parameters = memory.gradient_bytes / max(memory.gradient_bytes.sum(), 1.0)
        out = sums(edges[0], edge_bytes, num)
        saved = memory.saved_bytes + self.batch * memory.saved_bytes_per_sample
        rate_s = num / self.mean_rate / self.bound_s
        position = np.arange(num) / max(num - 1, 1)
        return np.column_stack([
            _log(compute * num),
            _log(parameters * num),
            _log(memory.gradient_bytes * rate_s),
            _log(out * rate_s),
            _log(memory.state_bytes * num / memory.usable_bytes.mean()),
            _log(saved * num / memory.usable_bytes.sum()),
            position,
            np.cumsum(compute) / max(compute.sum(), 1e-12),
            np.cumsum(parameters),
            np.full(num, np.log(num) / 4.0),
            _log(self.whole.max(axis=0) / np.maximum(self.whole.min(axis=0), 1e-12)),
            self._forward_s / np.maximum(self.whole[self.type_of == 0].max(axis=0), 1e-12),
            self._kinds(),
            np.full(num, _log(1)),
        ])  # fmt: skip

    @cached_property
    def _forward_s(self) -> npt.NDArray[np.float64]:
        """Seconds of each block's forward pass on the first type of device."""
        tables, graph = self.evaluator.tables, self.evaluator.graph
        phase = np.array([int(graph.ops[op].phase) for op in tables.op_id])
        forward = (tables.op_group >= 0) & (phase == 0)
        seconds = self.evaluator.prices.op_seconds(0, self.batch)[forward]
        return sums(tables.op_group[forward], seconds, self.num_blocks)

    @cached_property
    def cheapest_to_recompute(self) -> npt.NDArray[np.intp]:
        """Blocks by bytes freed per second of forward pass, the most first."""
        lets_go = self.memory.saved_bytes_per_sample - self.memory.passed_bytes_per_sample
        return np.argsort(-lets_go / np.maximum(self._forward_s, 1e-12))

    def _kinds(self) -> npt.NDArray[np.float64]:
        """Parts of each block's work: products, convolutions, attention, norms, the rest."""
        graph, evaluator = self.evaluator.graph, self.evaluator
        fine, block = evaluator.fine_op, evaluator.fine_block
        work = graph.flops[fine] + 17.0 * graph.bytes_moved[fine]
        family = np.array([_family(graph.ops[op].kind) for op in fine])
        real = block >= 0
        width = len(_KINDS) + 1
        mixed = sums(
            block[real] * width + family[real], work[real], self.num_blocks * width
        ).reshape(self.num_blocks, width)
        return np.asarray(mixed / np.maximum(mixed.sum(axis=1, keepdims=True), 1e-12))

    def _devices(self) -> npt.NDArray[np.float64]:
        cluster, memory = self.cluster, self.memory
        speed = self.bound_s / self.whole.sum(axis=1)  # sums to 1
        host = np.array(cluster.host_of)
        inner = np.array([each.intra.bandwidth_bytes_per_s for each in cluster.hosts])
        siblings = np.bincount(host, minlength=cluster.num_hosts)[host]
        usable = memory.usable_bytes
        return np.column_stack([
            _log(speed * self.num_devices),
            speed / speed.max(),
            _log(usable / max(memory.state_bytes.sum(), 1.0)),
            usable / usable.max(),
            _log(self.nic[host] / self.mean_rate),
            _log(memory.gradient_bytes.sum() / self.nic[host] / self.bound_s),
            siblings / self.num_devices,
            _log(inner[host] / self.mean_rate),
        ])  # fmt: skip

    def _links(self) -> npt.NDArray[np.float64]:
        """Features of each pair of devices; zeros between a device and itself."""
        cluster, size = self.cluster, self.memory.gradient_bytes.sum()
        host = np.array(cluster.host_of)
        is_inside = host[:, None] == host[None, :]
        rate = np.array([link.bandwidth_bytes_per_s for link in cluster.resources])
        of_device = np.array([cluster.links_of(device) for device in range(self.num_devices)])
        nic_out, nic_in, port_out, port_in = rate[of_device].T
        bottleneck = np.where(
            is_inside,
            np.minimum(port_out[:, None], port_in[None, :]),
            np.minimum(nic_out[:, None], nic_in[None, :]),
        )
        latency_between = np.zeros((self.num_devices, self.num_devices))
        for limit in cluster.pairs:
            of_pair = np.ix_(np.isin(host, limit.sources), np.isin(host, limit.targets))
            bottleneck[of_pair] = np.minimum(bottleneck[of_pair], limit.bandwidth_bytes_per_s)
            latency_between[of_pair] = np.maximum(latency_between[of_pair], limit.latency_s)
        nic_s = np.array([each.nic_latency_s for each in cluster.hosts])[host]
        inside_s = np.array([each.intra.latency_s for each in cluster.hosts])[host]
        latency = np.where(is_inside, inside_s[:, None], np.maximum(nic_s[:, None], nic_s))
        latency = np.maximum(latency, latency_between)
        # Blocks share the bytes, but each block pays the whole latency.
        seconds, latency = size / bottleneck, latency * self.num_blocks
        links = np.stack(
            [_log(seconds / self.bound_s), _log(latency / self.bound_s), is_inside], -1
        )
        links[np.arange(self.num_devices), np.arange(self.num_devices)] = 0.0
        return links

    def _candidates(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """(features of block and candidate, features of candidates)."""
        num, table, memory = self.num_blocks, self.table, self.memory
        compute, sync = self.compute_seconds, self.sync_seconds
        ideal = 1.0 / (1.0 / np.maximum(self.whole, 1e-15)).sum(axis=0)
        usable, member = memory.usable_bytes[self._different], self.member
        per_sample = np.asarray(memory.saved_bytes_per_sample, np.float64)
        worst = np.empty((num, len(table)))
        filled = np.zeros((len(table), len(usable)))
        for block, held in enumerate(self._held(per_sample)):
            worst[block] = (held / usable).max(axis=1)
            filled += held
        scale = num / self.bound_s
        pairs = np.stack(
            [
                _log(compute * scale),
                _log(sync * scale),
                _log((compute + sync) * scale),
                _log(compute / np.maximum(ideal[:, None], 1e-12)),
                _log(np.maximum(compute, sync) * scale),
                _log(worst * num),
            ],
            axis=2,
        )
        hosts = np.array([len({self.cluster.host_of[d] for d in c.devices}) for c in table])
        speed = self.bound_s / self.whole.sum(axis=1)
        total, total_sync = compute.sum(axis=0), sync.sum(axis=0)
        peak = (filled / usable).max(axis=1)
        slowest = np.array(
            [min(self.nic[self.cluster.host_of[d]] for d in c.devices) for c in table]
        )
        kinds = np.zeros((len(table), NUM_SYNCS))
        for number, decision in enumerate(table):
            if len(decision.devices) > 1:
                # ZeRO-1 loads links with a reduce-scatter and an all-gather.
                sliced = decision.sync.is_sharded
                seen = Sync.REDUCE_SCATTER_ALL_GATHER if sliced else decision.sync
                kinds[number, int(seen)] = 1.0
        even = [c.shares == split_evenly(self.batch, len(c.devices)) for c in table]
        candidates = np.column_stack([
            member.mean(axis=1),
            hosts / self.cluster.num_hosts,
            member @ speed,
            _log(total / self.bound_s),
            _log(total_sync / self.bound_s),
            _log(np.maximum(total, total_sync) / self.bound_s),
            _log((total + total_sync) / self.bound_s),
            _log(peak),
            (peak > 1.0).astype(np.float64),
            kinds,
            np.array(even, np.float64),
            (member.sum(axis=1) == 1).astype(np.float64),
            _log(slowest / self.mean_rate),
            self.counts.max(axis=1) / self.batch,
        ])  # fmt: skip
        return pairs, candidates

    def _held(self, per_sample: npt.NDArray[np.float64]) -> Iterator[npt.NDArray[np.float64]]:
        """Bytes of each block on distinct devices under each candidate.  # each [C, T]"""
        state, counts = self.state_of[:, self._different], self.counts[:, self._different]
        for of_state, of_sample in zip(self.memory.state_bytes, per_sample, strict=True):
            yield of_state * state + of_sample * counts

    @cached_property
    def compute_seconds(self) -> npt.NDArray[np.float64]:
        """Seconds of each block on its slowest device under each candidate.  # [G, C]"""
        key = self.type_of[None, :] * (self.batch + 1) + self.counts
        unique, inverse = np.unique(np.where(self.counts > 0, key, 0), return_inverse=True)
        rows = np.zeros((len(unique), self.num_blocks))
        for number, value in enumerate(unique.tolist()):
            kind, samples = divmod(value, self.batch + 1)
            if samples:
                rows[number] = self._block_seconds(kind, samples)
        inverse = inverse.reshape(self.counts.shape)
        slowest = rows[inverse[:, 0]]
        for device in self._different[1:]:
            np.maximum(slowest, rows[inverse[:, device]], out=slowest)
        return slowest.T

    @cached_property
    def sync_seconds(self) -> npt.NDArray[np.float64]:
        """Seconds to synchronise each block's gradients alone.  # [G, C]"""
        rate, latency = self._sync_costs()
        gradient_bytes = self.memory.gradient_bytes
        sync = gradient_bytes[:, None] * rate + latency
        sync[gradient_bytes == 0.0] = 0.0
        return sync

    @cached_property
    def cut_seconds(self) -> npt.NDArray[np.float64]:
        """Seconds of the values across a cut after each block, both ways, on an average NIC.

        Each value counts once, however many blocks on the other side read it.  # [G]
        """
        tables, num = self.evaluator.tables, self.num_blocks
        first = tables.op_group[tables.value_op].copy()  # first block that makes or reads a value
        last = first.copy()
        read = tables.slot_group >= 0
        np.minimum.at(first, tables.slot_value[read], tables.slot_group[read])
        np.maximum.at(last, tables.slot_value[read], tables.slot_group[read])
        crosses = (first >= 0) & (last > first)
        moved = moved_bytes(tables)[crosses]
        change = sums(first[crosses], moved, num) - sums(last[crosses], moved, num)
        return np.asarray(np.maximum(np.cumsum(change), 0.0) / self.mean_rate)

    def _sync_costs(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Seconds per gradient byte, and latency, of each candidate's synchronisation."""
        evaluator, cluster = self.evaluator, self.cluster
        rate, latency = np.zeros(len(self.table)), np.zeros(len(self.table))
        for number, decision in enumerate(self.table):
            if len(decision.devices) == 1:
                continue
            if decision.sync.is_served:
                # Servers balanced over the members: 2 m (n - m) / n payloads per NIC and way.
                n = len(decision.devices)
                hosts = [cluster.host_of[device] for device in decision.devices]
                counts = Counter(hosts)
                rate[number] = max(
                    2.0 * m * (n - m) / n / self.nic[host] if len(counts) > 1
                    else 2.0 * (n - 1) / n / cluster.hosts[host].intra.bandwidth_bytes_per_s
                    for host, m in counts.items()
                )  # fmt: skip
                ends = decision.devices[0], decision.devices[-1]
                latency[number] = 2.0 * cluster.latency_s(*ends)
                continue
            for channel in evaluator.channels.for_decision(decision):
                found = evaluator.channels[channel]
                assert found.kind != ChannelKind.POINT_TO_POINT
                cost = evaluator.cost_model.channel_seconds(cluster, found)
                rate[number] += cost.seconds_per_byte
                latency[number] += cost.latency_s + cost.fill_s
        return rate, latency

    def _overlap(self) -> npt.NDArray[np.float64]:
        """Part of the batch on the same devices under two candidates.  # [C, C]"""
        end = np.cumsum(self.counts, axis=1)
        begin = end - self.counts
        total = np.zeros((len(self.table), len(self.table)))
        for device in range(self.num_devices):
            own = np.flatnonzero(self.counts[:, device])
            first, last = begin[own, device], end[own, device]
            common = np.minimum.outer(last, last) - np.maximum.outer(first, first)
            total[np.ix_(own, own)] += np.maximum(common, 0)
        return total / self.batch

    def _fits(self, num_micro: int) -> npt.NDArray[np.bool_]:
        memory = self.memory
        # Saved values of all micro-batches may be alive at once, temporary ones of one only.
        per_sample = memory.saved_bytes_per_sample + memory.inner_bytes_per_sample / num_micro
        usable = memory.usable_bytes[self._different]
        fits = np.array([(held <= usable).all(axis=1) for held in self._held(per_sample)])
        # A block that fits nowhere may take any candidate; its score then has the overflow.
        return np.asarray(fits | ~fits.any(axis=1, keepdims=True))
