"""Encoders, rewards and methods of one's own: checked, trained with, and found again."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.utils import to_dense_batch
from typer.testing import CliRunner

from heterog.agents.checkpoint import load_checkpoint
from heterog.agents.config import PolicyConfig
from heterog.agents.conformance import check_encoder
from heterog.agents.encoder import ENCODERS, mlp
from heterog.cli import app
from heterog.cli.compare import _compare
from heterog.envs.conformance import check_reward
from heterog.envs.observation import NUM_BLOCK_FEATURES, NUM_CANDIDATE_FEATURES
from heterog.envs.pair import Pair, Score
from heterog.envs.reward import Reward, reward_of
from heterog.errors import ConformanceError, HeterogError
from heterog.graph.serialize import save_graph
from heterog.methods.planner import Budget
from heterog.search.request import Request
from tests.envs.cases import language_graph, mixed_cluster

CODE = """
from dataclasses import replace

import torch
from torch_geometric.utils import to_dense_batch

from heterog.agents.encoder import mlp
from heterog.envs.observation import NUM_BLOCK_FEATURES, NUM_CANDIDATE_FEATURES
from heterog.envs.reward import reward_of
from heterog.methods.registry import built_in_methods


def halved(pair, score):
    found = reward_of(pair, score)
    return replace(found, reward=0.5 * found.reward)


class Features(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.blocks = mlp(NUM_BLOCK_FEATURES, config.width, config.width)
        self.candidates = mlp(NUM_CANDIDATE_FEATURES, config.width, config.width)

    def forward(self, graphs):
        block, candidate = graphs["block"], graphs["candidate"]
        return (
            to_dense_batch(self.blocks(block.x), block.batch)[0],
            to_dense_batch(self.candidates(candidate.x), candidate.batch)[0],
        )


class Thumb:
    name, stage = "thumb", "search"

    def plan(self, problem):
        return built_in_methods()["ev_ar"].plan(problem)
"""


class Embedding(nn.Module):
    """Features alone, with one thing wrong."""

    def __init__(self, config: PolicyConfig, wrong: str = "") -> None:
        super().__init__()
        self.wrong = wrong
        self.blocks = mlp(NUM_BLOCK_FEATURES, config.width, config.width)
        self.candidates = mlp(NUM_CANDIDATE_FEATURES, config.width, config.width)

    def forward(self, graphs: Any) -> tuple[Tensor, Tensor]:
        block, candidate = graphs["block"], graphs["candidate"]
        x, y = self.blocks(block.x), self.candidates(candidate.x)
        if self.wrong == "mixed":  # normalised over everything in the batch
            x = x - x.mean(dim=0)
        if self.wrong == "infinite":
            x = x / 0.0
        if self.wrong == "fixed":
            x, y = x.detach(), y.detach()
        if self.wrong == "raises":
            raise KeyError("nodes")
        blocks = to_dense_batch(x, block.batch)[0]
        if self.wrong == "narrow":
            blocks = blocks[:, :, :-1]
        return blocks, to_dense_batch(y, candidate.batch)[0]


@pytest.mark.parametrize("name", list(ENCODERS))
def test_the_encoders_of_the_package_conform(name: str) -> None:
    check_encoder(ENCODERS[name])
    check_encoder(ENCODERS[name], PolicyConfig(width=8, num_heads=2, num_rounds=1))


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("mixed", r"embeds the blocks of a pair differently beside another pair"),
        ("infinite", r"embeddings that are not finite"),
        ("fixed", r"8 weights, and no gradient reaches any"),
        ("raises", r"fails: KeyError: 'nodes'"),
        ("narrow", r"embeds blocks as \(2, 5, 63\); wanted is \(2, 5, 64\)"),
    ],
)
def test_an_encoder_that_breaks_the_contract_is_told_how(wrong: str, text: str) -> None:
    check_encoder(Embedding)
    with pytest.raises(ConformanceError, match=text):
        check_encoder(lambda config: Embedding(config, wrong))


def infinite(pair: Pair, score: Score) -> Reward:
    return replace(reward_of(pair, score), reward=float("nan"))


def constant(pair: Pair, score: Score) -> Reward:
    return replace(reward_of(pair, score), reward=1.0)


def lies(pair: Pair, score: Score) -> Reward:
    return replace(reward_of(pair, score), overflow=0.0)


def number(pair: Pair, score: Score) -> Any:
    return -score.step_time_s


def drifts(pair: Pair, score: Score) -> Reward:
    return replace(reward_of(pair, score), reward=float(torch.rand(())))


@pytest.mark.parametrize(
    ("reward", "text"),
    [
        (infinite, r"reward infinite is nan .* must be finite"),
        (constant, r"reward constant is 1 for each of 64 strategies"),
        (lies, r"reward lies changes step_time_s or overflow"),
        (number, r"reward number returns float; return a heterog.envs.reward.Reward"),
        (drifts, r"reward drifts gives two answers"),
        (lambda pair: None, r"fails on .*TypeError"),
    ],
)
def test_a_reward_that_breaks_the_contract_is_told_how(reward: Any, text: str) -> None:
    check_reward(reward_of)
    with pytest.raises(ConformanceError, match=text):
        check_reward(reward)


@pytest.mark.usefixtures("few_validation_pairs")
def test_commands_take_what_files_hold(tmp_path: Path) -> None:
    """A reward and an encoder to train with, the policy asked again, a method beside others."""
    code, graph, cluster = (tmp_path / name for name in ("own.py", "lm.json.gz", "mixed.yaml"))
    code.write_text(CODE)
    save_graph(language_graph(), graph)
    mixed_cluster().save(cluster)
    policy, runner = tmp_path / "mine.pt", CliRunner()
    train = [
        "train", "--models", str(graph), "-o", str(policy), "--pairs", "2", "--steps", "2",
        "--search", "20", "--algorithm", "reinforce", "--reward", f"{code}:halved",
        "--encoder", f"{code}:Features", "--json",
    ]  # fmt: skip
    where = ["--cluster", str(cluster), "--budget", "20e", "--no-changes", "--json"]
    plan = ["plan", str(graph), "--method", "agent", "--policy", str(policy), *where]
    try:
        done = runner.invoke(app, train)
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["reward"] == "halved"
        assert load_checkpoint(policy).policy.config.encoder == "Features"
        del ENCODERS["Features"]  # as in the next process
        done = runner.invoke(app, plan)
        assert "has the encoder 'Features'" in str(done.exception)
        assert "--encoder FILE.py:Features" in str(done.exception)
        done = runner.invoke(app, [*plan, "--encoder", f"{code}:Features"])
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["method"] == "agent"
        methods = f"ddp,{code}:Thumb"
        options = ["--models", str(graph), "--clusters", str(cluster), "--methods", methods]
        done = runner.invoke(app, ["compare", *options, "--budget", "20e", "--json"])
        assert done.exit_code == 0, done.output
        assert {row["method"] for row in json.loads(done.stdout)["rows"]} == {"ddp", "thumb"}
        # A worker process reads the file again.
        request = Request(
            graph=language_graph(),
            cluster=mixed_cluster(),
            methods=("thumb",),
            budget=Budget(evaluations=5),
        )
        (row,) = _compare(methods, request).rows
        assert row.method == "thumb"
    finally:
        ENCODERS.pop("Features", None)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--reward", "gone.py:reward"], r"there is no file 'gone.py'"),
        (["--reward", "gone.py"], r"names no reward; write gone.py:reward"),
        (["--encoder", "{code}:Thumb"], r"encoder Thumb fails"),
        (["--reward", "{code}:halved"], r"'imitation' .* asks for no reward, so halved would"),
        (["--clusters", "rtx_mixed", "--max-devices", "8"], r"--clusters rtx_mixed has none"),
        (["--initial", "default", "--encoder", "paper"], r"has the encoder 'hetero', and its"),
        (["--initial", "default", "--resume", "x.pt"], r"give one of the two"),
    ],
)
def test_what_would_have_no_effect_is_refused(
    options: list[str], text: str, tmp_path: Path
) -> None:
    code = tmp_path / "own.py"
    code.write_text(CODE)
    options = [option.replace("{code}", str(code)) for option in options]
    asked = ["train", "--models", "vgg19", "-o", str(tmp_path / "p.pt"), *options]
    done = CliRunner().invoke(app, asked)
    assert isinstance(done.exception, HeterogError)
    assert re.search(text, str(done.exception)), done.exception
