"""Runs a family: captures it, plans it, executes the plans on ranks, compares.

A family runs in a process of its own that has three ranks: one that hangs or dies takes nothing
else with it. All of them are forks of this process, which has imported everything already.
"""

import logging
import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from families.family import BFLOAT16, Family
from families.reference import STEPS, Trained, train_on_one_device
from families.strategies import NUM_RANKS, strategies
from heterog.errors import HeterogError
from heterog.graph.capture import CapturedStep, capture_step
from heterog.graph.op_graph import OpGraph
from heterog.runtime.deploy import deploy
from heterog.search.plan import Plan

_FORK = multiprocessing.get_context("fork")
_END_S = 20
"""Seconds that ranks have to end by themselves."""
_STEP_TIMEOUT = timedelta(seconds=60)


class Row(NamedTuple):
    """What became of a family.

    Attributes:
        family: its name.
        strategies: error of each strategy that was executed, relative to how far weights moved.
        equal: whether at least three were executed or refused and all that were executed came
            out equal, or it was refused with the words that it should be.
        tolerance: largest error that counts as equal.
        refused: what was refused and why: by strategy, or under ``capture``.
        failed: what went wrong otherwise, the same way.
    """

    family: str
    strategies: dict[str, float]
    equal: bool
    tolerance: float
    refused: dict[str, str]
    failed: dict[str, str]


def run_family(family: Family, limit_s: float, *, searches: bool = True) -> Row:
    """Run a family in a process of its own.

    Args:
        family: of models.
        limit_s: seconds that it may take from one answer to the next.
        searches: whether a plan is searched for, too.
    """
    here, there = _FORK.Pipe()
    process = _FORK.Process(target=_family_process, args=(family, there, searches))
    process.start()
    there.close()
    row = None
    told: dict[str, Any] = {"strategies": {}, "refused": {}, "failed": {}, "noise": {}}
    end = f"no answer within {limit_s:g} s"
    try:
        while here.poll(limit_s):
            kind, key, value = here.recv()
            if kind == "done":
                row = True
                break
            told[kind][key] = value
    except EOFError:
        end = "its process died"
    if not row:
        told["failed"]["process"] = end
    _end(process)
    worst = max(told["strategies"].values(), default=0.0)
    # One device in bf16 has rounded as well.
    noise = max(told["noise"].values(), default=0.0)
    tolerance = max(family.tolerance, 3 * noise)
    num_asked = len(told["strategies"]) + len(told["refused"])
    equal = num_asked >= 3 and bool(told["strategies"]) and worst <= tolerance
    equal = equal and not told["failed"]
    if family.refused:
        equal = family.refused in told["refused"].get("capture", "")
    return Row(family.name, told["strategies"], equal, tolerance, told["refused"], told["failed"])


def _end(process: BaseProcess) -> None:
    """End a family's process and its ranks, which are in its process group."""
    process.join(_END_S if process.exitcode is None else 0)
    with suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()


def _family_process(family: Family, pipe: Connection, searches: bool) -> None:
    os.setpgid(0, 0)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    try:
        _run(family, searches, lambda kind, key, value: pipe.send((kind, key, value)))
    except HeterogError as error:
        pipe.send(("refused", "capture", str(error)))
    except Exception:
        pipe.send(("failed", "capture", traceback.format_exc()))
    pipe.send(("done", "", ""))
    pipe.close()
    os._exit(0)


def _run(family: Family, searches: bool, tell: Callable[[str, str, Any], None]) -> None:
    captured = capture_step(family.workload())
    ranks: Ranks | None = None
    for name, make in strategies(captured.graph, searches=searches):
        try:
            plan = make()
            ranks = ranks or Ranks(family, captured)
            wanted = train_on_one_device(family, captured, plan)
            if family.tolerance == BFLOAT16 and _is_in_bf16(captured.graph):
                exact = train_on_one_device(family, captured, plan, is_double=True)
                tell("noise", name, error_of(family, [exact], wanted))
            tell("strategies", name, error_of(family, ranks.train(plan), wanted))
        except HeterogError as error:
            tell("refused", name, str(error))
        except NotImplementedError:
            continue  # nothing to compare with
        except Exception:
            tell("failed", name, traceback.format_exc())
            if ranks:
                ranks.close()
            ranks = None
    if ranks:
        ranks.close()


def _is_in_bf16(graph: OpGraph) -> bool:
    """Whether weights are in bf16; autocast keeps them, and cannot be asked for doubles."""
    return any(graph.tensors[parameter].dtype == "bfloat16" for parameter in graph.parameters)


def error_of(family: Family, results: list[Trained], wanted: Trained) -> float:
    """Largest error of a loss or weight.

    That of a weight is relative to how far the weights of its tensor moved at most, or a
    thousandth of how far any did (gradients that are zero in theory are rounding in practice), or
    the rounding of the largest weight, which is more in bf16. That of a loss is relative to
    itself.
    """
    start = family.workload().make_model().state_dict()
    weights = results[0].weights
    assert set(weights) == set(wanted.weights), set(weights) ^ set(wanted.weights)
    moved = {
        name: float((value - start[name]).abs().max())
        for name, value in wanted.weights.items()
        if (value.is_floating_point() or value.is_complex()) and value.numel()
    }
    farthest = max(moved.values())
    assert farthest > 0, "nothing was trained"
    worst = 0.0
    for result in results:
        for loss, target in zip(result.losses, wanted.losses, strict=True):
            worst = max(worst, _not_nan(abs(loss - target) / max(abs(target), 1e-3)))
    for name, weight in wanted.weights.items():
        if name not in moved:
            # BatchNorm counts steps; on one device every local group was a step of its own.
            same = name.endswith("num_batches_tracked") or torch.equal(weights[name], weight)
            assert same, f"{name} differs"
            continue
        error = float((weights[name] - weight).abs().max())
        rounding = torch.finfo(weight.dtype).eps * float(weight.abs().max())
        worst = max(worst, _not_nan(error / max(moved[name], 1e-3 * farthest, rounding)))
    return worst


def _not_nan(error: float) -> float:
    return float("inf") if error != error else error


class Ranks:
    """Three processes that form a process group and train what they are given."""

    def __init__(self, family: Family, captured: CapturedStep) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._pipes = []
        self._processes = []
        for rank in range(NUM_RANKS):
            here, there = _FORK.Pipe()
            process = _FORK.Process(target=_rank, args=(rank, store, family, captured, there))
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def train(self, plan: Plan) -> list[Trained]:
        """What each rank has after some steps; weights are those of rank 0.

        Raises:
            HeterogError: a rank refused the plan.
            RuntimeError: a rank failed.
        """
        for pipe in self._pipes:
            pipe.send(plan)
        answers = [pipe.recv() for pipe in self._pipes]
        refusals = [answer for answer in answers if isinstance(answer, HeterogError)]
        if refusals:
            raise refusals[0]
        # The first that failed by itself says more than those that lost it.
        failures = [answer for answer in answers if isinstance(answer, str)]
        failures.sort(key=lambda text: "gloo" in text or "Connection" in text)
        if failures:
            raise RuntimeError(failures[0])
        return answers

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            with suppress(BrokenPipeError):
                pipe.send(None)  # closing would not do: later ranks have inherited this end
        for process in self._processes:
            process.join(_END_S)
            process.kill()
        self._folder.cleanup()


def _rank(rank: int, store: str, family: Family, captured: CapturedStep, pipe: Connection) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=_STEP_TIMEOUT,
    )
    while True:
        plan = pipe.recv()
        if plan is None:
            os._exit(0)
        answer: Any
        try:
            answer = _train(family, captured, plan)
        except HeterogError as error:
            answer = error
        except BaseException:
            answer = traceback.format_exc()
        pipe.send(answer)


def _train(family: Family, captured: CapturedStep, plan: Plan) -> Trained:
    # Every rank would capture the same; this process has done it before it became three.
    with mock.patch("heterog.runtime.deploy.capture_step", return_value=captured):
        step = deploy(family.workload(), plan)
    losses = [float(step(family.batch(number))) for number in range(STEPS)]
    weights = step.state_dict() or {}
    step.close()
    return Trained(losses, weights)
