"""The simulator's predictions of recorded runs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from heterog.cluster.execution import Execution
from heterog.cluster.topology import DEVICE_MODELS, Cluster
from heterog.errors import HeterogError, InputFileError
from heterog.fidelity.comparison import Compared
from heterog.fidelity.recorded import RecordedRun
from heterog.fidelity.run_fit import Case
from heterog.graph.op_graph import OpGraph
from heterog.pricing.device_models.parameters import shipped_peak_errors
from heterog.pricing.intervals import Interval
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.layouts.layout import Layout, parse_layout
from heterog.strategy.layouts.placed import place_layout

Graphs = Callable[[str, int | None], OpGraph]
"""Function that returns the graph of a model at a batch size; ``None`` for the model's own."""
Clusters = Callable[[str], Cluster]


def cases_of(
    runs: Sequence[RecordedRun], graphs: Graphs, clusters: Clusters
) -> Iterator[tuple[RecordedRun, Case]]:
    """The runs, each ready to be simulated; those of one model and batch size share a graph.

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
    """A run beside its prediction, by the cost model that its cluster names."""
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
        interval_s=evaluator.interval(found.step_time_s),
        measured_bytes=run.peak_bytes,
        predicted_bytes=predicted_bytes,
        interval_bytes=interval_bytes,
        choice=f"{run.model}, {case.graph.batch_size}, {run.cluster}, {run.execution}",
    )


def largest_peak(peaks_bytes: Sequence[int], cluster: Cluster) -> tuple[int, Interval]:
    """The largest peak of a device and its interval, bytes, both with what the device reserves.

    The reserve is the cluster file's, so that the interval knows of no error in it.

    Args:
        peaks_bytes: Predicted peak of each device, without what it reserves.
        cluster: Cluster of the devices.
    """
    reserved = [each.type.memory_bytes - each.usable_memory_bytes for each in cluster.devices]
    peak, more = max(zip(peaks_bytes, reserved, strict=True), key=sum)
    low, high = shipped_peak_errors().interval(peak)
    return peak + more, Interval(low + more, high + more)
