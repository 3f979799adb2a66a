"""Rules of several regions in one strategy."""

from heterog.graph.placement import OpRule, OpRules


def merge_rules(*parts: OpRules) -> OpRules:
    """Combine rules of several regions; an op keeps the first rule it is given."""
    merged: dict[int, OpRule] = {}
    for rules in parts:
        for op, rule in rules:
            merged.setdefault(op, rule)
    return tuple(sorted(merged.items(), key=lambda pair: pair[0]))
