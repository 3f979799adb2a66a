"""The roofline prior: seconds from data sheets, before anything has been measured.

    t = launch + max(FLOPs / (0.6 peak FLOP/s), bytes / (0.75 peak bandwidth))

(Williams, Waterman, Patterson 2009.) The two efficiencies and the launch overhead are fields of
the device type, so that a cluster file or a calibration can override them.
"""

from functools import lru_cache

import numpy as np

from heterog.cluster.catalog import product_peak
from heterog.cluster.hardware import DeviceType
from heterog.cluster.topology import Cluster
from heterog.graph.batch_plan import batch_plan
from heterog.graph.op_graph import Curve, FloatArray, OpGraph
from heterog.lowering.channels import Channel
from heterog.pricing.cost_model import ChannelSeconds, CostModel, alpha_beta

_SPREAD = 0.35


class Roofline:
    """Cost model from data-sheet numbers alone."""

    name = "roofline"

    def op_seconds(self, graph: OpGraph, device_type: DeviceType, samples: int) -> FloatArray:
        """Roofline seconds of every op at a local share; see ``CostModel``."""
        seconds = self.kernel_seconds(graph, device_type, *batch_plan(graph).work(samples))
        whole, batched = _measured(graph, device_type.name)
        share = samples / graph.batch_size
        measured = whole * (1.0 - batched + batched * share)
        for index, curve in _curves(graph, device_type.name):
            if batched[index]:
                measured[index] = on_curve(curve, share)
        return np.where(graph.is_view, 0.0, np.where(np.isnan(measured), seconds, measured))

    def work_seconds(
        self, graph: OpGraph, device_type: DeviceType, flops: FloatArray, num_bytes: FloatArray
    ) -> FloatArray:
        """Roofline seconds of parts of ops; measured seconds are scaled by the work."""
        seconds = self.kernel_seconds(graph, device_type, flops, num_bytes)
        measured, _ = _measured(graph, device_type.name)
        # An op without FLOPs is scaled by its bytes; an op without FLOPs and bytes is not scaled.
        by_bytes = num_bytes / np.where(graph.bytes_moved > 0, graph.bytes_moved, np.inf)
        fraction = np.where(
            graph.flops > 0, flops / np.where(graph.flops > 0, graph.flops, 1.0), by_bytes
        )
        fraction = np.where((graph.flops > 0) | (graph.bytes_moved > 0), fraction, 1.0)
        measured = measured * fraction
        for index, curve in _curves(graph, device_type.name):
            measured[index] = on_curve(curve, float(fraction[index]))
        return np.where(graph.is_view, 0.0, np.where(np.isnan(measured), seconds, measured))

    def kernel_seconds(
        self, graph: OpGraph, device_type: DeviceType, flops: FloatArray, num_bytes: FloatArray
    ) -> FloatArray:
        """Seconds of every op's kernel from its work, ignoring measurements.  # [num_ops]"""
        bandwidth = device_type.memory_bandwidth_bytes_per_s * device_type.memory_efficiency
        return device_type.launch_overhead_s + np.maximum(
            flops / attainable_flops_per_s(graph, device_type), num_bytes / bandwidth
        )

    def in_teams(self, members: int) -> CostModel:
        """This model, since a roofline has no host seconds."""
        return self

    def alone(self) -> CostModel:
        """This model, since exchanges make no op of a roofline slower."""
        return self

    def spread(self, graph: OpGraph, device_type: DeviceType) -> float:
        """Error on steps of language models on A100, H100, MI100 and MI210."""
        return _SPREAD

    def copy_seconds(self, device_type: DeviceType) -> tuple[float, float]:
        """Launch overhead, and seconds per byte moved through device memory."""
        bandwidth = device_type.memory_bandwidth_bytes_per_s * device_type.memory_efficiency
        return device_type.launch_overhead_s, 1.0 / bandwidth

    def channel_seconds(self, cluster: Cluster, channel: Channel) -> ChannelSeconds:
        """Alpha-beta seconds from the cluster's effective rates."""
        return alpha_beta(cluster, channel)


@lru_cache(maxsize=64)
def attainable_flops_per_s(graph: OpGraph, device_type: DeviceType) -> FloatArray:
    """FLOP/s that a large kernel of each op reaches, for its dtype.  # [num_ops]"""
    rates = [
        product_peak(
            device_type,
            graph.tensors[graph.output_start[index]].dtype if op.num_outputs else "float32",
        )
        for index, op in enumerate(graph.ops)
    ]
    return np.array(rates, np.float64) * device_type.compute_efficiency


@lru_cache(maxsize=64)
def _measured(graph: OpGraph, device_type: str) -> tuple[FloatArray, FloatArray]:
    """Measured seconds of the whole batch (NaN if none), and 1 where they scale with the share."""
    plan = batch_plan(graph)
    batched = (plan.flops_per_sample + plan.bytes_per_sample) > 0
    columns = [_whole(dict(op.measured_s).get(device_type, np.nan)) for op in graph.ops]
    return np.array(columns, np.float64), batched.astype(np.float64)


def _whole(measured: float | Curve) -> float:
    """Seconds of the whole batch."""
    return measured[-1][1] if isinstance(measured, tuple) else measured


@lru_cache(maxsize=64)
def _curves(graph: OpGraph, device_type: str) -> tuple[tuple[int, Curve], ...]:
    """Index and curve of each op that was measured at several shares on a device type."""
    return tuple(
        (index, found)
        for index, op in enumerate(graph.ops)
        for name, found in op.measured_s
        if name == device_type and isinstance(found, tuple)
    )


def on_curve(curve: Curve, share: float) -> float:
    """Seconds at a share of the batch, interpolated between measured points.

    Below the first point the line through the first two is extended, but not below the first
    point's seconds in proportion to the share.

    >>> points = ((0.5, 3.0), (1.0, 5.0))
    >>> on_curve(points, 0.75), on_curve(points, 0.25), on_curve(points, 0.0)
    (4.0, 2.0, 1.0)
    """
    shares = [point[0] for point in curve]
    seconds = [point[1] for point in curve]
    if share >= shares[0]:
        return float(np.interp(share, shares, seconds))
    in_proportion = seconds[0] * share / shares[0]
    if len(curve) == 1:
        return in_proportion
    slope = (seconds[1] - seconds[0]) / (shares[1] - shares[0])
    return max(seconds[0] - slope * (shares[0] - share), in_proportion)
