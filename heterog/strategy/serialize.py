"""Strategies as plain JSON values, versioned; equal decisions are written once."""

import re
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import Field, create_model

from heterog.errors import InputFileError, StrategyError
from heterog.graph.placement import H, L, P, Placement, R, S, Scatter, Window, neighbours
from heterog.modes.built_in import built_in_modes
from heterog.modes.mode import Mode
from heterog.names import shown
from heterog.records import MAX_INT32, Count, Int32, Many, NumBytes, Record, Text, parse_record
from heterog.strategy.schedules import Pass, PipelineSchedule, Turn
from heterog.strategy.strategy import REPLICATED, Decision, Keeps, OpRule, Strategy, Sync

SCHEMA_VERSION = 2
"""Version 1 had no schedule and no teams; its files can still be read."""


def strategy_to_dict(strategy: Strategy) -> dict[str, Any]:
    """Convert a strategy to a JSON-ready dict.

    ``decisions`` lists the distinct decisions, ``groups`` the number of the decision of each
    group. ``rules`` and ``op_rules`` (graph op, number of its rule) likewise; both may be missing.
    """
    numbers: dict[Decision, int] = {}
    rules: dict[OpRule, int] = {}
    ops = [[op, rules.setdefault(rule, len(rules))] for op, rule in strategy.op_rules]
    groups = [numbers.setdefault(decision, len(numbers)) for decision in strategy.decisions]
    return {
        "schema_version": SCHEMA_VERSION,
        "graph": strategy.graph,
        "cluster": strategy.cluster,
        "decisions": [
            {
                "devices": list(decision.devices),
                "shares": list(decision.shares),
                "sync": decision.sync.name.lower(),
                "slices": list(decision.slices),
                "recompute": decision.recompute,
                "teams": [list(team) for team in decision.teams],
                "parts": list(decision.parts),
            }
            | _rarely_said(decision)
            for decision in numbers
        ],
        "groups": groups,
        "homes": list(strategy.homes),
        "micro_batches": [list(counts) for counts in strategy.micro_batches],
        "bucket_bytes": strategy.bucket_bytes,
        "step_barrier": strategy.step_barrier,
        "rules": [
            {
                "inputs": [str(place) for place in rule.inputs],
                "outputs": [str(place) for place in rule.outputs],
                "units": rule.units,
            }
            | _scatter_to_dict(rule.scatter)
            for rule in rules
        ],
        "op_rules": ops,
        "schedule": {
            "in_flight": [list(caps) for caps in strategy.schedule.in_flight],
            "splits_backward": strategy.schedule.splits_backward,
            "turns": [[list(map(int, turn)) for turn in own] for own in strategy.schedule.turns],
            "chunk_starts": list(strategy.schedule.chunk_starts),
            **({"gathers_once": True} if strategy.schedule.gathers_once else {}),
        },
        "blocks": list(strategy.blocks),
    } | {mode.key: mode.to_json() for mode in strategy.modes}


def _rarely_said(decision: Decision) -> dict[str, Any]:
    """Fields of a decision that are written only where they say something."""
    said: dict[str, Any] = {}
    if decision.slice_groups:
        said["slice_groups"] = [list(group) for group in decision.slice_groups]
    if decision.keeps:
        said["keeps"] = decision.keeps.name.lower()
    return said


class _DecisionRecord(Record):
    devices: list[Int32]
    shares: list[Int32]
    sync: str
    slices: list[Int32]
    recompute: bool = False
    teams: Many[Many[Int32]] = Field(default_factory=list)
    parts: Many[Int32] = Field(default_factory=list)
    slice_groups: Many[Many[Int32]] = Field(default_factory=list)
    keeps: str = "nothing"


class _ScatterRecord(Record):
    place: str
    units: Count


class _RuleRecord(Record):
    inputs: list[str]
    outputs: list[str]
    units: Count
    scatter: _ScatterRecord | None = None


_Pair = Annotated[list[Int32], Field(min_length=2, max_length=2)]
_Turn = Annotated[list[Int32], Field(min_length=3, max_length=3)]
_Home = Annotated[int, Field(ge=REPLICATED, le=MAX_INT32)]


class _ScheduleRecord(Record):
    in_flight: Many[list[Int32]] = Field(default_factory=list)
    splits_backward: bool = False
    turns: Many[Many[_Turn]] = Field(default_factory=list)
    chunk_starts: Many[Int32] = Field(default_factory=list)
    gathers_once: bool = False


class _StrategyRecord(Record):
    schema_version: int
    graph: Text
    cluster: Text
    decisions: Many[_DecisionRecord]
    groups: Many[Int32]
    homes: Many[_Home]
    micro_batches: list[Many[Int32]]
    bucket_bytes: NumBytes
    step_barrier: bool
    rules: Many[_RuleRecord] = Field(default_factory=list)
    op_rules: Many[_Pair] = Field(default_factory=list)
    schedule: _ScheduleRecord = Field(default_factory=_ScheduleRecord)
    blocks: Many[Int32] = Field(default_factory=list)


def strategy_from_dict(record: object) -> Strategy:
    """Read the strategy from a dict made by ``strategy_to_dict``.

    Raises:
        StrategyError: a field is missing or has a wrong value; names it.
    """
    try:
        found = parse_record(record, _record_type(), "strategy", versions=(1, SCHEMA_VERSION))
    except InputFileError as error:
        raise StrategyError(str(error)) from error
    decisions = [_decision(number, each) for number, each in enumerate(found.decisions)]
    rules = [
        OpRule(
            inputs=tuple(map(_placement, each.inputs)),
            outputs=tuple(map(_placement, each.outputs)),
            units=each.units,
            scatter=_scatter(each.scatter),
        )
        for each in found.rules
    ]
    ops = [op for op, _ in found.op_rules]
    if sorted(set(ops)) != ops:
        raise StrategyError("strategy: field 'op_rules' has an op twice or out of order.")
    return Strategy(
        graph=found.graph,
        cluster=found.cluster,
        decisions=tuple(_entry(decisions, number, "groups") for number in found.groups),
        homes=tuple(found.homes),
        micro_batches=tuple(map(tuple, found.micro_batches)),
        bucket_bytes=found.bucket_bytes,
        step_barrier=found.step_barrier,
        op_rules=tuple((op, _entry(rules, number, "op_rules")) for op, number in found.op_rules),
        schedule=_schedule(found.schedule),
        blocks=tuple(found.blocks),
        modes=_modes(found),
    )


@cache
def _record_type() -> type[_StrategyRecord]:
    """The record of a strategy, with a field for each mode; exact strategies have none of them."""
    fields: dict[str, Any] = {mode.key: (mode.record or mode, None) for mode in built_in_modes()}
    return create_model("_RecordWithModes", __base__=_StrategyRecord, **fields)


def _modes(record: _StrategyRecord) -> tuple[Mode, ...]:
    """The modes whose fields a record has."""
    said = dict(record)
    read = ((mode, said[mode.key]) for mode in built_in_modes())
    found = (mode.from_record(own) for mode, own in read if own is not None)
    return tuple(mode for mode in found if mode is not None)


def _scatter_to_dict(scatter: Scatter | None) -> dict[str, Any]:
    if scatter is None:
        return {}
    return {"scatter": {"place": str(scatter.place), "units": scatter.units}}


def _scatter(record: _ScatterRecord | None) -> Scatter | None:
    return None if record is None else Scatter(place=_placement(record.place), units=record.units)


def _schedule(record: _ScheduleRecord) -> PipelineSchedule:
    if any(work >= len(Pass) for own in record.turns for _, _, work in own):
        raise StrategyError(
            "strategy: field 'schedule.turns' has a turn that is no forward (0), backward (1) or "
            "weights pass (2)."
        )
    return PipelineSchedule(
        in_flight=tuple(map(tuple, record.in_flight)),
        splits_backward=record.splits_backward,
        turns=tuple(
            tuple(Turn(micro, chunk, Pass(work)) for micro, chunk, work in own)
            for own in record.turns
        ),
        chunk_starts=tuple(record.chunk_starts),
        gathers_once=record.gathers_once,
    )


def _decision(number: int, record: _DecisionRecord) -> Decision:
    if record.sync.upper() not in Sync.__members__ or record.sync != record.sync.lower():
        raise StrategyError(
            f"strategy: field 'decisions.{number}.sync' is {shown(record.sync)}, none of "
            f"{', '.join(sync.name.lower() for sync in Sync)}."
        )
    kept = {each.name.lower(): each for each in Keeps}
    if record.keeps not in kept:
        raise StrategyError(
            f"strategy: field 'decisions.{number}.keeps' is {shown(record.keeps)}, none of "
            f"{', '.join(kept)}."
        )
    return Decision(
        devices=tuple(record.devices),
        shares=tuple(record.shares),
        sync=Sync[record.sync.upper()],
        slices=tuple(record.slices),
        recompute=record.recompute,
        keeps=kept[record.keeps],
        teams=tuple(map(tuple, record.teams)),
        parts=tuple(record.parts),
        slice_groups=tuple(map(tuple, record.slice_groups)),
    )


_T = TypeVar("_T")


def _entry(table: Sequence[_T], number: int, field: str) -> _T:
    if number >= len(table):
        raise StrategyError(
            f"strategy: field '{field}' names entry {number} of a list of {len(table)}."
        )
    return table[number]


def _placement(text: str) -> Placement:
    """The placement of a text like ``R``, ``S(0,3)``, ``H(2,4,1,-1)`` or ``H(1,@key)``.

    >>> _placement("S(0,3)")
    Placement(kind='S', dim=0, outer=3)
    """
    known = {str(place): place for place in (R, P, L)}
    if text in known:
        return known[text]
    halo = re.fullmatch(r"H\((\d{1,9}),(\d{1,9}),(-?\d{1,9}),(-?\d{1,9})\)", text)
    if halo is not None:
        return H(int(halo[1]), Window(int(halo[2]), int(halo[3]), int(halo[4])))
    sparse = re.fullmatch(r"H\((\d{1,9}),@([0-9a-f]{16})\)", text)
    if sparse is not None:
        return neighbours(int(sparse[1]), sparse[2])
    found = re.fullmatch(r"S\((\d{1,9}),(\d{1,9})\)", text)
    if found is None or int(found[2]) < 1:
        raise StrategyError(
            f"strategy: {shown(text)} is no placement; R, P, L or S(dim,outer) is meant, "
            "or H(dim,step,before,after) for an input, H(dim,@key) for one of a sparse product."
        )
    return S(int(found[1]), int(found[2]))
