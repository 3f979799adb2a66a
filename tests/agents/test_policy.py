"""The decoder is an exact distribution, masks hold, and files are read with care."""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Batch

from heterog.agents import checkpoint as checkpoints
from heterog.agents.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from heterog.agents.config import PolicyConfig
from heterog.agents.encoder import all_joined
from heterog.agents.graph_data import PairBatch, graphs_of
from heterog.agents.policy import (
    Policy,
    Variety,
    _decode,
    _noise,
    draw,
    log_probabilities,
    rule_of_thumb,
    score_pairs,
)
from heterog.envs.pair import Pair, RunningMemory
from heterog.errors import InputFileError, UnknownNameError
from tests.envs.cases import crowded_pair, language_pair, toy_pair

SMALL = PolicyConfig(width=16, num_heads=2, num_rounds=1, rank=4, stay_bias=1.0)
KINDS = [SMALL, PolicyConfig(encoder="paper", width=16, num_heads=2, rank=0)]


def make_policy(config: PolicyConfig, seed: int = 0) -> Policy:
    torch.manual_seed(seed)
    return Policy(config).eval()


@pytest.mark.parametrize("config", KINDS, ids=["hetero", "paper"])
def test_probabilities_of_all_rows_sum_to_one(config: PolicyConfig) -> None:
    pair = toy_pair()
    policy = make_policy(config)
    rows = np.array(list(itertools.product(range(pair.num_candidates), repeat=pair.num_blocks)))
    # Beside a larger pair: padding must not take probability.
    scores = policy(PairBatch([language_pair().observation, pair.observation]))
    actions = torch.zeros(len(rows), scores.unary.shape[1], dtype=torch.long)
    actions[:, : pair.num_blocks] = torch.from_numpy(rows)
    which = torch.ones(len(rows), dtype=torch.long)
    log_p, entropy = log_probabilities(scores, which, actions)
    p = log_p.detach().double().exp()
    assert float(p.sum()) == pytest.approx(1.0, rel=1e-5)
    # The chain rule: the expected sum of conditional entropies is the entropy of the whole.
    whole = -(p * log_p.detach()).sum()
    assert float((p * entropy.detach()).sum()) == pytest.approx(float(whole), rel=1e-4)


def test_messages_between_all_nodes_are_those_along_each_edge() -> None:
    """Of two pairs of different sizes, so that one is padded."""
    observations = [language_pair().observation, toy_pair().observation]
    encoder: Any = make_policy(SMALL).encoder
    graphs, seen = PairBatch(observations).graphs, []
    along = encoder.rounds[0].convolve
    x = {kind: torch.randn(graphs[kind].num_nodes, SMALL.width) for kind in ("block", "device")}
    normed = {kind: encoder.rounds[0].norms[kind](value) for kind, value in x.items()}
    edges = {edge: graphs[edge].edge_index for edge in along.convs.keys()}
    features = {edge: graphs[edge].edge_attr for edge in edges}
    for kind, message in along(normed, edges, features).items():
        summed = x[kind] + message
        fed = encoder.rounds[0].feed_forward[kind](encoder.rounds[0].out_norms[kind](summed))
        seen.append((kind, summed + fed))
    found = encoder.rounds[0](x, graphs, all_joined(graphs))
    for kind, expected in seen:
        assert torch.allclose(found[kind], expected, atol=1e-5)


def test_draws_follow_the_probabilities() -> None:
    pair, policy = toy_pair(), make_policy(SMALL)
    scores = policy(PairBatch([pair.observation]))
    rows = draw(scores.of(0, pair), pair, 20_000, np.random.default_rng(0)).rows
    unique, counts = np.unique(rows, axis=0, return_counts=True)
    log_p, _ = log_probabilities(
        scores, torch.zeros(len(unique), dtype=torch.long), torch.from_numpy(unique).long()
    )
    expected = log_p.detach().exp().numpy()
    np.testing.assert_allclose(counts / len(rows), expected, atol=0.015)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("make", [toy_pair, language_pair, crowded_pair])
def test_rows_drawn_at_once_are_those_drawn_block_by_block(
    make: Callable[[], Pair], greedy: bool, recompute: bool
) -> None:
    pair, variety = make(), Variety(num_steady=4, temperature=3.0, recompute=recompute)
    scores = score_pairs(make_policy(SMALL), [pair])[0]
    found = draw(
        scores, pair, 24, np.random.default_rng(7), variety, greedy=greedy, keep_masks=True
    )
    drawn = _noise(pair, 24, variety.num_steady, np.random.default_rng(7))
    memory = RunningMemory(pair, 24, recompute=recompute)
    noise = None if greedy else variety.temperature * drawn
    expected = _decode(scores, noise, memory, keep_masks=True)
    np.testing.assert_array_equal(found.rows, expected.rows)
    np.testing.assert_array_equal(found.masks, expected.masks)
    again = draw(scores, pair, 24, np.random.default_rng(7), variety, greedy=greedy)
    np.testing.assert_array_equal(again.rows, expected.rows)
    assert again.masks.size == 0


def test_steady_draws_do_not_waver() -> None:
    """Where every block is alike a row is uniform, and as likely as the candidate's score says."""
    pair = toy_pair()
    scores = rule_of_thumb(pair)
    alike = np.where(scores.unary.min(axis=0) < -1e3, scores.unary.min(axis=0), 0.0)
    still = np.zeros_like(scores.cut)
    scores = replace(
        scores, unary=np.tile(alike, (pair.num_blocks, 1)), cut=still, stay=still + 1.0
    )
    rows = draw(scores, pair, 4000, np.random.default_rng(0), Variety(num_steady=4000)).rows
    assert (rows == rows[:, :1]).all()
    chosen, counts = np.unique(rows[:, 0], return_counts=True)
    allowed = np.flatnonzero(alike == 0.0)
    assert set(chosen) == set(allowed)
    np.testing.assert_allclose(counts / len(rows), 1.0 / len(allowed), atol=0.05)


@pytest.mark.parametrize("num_changes", [0, 1, 2])
def test_draws_with_so_many_changes_follow_the_probabilities_given_that(num_changes: int) -> None:
    pair, policy = toy_pair(), make_policy(SMALL, seed=3)
    scores = policy(PairBatch([pair.observation]))
    rows = np.array([
        row
        for row in itertools.product(range(pair.num_candidates), repeat=pair.num_blocks)
        if np.count_nonzero(np.diff(row)) == num_changes
    ])  # fmt: skip
    with torch.no_grad():
        log_p, _ = log_probabilities(
            scores, torch.zeros(len(rows), dtype=torch.long), torch.from_numpy(rows)
        )
    expected = torch.softmax(log_p, 0).numpy()
    wanted = np.full(20_000, num_changes, np.int32)
    drawn = draw(
        score_pairs(policy, [pair])[0],
        pair,
        20_000,
        np.random.default_rng(0),
        Variety(num_changes=wanted),
    ).rows
    numbers = {row.tobytes(): number for number, row in enumerate(rows.astype(np.int32))}
    counts = np.bincount([numbers[row.tobytes()] for row in drawn], minlength=len(rows))
    np.testing.assert_allclose(counts / len(drawn), expected, atol=0.015)


def test_cold_draws_are_those_of_sharper_scores() -> None:
    pair = toy_pair()
    scores = rule_of_thumb(pair)
    cold = draw(scores, pair, 64, np.random.default_rng(0), Variety(temperature=0.5)).rows
    sharp = replace(scores, unary=2.0 * scores.unary, cut=2.0 * scores.cut, stay=2.0 * scores.stay)
    np.testing.assert_array_equal(cold, draw(sharp, pair, 64, np.random.default_rng(0)).rows)


def test_padding_does_not_change_scores() -> None:
    pair, policy = toy_pair(), make_policy(SMALL)
    alone = score_pairs(policy, [pair])[0]
    beside = score_pairs(policy, [language_pair(), pair])[1]
    np.testing.assert_allclose(alone.unary, beside.unary, atol=1e-4)
    np.testing.assert_allclose(alone.pair, beside.pair, atol=1e-5)


def test_a_masked_candidate_has_no_probability_unless_it_was_chosen() -> None:
    pair = toy_pair()
    scores = make_policy(SMALL)(PairBatch([pair.observation]))
    actions = torch.tensor([[0, 0, 0, 0], [1, 0, 0, 0]])
    masks = torch.ones(2, 4, pair.num_candidates, dtype=torch.bool)
    masks[:, 0, 1:] = False  # the first block may only take candidate 0
    log_p, _ = log_probabilities(scores, torch.zeros(2, dtype=torch.long), actions, masks)
    free, _ = log_probabilities(scores, torch.zeros(2, dtype=torch.long), actions)
    assert log_p[0] > free[0]
    assert torch.isfinite(log_p[1])


def test_graph_data_holds_every_relation() -> None:
    pair = language_pair()
    data = graphs_of([pair.observation])
    blocks, devices = pair.num_blocks, pair.cluster.num_devices
    assert data["block", "on", "device"].edge_index.shape == (2, blocks * devices)
    assert data["device", "link", "device"].edge_attr.shape == (devices**2, 3)
    assert data["device", "in", "candidate"].edge_index[1].max() == pair.num_candidates - 1
    assert data.validate()


def test_graphs_of_several_pairs_are_those_that_pyg_batches() -> None:
    observations = [language_pair().observation, toy_pair().observation]
    alone = [graphs_of([each]) for each in observations]
    for graph in alone:
        for nodes in graph.node_stores:
            del nodes["batch"], nodes["ptr"]
    expected, found = Batch.from_data_list(alone), graphs_of(observations)
    assert found.node_types == expected.node_types
    assert found.edge_types == expected.edge_types
    for own, batched in zip(found.stores[1:], expected.stores[1:], strict=True):
        assert list(own.keys()) == list(batched.keys())
        for key, value in batched.items():
            assert own[key].dtype == value.dtype
            assert torch.equal(own[key], value)


def test_checkpoints_come_back_equal(tmp_path: Path) -> None:
    policy = make_policy(SMALL)
    path = tmp_path / "policy.pt"
    save_checkpoint(path, Checkpoint(policy=policy, provenance={"seed": 3}))
    found = load_checkpoint(path)
    assert found.provenance == {"seed": 3}
    assert found.policy.config == policy.config
    for mine, theirs in zip(
        policy.state_dict().values(), found.policy.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_checkpoints_of_other_observations_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "policy.pt"
    monkeypatch.setattr(checkpoints, "OBSERVATION_VERSION", 99)
    save_checkpoint(path, Checkpoint(policy=make_policy(SMALL)))
    monkeypatch.undo()
    with pytest.raises(InputFileError, match=r"observations of version 99.*Train it again"):
        load_checkpoint(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    bad = tmp_path / "bad.pt"
    bad.write_bytes(b"not a policy")
    with pytest.raises(InputFileError, match="is no policy of heterog"):
        load_checkpoint(bad)
    with pytest.raises(InputFileError, match="cannot read policy"):
        load_checkpoint(tmp_path / "missing.pt")
    torch.save({"schema_version": 7}, bad)
    with pytest.raises(InputFileError, match="schema_version 7"):
        load_checkpoint(bad)
    with pytest.raises(UnknownNameError, match="unknown policy 'defalt'"):
        load_checkpoint("defalt")


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"width": 4096, "num_rounds": 64}, r"fit together: Missing key.*encoder.rounds"),
        ({"width": 2 * SMALL.width}, r"fit together: size mismatch for"),
        ({"width": 10, "num_heads": 4}, r"fit together: .*width 10, 4 heads"),
    ],
)
def test_sizes_that_the_weights_do_not_have_are_refused(
    sizes: dict[str, int], text: str, tmp_path: Path
) -> None:
    """Before a network of that size is made: this one would take a hundred gigabytes."""
    path = tmp_path / "policy.pt"
    save_checkpoint(path, Checkpoint(policy=make_policy(SMALL)))
    record = torch.load(path, weights_only=True)
    torch.save(record | {"config": record["config"] | sizes}, path)
    with pytest.raises(InputFileError, match=text):
        load_checkpoint(path)


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return print, ("this must not run",)

    path = tmp_path / "evil.pt"
    torch.save({"schema_version": 1, "weights": Evil()}, path)
    with pytest.raises(InputFileError, match="is no policy of heterog"):
        load_checkpoint(path)


def test_a_policy_needs_a_width_that_heads_divide() -> None:
    with pytest.raises(ValueError, match="width 10, 4 heads"):
        PolicyConfig(width=10)


@pytest.mark.distributed  # it starts a process
def test_networks_leave_no_files_in_the_temporary_folder(tmp_path: Path) -> None:
    """PyG left two for each class of layers in each process: hundreds after a day of plans."""
    makes = (
        "from heterog.agents.config import PolicyConfig\n"
        "from heterog.agents.improver import Improver\n"
        "from heterog.agents.policy import Policy\n"
        "Improver(), Policy(PolicyConfig()), Policy(PolicyConfig(encoder='paper'))\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", makes], env=environment, check=True)
    assert not [each for each in tmp_path.rglob("*") if each.is_file()]
