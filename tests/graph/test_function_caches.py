"""Caches that are filled while a model is captured are emptied, whenever they were made."""

import functools
import gc

import pytest

from heterog.graph import repeated_calls
from heterog.graph.repeated_calls import caches_without_fakes


def doubled(number: int) -> int:
    return 2 * number


def test_only_what_was_filled_meanwhile_is_emptied() -> None:
    kept, filled = functools.lru_cache(doubled), functools.cache(doubled)
    kept(1)
    filled(1)
    with caches_without_fakes():
        kept(1)
        filled(2)
    assert kept.cache_info().currsize == 1
    assert filled.cache_info().currsize == 0


def test_caches_are_found_that_are_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    with caches_without_fakes():
        pass
    later = functools.cache(doubled)
    with caches_without_fakes():
        later(1)
        inside = functools.cache(doubled)
        inside(1)
    assert later.cache_info().currsize == inside.cache_info().currsize == 0
    del inside
    in_its_place = functools.cache(doubled)  # as many as before
    with caches_without_fakes():
        in_its_place(1)
    assert in_its_place.cache_info().currsize == 0


def test_caches_are_found_though_somebody_has_frozen_all_objects() -> None:
    """Python then looks at none of them, and training scripts may do so before they deploy."""
    frozen = functools.cache(doubled)
    gc.freeze()
    try:
        with caches_without_fakes():
            frozen(1)
    finally:
        gc.unfreeze()
    assert frozen.cache_info().currsize == 0


def test_all_objects_are_looked_at_only_where_there_may_be_a_new_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[str] = []
    look = gc.get_referrers

    def look_and_count(kind: type) -> list[object]:
        looks.append(kind.__name__)  # the type itself would count as a reference
        return look(kind)

    monkeypatch.setattr(gc, "get_referrers", look_and_count)
    monkeypatch.setattr(repeated_calls, "_FOUND", repeated_calls._FunctionCaches())
    for _ in range(3):
        with caches_without_fakes():
            pass
    assert len(looks) == 1
    new = functools.cache(doubled)
    with caches_without_fakes():
        new(1)
    assert len(looks) == 2
    # Where references to a type are not counted, always.
    monkeypatch.setattr(repeated_calls, "_are_counted", lambda: False)
    monkeypatch.setattr(repeated_calls, "_FOUND", repeated_calls._FunctionCaches())
    for _ in range(3):
        with caches_without_fakes():
            new(1)
        assert new.cache_info().currsize == 0
    assert len(looks) == 8
