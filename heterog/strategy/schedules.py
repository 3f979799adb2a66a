"""Schedules: the order in which devices process micro-batches, by caps or by named orders.

Without a ``PipelineSchedule`` a device runs the next ready op of the earliest micro-batch. That is
fast, but keeps every micro-batch alive that arrives before its gradient does. A *cap* bounds
their number; "one forward, one backward" (1F1B; Narayanan et al., PipeDream, 2019) amounts to
caps: stage s of p holds at most p - s. An *explicit order* states every turn: interleaved stages
(Narayanan et al., Megatron-LM, 2021) or zero bubble schedules (Qi et al. 2024) are not expressed
by caps.

Named schedules make the turns of each rank. Stages are numbered in the order of the model. If
devices hold several stages, p *ranks* (device sets) hold v *chunks* each: interleaved, stage k
lies on rank k mod p; in a V, rank i has stages i and 2 p - 1 - i. All devices of a rank share its
micro-batches and so have the same turns.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from itertools import pairwise, product
from typing import ClassVar, NamedTuple

from heterog.errors import StrategyError
from heterog.records import VALUE, Flag, Int32, Series


class Pass(IntEnum):
    """The part of a micro-batch's work on a chunk that is done in one turn."""

    FORWARD = 0
    BACKWARD = 1
    """Gradients of the chunk's inputs from others; all gradients unless the pass is split."""
    WEIGHTS = 2
    """Gradients of parameters, which nothing else in the backward pass waits for."""


class Turn(NamedTuple):
    """One pass of a micro-batch on a chunk, as a unit of a device's work.

    Attributes:
        micro: Number of the micro-batch.
        chunk: Number of the chunk on the device.
        work: The pass.
    """

    micro: Int32
    chunk: Int32
    work: Pass


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSchedule:
    """The order in which each device processes the micro-batches of a step.

    A *chunk* of a device is a run of consecutive groups that it takes part in. A device's chunks
    are numbered in the order of the model; ``device_chunks`` finds them.

    Attributes:
        in_flight: Caps by device and chunk: most micro-batches in flight there at a time. A
            micro-batch is in flight from its forward pass until the last op has read its kept
            values. 0, or a missing entry, is no cap.
        splits_backward: Whether weight gradients of a micro-batch come after the gradients that
            other devices wait for: whenever a device would otherwise wait (or in stated turns).
            Stages of a single micro-batch then make their weight gradients at the same time.
        turns: Turns of each device in order, one for each pass, each chunk, and each micro-batch
            that has samples there. If empty, a device takes the earliest micro-batch that can go
            on.
        chunk_starts: Groups at which a chunk begins on every device that takes part in them, even
            on one that takes part in the group before.
        gathers_once: Whether slices of ZeRO-2 and -3 are gathered once for the forward passes of
            all micro-batches and once for their backward passes, and gradients are reduced after
            the last micro-batch, instead of for each. Whole parameters and gradients are kept from
            the first to the last micro-batch: in a breadth-first order, those of one chunk.
    """

    __pydantic_config__: ClassVar = VALUE

    in_flight: Series[Series[Int32]] = ()
    splits_backward: Flag = False
    turns: Series[Series[Turn]] = ()
    chunk_starts: Series[Int32] = ()
    gathers_once: Flag = False

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
        """The smallest cap of each device in ``in_flight``; 0 if it has none."""
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
            # Plain tuples equal turns and are faster: each strategy of a search has thousands.
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
    # Most groups share the devices object of the group before, so only a few runs are visited.
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


Stages = Sequence[Sequence[int]]
"""Devices of each stage."""
_F, _B, _W = Pass


def caps_of_stages(
    stages: Stages, num_devices: int, *, hidden: float = 0.0, returns: int = 0
) -> PipelineSchedule:
    """Caps on micro-batches in flight with which a pipeline waits only for its first one.

    With ``hidden`` 0 the caps are those of 1F1B: stage s of p holds p - s micro-batches. If
    messages take a part of a stage's time, 1F1B waits for every message. The caps
    (p - s) + (p - 1 - s) ceil(hidden) reach the time of a pipeline without caps, if all stages and
    all links are equal.

    Args:
        stages: Devices of each stage; each device is in one of them.
        num_devices: Number of devices of the cluster.
        hidden: Seconds of two messages over the seconds of a stage's forward and backward pass.
        returns: Stages through which values go again after the last; see ``num_returns``.

    >>> caps_of_stages([(0,), (1,), (2,)], 3).in_flight
    ((3,), (2,), (1,))
    >>> caps_of_stages([(0,), (1,), (2,)], 3, hidden=0.5).in_flight
    ((5,), (3,), (1,))
    >>> caps_of_stages([(0,), (1,), (2,)], 3, returns=2).in_flight
    ((5,), (4,), (3,))
    """
    caps: list[tuple[int, ...]] = [()] * num_devices
    more = -int(-hidden // 1)
    for stage, devices in enumerate(stages):
        later = len(stages) - 1 - stage + returns
        for device in devices:
            if caps[device]:
                raise StrategyError(f"device {device} has two stages; caps are for one each.")
            caps[device] = (later + 1 + later * more,)
    return PipelineSchedule(in_flight=tuple(caps))


class _Turns:
    """Collects the turns of one rank by pass and chunk, and counts the micro-batches."""

    def __init__(self, num_micro: int) -> None:
        self.turns: list[Turn] = []
        self.count: Counter[tuple[int, Pass]] = Counter()
        self._num_micro = num_micro

    def add(self, *passes: tuple[Pass, int], times: int = 1) -> None:
        """Add passes of chunks in this order, again and again.

        Each is of its next micro-batch, or left out if there is no further micro-batch.
        """
        for work, chunk in passes * times:
            micro = self.count[chunk, work]
            self.count[chunk, work] += 1
            if micro < self._num_micro:
                self.turns.append(Turn(micro, chunk, work))


def by_chunks(rank: int, num_ranks: int, num_chunks: int, num_micro: int) -> list[Turn]:
    """All forward passes, then all backward passes, chunk by chunk.

    With one chunk this is GPipe (Huang et al. 2019), with several breadth-first (Lamy-Poirier
    2023). With ``gathers_once`` a chunk's parameters are gathered twice in a step and its
    gradients reduced once: 3 S (n - 1) / n bytes for each of n replicas that keep S bytes in
    slices, however many micro-batches there are.
    """
    del rank, num_ranks
    turns = _Turns(num_micro)
    for work, chunks in ((_F, range(num_chunks)), (_B, reversed(range(num_chunks)))):
        for chunk in chunks:
            turns.add((work, chunk), times=num_micro)
    return turns.turns


def one_forward_one_backward(
    rank: int, num_ranks: int, num_chunks: int, num_micro: int
) -> list[Turn]:
    """One forward pass for each later rank, then forward and backward in turn (PipeDream)."""
    if num_chunks != 1:
        raise StrategyError(f"1f1b is for 1 stage per device, not {num_chunks}; see interleaved.")
    turns = _Turns(num_micro)
    warm_up = min(num_ranks - 1 - rank, num_micro)
    for number in range(num_micro + warm_up):
        turns.add((_F, 0))
        if number >= warm_up:
            turns.add((_B, 0))
    return turns.turns


def interleaved(
    rank: int, num_ranks: int, num_chunks: int, num_micro: int, *, zero_bubble: bool = False
) -> list[Turn]:
    """One forward, one backward, over chunks in rounds (Narayanan et al. 2021, section 2.2).

    With ``zero_bubble`` the weight gradients of rank r are delayed by r backward passes.
    """
    rounds = max(num_micro // num_ranks, 1)
    if num_micro % rounds:
        raise StrategyError(
            f"{num_micro} micro-batches do not divide into {rounds} rounds of {num_ranks} ranks; "
            "an interleaved schedule needs a multiple of the ranks."
        )
    per_round, total = num_micro // rounds, num_micro * num_chunks
    later = (1 if zero_bubble else 2) * (num_ranks - 1 - rank)
    warm_up = min((num_chunks - 1) * per_round + later, total)
    turns = _Turns(num_micro)
    backward: list[int] = []
    written = 0
    for number in range(total + warm_up):
        if number < total:
            turns.add((_F, number // per_round % num_chunks))
        if number < warm_up:
            continue
        chunk = num_chunks - 1 - (number - warm_up) // per_round % num_chunks
        turns.add((_B, chunk))
        backward.append(chunk)
        if zero_bubble and number - warm_up >= rank:
            turns.add((_W, backward[written]))
            written += 1
    if zero_bubble:
        turns.add(*((_W, chunk) for chunk in backward[written:]))
    return turns.turns


def zero_bubble_v(rank: int, num_ranks: int, num_chunks: int, num_micro: int) -> list[Turn]:
    """Two chunks in a V, weight gradients while a rank would wait (Qi et al. 2024, section 6)."""
    _check_v(num_chunks)
    turns = _Turns(num_micro)
    count = turns.count
    turns.add((_F, 0), times=2 * (num_ranks - rank) - 1)
    turns.add((_F, 1), (_F, 0), times=rank)
    turns.add((_F, 1), (_B, 1), (_W, 1), times=num_ranks - rank)
    # The pattern needs 2 p - 1 micro-batches; if there are fewer, the missing ones are left out.
    enough = max(2 * num_ranks - 1, num_micro)
    while count[1, _F] < count[0, _F] or count[0, _F] < enough:
        if count[0, _F] < enough:
            turns.add((_F, 0))
        turns.add((_B, 0), (_W, 0), (_F, 1), (_B, 1), (_W, 1))
    turns.add((_B, 0), (_B, 1), times=rank)
    turns.add((_B, 0), (_W, 0), times=num_ranks - rank)
    for chunk in (1, 0):
        turns.add((_W, chunk), times=count[chunk, _B] - count[chunk, _W])
    return turns.turns


def dual_pipe_v(rank: int, num_ranks: int, num_chunks: int, num_micro: int) -> list[Turn]:
    """DeepSeek's DualPipe folded into a V: a forward pass for each backward pass.

    Source: github.com/deepseek-ai/DualPipe, as in ``torch.distributed.pipelining``.
    """
    _check_v(num_chunks)
    if num_micro < 2 * num_ranks:
        raise StrategyError(
            f"{num_micro} micro-batches are too few for dual_pipe_v on {num_ranks} ranks; it "
            f"needs {2 * num_ranks}."
        )
    turns = _Turns(num_micro)
    waiting: list[int] = []  # chunks whose weight gradients are deferred

    def add_inputs(chunk: int) -> None:
        turns.add((_B, chunk))
        waiting.append(chunk)

    def add_weights() -> None:
        if waiting:
            turns.add((_W, waiting.pop(0)))

    later = num_ranks - rank - 1
    turns.add((_F, 0), times=2 * later)
    turns.add((_F, 0), (_F, 1), times=rank + 1)
    for _ in range(later):
        add_inputs(1)
        add_weights()
        turns.add((_F, 1))
    pairs = num_micro - 2 * num_ranks + rank + 1
    turns.add((_F, 0), (_B, 1), (_W, 1), (_F, 1), (_B, 0), (_W, 0), times=pairs)
    turns.add((_B, 1), (_W, 1), (_F, 1), (_B, 0), (_W, 0), times=later)
    # The second half of the remaining backward passes defers its weight gradients.
    half = 2 * ((rank + 1) // 2) + (rank % 2 == 0)
    for number in range(2 * (rank + 1)):
        chunk = 1 - number % 2
        if number < half:
            turns.add((_B, chunk), (_W, chunk))
        else:
            add_inputs(chunk)
    for _ in range(later):
        add_weights()
        add_inputs(0)
    turns.add(*((_W, chunk) for chunk in waiting))
    return turns.turns


def as_caps(schedule: PipelineSchedule, returns: int = 0) -> PipelineSchedule:
    """Replace stated turns by caps that allow as many micro-batches in flight in each chunk.

    Args:
        schedule: The turns.
        returns: Number of further micro-batches in flight in each chunk, if there are so many;
            see ``num_returns``.

    >>> as_caps(stated_turns("1f1b", [(0,), (1,)], 1, 4, num_devices=2)).in_flight
    ((2,), (1,))
    """
    last = _W if schedule.splits_backward else _B
    caps = []
    for turns in schedule.turns:
        most, now = Counter[int](), Counter[int]()
        for turn in turns:
            now[turn.chunk] += (turn.work == _F) - (turn.work == last)
            most[turn.chunk] = max(most[turn.chunk], now[turn.chunk])
        micro = len({turn.micro for turn in turns})
        caps.append(tuple(min(most[chunk] + returns, micro) for chunk in sorted(most)))
    return replace(schedule, in_flight=tuple(caps), turns=())


def _check_v(num_chunks: int) -> None:
    if num_chunks != 2:
        raise StrategyError(f"a schedule in a V has 2 chunks per device, not {num_chunks}.")


Generator = Callable[[int, int, int, int], list[Turn]]
"""Makes turns from (rank, number of ranks, chunks of each, number of micro-batches)."""
SCHEDULES: dict[str, Generator] = {
    "gpipe": by_chunks,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "interleaved_zero_bubble": partial(interleaved, zero_bubble=True),
    "breadth_first": by_chunks,
    "zero_bubble_v": zero_bubble_v,
    "dual_pipe_v": dual_pipe_v,
}
"""Schedules that state every turn; see ``caps_of_stages`` for caps alone."""
_IN_A_V = frozenset({"zero_bubble_v", "dual_pipe_v"})


def stages_of(name: str, ranks: Stages, num_chunks: int) -> tuple[tuple[int, ...], ...]:
    """Devices of each stage, in the order of the model, as a schedule needs them.

    >>> stages_of("interleaved", [(0,), (1,)], 2)
    ((0,), (1,), (0,), (1,))
    >>> stages_of("zero_bubble_v", [(0,), (1,)], 2)
    ((0,), (1,), (1,), (0,))
    """
    once = tuple(tuple(devices) for devices in ranks)
    return once + once[::-1] if name in _IN_A_V else once * num_chunks


def stated_turns(
    name: str,
    ranks: Stages,
    num_chunks: int,
    num_micro: int,
    *,
    num_devices: int,
    chunk_starts: tuple[int, ...] = (),
) -> PipelineSchedule:
    """A named schedule with every turn stated.

    Args:
        name: One of ``SCHEDULES``.
        ranks: Devices of each rank; ``stages_of`` assigns the stages to them.
        num_chunks: Number of stages of each rank.
        num_micro: Number of micro-batches.
        num_devices: Number of devices of the cluster.
        chunk_starts: First group of each stage, if neighbouring stages share devices.

    Raises:
        StrategyError: the schedule does not exist, or not for these numbers.
    """
    if name not in SCHEDULES:
        raise StrategyError(f"no schedule is called '{name}'; there are {', '.join(SCHEDULES)}.")
    turns: list[tuple[Turn, ...]] = [()] * num_devices
    for rank, devices in enumerate(ranks):
        own = tuple(SCHEDULES[name](rank, len(ranks), num_chunks, num_micro))
        for device in devices:
            turns[device] = own
    splits = any(turn.work == _W for own in turns for turn in own)
    return PipelineSchedule(
        splits_backward=splits,
        turns=tuple(turns),
        chunk_starts=chunk_starts,
        gathers_once=name == "breadth_first",
    )
