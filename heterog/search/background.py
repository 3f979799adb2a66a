"""A background job beside a plan: where it runs, how much it gets done, what it costs.

Every device with enough free memory trains its own replica on its own small batch; replicas do
not communicate (each of DeepPool's background jobs runs on one GPU). Ops of the background run
while the device is otherwise idle; ``simulator.multiplex`` simulates both jobs. An op longer than
every known gap is begun only if it is at most as long as the *allowance*. The allowance is chosen
so that the background does the most work while the foreground stays under the limit.
"""

from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar

import numpy as np

from heterog.errors import HeterogError
from heterog.graph.op_graph import FloatArray, OpGraph
from heterog.methods.data_parallel import uniform_strategy
from heterog.records import (
    VALUE,
    Amount,
    Count,
    Name,
    PositiveSeconds,
    Seconds,
    Series,
    Text,
    finite,
)
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.multiplex import Foreground, Multiplexed, foreground_of_program, multiplex
from heterog.strategy.strategy import Decision, Strategy

DEFAULT_SLOW_DOWN = 1.1
"""DeepPool's limit on a tasklet's slow-down."""
_MOST_ALLOWANCES = 24  # of more lengths of ops, only quantiles are tried
_ROUNDING = 1e-9  # times are added in another order


@dataclass(frozen=True, slots=True, kw_only=True)
class BackgroundPlan:
    """A background job that shares a plan's devices.

    Attributes:
        model: Name of the background job's model.
        source: Source of its workload, for ``heterog run``; empty if nothing can run it.
        batch_size: Samples of one of its steps on one device.
        limit: Largest slow-down of the foreground allowed.
        allowance_s: Longest op that is begun although no gap is known to hold it.
        step_time_alone_s: Step time of the foreground alone.
        step_time_s: Step time of the foreground with the background.
        idle_share: Part of the foreground's step in which each device computes nothing.
        samples_per_s: Throughput of the background on each device; 0 where it does not run.
        shortage: For each device, why it does not run there; empty where it does.
    """

    __pydantic_config__: ClassVar = VALUE

    model: Name
    source: Text
    batch_size: Count
    limit: Annotated[float, finite(1.0, 1e9)]
    allowance_s: Seconds
    step_time_alone_s: PositiveSeconds
    step_time_s: PositiveSeconds
    idle_share: Series[Annotated[float, finite(-1e-6, 1.0 + 1e-6)]]
    samples_per_s: Series[Amount]
    shortage: Series[Text]

    @property
    def slow_down(self) -> float:
        """The foreground's step with the background over its step alone."""
        return self.step_time_s / self.step_time_alone_s

    @property
    def total_samples_per_s(self) -> float:
        """Throughput of the background on all devices together."""
        return sum(self.samples_per_s)

    @property
    def devices(self) -> tuple[int, ...]:
        """Devices that have room for the background."""
        return tuple(device for device, why in enumerate(self.shortage) if not why)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON, with derived values for readers."""
        return asdict(self) | {
            "slow_down": self.slow_down,
            "total_samples_per_s": self.total_samples_per_s,
        }


def plan_background(
    evaluator: Evaluator,
    strategy: Strategy,
    order: Order,
    background: OpGraph,
    *,
    limit: float = DEFAULT_SLOW_DOWN,
) -> BackgroundPlan:
    """Put a background job beside a strategy.

    Args:
        evaluator: Evaluator of the foreground.
        strategy: The foreground's strategy.
        order: Order in which the foreground runs.
        background: Graph of the background job's step, at the batch that one device trains on.
        limit: Largest slow-down of the foreground allowed, 1 or more.

    Raises:
        HeterogError: the limit is below 1.
    """
    if not limit >= 1.0:
        raise HeterogError(
            f"a slow-down limit of {limit:g} is below 1: nothing is faster beside another job."
        )
    choice = evaluator.encode(strategy)
    foreground = foreground_of_program(*evaluator.referee_timings(choice, order))
    ops, shortage = _ops_per_device(evaluator, strategy, order, background)
    allowance, both = best_allowance(foreground, ops, limit)
    steps = [
        done / max(len(own), 1) / both.step_seconds
        for done, own in zip(both.ops.tolist(), ops, strict=True)
    ]
    return BackgroundPlan(
        model=background.name,
        source=background.source,
        batch_size=background.batch_size,
        limit=limit,
        allowance_s=allowance,
        step_time_alone_s=foreground.step_seconds / choice.num_steps,
        step_time_s=both.step_seconds / choice.num_steps,
        idle_share=tuple(float(share) for share in foreground.idle_share),
        samples_per_s=tuple(rate * background.batch_size for rate in steps),
        shortage=shortage,
    )


def best_allowance(
    foreground: Foreground, ops: list[FloatArray], limit: float
) -> tuple[float, Multiplexed]:
    """The allowance with which the background does the most under a limit on the slow-down.

    With an allowance of 0, ops run only in gaps that hold them. If even these delay the
    foreground too much, the background runs nowhere.
    """
    lengths = np.unique(np.concatenate([*ops, np.zeros(1)]))
    if len(lengths) > _MOST_ALLOWANCES:
        lengths = np.quantile(lengths, np.linspace(0.0, 1.0, _MOST_ALLOWANCES), method="nearest")
    best: tuple[float, Multiplexed] | None = None
    most = -1.0
    for allowance in lengths.tolist():
        both = multiplex(foreground, ops, np.full(foreground.num_devices, allowance))
        done = float(both.busy_seconds.sum()) / both.step_seconds
        longest = limit * foreground.step_seconds * (1.0 + _ROUNDING)
        if both.step_seconds <= longest and done > most * (1.0 + _ROUNDING):
            best, most = (allowance, both), done
    if best is None:  # delays of small ops add up: leave the devices alone
        none = [np.zeros(0) for _ in ops]
        return 0.0, multiplex(foreground, none, np.zeros(foreground.num_devices))
    return best


def _ops_per_device(
    evaluator: Evaluator, strategy: Strategy, order: Order, background: OpGraph
) -> tuple[list[FloatArray], tuple[str, ...]]:
    """(seconds of the background's ops on each device, why it has no room there)."""
    cluster = evaluator.cluster
    own = Evaluator(background, cluster, evaluator.cost_model)
    taken = evaluator.referee(strategy, order).peak_memory_bytes
    ops, shortage = [], []
    for device in range(cluster.num_devices):
        device_type = cluster.device_types[cluster.type_index[device]]
        alone = Decision(devices=(device,), shares=(background.batch_size,))
        needed = own.evaluate(uniform_strategy(own, alone), Order.PROGRAM).peak_memory_bytes
        missing = needed[device] + taken[device] - cluster.devices[device].usable_memory_bytes
        seconds = evaluator.cost_model.op_seconds(background, device_type, background.batch_size)
        ops.append(seconds[seconds > 0] if missing <= 0 else np.zeros(0))
        shortage.append("" if missing <= 0 else f"{missing / 2**30:.2f} GiB of memory short")
    return ops, tuple(shortage)
