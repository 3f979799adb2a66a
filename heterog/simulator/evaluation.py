"""What an evaluation of a strategy says: whether it can run, how long a step takes, and memory.

It can run if its memory fits, and its training is that of one device.
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from heterog.cluster.topology import Cluster
from heterog.graph.batch_plan import micro_batches_refused, norms_of_lone_values
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph, UpdateScope
from heterog.lowering import Choice
from heterog.lowering.program import FloatArray
from heterog.pricing.price_table import RuleSets
from heterog.simulator.engine import Order
from heterog.strategy.stepping import apart_fault
from heterog.units import format_bytes


class Outcome(StrEnum):
    """Whether a strategy can run."""

    OK = "ok"
    OUT_OF_MEMORY = "out_of_memory"
    CANNOT_RUN = "cannot_run"
    """Ranks would not compute what one device does, or get stuck."""
    TOO_LARGE = "too_large"
    """Not simulated: its program has more tasks than ``Evaluator.most_tasks``."""
    GIVEN_UP = "given_up"
    """Slower than the limit that was asked for; ``step_time_s`` is a lower bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Predicted step time and memory of a strategy.

    Attributes:
        outcome: ``ok`` or why it cannot run.
        step_time_s: Seconds per training step, also where memory does not suffice.
        peak_memory_bytes: Predicted peak memory of each device.
        order: Order in which waiting tasks ran.
        shortage: For ``out_of_memory``, the device and the missing bytes in words.
        overflow_bytes: Bytes missing on the worst device, 0 if none; infinite for what cannot run.
        is_ok: Whether the strategy can run.
        preference: Sort key, smaller is better: what fits comes first (overflow 0), then the
            shorter step. What was given up comes last: whether it fits is not known.
    """

    outcome: Outcome
    step_time_s: float
    peak_memory_bytes: tuple[int, ...]
    order: Order
    shortage: str = ""
    overflow_bytes: float = 0.0
    is_ok: bool = field(init=False, repr=False, compare=False)
    preference: tuple[float, float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        missing = math.inf if self.outcome == Outcome.GIVEN_UP else self.overflow_bytes
        object.__setattr__(self, "is_ok", self.outcome == Outcome.OK)
        object.__setattr__(self, "preference", (missing, self.step_time_s))


def given_up(seconds: float, order: Order) -> Evaluation:
    """Evaluation of a strategy that was given up, because it takes at least these seconds."""
    return Evaluation(
        outcome=Outcome.GIVEN_UP, step_time_s=seconds, peak_memory_bytes=(), order=order
    )


MEMORY_MARGIN = 0.04
"""Share added to what tensors and workspaces need: small workspaces, rounding of allocators,
gradients that are on their way to a server and are not freed at once."""


class Feasibility:
    """Judges what was predicted of choices of one graph on one cluster.

    Attributes:
        usable: Bytes that a step may use on each device.
    """

    def __init__(self, graph: OpGraph, cluster: Cluster, rules: RuleSets) -> None:
        self._graph, self._cluster, self._rules = graph, cluster, rules
        self.usable = np.array([device.usable_memory_bytes for device in cluster.devices])

    def judge(self, choice: Choice, seconds: float, peak: FloatArray, order: Order) -> Evaluation:
        """Evaluation of a predicted step time and memory."""
        peak = np.rint(peak * (1.0 + MEMORY_MARGIN))
        if refused := self.refused(choice):
            return Evaluation(
                outcome=Outcome.CANNOT_RUN,
                step_time_s=seconds,
                peak_memory_bytes=tuple(peak.astype(np.int64).tolist()),
                order=order,
                shortage=refused,
                overflow_bytes=math.inf,  # whatever fits is better
            )
        over = peak - self.usable
        worst = int(np.argmax(over))
        missing = float(over[worst])
        shortage = ""
        if missing > 0:
            device = self._cluster.devices[worst]
            shortage = (
                f"{device.name} ({device.type.name}) needs {format_bytes(peak[worst])}, "
                f"{format_bytes(missing)} more than its {format_bytes(self.usable[worst])}"
            )
        return Evaluation(
            outcome=Outcome.OUT_OF_MEMORY if missing > 0 else Outcome.OK,
            step_time_s=seconds,
            peak_memory_bytes=tuple(peak.astype(np.int64).tolist()),
            order=order,
            shortage=shortage,
            overflow_bytes=max(missing, 0.0),
        )

    def refused(self, choice: Choice) -> str:
        """Why its training would not be that of one device; empty if it would."""
        return (
            micro_batches_refused(self._graph, choice.num_micro)
            or self._lone_norm(choice)
            or self.scope_fault(choice)
        )

    def scope_fault(self, choice: Choice) -> str:
        """Why an optimizer that looks at all parameters would not see all, or empty."""
        if self._graph.scope != UpdateScope.MODEL or not self._graph.updates:
            return ""
        division = choice.division[self._rules.tables_of(choice).parameter_group]
        return apart_fault(self._graph, choice.home, choice.member[division].astype(np.bool_))

    def _lone_norm(self, choice: Choice) -> str:
        """Description of a BatchNorm that a device would train on one value per channel, or empty.

        Those with rules are left to the rehearsal: members of a team may see all of its samples.
        """
        norms = norms_of_lone_values(self._graph)
        ruled = {op for op, _ in self._rules.rules_of(choice.rule_set)} if norms else set()
        for op in norms:
            group = group_ops(self._graph).group[op]
            is_lone = choice.shares[choice.division[group]] == 1  # [num_micro, num_devices]
            if op not in ruled and is_lone.any():
                device = self._cluster.devices[int(np.flatnonzero(is_lone.any(0))[0])]
                return (
                    f"{device.name} would have one sample of BatchNorm "
                    f"'{self._graph.ops[op].module or '(root)'}', which torch trains on more than "
                    "one value per channel; a larger batch, or more samples on fewer devices, can."
                )
        return ""
