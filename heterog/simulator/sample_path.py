"""A bound that accounts for launches of kernels and for samples that wait for one another.

The compute part (a) of ``lower_bound`` lets every part of an op run at the best throughput of any
share: as if the whole batch were in one kernel, whose launch and weights cost next to nothing, and
all devices nevertheless had an equal part of it. Both cannot be had. The larger a kernel, the
longer its samples are in it; the smaller, the more kernels there are.

Let kernel j do a part x_j of op o in c_j seconds on device d; the parts of an op add up to 1. Take
a dependency path of ops, and draw a part of the batch at random: at each op of the path it is in
kernel j with probability x_j, and the kernels that it is in run one after another within the step.
(Parts along the batch are the same samples at every op. Where an op reads all of another one, or
is split along another axis, any kernel of the next op waits for the one before.) So

    sum over the path of x_j c_j <= T,    and on every device    sum of c_j <= T.

The first taken alpha times, the second w_d times with sum_d w_d = 1, and everything that is not
known replaced by the best that it could be:

    (1 + alpha) T >= sum_{o on path} min_{d,x} (alpha + w_d / x) c(o,d,x)
                   + sum_{other o}   min_{d,x} (w_d / x) c(o,d,x)

for every alpha >= 0, w and path. With alpha = 0 this is (a). For n equal ops of a launch l and a
work v on D equal devices the right side is n (sqrt(alpha l) + sqrt(v / D))^2, and the best alpha
gives T >= n (l + v / D): by Cauchy and Schwarz, what data parallelism takes without communication.

Ops that differ in l / v would have kernels of different sizes there, several to a device: samples
that change devices from op to op, for nothing. Without micro-batches that cannot be: an op has one
kernel on each device, which holds the device's part x_d of the batch, so that an op of the path
counts for at least

    min over x with sum_d x_d = 1 of  sum_d (alpha x_d + w_d) c(o,d,x_d),    c(o,d,0) = 0

instead (``one_pass``). From below by weak duality: for every price p of a part it is at least
p + sum_d min(0, min_x (alpha x + w_d) c(o,d,x) - p x), and a p for each op is looked for.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from heterog.cluster.topology import Cluster, DeviceType
from heterog.graph.batch_plan import batch_plan
from heterog.graph.op_graph import FloatArray, OpGraph, Phase
from heterog.simulator.cost_model import CostModel
from heterog.simulator.lower_bound import (
    best_times,
    device_weights,
    heaviest_path,
    share_ranges,
)

_ROUNDING = 1e-9  # as in ``lower_bound``
_FINEST_STEP = 256  # as in ``lower_bound``; coarser, as each bound asks for all of them
# Parts of an op that may be split along any axis: each range of 1 % is priced by its small end, so
# the bound is lower by at most that, down to where a launch is all that is left.
_PART_RATIO = 0.99
_SMALLEST_PART = 2.0**-12
_EVALUATIONS = 200  # of a search in as many dimensions as there are types of devices
_HALVINGS = 24


def sample_path_s(
    graph: OpGraph,
    cluster: Cluster,
    cost_model: CostModel,
    *,
    with_op_rules: bool = False,
    one_pass: bool = False,
) -> float:
    """Seconds of a step with barrier that no strategy can go below; see the module docstring.

    Args:
        graph: One training step.
        cluster: The devices; its links do not matter.
        cost_model: Seconds of ops, from the model that judges strategies; more samples must
            not take less time.
        with_op_rules: Whether strategies may give ops rules of their own.
        one_pass: Whether strategies have neither micro-batches nor such rules.
    """
    assert not (with_op_rules and one_pass), "an op with rules may have several kernels"
    types = cluster.device_types
    counts = np.bincount(cluster.type_index, minlength=len(types))
    plan = batch_plan(graph)
    is_update = np.array([op.phase == Phase.UPDATE for op in graph.ops], np.bool_)
    follows_batch = ((plan.flops_per_sample + plan.bytes_per_sample) > 0) & ~is_update
    whole = np.array([best_times(graph, each, cost_model)[0] for each in types])
    tables = [_kernels(graph, each, cost_model, with_op_rules=with_op_rules) for each in types]
    is_free = whole.max(axis=0) == 0.0
    if with_op_rules:
        # Ops that do not follow the batch may be split, too.
        best = [(seconds / parts[:, None]).min(axis=0) for seconds, parts in tables]
        whole = np.where(is_free | is_update, whole, np.minimum(whole, best))
    # Ops that cost the same everywhere are looked at once.
    rows = np.concatenate([whole, *(seconds for seconds, _ in tables)])
    _, first, number = np.unique(rows, axis=1, return_index=True, return_inverse=True)
    number = number.reshape(-1)
    on_path = follows_batch & ~is_free
    small = [(seconds[:, first], parts) for seconds, parts in tables]

    def bound(alpha: float, weights: FloatArray) -> float:
        off_path = (weights[:, None] * whole[:, first]).min(axis=0)
        if one_pass:
            path = _in_one_pass(alpha, weights, counts, small)
        else:
            path = np.full(len(first), np.inf)
            for weight, (seconds, parts) in zip(weights, small, strict=True):
                of_type = ((alpha + weight / parts)[:, None] * seconds).min(axis=0)
                np.minimum(path, of_type, out=path)
        gain = np.where(on_path, (path - off_path)[number], 0.0)
        total = off_path[number].sum() + heaviest_path(graph, gain)
        return float(total / (1.0 + alpha))

    found = _highest(bound, device_weights(whole.T, counts), counts) * (1.0 - _ROUNDING)
    if one_pass:
        # A bound with micro-batches holds without them, and each search may end anywhere.
        found = max(found, sample_path_s(graph, cluster, cost_model))
    return found


def _highest(
    bound: Callable[[float, FloatArray], float],
    by_compute: FloatArray,
    counts: npt.NDArray[np.integer],
) -> float:
    """The highest bound found over the weight of the path and those of the devices.

    Any point is a valid bound, so finding the very best one is not necessary.
    """
    import scipy.optimize  # takes 0.3 s, which most of what imports this need not wait for

    start = np.maximum(by_compute, 1e-3 / counts.sum())  # the search moves by factors

    def given(point: FloatArray) -> tuple[float, FloatArray]:
        weights = start * np.exp(np.append(point[1:], 0.0))
        return float(np.exp(point[0])), weights / float(counts @ weights)

    # It begins with a path that weighs a twentieth of the devices, whose weights are those of (a).
    begin = np.append(np.log(0.05), np.zeros(len(counts) - 1))
    # scipy's stubs do not know all the options of this method.
    found = scipy.optimize.minimize(  # type: ignore[call-overload]
        lambda point: -bound(*given(point)),
        begin,
        method="Nelder-Mead",
        options={"maxfev": _EVALUATIONS, "initial_simplex": _simplex(begin)},
    )
    return max(-float(found.fun), bound(0.0, by_compute))


def _in_one_pass(
    alpha: float,
    weights: FloatArray,
    counts: npt.NDArray[np.int64],
    tables: Sequence[tuple[FloatArray, FloatArray]],
) -> FloatArray:
    """The least cost of every op on the path if it has at most one kernel on each device.

    Args:
        alpha: Weight of the path.
        weights: Weight of a device of each type.
        counts: Number of devices of each type.
        tables: (seconds [num_parts, num_ops], parts [num_parts]) of the kernels on each type.

    Returns:
        # [num_ops]
    """
    costs = []
    for weight, (seconds, parts) in zip(weights, tables, strict=True):
        # A kernel does at most its part, and at least a sample more than the one before.
        least = np.append(0.0, parts[:-1]) + parts[0]
        costs.append(((alpha * least + weight)[:, None] * seconds, parts))
    columns = np.arange(tables[0][0].shape[1])
    low = np.zeros(len(columns))
    high = np.max([cost.max(axis=0) / parts[0] for cost, parts in costs], axis=0)
    best = np.zeros(len(columns))
    for _ in range(_HALVINGS):
        price = 0.5 * (low + high)
        value, taken = price.copy(), np.zeros(len(columns))
        for count, (cost, parts) in zip(counts, costs, strict=True):
            left = cost - price * parts[:, None]
            chosen = left.argmin(axis=0)
            least_left = left[chosen, columns]
            value += count * np.minimum(least_left, 0.0)
            taken += count * np.where(least_left < 0.0, parts[chosen], 0.0)
        np.maximum(best, value, out=best)
        low, high = np.where(taken < 1.0, price, low), np.where(taken < 1.0, high, price)
    return best


def _simplex(begin: FloatArray) -> FloatArray:
    steps = np.full(len(begin), 0.1)
    steps[0] = 1.0
    return np.vstack([begin, begin + np.diag(steps)])


@lru_cache(maxsize=16)
def _kernels(
    graph: OpGraph, device_type: DeviceType, cost_model: CostModel, *, with_op_rules: bool
) -> tuple[FloatArray, FloatArray]:
    """Least seconds of kernels of all sizes.

    Returns:
        (seconds of every op in a kernel that does at most a part of it [num_parts, num_ops],
        these parts [num_parts]).
    """
    batch = graph.batch_size
    seconds, parts = [], []
    for share, last in share_ranges(batch, _FINEST_STEP):
        seconds.append(cost_model.op_seconds(graph, device_type, share))
        parts.append(last / batch)
    if with_op_rules:
        part = 1.0
        while part > _SMALLEST_PART:
            smaller = part * _PART_RATIO
            seconds.append(
                cost_model.work_seconds(
                    graph, device_type, smaller * graph.flops, smaller * graph.bytes_moved
                )
            )
            parts.append(part)
            part = smaller
        nothing = np.zeros(graph.num_ops)
        seconds.append(cost_model.work_seconds(graph, device_type, nothing, nothing))
        parts.append(part)
    return np.array(seconds), np.array(parts)
