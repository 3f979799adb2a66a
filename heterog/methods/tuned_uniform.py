"""One decision for the whole model, tuned by hand, on the best machines.

The best subset of machines; shares in proportion to measured speed; gradients by reduce-scatter
and all-gather, with slices in proportion to the rates of NICs, tensor by tensor or in 25 MiB
buckets, whichever is better; a full update on every rank; the best of the three orders.
"""

from heterog.cluster.topology import Cluster
from heterog.methods.data_parallel import Trials, replicated, uniform_strategy
from heterog.methods.planner import Searching
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.space import device_sets
from heterog.strategy.division import split_in_proportion
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES, Decision, Sync


def machine_subsets(cluster: Cluster) -> list[tuple[int, ...]]:
    """Device sets of whole machines, the largest first; at most 256 (see ``space``)."""
    hosts = [set(devices) for devices in cluster.host_devices]
    whole = [
        devices
        for devices in device_sets(cluster)
        if all(host <= set(devices) or host.isdisjoint(devices) for host in hosts)
    ]
    return sorted(whole, key=lambda devices: (-len(devices), devices))


def tuned_decision(
    evaluator: Evaluator, devices: tuple[int, ...], speeds: tuple[float, ...]
) -> Decision:
    """Replicas on some devices: shares in proportion to speed, slices to rates of NICs."""
    weights = tuple(speeds[device] for device in devices)
    shares = split_in_proportion(evaluator.graph.batch_size, weights)
    return replicated(evaluator.cluster, devices, shares, Sync.REDUCE_SCATTER_ALL_GATHER)


class _Search(Trials):
    num_returned = 3

    def search(self) -> None:
        """Try every subset of machines, both bucket sizes and every order."""
        evaluator, barrier = self.evaluator, self.problem.step_barrier
        for devices in machine_subsets(evaluator.cluster):
            decision = tuned_decision(evaluator, devices, evaluator.speeds)
            for size in (0, DEFAULT_BUCKET_BYTES):
                self.judge(
                    uniform_strategy(evaluator, decision, bucket_bytes=size, step_barrier=barrier)
                )


class TunedUniform(Searching):
    """One tuned decision for every group; see the module docstring."""

    name = "tuned_uniform"
    stage = "baseline"
    search = _Search
