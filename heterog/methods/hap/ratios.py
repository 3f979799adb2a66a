"""Sharding ratios of a program by linear program.

Variables are the ratio B_c of each class of like devices, and the time T_k of each stage:

    min sum_k w_k T_k   subject to   sum_c n_c B_c = 1,
        T_k >= t_kc(p) + t'_kc(p) (B_c - p)    for some p, each stage and class     (work)
        T_k >= alpha + n beta S_k B_c          for each padded gather               (volume)
        fixed_c + B_c divided_c <= usable_c + overflow                              (memory)

(HAP section 5.1.) A roofline is convex in the part that a device computes, so its tangents bound
it from below and are exact where they touch. Repeated stages are one stage with a weight w_k.
Unlike the paper, sizes are bytes instead of elements, latencies and memory count, and T_k has no
upper bound.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from heterog.graph.op_graph import Phase
from heterog.graph.placement import OpCall
from heterog.grouped import grouped
from heterog.methods.hap.programs import SpmdPrices, Work, form_sets
from heterog.simulator.evaluator import MEMORY_MARGIN, Evaluator

_OVERFLOW_PRICE_S = 1e3
"""Seconds charged for an overflow of a device's whole memory; they outweigh any gain in speed."""
_TANGENTS = (0.25, 1.0, 4.0)
"""Points at which work is linearised, as multiples of the even part."""


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """Devices that the linear program does not distinguish.

    Attributes:
        type_number: Number of the cluster's device type.
        devices: Positions of its members among the devices of the program.
        usable_memory_bytes: Usable memory of each.
    """

    type_number: int
    devices: tuple[int, ...]
    usable_memory_bytes: int


def device_classes(evaluator: Evaluator, devices: Sequence[int]) -> tuple[DeviceClass, ...]:
    """Devices by type and memory, in order of first appearance."""
    cluster = evaluator.cluster
    found = grouped(
        ((cluster.type_index[device], cluster.devices[device].usable_memory_bytes), position)
        for position, device in enumerate(devices)
    )
    return tuple(
        DeviceClass(kind, tuple(members), memory) for (kind, memory), members in found.items()
    )


def best_ratios(
    work: Work, prices: SpmdPrices, triples: Sequence[int]
) -> tuple[float, ...] | None:
    """Ratios of all devices for a program; ``None`` if the solver finds none.

    Args:
        work: Work of the program's theory.
        prices: Prices at any ratios: only the devices and the padded gather are used, which do
            not depend on ratios.
        triples: The program.
    """
    from scipy.optimize import linprog  # takes 0.3 s, which ranks need not wait for

    classes = device_classes(prices.evaluator, prices.devices)
    rows, weights = _stages(work, prices, triples, classes)
    num_classes, num_stages = len(classes), len(weights)
    memory, usable = _memory(work, triples, classes)
    # Columns: ratios, stage times, relative overflow of memory.
    width = num_classes + num_stages + 1
    matrix = np.zeros((len(rows) + num_classes, width))
    limit = np.empty(len(rows) + num_classes)
    for number, (stage, device_class, value, slope) in enumerate(rows):
        matrix[number, device_class] = slope
        matrix[number, num_classes + stage] = -1.0
        limit[number] = -value
    for number in range(num_classes):
        matrix[len(rows) + number, number] = memory[number]
        matrix[len(rows) + number, -1] = -1.0
        limit[len(rows) + number] = usable[number]
    total = np.zeros((1, width))
    total[0, :num_classes] = [len(each.devices) for each in classes]
    solved = linprog(
        c=np.concatenate([np.zeros(num_classes), weights, [_OVERFLOW_PRICE_S]]),
        A_ub=matrix,
        b_ub=limit,
        A_eq=total,
        b_eq=[1.0],
        bounds=(0.0, None),
        method="highs",
    )
    if solved.x is None:
        return None
    ratios = np.zeros(len(prices.devices))
    for ratio, each in zip(solved.x[:num_classes], classes, strict=True):
        ratios[list(each.devices)] = max(float(ratio), 0.0)
    return tuple(float(ratio) for ratio in ratios)


def _stages(
    work: Work, prices: SpmdPrices, triples: Sequence[int], classes: Sequence[DeviceClass]
) -> tuple[list[tuple[int, int, float, float]], list[float]]:
    """(stage, class, value at ratio 0, slope) of each row, and the weight of each stage."""
    even = 1.0 / len(prices.devices)
    tangents = [_tangents(work, prices, each, even) for each in classes]
    theory = work.theory
    numbers: dict[tuple[float, ...], int] = {}
    weights: list[float] = []
    rows: list[tuple[int, int, float, float]] = []

    def add(lines: list[tuple[int, float, float]], count: int) -> None:
        """Add stages of lines (class, value at 0, slope); like stages become one."""
        key = tuple(round(number, 15) for line in lines for number in line)
        if key in numbers:
            weights[numbers[key]] += count
            return
        stage = numbers[key] = len(weights)
        weights.append(float(count))
        rows.extend((stage, *line) for line in lines)

    # The same triple of a repeated layer costs the same.
    repeated: dict[tuple[OpCall, int], tuple[int, int]] = {}  # (an op, how often)
    for row, number in zip(theory.rows, triples, strict=True):
        if row.triples[number].units:
            call = theory.graph.calls[row.op]
            op, count = repeated.get((call, number), (row.op, 0))
            repeated[call, number] = op, count + 1
    for (_, number), (op, count) in repeated.items():
        lines = [
            (device_class, float(value[number, op]), float(slope[number, op]))
            for device_class, tangent in enumerate(tangents)
            for value, slope in tangent
        ]
        add(lines, count)
    for num_bytes, count in Counter(_gathered(work, triples)).items():
        latency, per_byte = prices.padded_gather(num_bytes)
        add([(device_class, latency, per_byte) for device_class in range(len(classes))], count)
    return rows, weights


_Line = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]  # value at 0, slope


def _tangents(work: Work, prices: SpmdPrices, each: DeviceClass, even: float) -> list[_Line]:
    """Lines below the seconds of every triple, as functions of the part that a device does."""
    found = []
    for multiple in _TANGENTS:
        part = min(multiple * even, 1.0)
        width = 1e-3 * part
        at = work.seconds(prices.evaluator, each.type_number, np.full(work.units.shape, part))
        above = work.seconds(
            prices.evaluator, each.type_number, np.full(work.units.shape, part + width)
        )
        slope = (above - at) / width
        found.append((at - slope * part, slope))
    return found


def _gathered(work: Work, triples: Sequence[int]) -> list[int]:
    """Bytes of the values that are made split and needed whole (or along another axis)."""
    theory = work.theory
    chosen = [row.triples[number] for row, number in zip(theory.rows, triples, strict=True)]
    needed = form_sets(pair for triple in chosen for pair in triple.needs)
    return [
        theory.values[value].num_bytes
        for value, form in dict(pair for triple in chosen for pair in triple.makes).items()
        if theory.form(value, form).kind == "S" and needed.get(value, 0) & ~(1 << form)
    ]


def _memory(
    work: Work, triples: Sequence[int], classes: Sequence[DeviceClass]
) -> tuple[list[float], list[float]]:
    """(divided bytes, room for them) of each class, as shares of a device's memory.

    Every device holds replicated parameters with gradients and optimizer state, and whole
    activations. Split parameters and split activations that the backward pass reads are divided.
    """
    theory = work.theory
    graph = theory.graph
    held_bytes = [0.0, 0.0]  # by every device, and divided
    state = 2.0 + graph.optimizer_state_ratio
    read_late = {
        read.value
        for row in theory.rows
        if graph.ops[row.op].phase == Phase.BACKWARD
        for read in row.reads
    }
    seen: set[int] = set()
    for row, number in zip(theory.rows, triples, strict=True):
        triple = row.triples[number]
        if row.is_update:
            value, form = triple.needs[0]
            held_bytes[form > 0] += theory.values[value].num_bytes * state
        elif graph.ops[row.op].phase == Phase.FORWARD:
            for value, form in triple.makes:
                if value in read_late and value not in seen:
                    seen.add(value)
                    is_split = theory.form(value, form).kind == "S"
                    held_bytes[is_split] += theory.values[value].num_bytes
    fixed, divided = held_bytes
    grown = 1.0 + MEMORY_MARGIN
    return (
        [grown * divided / each.usable_memory_bytes for each in classes],
        [1.0 - grown * fixed / each.usable_memory_bytes for each in classes],
    )
