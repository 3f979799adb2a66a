"""Strategies as plain JSON values, versioned; equal decisions are written once."""

import re
from collections.abc import Mapping
from typing import Any

from heterog.errors import StrategyError
from heterog.graph.placement import L, P, Placement, R, S
from heterog.strategy.strategy import Decision, OpRule, Strategy, Sync

SCHEMA_VERSION = 1


def strategy_to_dict(strategy: Strategy) -> dict[str, Any]:
    """A strategy as a JSON-ready dict.

    ``decisions`` lists the different decisions, ``groups`` the number of the decision of each
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
            }
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
            for rule in rules
        ],
        "op_rules": ops,
    }


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"recompute is {value!r}; it must be true or false")
    return value


def strategy_from_dict(record: Mapping[str, Any]) -> Strategy:
    """The strategy of a dict made by ``strategy_to_dict``.

    Raises:
        StrategyError: a field is missing or has a wrong value; names it.
    """
    version = record.get("schema_version")
    if version != SCHEMA_VERSION:
        raise StrategyError(
            f"strategy has schema_version {version!r}; this heterog reads {SCHEMA_VERSION}."
        )
    try:
        decisions = [
            Decision(
                devices=tuple(map(int, entry["devices"])),
                shares=tuple(map(int, entry["shares"])),
                sync=Sync[str(entry["sync"]).upper()],
                slices=tuple(map(int, entry["slices"])),
                recompute=_flag(entry.get("recompute", False)),
            )
            for entry in record["decisions"]
        ]
        rules = [
            OpRule(
                inputs=tuple(map(_placement, entry["inputs"])),
                outputs=tuple(map(_placement, entry["outputs"])),
                units=int(entry["units"]),
            )
            for entry in record.get("rules", ())
        ]
        return Strategy(
            graph=str(record["graph"]),
            cluster=str(record["cluster"]),
            decisions=tuple(decisions[number] for number in record["groups"]),
            homes=tuple(map(int, record["homes"])),
            micro_batches=tuple(tuple(map(int, counts)) for counts in record["micro_batches"]),
            bucket_bytes=int(record["bucket_bytes"]),
            step_barrier=bool(record["step_barrier"]),
            op_rules=tuple((int(op), rules[number]) for op, number in record.get("op_rules", ())),
        )
    except KeyError as error:
        raise StrategyError(f"strategy: field or value {error} is missing or unknown.") from error
    except (TypeError, ValueError, IndexError) as error:
        raise StrategyError(f"strategy: {error}.") from error


def _placement(text: str) -> Placement:
    """The placement of a text like ``R`` or ``S(0,3)``.

    >>> _placement("S(0,3)")
    Placement(kind='S', dim=0, outer=3)
    """
    known = {str(place): place for place in (R, P, L)}
    if text in known:
        return known[text]
    found = re.fullmatch(r"S\((\d+),(\d+)\)", text)
    if found is None:
        raise ValueError(f"{text!r} is no placement; R, P, L or S(dim,outer) is meant")
    return S(int(found[1]), int(found[2]))
