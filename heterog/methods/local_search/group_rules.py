"""Op rules inside a search: one number per group, so that moves change them group by group.

A strategy's op rules (``OpRule``) are cut at the borders of groups. Parts of legal rules are
legal: ops that must be decided together (local statistics and their readers) are in one group, and
if placements differ at a border, lowering converts the value.
"""

from collections.abc import Collection
from functools import cached_property

import numpy as np

from heterog.errors import StrategyError
from heterog.graph.axis_plan import axis_plan
from heterog.graph.grouping import CONSTANT_GROUP, group_ops
from heterog.graph.placement import OpRules
from heterog.grouped import grouped
from heterog.memo import kept
from heterog.methods.teams import rules_of_model, team_sizes
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.layer_shardings import layer_shardings
from heterog.strategy.layouts.tensor import first_divided

RuleRow = tuple[int, ...]
"""Number of each group's rules, 0 for none; empty if no group has any."""
Place = dict[int, OpRules]
"""One layer's sharding: the rules of each group that it touches."""


class GroupRules:
    """Numbers the rules of groups, and joins them to rules of a whole strategy.

    Args:
        evaluator: Evaluator that numbers whole rule sets.
    """

    def __init__(self, evaluator: Evaluator) -> None:
        self._evaluator = evaluator
        grouping = group_ops(evaluator.graph)
        self._group = grouping.group
        self._num_groups = grouping.num_groups
        self._parts: list[OpRules] = [()]
        self._numbers: dict[OpRules, int] = {(): 0}

    @cached_property
    def layers(self) -> list[list[Place]]:
        """Ways to shard the graph's layers: for each way, all its places, in order."""
        return [
            [self._by_group(rules) for rules in places]
            for places in layer_shardings(self._evaluator.graph)
        ]

    @cached_property
    def of_teams(self) -> RuleRow:
        """The rules by which teams divide every layer; empty if there are none."""
        rules = rules_of_model(self._evaluator.graph)
        return () if rules is None else self.row_of(rules.op_rules)

    @cached_property
    def team_sizes(self) -> list[int]:
        """Sizes of teams worth trying."""
        return team_sizes(self._evaluator.cluster, rules_of_model(self._evaluator.graph))

    def are_of_teams(self, rules: RuleRow) -> bool:
        """Whether rules are those of teams.

        Finding these takes a second on large convolutional models, so the first groups that teams
        can divide are looked at before: rules of a few other layers have none there.
        """
        return (
            bool(rules) and all(rules[n] for n in self._first_divided) and rules == self.of_teams
        )

    @cached_property
    def _first_divided(self) -> set[int]:
        groups = tuple(range(self._num_groups))
        return {int(self._group[op]) for op in first_divided(self._evaluator.graph, groups)}

    def row_of(self, op_rules: OpRules) -> RuleRow:
        """Numbers of a strategy's rules, without rules of constants, which have no effect."""
        return self.added((), self._by_group(op_rules))

    def op_rules(self, rules: RuleRow) -> OpRules:
        """The rules of all groups together."""
        return tuple(sorted((pair for n in rules for pair in self._parts[n]), key=lambda p: p[0]))

    @kept
    def rule_set(self, rules: RuleRow, blocks: tuple[int, ...] = ()) -> int | None:
        """The evaluator's number of rules and blocks; ``None`` if they are refused together."""
        number = self._evaluator.rules.number(self.op_rules(rules), blocks)
        try:
            self._evaluator.rules.of(number)
        except StrategyError:
            return None
        return number

    @kept
    def may_cut(self, rules: RuleRow) -> bool:
        """Whether rules have a meaning on a part of the batch, as in micro-batches and teams."""
        return not rules or axis_plan(self._evaluator.graph, self.op_rules(rules)).crossing is None

    def added(self, rules: RuleRow, place: Place) -> RuleRow:
        """Add the rules of a place; they replace a group's own rules that contradict them."""
        row = list(rules or (0,) * self._num_groups)
        for group, new in place.items():
            old = self._parts[row[group]]
            is_apart = {op for op, _ in old}.isdisjoint(op for op, _ in new)
            both = (*old, *new) if is_apart else new
            row[group] = self._number(tuple(sorted(both, key=lambda pair: pair[0])))
        return _normal(row)

    def removed(self, rules: RuleRow, place: Place) -> RuleRow:
        """Remove the rules of one place."""
        row = list(rules or (0,) * self._num_groups)
        for group, old in place.items():
            gone = {op for op, _ in old}
            kept = tuple(pair for pair in self._parts[row[group]] if pair[0] not in gone)
            row[group] = self._number(kept)
        return _normal(row)

    def without(self, rules: RuleRow, groups: Collection[int]) -> RuleRow:
        """Remove the rules of some groups."""
        return _normal([0 if group in groups else n for group, n in enumerate(rules)])

    def holds(self, rules: RuleRow, place: Place) -> bool:
        """Whether the rules of a place are all among some rules."""
        return bool(rules) and all(
            set(part) <= set(self._parts[rules[group]]) for group, part in place.items()
        )

    def _by_group(self, op_rules: OpRules) -> Place:
        place = grouped((int(self._group[op]), number) for number, (op, _) in enumerate(op_rules))
        place.pop(CONSTANT_GROUP, None)
        return {group: tuple(op_rules[n] for n in numbers) for group, numbers in place.items()}

    def _number(self, part: OpRules) -> int:
        if part not in self._numbers:
            self._numbers[part] = len(self._parts)
            self._parts.append(part)
        return self._numbers[part]


def _normal(row: list[int]) -> RuleRow:
    return tuple(row) if np.any(row) else ()
