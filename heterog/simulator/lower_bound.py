"""Lower bounds on the seconds of a step: of all strategies, and of one choice (``floor_s``).

The bound of all strategies is the larger of two relaxations.

(a) Compute. Every op may be split in any fractions, every part runs at the best throughput of any
share on its device, and no task ever waits:

    min T   subject to   sum_o x[o,d] t[o,d] <= T  for every device d,
                         sum_d x[o,d] = 1,  x >= 0

where t[o,d] = min over shares s of B cost(o,d,s) / s for an op whose work follows the batch. A
device that runs the op on shares s_1, ..., s_k (micro-batches) is busy for sum_i cost(o,d,s_i) >=
t[o,d] sum_i s_i / B, and the shares of all devices and micro-batches sum to B, so x = sum_i s_i /
B is feasible. An op whose work does not follow the batch runs whole at least once on some device,
and so does each update.

(b) Path. The longest chain of ops, views and updates that read from one another, every op at its
shortest time over all shares and device types: some chain of tasks runs all of these ops one after
another, on at least one sample each. An update that may be cut into slices (ZeRO) takes at least
T with sum_d T / t[d] = 1: then all devices end it together.

With rules of single ops (``OpRule``) an op may be split along any axis, so that a part x of it has
x of its FLOPs and moves at least x of its bytes. Then t[o,d] is also at most the minimum over x of
cost(o,d,x) / x, tried at powers of a half, and the path counts only a launch for an op.

A strategy on one device may be priced by a model of its own, because exchanges make kernels beside
them slower. Then each bound is the least of that of all devices and that of each of them alone.

Both relaxations leave out all communication and all copies. Ops on constants alone count as 0 in
both: they give the same result in every step, so a strategy may keep it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from heterog.cluster.hardware import DeviceType
from heterog.cluster.topology import Cluster
from heterog.graph.batch_plan import batch_plan
from heterog.graph.op_graph import OpGraph, Phase
from heterog.lowering import Choice
from heterog.lowering.kernels import kernel
from heterog.lowering.program import FloatArray, IntArray
from heterog.lowering.tables import Domain
from heterog.pricing.cost_model import CostModel
from heterog.pricing.price_table import PriceTable
from heterog.strategy.sync import Sharded


def floor_s(prices: PriceTable, choice: Choice) -> float:
    """Lower bound of the seconds of a choice's step, in microseconds without a simulation.

    It is the larger of two bounds: the compute of the busiest device, and the gradients over the
    busiest link, which begin when all members of some ring have run their forward pass. Constants,
    updates, parameter servers and transfers between groups are left out. The bound is 0 if ops run
    by rules or messages are encoded.
    """
    if choice.rule_set or not all(mode.has_floor for mode in choice.modes):
        return 0.0
    types = prices.types_of(choice)
    prices.price_shares(choice.shares[: len(choice.member)], types)
    forward, whole = seconds = np.zeros((2, len(types)))
    _add_compute(prices.group_seconds, types, choice.shares, choice.division[:-1], seconds)
    floor = whole.max()
    rings, everyone = choice.rings, Domain.ALL
    ring = rings.first[:, everyone]
    has_ring = ring < rings.end[:, everyone]
    reduced = np.flatnonzero(has_ring & (choice.sharded <= Sharded.STATE))
    if len(reduced):
        payload, ring = prices.reduced_bytes[reduced], ring[reduced]
        load = _load(prices, rings.first_channel[ring], payload)
        gathered = np.where(choice.sharded[reduced], prices.gathered_bytes[reduced], payload)
        load += _load(prices, rings.second_channel[ring], gathered)
        member = rings.member[ring[payload > 0.0]] > 0
        first = (member * forward).max(1).min(initial=np.inf)
        if np.isfinite(first):
            floor = max(floor, first / choice.num_steps + load.max())
    return float(floor)


@kernel
def _add_compute(
    group_seconds: FloatArray,
    types: IntArray,
    shares: IntArray,
    division: IntArray,
    seconds: FloatArray,
) -> None:
    """Add the seconds of every group and micro-batch to its devices.

    Args:
        group_seconds: See ``PriceTable``.
        types: Type of each device.  # [num_devices]
        shares: Samples of each device.  # [num_rows, num_micro, num_devices]
        division: Row of each group.  # [num_groups]
        seconds: Seconds of forward ops and of all ops.  # [2, num_devices]
    """
    for group in range(len(division)):
        for micro in range(shares.shape[1]):
            for device in range(len(types)):
                share = shares[division[group], micro, device]
                if share:
                    for part in range(2):
                        seconds[part, device] += group_seconds[part, types[device], share, group]


def _load(prices: PriceTable, channel: IntArray, payload: FloatArray) -> FloatArray:
    """Seconds that payloads over channels occupy each link; -1 marks no channel.

    Args:
        prices: Prices of the graph on the cluster.
        channel: Channel of each payload.
        payload: Bytes of each payload.

    Returns:
        # [num_resources]
    """
    load = np.zeros(prices.num_resources)
    numbers, place = np.unique(channel, return_inverse=True)
    total = np.bincount(place, payload, len(numbers))
    for number, num_bytes in zip(numbers.tolist(), total, strict=True):
        if number >= 0:
            load += num_bytes * prices.held_by(number)
    return load


# Sums of the same seconds in another order differ by about 1e-13, which must not put an optimal
# strategy below the bound.
_ROUNDING = 1e-9
# Shares are tried one by one up to twice this number, then in relative steps of its inverse.
_FINEST_STEP = 1024
_STEP_ALONE = 16  # for a device alone, whose bound is seldom the least
# Parts of an op down to 1/2048: the seconds of smaller parts are those of a launch.
_HALVINGS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerBound:
    """Least seconds of any strategy of a graph on a cluster.

    Attributes:
        seconds: The larger of both bounds; holds with a step barrier.
        compute_s: Bound (a), all devices always busy; also holds per step without a barrier.
        path_s: Bound (b), the longest chain of ops.
        with_op_rules: Whether the bounds also hold for strategies with op rules.
    """

    seconds: float
    compute_s: float
    path_s: float
    with_op_rules: bool = False


def lower_bound_s(
    graph: OpGraph, cluster: Cluster, cost_model: CostModel, *, with_op_rules: bool = False
) -> LowerBound:
    """Compute the lower bound of a graph on a cluster; see the module docstring.

    Args:
        graph: One training step.
        cluster: The devices; its links do not matter.
        cost_model: Seconds of ops, from the model by which strategies are judged.
        with_op_rules: Whether strategies may have op rules.
    """
    types, alone = cluster.device_types, _alone(cost_model)
    counts = np.bincount(cluster.type_index, minlength=len(types))
    times = [best_times(graph, kind, cost_model) for kind in types]
    bounds = [_bounds(graph, types, times, counts, cost_model, with_op_rules)]
    for kind in types if alone is not cost_model else ():
        own = [best_times(graph, kind, alone, _STEP_ALONE)]
        bounds.append(_bounds(graph, (kind,), own, np.ones(1, np.int64), alone, with_op_rules))
    compute_s, path_s = np.min(bounds, axis=0).tolist()
    return LowerBound(
        seconds=max(compute_s, path_s),
        compute_s=compute_s,
        path_s=path_s,
        with_op_rules=with_op_rules,
    )


@lru_cache(maxsize=16)
def _alone(cost_model: CostModel) -> CostModel:
    """The model of a device alone, one object for each model: times are cached by model."""
    return cost_model.alone()


def _bounds(
    graph: OpGraph,
    types: Sequence[DeviceType],
    times: Sequence[tuple[FloatArray, FloatArray]],
    counts: npt.NDArray[np.int64],
    cost_model: CostModel,
    with_op_rules: bool,
) -> tuple[float, float]:
    """Bounds (a) and (b) on some devices of each type, from its ``best_times``."""
    if with_op_rules:
        times = [
            _best_times_of_parts(graph, device_type, cost_model, *found)
            for device_type, found in zip(types, times, strict=True)
        ]
    whole = np.array([whole_s for whole_s, _ in times])  # [num_types, num_ops]
    shortest = np.array([shortest_s for _, shortest_s in times])
    compute_s = _balanced_seconds(whole.T, counts) * (1.0 - _ROUNDING)
    path_s = heaviest_path(graph, _on_path(graph, shortest, counts)) * (1.0 - _ROUNDING)
    return compute_s, path_s


def _on_path(graph: OpGraph, shortest: FloatArray, counts: npt.NDArray[np.int64]) -> FloatArray:
    """Least seconds of every op on a path, from its shortest seconds [num_types, num_ops]."""
    seconds = np.asarray(shortest.min(axis=0))
    if graph.updates_elementwise:
        with np.errstate(divide="ignore"):
            shared = 1.0 / (counts[:, None] / shortest).sum(axis=0)
        seconds = np.where(graph.phases == Phase.UPDATE, shared, seconds)
    return seconds


def share_ranges(batch_size: int, finest_step: int) -> Iterator[tuple[int, int]]:
    """First and last share of each range of shares that one evaluation covers.

    From twice ``finest_step`` samples on, a range holds several shares. Seconds do not fall when
    samples are added, so at any share in a range they are at least cost(first), and the throughput
    is at most last / cost(first). That lowers a bound by at most 1 / ``finest_step``, and it stays
    valid.
    """
    first = 1
    while first <= batch_size:
        last = min(first + max(first // finest_step, 1) - 1, batch_size)
        yield first, last
        first = last + 1


@lru_cache(maxsize=128)
def best_times(
    graph: OpGraph,
    device_type: DeviceType,
    cost_model: CostModel,
    finest_step: int = _FINEST_STEP,
) -> tuple[FloatArray, FloatArray]:
    """Seconds of every whole op at its best throughput, and its shortest seconds of any share."""
    plan = batch_plan(graph)
    follows_batch = (plan.flops_per_sample + plan.bytes_per_sample) > 0
    batch = graph.batch_size
    whole = np.full(graph.num_ops, np.inf)
    shortest = np.full(graph.num_ops, np.inf)
    for share, last in share_ranges(batch, finest_step):
        seconds = cost_model.op_seconds(graph, device_type, share)
        np.minimum(shortest, seconds, out=shortest)
        np.minimum(whole, np.where(follows_batch, batch / last, 1.0) * seconds, out=whole)
    # The optimizer step is priced at the full batch, whatever the shares.
    full = cost_model.op_seconds(graph, device_type, batch)
    is_update = graph.phases == Phase.UPDATE
    is_free = graph.is_view | graph.is_constant
    for best in (whole, shortest):
        best[is_update] = full[is_update]
        best[is_free] = 0.0
        best.flags.writeable = False
    return whole, shortest


def _best_times_of_parts(
    graph: OpGraph,
    device_type: DeviceType,
    cost_model: CostModel,
    whole: FloatArray,
    shortest: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """Extend the result of ``best_times`` to ops that may be split along any axis."""
    is_free = whole == 0.0
    is_update = graph.phases == Phase.UPDATE
    found = whole
    for halvings in range(_HALVINGS):
        part = 0.5**halvings
        seconds = cost_model.work_seconds(
            graph, device_type, part * graph.flops, part * graph.bytes_moved
        )
        found = np.minimum(found, seconds / part)
    nothing = np.zeros(graph.num_ops)
    launch = np.minimum(shortest, cost_model.work_seconds(graph, device_type, nothing, nothing))
    # The update of a slice of a parameter takes seconds in proportion to the slice.
    return np.where(is_free | is_update, whole, found), np.where(is_free | is_update, 0.0, launch)


def _balanced_seconds(whole: FloatArray, counts: npt.NDArray[np.int64]) -> float:
    """Solve the linear program (a) for ``whole`` seconds [num_ops, num_types].

    ``counts`` has the number of devices of each type. By weak duality *any* weights give a valid
    bound: the solver's tolerances may lower it a little, never lift it too high.
    """
    return float((whole * device_weights(whole, counts)).min(axis=1).sum())


def device_weights(whole: FloatArray, counts: npt.NDArray[np.int64]) -> FloatArray:
    """Value of a second on a device of each type if all are busy: the solution of the dual of (a).

    Devices of one type are merged exactly (spreading an op evenly over them is never worse), and
    so are ops with equal rows. The dual is

        max sum_o y_o   subject to   y_o <= w_k t[o,k],  sum_k counts_k w_k = 1,  w >= 0

    Args:
        whole: Seconds of the whole ops.  # [num_ops, num_types]
        counts: Number of devices of each type.  # [num_types]

    Returns:
        w for one device of each type; the sum over all devices is 1.  # [num_types]
    """
    import scipy.optimize  # imported here: it takes 0.3 s, and few importers of this need it
    import scipy.sparse

    # k equal ops are merged into one that takes k times as long: a repeated layer is one row.
    rows, multiplicity = np.unique(whole, axis=0, return_counts=True)
    times = rows * multiplicity[:, None]
    times = times[times.max(axis=1) > 0.0]
    num_rows, num_types = times.shape
    if num_rows == 0 or num_types == 1:
        return np.full(num_types, 1.0 / counts.sum())
    # Columns: w scaled by the number of devices (all about 1), then y in units of the total.
    scale = float(times.min(axis=1).sum()) or float(times.max())
    entries = np.arange(num_rows * num_types)
    row_of = entries // num_types
    type_of = entries % num_types
    constraints = scipy.sparse.csr_matrix(
        (
            np.concatenate([-(times / counts).ravel() / scale, np.ones(len(entries))]),
            (
                np.concatenate([entries, entries]),
                np.concatenate([type_of, num_types + row_of]),
            ),
        ),
        shape=(len(entries), num_types + num_rows),
    )
    objective = np.concatenate([np.zeros(num_types), -np.ones(num_rows)])
    equal = scipy.sparse.csr_matrix(
        (np.ones(num_types), (np.zeros(num_types, np.int64), np.arange(num_types))),
        shape=(1, num_types + num_rows),
    )
    # scipy's stubs do not know that linprog takes sparse matrices.
    result = scipy.optimize.linprog(  # type: ignore[call-overload]
        objective,
        A_ub=constraints,
        b_ub=np.zeros(len(entries)),
        A_eq=equal,
        b_eq=np.ones(1),
        bounds=(0.0, None),
        method="highs",
    )
    assert result.x is not None, f"the linear program of the lower bound failed: {result.message}"
    weights: FloatArray = np.maximum(result.x[:num_types], 0.0) / counts
    return weights / float(counts @ weights)


def heaviest_path(graph: OpGraph, weight: FloatArray) -> float:
    """The largest sum of weights along a chain of ops that read from one another.

    Ops come in program order, makers before readers, so one pass is enough.
    """
    done = np.zeros(len(graph.tensors))
    heaviest = 0.0
    for index, op in enumerate(graph.ops):
        before = max((done[tensor] for tensor in op.inputs), default=0.0)
        total = float(before + weight[index])
        done[graph.output_start[index] : graph.output_start[index + 1]] = total
        heaviest = max(heaviest, total)
    return heaviest
