"""The order in which devices process micro-batches: caps, split backward passes, explicit orders.

Without any of it a device does the next op of the earliest micro-batch that has one ready. That is
fast, and keeps as many micro-batches alive as arrive before their gradients do. A *cap* bounds
them, which is what "one forward, one backward" (1F1B; Narayanan et al., PipeDream, 2019) comes to:
stage s of p holds at most p - s. An *explicit order* says everything: interleaved stages
(Narayanan et al., Megatron-LM, 2021) or zero bubble schedules (Qi et al. 2024) are no vector of
caps.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import pairwise, product
from typing import NamedTuple

from heterog.errors import StrategyError


class Pass(IntEnum):
    """The part of a micro-batch's work on a chunk that is done in one turn."""

    FORWARD = 0
    BACKWARD = 1
    """Gradients of the chunk's inputs from others; all gradients unless the pass is split."""
    WEIGHTS = 2
    """Gradients of parameters, which nothing else in the backward pass waits for."""


class Turn(NamedTuple):
    """One pass of a micro-batch on a chunk, as a unit of a device's work."""

    micro: int
    chunk: int
    work: Pass


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSchedule:
    """The order in which each device processes the micro-batches of a step.

    A *chunk* of a device is a run of consecutive groups that it takes part in. A device's chunks
    are numbered in the order of the model; ``device_chunks`` finds them.

    Attributes:
        in_flight: Caps by device and chunk: most micro-batches under way there at a time, that is,
            begun forward and still needed by something that reads their kept values. 0, or a
            missing entry, is no cap.
        splits_backward: Whether weight gradients of a micro-batch come after the gradients that
            other devices wait for: whenever a device would otherwise wait (or in stated turns).
            Stages of a single micro-batch then make their weight gradients beside each other.
        turns: Turns of each device in order, with each micro-batch that has samples there and
            each chunk once for every pass; empty lets a device take the earliest micro-batch that
            can go on.
        chunk_starts: Groups at which a chunk begins on every device that takes part in them, even
            on one that takes part in the group before.
    """

    in_flight: tuple[tuple[int, ...], ...] = ()
    splits_backward: bool = False
    turns: tuple[tuple[Turn, ...], ...] = ()
    chunk_starts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if any(cap < 0 for caps in self.in_flight for cap in caps):
            raise StrategyError(f"in_flight is {self.in_flight}; caps must be 0 (none) or more.")
        for device, turns in enumerate(self.turns):
            if len(set(turns)) < len(turns):
                raise StrategyError(f"the turns of device {device} have the same turn twice.")

    @property
    def is_default(self) -> bool:
        """Whether devices take the earliest micro-batch that can go on."""
        return self == AS_IT_COMES

    @property
    def device_caps(self) -> tuple[int, ...]:
        """The smallest cap of each device in ``in_flight``; 0 where it has none."""
        return tuple(min(filter(None, caps), default=0) for caps in self.in_flight)

    def fitted(self, group_devices: Sequence[Sequence[int]]) -> "PipelineSchedule":
        """Adapt the caps to other decisions: one cap for all chunks of a device, and no turns.

        Args:
            group_devices: Devices of each group's decision.
        """
        num_devices = max(len(self.in_flight), 1 + max(map(max, group_devices)))
        chunks = device_chunks(group_devices, num_devices, self.chunk_starts)
        pairs = zip(self.device_caps, chunks, strict=False)
        caps = tuple((cap,) * len(own) for cap, own in pairs)
        return replace(self, in_flight=caps if any(map(any, caps)) else (), turns=())

    def check(self, chunks: Sequence[Sequence[range]], samples: Sequence[Sequence[int]]) -> None:
        """Refuse caps and turns that do not fit a strategy's chunks and micro-batches.

        Args:
            chunks: Chunks of each device, from ``device_chunks``.
            samples: Most samples that any group has, by device and micro-batch.

        Raises:
            StrategyError: a cap or turn does not fit; names the device.
        """
        for name, each in (("in_flight", self.in_flight), ("turns", self.turns)):
            if len(each) > len(chunks):
                raise StrategyError(
                    f"{name} names {len(each)} devices; the cluster has {len(chunks)}."
                )
        for device, caps in enumerate(self.in_flight):
            if len(caps) > len(chunks[device]):
                raise StrategyError(
                    f"in_flight has {len(caps)} caps for device {device}, which has "
                    f"{len(chunks[device])} chunks."
                )
        if not self.turns:
            return
        passes = list(Pass) if self.splits_backward else [Pass.FORWARD, Pass.BACKWARD]
        for device, own in enumerate(chunks):
            turns = self.turns[device] if device < len(self.turns) else ()
            micros = [micro for micro, count in enumerate(samples[device]) if count]
            # Plain tuples, which equal turns: there are thousands, in each strategy of a search.
            wanted = set(product(micros, range(len(own)), passes))
            said = set[tuple[int, int, Pass]](turns)
            if wanted != said:
                missing, extra = wanted - said, said - wanted
                one = Turn(*min(missing or extra))
                what = "lack" if missing else "have too much:"
                raise StrategyError(
                    f"the turns of device {device} {what} micro-batch {one.micro}, chunk "
                    f"{one.chunk}, {one.work.name.lower()} ({len(missing)} missing, "
                    f"{len(extra)} too many)."
                )


AS_IT_COMES = PipelineSchedule()
"""The default: a device takes the earliest micro-batch that can go on."""


def device_chunks(
    group_devices: Sequence[Sequence[int]], num_devices: int, chunk_starts: Collection[int] = ()
) -> tuple[tuple[range, ...], ...]:
    """The chunks of every device: runs of consecutive groups that it takes part in.

    Args:
        group_devices: Devices of each group's decision.
        num_devices: Number of devices of the cluster.
        chunk_starts: Groups at which a chunk begins in any case.

    >>> device_chunks([(0,), (0, 1), (1,), (0,)], 2)
    ((range(0, 2), range(3, 4)), (range(1, 3),))
    """
    found: list[list[range]] = [[] for _ in range(num_devices)]
    # Most groups have the very devices of the one before them, so that a few runs are looked at.
    num_groups = len(group_devices)
    cuts = (g for g in range(1, num_groups) if group_devices[g] is not group_devices[g - 1])
    starts = (group for group in chunk_starts if 0 <= group < num_groups)
    for begin, end in pairwise(sorted({0, *cuts, *starts, num_groups})):
        for device in group_devices[begin]:
            own = found[device]
            if own and own[-1].stop == begin and begin not in chunk_starts:
                own[-1] = range(own[-1].start, end)
            else:
                own.append(range(begin, end))
    return tuple(map(tuple, found))
