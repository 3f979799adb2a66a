"""Strategies as plain JSON values, versioned; equal decisions are written once."""

from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import Field, create_model

from heterog.errors import InputFileError, StrategyError
from heterog.graph.placement import Scatter
from heterog.modes.built_in import built_in_modes
from heterog.modes.mode import Mode
from heterog.records import MAX_INT32, Int32, Many, NumBytes, Record, Text, parse_record, stated
from heterog.strategy.schedules import AS_IT_COMES, PipelineSchedule
from heterog.strategy.strategy import REPLICATED, Decision, OpRule, Strategy

SCHEMA_VERSION = 2
"""Version 1 had no schedule and no teams; its files can still be read."""


def strategy_to_dict(strategy: Strategy) -> dict[str, Any]:
    """Convert a strategy to a JSON-ready dict.

    ``decisions`` lists the distinct decisions, ``groups`` the number of the decision of each
    group. ``rules`` lists the distinct rules, ``op_rules`` pairs (graph op, number of its rule);
    both may be missing.
    """
    numbers: dict[Decision, int] = {}
    rules: dict[OpRule, int] = {}
    ops = [[op, rules.setdefault(rule, len(rules))] for op, rule in strategy.op_rules]
    groups = [numbers.setdefault(decision, len(numbers)) for decision in strategy.decisions]
    return {
        "schema_version": SCHEMA_VERSION,
        "graph": strategy.graph,
        "cluster": strategy.cluster,
        "decisions": [_decision_to_dict(decision) for decision in numbers],
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
        **({"first_bucket_bytes": first} if (first := strategy.first_bucket_bytes) else {}),
    } | {mode.key: mode.to_json() for mode in strategy.modes}


def _decision_to_dict(decision: Decision) -> dict[str, Any]:
    """Its fields; those that are rarely used are left out where they have their default."""
    return {
        "devices": list(decision.devices),
        "shares": list(decision.shares),
        "sync": decision.sync.name.lower(),
        "slices": list(decision.slices),
        "recompute": decision.recompute,
        "teams": [list(team) for team in decision.teams],
        "parts": list(decision.parts),
        **stated(
            {
                "slice_groups": [list(group) for group in decision.slice_groups] or None,
                "keeps": decision.keeps.name.lower() if decision.keeps else None,
            }
        ),
    }


_Pair = Annotated[list[Int32], Field(min_length=2, max_length=2)]
_Home = Annotated[int, Field(ge=REPLICATED, le=MAX_INT32)]


class _StrategyRecord(Record):
    schema_version: int
    graph: Text
    cluster: Text
    decisions: Many[Decision]
    groups: Many[Int32]
    homes: Many[_Home]
    micro_batches: list[Many[Int32]]
    bucket_bytes: NumBytes
    first_bucket_bytes: NumBytes = 0
    step_barrier: bool
    rules: Many[OpRule] = Field(default_factory=list)
    op_rules: Many[_Pair] = Field(default_factory=list)
    schedule: PipelineSchedule = AS_IT_COMES
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
    ops = [op for op, _ in found.op_rules]
    if sorted(set(ops)) != ops:
        raise StrategyError("strategy: field 'op_rules' has an op twice or out of order.")
    return Strategy(
        graph=found.graph,
        cluster=found.cluster,
        decisions=tuple(_entry(found.decisions, number, "groups") for number in found.groups),
        homes=tuple(found.homes),
        micro_batches=tuple(map(tuple, found.micro_batches)),
        bucket_bytes=found.bucket_bytes,
        first_bucket_bytes=found.first_bucket_bytes,
        step_barrier=found.step_barrier,
        op_rules=tuple(
            (op, _entry(found.rules, number, "op_rules")) for op, number in found.op_rules
        ),
        schedule=found.schedule,
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


_T = TypeVar("_T")


def _entry(table: Sequence[_T], number: int, field: str) -> _T:
    if number >= len(table):
        raise StrategyError(
            f"strategy: field '{field}' names entry {number} of a list of {len(table)}."
        )
    return table[number]
