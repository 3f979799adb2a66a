"""Ranks that would train unlike each other say so, all of them, and name what differs."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from heterog.errors import StrategyError
from heterog.graph.grouping import group_ops
from heterog.runtime.deploy import DeployedStep, deploy
from heterog.runtime.step.alike import BatchShapes
from heterog.search.plan import load_plan
from tests.runtime.cases import BATCH, batch_of, captured_once, workload_of
from tests.runtime.ranks import Ranks
from tests.runtime.strategies import SYNCS, graph_of, plan_of, strategy_of

WAYS = {
    "none": "",
    "learning rate": r"when the plan is deployed: the optimizer's lr \(0.1 on ranks 0, 2, 0.5 on "
    r"rank 1\)\. Give every rank the same",
    "seed": r"seed \(0 on ranks 0, 2, 7 on rank 1\)",
    "clipping": r"max_grad_norm \(None on ranks 0, 2, 1.0 on rank 1\)",
    "batch": r"in step 1: values of the batch's batch\.1 \(\w+ on ranks 0, 2, \w+ on rank 1\)",
    "shape": rf"in step 1: shape of the batch's batch\.0 \(\({BATCH}, 6\) torch\.float32 on ranks "
    rf"0, 2, \({BATCH - 1}, 6\) torch\.float32 on rank 1\)",
    "recorded": r"in step 1: shape of the batch's batch\.0 ",
    "schedule": r"in step 9: lr of group 0 \(0\.1 on ranks 0, 2, 0\.05 on",
    "weights": r"replicas of '\S+' on ranks \d and \d have drifted apart after step 8, ",
    "nan": r"replicas of '\S+' on ranks \d and 1 have drifted apart after step 8, by inf",
}


def trained(rank: int, path: str, way: str) -> str:
    """What a rank says, of which the second is unlike the others."""
    is_odd = rank == 1
    workload = workload_of("mlp")
    if way == "learning rate" and is_odd:
        workload = replace(workload, optimizer_options={"lr": 0.5, "momentum": 0.9})
    with captured_once("mlp"):
        try:
            step = deploy(
                workload,
                load_plan(path),
                seed=7 if way == "seed" and is_odd else 0,
                max_grad_norm=1.0 if way == "clipping" and is_odd else None,
            )
            for number in range(18):
                batch = _batch(way if is_odd else "none", number)
                step.record(batch) if way == "recorded" else step(batch)
                if is_odd:
                    _change(step, way, number)
        except StrategyError as error:
            return str(error)
    step.close()
    return ""


def _batch(way: str, number: int) -> tuple[Tensor, ...]:
    inputs, targets = batch_of("mlp", number)
    if way == "batch":
        return inputs, targets + 1
    return (inputs[1:], targets[1:]) if way in ("shape", "recorded") else (inputs, targets)


def _change(step: DeployedStep, way: str, number: int) -> None:
    if way == "schedule" and number == 5:
        step.optimizer.param_groups[0]["lr"] = 0.05
    if way == "weights" and number == 5:
        with torch.no_grad():
            next(iter(step.parameters.values())).add_(1e-2)
    if way == "nan" and number == 7:  # the next step would spread it to all ranks
        with torch.no_grad():
            next(iter(step.parameters.values())).fill_(torch.nan)


@pytest.mark.distributed
@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_are_unlike_say_so(ranks: Ranks, tmp_path: Path, way: str) -> None:
    graph = graph_of("mlp")
    strategy = strategy_of(graph, [SYNCS["ring"]] * group_ops(graph).num_groups)
    path = tmp_path / "plan.json"
    plan_of(graph, strategy).save(path)
    said = ranks.run(trained, str(path), way)
    assert len(set(said)) == 1, "every rank ends with the same words"
    if way == "none":
        assert said[0] == ""
    else:
        with pytest.raises(StrategyError, match=WAYS[way]):
            raise StrategyError(said[0])


SHAPES = {name: ((name, (count, 6), "torch.float32"),) for name, count in (("a", 8), ("b", 5))}


def begin(rank: BatchShapes, shapes: str, when: str) -> None:
    rank.begin_step(SHAPES[shapes])
    rank.check(when)


def test_a_batch_of_other_shapes_on_one_rank_is_found_in_any_step() -> None:
    """One rank after the other here, as no rank waits for others while its shapes stay."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.05))
    one, other = (BatchShapes(store, "job", rank, 2) for rank in range(2))
    for step in range(7):
        begin(one, "a", f"in step {step}")
        begin(other, "a", f"in step {step}")
    begin(one, "a", "in step 7")
    text = (
        r"alike in step 7: shapes \(a \(8, 6\) torch.float32 on rank 0, "
        r"b \(5, 6\) torch.float32 on rank 1\)"
    )
    with pytest.raises(StrategyError, match=text):
        begin(other, "b", "in step 7")
    with pytest.raises(StrategyError, match=r"other shapes in step 8 .* ranks \[1\] have"):
        begin(one, "b", "in step 8")
    begin(other, "b", "in step 8")  # as on the other rank now
