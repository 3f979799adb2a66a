"""The work on a model of many small parameters grows with their number, counted in calls."""

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heterog
from heterog.graph.capture import capture_step
from heterog.graph.grouping import group_ops
from heterog.graph.workload import Workload
from heterog.lowering import lower
from heterog.methods.hap import segments
from heterog.runtime.measure.rehearsal import rehearse
from tests.runtime.strategies import ZERO, cluster, strategy_of
from tests.search.asking import make_plan

OURS = str(Path(heterog.__file__).parent)
FEW = 60
"""Calls more or less that depend on how a search goes."""


class Many(nn.Module):
    """Parameters of one element."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.own = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(number))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.cat(list(self.own)).sum()


def captured_and_planned(number: int) -> None:
    """Capture, a search, and the rehearsal of a bucket that has all parameters in slices."""
    workload = Workload(
        model=lambda: Many(number),
        example_batch=lambda: (torch.zeros(8, 4), torch.zeros(8, 4)),
        loss=nn.functional.mse_loss,
        optimizer=torch.optim.SGD,
        optimizer_options={"lr": 0.1},
    )
    step = capture_step(workload)
    make_plan(step.graph, cluster(), methods=("hap",), budget="1e")
    decisions = [ZERO["zero1"]] * group_ops(step.graph).num_groups
    sliced = strategy_of(step.graph, decisions, bucket_bytes=1 << 20)
    program = lower(step.graph, cluster(), sliced, num_steps=1)
    assert rehearse(step, sliced, program, range(program.num_tasks)) == ""


def calls_of(work: Callable[[], None]) -> Counter[tuple[CodeType, str]]:
    """How often each function of heterog is called, and calls each built-in function."""
    counts: Counter[tuple[CodeType, str]] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call") and frame.f_code.co_filename.startswith(OURS):
            counts[frame.f_code, "" if event == "call" else argument.__name__] += 1

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return counts


def test_no_function_is_called_for_each_pair_of_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twice as many more parameters make twice as many more calls; pairs would make four times."""
    monkeypatch.setattr(segments, "_MOST_CARRIED", 1)  # of thousands, hap leaves the graph alone
    captured_and_planned(4)  # what is done once
    few, some, many = [calls_of(partial(captured_and_planned, number)) for number in (8, 16, 32)]
    for code, built_in in many:
        calls = [each[code, built_in] for each in (few, some, many)]
        place = f"{code.co_filename}:{code.co_firstlineno} {code.co_name} {built_in}"
        assert calls[2] - calls[1] <= 2.6 * max(calls[1] - calls[0], 0) + FEW, (place, calls)
