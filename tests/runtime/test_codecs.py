"""Codecs on real ranks: the numbers of one device that encodes and decodes at the same places."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from heterog.graph.grouping import group_ops
from heterog.modes.codecs.value import Codec, CodecKind, CodecRule, Traffic, with_rules
from heterog.runtime.checkpoint import load_checkpoint, save_checkpoint
from heterog.runtime.checkpoint.left_out import left_out_entries
from heterog.runtime.deploy import DeployedStep
from heterog.strategy.strategy import Decision, Strategy, Sync
from tests.runtime.cases import SGD, Trained, assert_same, batch_of, deployed, train
from tests.runtime.codec_reference import pipelined, replicated, served
from tests.runtime.ranks import Ranks
from tests.runtime.strategies import graph_of, plan_of, strategy_of

FP16, INT8 = Codec(kind=CodecKind.FP16), Codec(kind=CodecKind.INT8)
TOP_K = Codec(kind=CodecKind.TOP_K, reduction=4.0)
CODECS = {"fp16": FP16, "int8": INT8, "top_k": TOP_K}


def trained(ranks: Ranks, folder: Path, strategy: Strategy) -> list[Trained]:
    path = folder / "plan.json"
    plan_of(graph_of("mlp"), strategy).save(path)
    return ranks.run(train, "mlp", SGD, str(path))


@pytest.mark.distributed
@pytest.mark.parametrize("name", CODECS)
def test_activations_and_their_gradients(ranks: Ranks, tmp_path: Path, name: str) -> None:
    """Two stages and micro-batches; the way back has a codec of its own."""
    graph = graph_of("mlp")
    names = group_ops(graph).names
    decisions = [Decision(devices=(0 if group < "2" else 1,), shares=(8,)) for group in names]
    there, back = CODECS[name], INT8 if name == "fp16" else FP16
    strategy = with_rules(
        strategy_of(graph, decisions, micro_batches=((3, 5),) * 3),
        (
            CodecRule(traffic=Traffic.ACTIVATIONS, devices=(0, 1), codec=there),
            CodecRule(traffic=Traffic.ACTIVATION_GRADIENTS, devices=(1, 0), codec=back),
        ),
    )
    assert_same(trained(ranks, tmp_path, strategy), pipelined(2, (3, 5), there, back))


@pytest.mark.distributed
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("step_barrier", [True, False])
def test_sums_of_gradients(ranks: Ranks, tmp_path: Path, name: str, step_barrier: bool) -> None:
    graph = graph_of("mlp")
    sync = Sync.HIERARCHICAL if name == "int8" else Sync.RING
    decision = Decision(devices=(0, 1, 2), shares=(4, 3, 1), sync=sync)
    rule = CodecRule(traffic=Traffic.GRADIENTS, devices=(0, 1, 2), codec=CODECS[name])
    strategy = strategy_of(
        graph, [decision] * group_ops(graph).num_groups, step_barrier=step_barrier
    )
    found = trained(ranks, tmp_path, with_rules(strategy, (rule,)))
    assert_same(found, replicated((4, 3, 1), CODECS[name]))


@pytest.mark.distributed
@pytest.mark.parametrize("pull", [None, FP16, INT8])
def test_servers(ranks: Ranks, tmp_path: Path, pull: Codec | None) -> None:
    graph = graph_of("mlp")
    decision = Decision(devices=(0, 1, 2), shares=(4, 3, 1), sync=Sync.PARAMETER_SERVER)
    codecs = [
        CodecRule(traffic=Traffic.GRADIENTS, devices=(src, 0), codec=TOP_K) for src in (1, 2)
    ]
    if pull is not None:
        codecs += [
            CodecRule(traffic=Traffic.PARAMETERS, devices=(0, dst), codec=pull) for dst in (1, 2)
        ]
    strategy = strategy_of(
        graph,
        [decision] * group_ops(graph).num_groups,
        homes=(0,) * len(graph.updates),
        step_barrier=pull is not INT8,
    )
    found = trained(ranks, tmp_path, with_rules(strategy, tuple(codecs)))
    expected = served((4, 3, 1), 0, TOP_K, pull)
    assert_same(found, expected)


def replicas(codec: Codec) -> Strategy:
    graph = graph_of("mlp")
    decision = Decision(devices=(0, 1, 2), shares=(4, 3, 1), sync=Sync.RING)
    rule = CodecRule(traffic=Traffic.GRADIENTS, devices=(0, 1, 2), codec=codec)
    plain = strategy_of(graph, [decision] * group_ops(graph).num_groups, bucket_bytes=600)
    return with_rules(plain, (rule,))


def left_out(step: DeployedStep) -> dict[str, Tensor]:
    """What a rank has left out of each parameter."""
    return {entry.whole: entry.value.clone() for entry in left_out_entries(step)}


def resumed(
    rank: int, path: str, exact_path: str, folder: str
) -> tuple[list[float], list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses of a run, and of one that is stopped after a step, and what is left out then."""
    going = deployed("mlp", path)
    losses = [float(going(batch_of("mlp", step))) for step in range(2)]
    stopped = deployed("mlp", path)
    again = [float(stopped(batch_of("mlp", 0)))]
    save_checkpoint(stopped, folder)
    saved = left_out(stopped)
    goes_on = deployed("mlp", path)
    load_checkpoint(goes_on, folder)
    assert all(torch.equal(left_out(goes_on)[name], value) for name, value in saved.items())
    again.append(float(goes_on(batch_of("mlp", 1))))
    other = deployed("mlp", exact_path)
    load_checkpoint(other, folder)
    return losses, again, saved, left_out(other)


@pytest.mark.distributed
def test_a_checkpoint_keeps_what_was_left_out(ranks: Ranks, tmp_path: Path) -> None:
    """In full under the same plan; where others send, the first of them takes over the sum."""
    graph = graph_of("mlp")
    plan_of(graph, replicas(TOP_K)).save(tmp_path / "plan.json")
    decision = Decision(devices=(1, 2), shares=(5, 3), sync=Sync.RING)
    rule = CodecRule(traffic=Traffic.GRADIENTS, devices=(1, 2), codec=INT8)
    others = strategy_of(graph, [decision] * group_ops(graph).num_groups)
    plan_of(graph, with_rules(others, (rule,))).save(tmp_path / "other.json")
    found = ranks.run(
        resumed, str(tmp_path / "plan.json"), str(tmp_path / "other.json"), str(tmp_path / "kept")
    )
    sums: dict[str, Tensor] = {}
    for rank, (losses, again, saved, _) in enumerate(found):
        assert again == losses
        for name, value in saved.items():
            assert name.endswith(f".{rank}")
            assert value.any()
            key = name.rpartition(".")[0]
            sums[key] = sums.get(key, torch.zeros(())) + value
    assert len(sums) == len(graph.updates)
    assert not found[0][3]
    for name, value in found[1][3].items():
        assert torch.allclose(value, sums[name.rpartition(".")[0]], atol=1e-6)
    assert not any(value.any() for value in found[2][3].values())
