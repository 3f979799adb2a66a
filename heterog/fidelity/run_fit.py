"""Simulates recorded runs, and fits a few parameters of the device models to them.

    log T(theta) is fitted to log T_measured by Gauss-Newton, with

    theta = log(seconds to issue a kernel), log(1 + the share that each member of a team adds to
            these seconds if stages lie on several hosts), and for each GPU type
            log(factors of products, fused attention, streams and float32)

and a normal prior around the shipped values (a ridge). So a few runs move only the parameters that
they depend on. Derivatives are finite differences; a step time is piecewise smooth in all
parameters.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from heterog.cluster.topology import DEVICE_MODELS, Cluster, Execution
from heterog.errors import HeterogError, InputFileError
from heterog.fidelity.comparison import Compared, RecordedRun
from heterog.graph.op_graph import FloatArray, OpGraph
from heterog.pricing.device_models.model import DeviceModels
from heterog.pricing.device_models.parameters import InTraining, shipped_peak_errors
from heterog.pricing.intervals import Interval
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.layouts.layout import Layout, parse_layout
from heterog.strategy.layouts.placed import place_layout
from heterog.strategy.strategy import Strategy

_HOSTS = 2
"""Parameters of the host, which come first."""
_FACTORS = ("products", "fused_attention", "streams", "float32")
_RUN_SPREAD = 0.08
"""Standard deviation of the logarithm of a step time whose parameters are right."""
_FACTOR_SPREAD = 0.3
_HOST_SPREAD = 1.0
"""Standard deviation of the logarithm of factors and of the host's seconds before any run."""
_RUNS_BEFORE, _SPREAD_BEFORE = 3, 0.12
"""Prior of the fitted spread: a number of imagined runs, and the size of their errors."""
_MOST_LEVERAGE = 0.9
_ITERATIONS = 8
_STEP = 0.05
_GAIN = 0.999
"""Another step is made only if the last one has reduced the cost at least by this factor."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """One recorded run, ready to be simulated.

    Attributes:
        graph: Graph of the whole batch.
        cluster: Cluster that it ran on.
        strategy: Strategy that it ran with.
        measured_s: Measured seconds of a step.
    """

    graph: OpGraph
    cluster: Cluster
    strategy: Strategy
    measured_s: float

    def predicted_s(self, model: DeviceModels) -> float:
        """Seconds of a step by a cost model."""
        evaluator = Evaluator(self.graph, self.cluster, model.on(self.cluster))
        return evaluator.evaluate(self.strategy, Order.FIFO).step_time_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunFit:
    """Result of a fit.

    Attributes:
        models: The fitted device models.
        before: Errors log(predicted / measured) of each run by the models before.  # [num_cases]
        after: Errors log(predicted / measured) of each run by the fitted models.  # [num_cases]
        left_out: Errors of each run as if it had not been fitted, to first order: the
            residual over (1 - leverage), as in a linear regression.  # [num_cases]
    """

    models: DeviceModels
    before: FloatArray
    after: FloatArray
    left_out: FloatArray


def fit_runs(cases: Sequence[Case], start: DeviceModels) -> RunFit:
    """Fit a few parameters to recorded runs.

    Args:
        cases: At least one run.
        start: Device models before the fit.
    """
    start = start.on(cases[0].cluster)
    types = sorted({kind.name for case in cases for kind in case.cluster.device_types})
    begin = at = _parameters(start, types)
    spread = np.full(len(at), _FACTOR_SPREAD)
    spread[0] = _HOST_SPREAD
    measured = np.log([case.measured_s for case in cases])
    best, least, before = at, np.inf, np.zeros(len(cases))
    after = left_out = before
    for iteration in range(_ITERATIONS):
        models = _model(at, types, start)
        off = np.log([case.predicted_s(models) for case in cases]) - measured
        from_start = at - begin
        cost = float(
            (off / _RUN_SPREAD) @ (off / _RUN_SPREAD) + ((from_start / spread) ** 2).sum()
        )
        if iteration == 0:
            before = off
        if cost > least:  # past a kink, where other tasks became critical: go back half way
            at = (at + best) / 2.0
            continue
        is_last = cost > _GAIN * least
        best, least, after = at, cost, off
        jacobian = _derivatives(cases, at, off + measured, types, start)
        curvature = jacobian.T @ jacobian / _RUN_SPREAD**2 + np.diag(spread**-2.0)
        leverage = np.einsum("ij,jk,ik->i", jacobian, np.linalg.inv(curvature), jacobian)
        left_out = off / (1.0 - np.minimum(leverage / _RUN_SPREAD**2, _MOST_LEVERAGE))
        slope = jacobian.T @ off / _RUN_SPREAD**2 + from_start / spread**2
        if is_last:
            break
        at = at - np.linalg.solve(curvature, slope)
    counted = float((left_out**2).sum()) + _RUNS_BEFORE * _SPREAD_BEFORE**2
    of_runs = float(np.sqrt(counted / (len(cases) + _RUNS_BEFORE)))
    return RunFit(
        models=_model(best, types, start, of_runs), before=before, after=after, left_out=left_out
    )


def _derivatives(
    cases: Sequence[Case],
    at: FloatArray,
    here: FloatArray,
    types: Sequence[str],
    like: DeviceModels,
) -> FloatArray:
    """Derivatives of log T at ``at``, where it is ``here``.  # [num_cases, num_parameters]"""
    jacobian = np.zeros((len(cases), len(at)))
    for row, case in enumerate(cases):
        own = {kind.name for kind in case.cluster.device_types}
        for column in range(len(at)):
            of = (column - _HOSTS) // len(_FACTORS)
            if of >= 0 and types[of] not in own:
                continue
            moved = at.copy()
            moved[column] += _STEP
            there = np.log(case.predicted_s(_model(moved, types, like)))
            jacobian[row, column] = (there - here[row]) / _STEP
    return jacobian


def _parameters(model: DeviceModels, types: Sequence[str]) -> FloatArray:
    found = [model.host.issue_s, 1.0 + model.host.per_member]
    for name in types:
        factors = model.in_training(name)
        found += [getattr(factors, factor) for factor in _FACTORS]
    return np.log(found)


def _model(
    parameters: FloatArray, types: Sequence[str], like: DeviceModels, spread: float = 0.0
) -> DeviceModels:
    host_s, member, *rest = np.exp(parameters)
    factors = np.reshape(rest, (len(types), len(_FACTORS)))
    return DeviceModels(
        like.execution,
        tf32=like.tf32,
        host_s=float(host_s),
        per_member=max(float(member) - 1.0, 0.0),
        in_training={
            name: InTraining(
                **dict(zip(_FACTORS, map(float, row), strict=True)),
                spread=spread,
                measured_on=name,
            )
            for name, row in zip(types, factors, strict=True)
        },
    )


Graphs = Callable[[str, int | None], OpGraph]
"""Function that returns the graph of a model at a batch size; ``None`` for the model's own."""
Clusters = Callable[[str], Cluster]


def cases_of(
    runs: Sequence[RecordedRun], graphs: Graphs, clusters: Clusters
) -> Iterator[tuple[RecordedRun, Case]]:
    """The runs, each ready to be simulated; runs of one model and batch size share a graph.

    Raises:
        InputFileError: a layout does not fit its model or cluster, or one of them is not known.
    """
    last: tuple[tuple[str, int | None], OpGraph] | None = None
    for run in sorted(runs, key=lambda run: (run.model, run.batch_size or 0)):
        try:
            key = (run.model, run.batch_size)
            if last is None or last[0] != key:
                last = (key, graphs(*key))
            graph, cluster = last[1], _cluster_of(run, clusters)
            layout = parse_layout(run.layout) if run.layout else Layout()
            strategy = place_layout(layout, graph, cluster).strategy
        except HeterogError as error:
            raise InputFileError(f"line {run.line} of the runs: {error}") from error
        yield run, Case(graph=graph, cluster=cluster, strategy=strategy, measured_s=run.seconds)


def _cluster_of(run: RecordedRun, clusters: Clusters) -> Cluster:
    """The cluster of a run, with the program that the run names."""
    cluster = clusters(run.cluster)
    if not run.execution:
        return cluster
    if cluster.calibration not in (None, DEVICE_MODELS):
        raise HeterogError(
            f"execution {run.execution} is for device models, and cluster {run.cluster} is priced "
            f"by {cluster.calibration}; leave the column empty, or 'calibration' out of the file."
        )
    return replace(cluster, execution=Execution(run.execution))


def compared(run: RecordedRun, case: Case) -> Compared:
    """A run with its prediction by the cost model of its cluster."""
    evaluator = Evaluator(case.graph, case.cluster)
    found = evaluator.evaluate(case.strategy, Order.FIFO)
    predicted_bytes, interval_bytes = largest_peak(found.peak_memory_bytes, case.cluster)
    return Compared(
        family=run.family,
        name=", ".join(
            [run.model, f"batch {case.graph.batch_size}", run.cluster, run.layout or "dp"]
            + [run.execution] * bool(run.execution)
        ),
        measured_s=run.seconds,
        predicted_s=found.step_time_s,
        interval_s=evaluator.interval(found.step_time_s, case.strategy),
        measured_bytes=run.peak_bytes,
        predicted_bytes=predicted_bytes,
        interval_bytes=interval_bytes,
        choice=f"{run.model}, {case.graph.batch_size}, {run.cluster}, {run.execution}",
    )


def largest_peak(peaks_bytes: Sequence[int], cluster: Cluster) -> tuple[int, Interval]:
    """The largest peak of a device and its interval, in bytes, both with the device's reserve.

    The reserve is a number of the cluster file, so it does not widen the interval.

    Args:
        peaks_bytes: Predicted peak of each device, without its reserve.
        cluster: Cluster of the devices.
    """
    reserved = [each.type.memory_bytes - each.usable_memory_bytes for each in cluster.devices]
    peak, more = max(zip(peaks_bytes, reserved, strict=True), key=sum)
    low, high = shipped_peak_errors().interval(peak)
    return peak + more, Interval(low + more, high + more)
