"""Checkpoints do not know layouts: what one saved any other resumes, as one device would go on."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.optim.lr_scheduler import ExponentialLR

from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.graph.workload import Workload
from heterog.runtime.checkpoint import load_checkpoint, read_contents, save_checkpoint
from heterog.runtime.checkpoint.files import read_tensors
from heterog.runtime.deploy import deploy
from heterog.search.plan import load_plan
from heterog.strategy.strategy import REPLICATED, Decision, Strategy, Sync
from heterog.strategy.tensor_parallel import shardings
from tests.runtime.any_strategy import any_strategy
from tests.runtime.cases import EVERY, batch_of, captured_once
from tests.runtime.grids import done_by_all, grid_cluster
from tests.runtime.ranks import PARENT, Ranks
from tests.simulator.builders import plan_by_hand
from tests.strategy.merging import merge_rules
from tests.thorough import one_in

SEED = int(os.environ.get("HETEROG_SEED", "0"))
CASES = int(os.environ.get("HETEROG_RANDOM_STRATEGIES", "1"))
MODELS = ("mlp", "gpt", "moe", "tied", "residual")
MAX_NORM = 0.3
DECAY = 0.8
ADAM = {"lr": 1e-2, "eps": 1e-3}
"""Without so large an ``eps`` a gradient that is zero but for rounding moves its weight by lr."""


class Tied(nn.Module):
    """A tied embedding and attention, of a width that is not the batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 12)
        self.layer = nn.TransformerEncoderLayer(12, 3, 18, 0.0, batch_first=True)
        self.decoder = nn.Linear(12, 13, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.decoder(self.layer(self.embedding(tokens)))
        return out.flatten(0, 1)


WORKLOADS = EVERY | {"tied": (Tied, EVERY["language"][1])}


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Ranks]:
    pool = Ranks(1)
    yield pool
    pool.close()


def workload_of(name: str) -> Workload:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        made = WORKLOADS[name][0]()
        assert isinstance(made, nn.Module)
        return made

    batch, loss = batch_of(name, 0), WORKLOADS[name][1]
    return Workload(seeded, batch, loss, torch.optim.Adam, ADAM, name=name)


@cache
def graph_of(name: str) -> OpGraph:
    return PARENT.capture((name, "layouts"), workload_of, name)


@cache
def uninterrupted(name: str, num_steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and by the names of checkpoints weights and Adam's state, of one device."""
    workload = workload_of(name)
    model = workload.make_model()
    stepper = torch.optim.Adam(model.parameters(), **ADAM)  # type: ignore[arg-type]
    scheduler = ExponentialLR(stepper, DECAY)
    losses = []
    for number in range(num_steps):
        loss = workload.step_loss(model, batch_of(name, number))
        stepper.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        stepper.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    found: dict[str, Tensor] = {}
    for key, value in model.named_parameters():
        found[f"model.{key}"] = value.detach()
        found |= {f"optimizer.{key}.{each}": x for each, x in stepper.state[value].items()}
    return losses, found


def go_on(
    rank: int, name: str, plan: str, steps: tuple[int, int], resume: str, save: str
) -> tuple[list[float], dict[str, Tensor] | None]:
    """Deploy, resume, train with a scheduler and clipping, save."""
    with captured_once((name, "layouts")):
        step = deploy(workload_of(name), load_plan(plan), max_grad_norm=MAX_NORM)
        extra: Mapping[str, Any] = load_checkpoint(step, resume) if resume else {}
        scheduler = ExponentialLR(step.optimizer, DECAY)
        if extra:
            scheduler.load_state_dict(extra["scheduler"])
        losses = []
        for number in range(*steps):
            losses.append(float(step(batch_of(name, number))))
            scheduler.step()
        state = {key: x for key, x in scheduler.state_dict().items() if key != "_get_lr_called"}
        save_checkpoint(step, save, extra={"scheduler": state})
        return losses, step.state_dict()


def check_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    for key, target in wanted.items():
        limit = 1e-4 * max(float(target.abs().max()), 1e-3)
        assert found[key].shape == target.shape, key
        assert float((found[key] - target).abs().max()) <= limit, key


def saved(folder: Path) -> dict[str, Tensor]:
    contents = read_contents(folder)
    return read_tensors(contents, folder, contents.names)


def plan_file(path: Path, graph: OpGraph, strategy: Strategy, num_devices: int) -> str:
    plan_by_hand(graph, grid_cluster(num_devices), strategy).save(path)
    return str(path)


def whole_on(graph: OpGraph, num_devices: int, decision: Decision, **changes: Any) -> Strategy:
    """One decision for all groups."""
    strategy = Strategy(
        graph=graph.fingerprint,
        cluster=grid_cluster(num_devices).fingerprint,
        decisions=(decision,) * group_ops(graph).num_groups,
        homes=(REPLICATED,) * len(graph.updates),
    )
    return replace(strategy, **changes)


def tensor_parallel(graph: OpGraph, num_devices: int, decision: Decision) -> Strategy:
    """Every layer that can be is sharded inside teams; all else is done by each member."""
    groups = range(group_ops(graph).num_groups)
    rules = merge_rules(*(each.op_rules for each in shardings(graph, groups)))
    rules = merge_rules(rules, done_by_all(graph, groups))
    return whole_on(graph, num_devices, decision, op_rules=rules, bucket_bytes=500)


def random_layout(rng: Random, graph: OpGraph, num_devices: int) -> Strategy:
    if num_devices == 1:
        return whole_on(graph, 1, Decision(devices=(0,), shares=(8,)))
    return any_strategy(rng, graph, num_devices)


@one_in(5)
@pytest.mark.distributed
@pytest.mark.parametrize("name", MODELS)
def test_random_layouts_follow_each_other(
    two_ranks: Ranks, four_ranks: Ranks, one_rank: Ranks, tmp_path: Path, name: str
) -> None:
    """4 ranks, 2 ranks, 4 ranks, one: each goes on from what the one before has saved."""
    graph = graph_of(name)
    for seed in range(SEED, SEED + CASES):
        rng = Random(f"{name} {seed}")
        folder, losses = "", []
        for begin, (pool, num_devices) in enumerate(
            [(four_ranks, 4), (two_ranks, 2), (four_ranks, 4), (one_rank, 1)]
        ):
            strategy = random_layout(rng, graph, num_devices)
            plan = plan_file(tmp_path / "plan.json", graph, strategy, num_devices)
            new = str(tmp_path / f"{seed}-{begin}")
            results = pool.run(go_on, name, plan, (begin, begin + 1), folder, new)
            losses += results[0][0]
            folder = new
            wanted, state = uninterrupted(name, begin + 1)
            assert losses == pytest.approx(wanted, rel=1e-5), (seed, begin)
            check_same(saved(Path(folder)), state)


TEAMS = ((0, 1), (2, 3))
SHARES = (3, 3, 1, 1)
GRIDS = {
    "teams": Decision(devices=(0, 1, 2, 3), shares=SHARES, teams=TEAMS, parts=(1, 1, 1, 1)),
    "unlike teams": Decision(
        devices=(0, 1, 2, 3), shares=SHARES, teams=((1,), (2, 0, 3)), parts=(3, 1, 2, 1)
    ),
    "teams with zero1": Decision(
        devices=(0, 1, 2, 3), shares=SHARES, teams=TEAMS, parts=(1, 1, 1, 1), sync=Sync.ZERO1
    ),
    "teams with zero3": Decision(
        devices=(0, 1, 2, 3), shares=SHARES, teams=TEAMS, parts=(1, 1, 1, 1), sync=Sync.ZERO3
    ),
}
COPIES = Decision(
    devices=(0, 1, 2, 3),
    shares=SHARES,
    sync=Sync.ZERO3,
    slices=(1, 3, 1, 3),
    slice_groups=((0, 1), (2, 3)),
)


@pytest.mark.distributed
def test_one_of_several_copies_in_slices_is_saved(
    four_ranks: Ranks, two_ranks: Ranks, tmp_path: Path
) -> None:
    """Hybrid shards, then two ranks, then hybrid shards again."""
    graph = graph_of("gpt")
    folder, losses = "", []
    for begin, (pool, num_devices) in enumerate(
        [(four_ranks, 4), (two_ranks, 2), (four_ranks, 4)]
    ):
        decision = COPIES if num_devices == 4 else Decision(devices=(0, 1), shares=(5, 3))
        strategy = whole_on(graph, num_devices, decision, bucket_bytes=500)
        plan = plan_file(tmp_path / "plan.json", graph, strategy, num_devices)
        new = str(tmp_path / str(begin))
        losses += pool.run(go_on, "gpt", plan, (begin, begin + 1), folder, new)[0][0]
        folder = new
        wanted, state = uninterrupted("gpt", begin + 1)
        assert losses == pytest.approx(wanted, rel=1e-5), begin
        check_same(saved(Path(folder)), state)


@one_in(2)
@pytest.mark.distributed
@pytest.mark.parametrize("case", GRIDS)
def test_shards_are_saved_as_they_lie_and_torch_puts_them_together(
    four_ranks: Ranks, tmp_path: Path, case: str
) -> None:
    """A fused projection has three boxes a slice; no file holds what another one has."""
    graph = graph_of("tied")
    plan = plan_file(tmp_path / "plan.json", graph, tensor_parallel(graph, 4, GRIDS[case]), 4)
    folder = tmp_path / "checkpoint"
    results = four_ranks.run(go_on, "tied", plan, (0, 2), "", str(folder))
    contents = read_contents(folder)
    fused = "optimizer.layer.self_attn.in_proj_weight.exp_avg"
    if case == "unlike teams":
        assert not contents.parts, "one member of the first team has all"
    else:
        assert len(contents.parts[fused]) >= 6, "queries, keys and values of two slices"
        tied = contents.parts["optimizer.embedding.weight.exp_avg"]
        files = {contents.tensors[part].file for part in tied}
        assert len(files) == (4 if "zero" in case else 2)
    losses, state = uninterrupted("tied", 2)
    assert results[0][0] == pytest.approx(losses, rel=1e-5)
    data = folder / contents.data
    dcp_to_torch_save(data, tmp_path / "whole.pt")
    check_same(torch.load(tmp_path / "whole.pt", weights_only=True), state)
    check_same(saved(folder), state)
    parameters = {key: value for key, value in state.items() if key.startswith("model.")}
    assert results[0][1] is not None
    check_same({f"model.{key}": x for key, x in results[0][1].items()}, parameters)
