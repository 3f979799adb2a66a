"""Segments make the numbers that single turns make, to the last bit, and drop what those drop."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from heterog.lowering.program import OP_KINDS
from heterog.runtime.step.compiled import Compiler, _inductor, as_compiled
from heterog.runtime.step.executor import StepExecutor
from heterog.runtime.step.local_op import _FAST
from heterog.runtime.step.recipes import Like
from heterog.runtime.step.replays import Kernels
from heterog.runtime.step.segments import lying_as
from tests.runtime.cases import SGD, batch_of, deployed
from tests.runtime.ranks import Ranks
from tests.runtime.test_updates import saved_plan
from tests.thorough import few_of

CASES = ("ring", "hybrid", "uneven slices", "one device")


def traced(function: Kernels, likes: Sequence[Like]) -> Kernels:
    """In place of inductor, which takes many seconds: what it would compile, as it is traced."""
    return as_compiled(function, likes, lambda graph, _: lambda given: graph(*given))


def moved(function: Kernels, likes: Sequence[Like]) -> Kernels:
    """A compiler that lays out results in its own way, and reads them as in the first step."""
    run = traced(function, likes)

    def call(given: list[Tensor]) -> list[Tensor]:
        assert [each.stride() for each in given] == [each.stride for each in likes]
        return [each.mT.contiguous().mT if each.dim() > 1 else each for each in run(given)]

    return call


def refused(function: Kernels, likes: Sequence[Like]) -> Kernels:
    """A compiler that can do nothing."""
    raise RuntimeError("no such kernel\nfor this")


class Played(NamedTuple):
    """What came of three steps: losses, parameters, and how the last one was run."""

    losses: list[float]
    parameters: list[Tensor]
    left: int
    """Buffers that are held at the end."""
    in_segments: float
    """Fraction of the ops that were run in segments."""
    num_segments: int
    num_texts: int


def moved_batch(name: str, number: int) -> list[Tensor]:
    """A batch that lies in memory otherwise than the first."""
    return [
        each.mT.contiguous().mT if number and each.dim() > 1 else each
        for each in batch_of(name, number)
    ]


def compiled(rank: int, name: str, plan_path: str, how: str) -> tuple[Played, int]:
    """Three steps with compiled segments; number of functions that were compiled."""
    compiler = Compiler()
    inductor = {"traced": traced, "moved": moved, "refused": refused, "inductor": _inductor}[how]
    batches = moved_batch if how == "moved" else batch_of
    with mock.patch("heterog.runtime.step.compiled._inductor", inductor):
        return played(rank, name, plan_path, False, compiler, batches), compiler.num_compiled


def played(
    rank: int,
    name: str,
    plan_path: str,
    is_single: bool,
    compiler: Compiler | None = None,
    batches: Callable[[str, int], Sequence[Tensor]] = batch_of,
) -> Played:
    """Three steps, in segments or turn by turn."""
    step = deployed(name, plan_path, SGD)
    executor: StepExecutor = step._executor
    executor._segments = replace(executor._segments, compiler=compiler)
    losses = []
    for number in range(3):
        losses.append(float(step(batches(name, number))))
        if is_single:
            executor._pieces.clear()
            executor._interpreter.noted.clear()  # as before a first step
    left = len(executor._values.held)
    pieces = [piece for run in executor._pieces.values() for piece in run]
    kinds = executor.part.kinds
    singles = [each for each in pieces if each.segment is None and each.turn.task >= 0]
    ops = [turn for turn in executor.turns if turn.task >= 0 and kinds[turn.task] in OP_KINDS]
    outside = sum(kinds[each.turn.task] in OP_KINDS for each in singles)
    codes = [each.segment.__code__ for each in pieces if each.segment is not None]
    return Played(
        losses,
        [value.detach().clone() for value in step.parameters.values()],
        left,
        1 - outside / max(len(ops), 1),
        len(codes),
        len(set(codes)),
    )


class Called(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which ops are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[object] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an op, and note it."""
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def test_functions_of_torch_call_the_ops_that_they_stand_for() -> None:
    x = torch.randn(2, 2)
    arguments = {
        "transpose": (x, 0, 1), "permute": (x, [1, 0]), "unsqueeze": (x, 0), "squeeze": (x, 0),
        "select": (x, 0, 1), "expand": (x[:1], [2, 2]), "mm": (x, x), "bmm": (x[None], x[None]),
        "addmm": (x, x, x), "add": (x, x), "sub": (x, x), "mul": (x, x), "div": (x, x),
        "pow": (x, 2), "sum": (x, [0], True), "mean": (x, [0], True), "_softmax": (x, 1, False),
        "_log_softmax": (x, 1, False), "native_layer_norm": (x, [2], None, None, 1e-5),
    }  # fmt: skip
    for op, function in _FAST.items():
        given = arguments.get(op._schema.name.removeprefix("aten::"), (x,))
        with torch.no_grad(), Called() as called:
            function(*given)
        assert called.ops == [op]


def test_half_a_library_in_the_cache_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    half = tmp_path / "a" / "main.so"
    half.parent.mkdir()
    half.touch()

    def loads(function: Kernels, likes: Sequence[Like]) -> Kernels:
        if half.exists():
            raise ImportError(f"{half}: file too short")
        return function

    with mock.patch("heterog.runtime.step.compiled._inductor", loads):
        compiler = Compiler()
        compiler.part("one", list, (), 1)
        compiler.compile()
    assert compiler.num_compiled == 1
    assert not half.exists()


def test_without_a_compiler_two_parts_are_tried() -> None:
    compiler, told = Compiler(), list[str]()
    compiler.tell = told.append
    parts = [compiler.part(number, list, (), 20) for number in range(5)]
    assert compiler.part(4, list, (), 20) is parts[4]
    with mock.patch("heterog.runtime.step.compiled._inductor", refused):
        compiler.compile()
    assert told == [
        "part 1 of 5, about 16 s of a core left",
        "part 2 of 5, about 13 s of a core left",
    ]
    assert [part.run for part in parts] == [list] * 5
    assert compiler.refused == (
        "5 of 5 parts were not compiled and run as generated Python: no such kernel"
    )


def test_results_are_what_their_readers_are_compiled_for() -> None:
    value = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    made = lying_as(value, (1, 2), torch.float32)
    assert (made.stride(), made.dtype, made.tolist()) == ((1, 2), torch.float32, value.tolist())
    assert lying_as(value, (3, 1), torch.bfloat16) is value


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            RuntimeError("C++ compile error\nCommand: g++\na.cpp:1: fatal error: no a.h"),
            "no a.h",
        ),
        (AssertionError(), "AssertionError"),
    ],
)
def test_a_refusal_says_why(error: Exception, words: str) -> None:
    compiler = Compiler()
    compiler.part("one", list, (), 1)
    with mock.patch("heterog.runtime.step.compiled._inductor", side_effect=error):
        compiler.compile()
    assert compiler.refused.endswith(words)


@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES)
def test_segments_do_what_single_turns_do(ranks: Ranks, tmp_path: Path, case: str) -> None:
    path = saved_plan(tmp_path, "gpt", case, step_barrier=case != "hybrid")
    together = ranks.run(played, "gpt", path, False)
    for one, other in zip(together, ranks.run(played, "gpt", path, True), strict=True):
        assert other.num_segments == 0
        assert one.losses == other.losses
        for value, wanted in zip(one.parameters, other.parameters, strict=True):
            assert value.equal(wanted)
        assert one.left <= other.left
        assert one.in_segments >= 0.9
        assert one.num_texts <= one.num_segments


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("case", "how"),
    few_of(
        [("hybrid", "traced"), ("hybrid", "moved"), ("ring", "refused"), ("ring", "inductor")], 3
    ),
)
def test_compiled_segments_do_the_same(ranks: Ranks, tmp_path: Path, case: str, how: str) -> None:
    path = saved_plan(tmp_path, "gpt", case, step_barrier=True)
    plain = ranks.run(played, "gpt", path, False)
    found = ranks.run(compiled, "gpt", path, how)
    assert any(number > 0 for _, number in found) == (how != "refused")
    for one, (other, number) in zip(plain, found, strict=True):
        assert number <= other.num_segments
        # Inductor sums in another order: sqrt(n) roundings of a sum of some hundred numbers.
        rtol = 1e-5 if how == "inductor" else 0.0
        torch.testing.assert_close(one.losses, other.losses, rtol=rtol, atol=rtol)
        torch.testing.assert_close(one.parameters, other.parameters, rtol=rtol, atol=rtol)
