"""Rules of single ops: their hash is computed once, and never leaves the process."""

import pickle
from dataclasses import replace

from heterog.graph.placement import OpRule, Placement


def rule(units: int = 4) -> OpRule:
    """A rule made anew, so that no hash of it is known."""
    return OpRule(inputs=(Placement("S", 1, 2),), outputs=(Placement("R"),), units=units)


def test_rules_that_are_equal_have_equal_hashes_before_and_after_they_are_asked() -> None:
    first, second = rule(), rule()
    assert hash(first) == hash(second) == hash(first)
    assert {(0, first): "found"}[0, second] == "found"
    assert hash(first) != hash(rule(units=5))


def test_the_text_of_a_rule_stays_because_programs_hash_it() -> None:
    assert repr(rule()) == (
        "OpRule(inputs=(Placement(kind='S', dim=1, outer=2),), "
        "outputs=(Placement(kind='R', dim=0, outer=1),), units=4, scatter=None)"
    )


def test_a_copy_with_another_field_has_a_hash_of_its_own() -> None:
    known = rule()
    hash(known)
    assert hash(replace(known, units=5)) == hash(rule(units=5))


def test_a_pickle_holds_no_hash_which_another_process_would_compute_otherwise() -> None:
    known, unknown = rule(), rule()
    hash(known)
    assert pickle.dumps(known) == pickle.dumps(unknown)
