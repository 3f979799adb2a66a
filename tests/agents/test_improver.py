"""The policy that improves plans: what it leads, learns, and writes."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from heterog.agents.improver import (
    LEAST_PART,
    Improver,
    ImproverConfig,
    LedMoves,
    Payoff,
    led_by,
    load_improver,
    of_today,
    save_improver,
)
from heterog.agents.move_imitation import (
    Recorded,
    Recorder,
    gaining_shares,
    imitate,
    loss_of,
    points_of,
)
from heterog.cluster import Cluster
from heterog.envs.toy import chain_graph
from heterog.errors import InputFileError
from heterog.methods.local_search.move_features import NUM_MOVE_FEATURES, MoveFeatures
from heterog.methods.local_search.neighbours import MoveKind, State
from heterog.methods.local_search.plan_moves import PlanMoves, drawn_moves
from heterog.methods.local_search.planner import LocalSearch, Search
from heterog.methods.planner import Budget, PlanResult, Problem
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES

ROOT = Path(__file__).parents[2]
WALK = "6d44956f"
"""Digest of a blind walk, as it was before moves had names."""


def problem(num_evaluations: int = 200, seed: int = 0) -> Problem:
    evaluator = Evaluator(chain_graph(num_layers=6), Cluster.load("paper_8gpu"))
    return Problem(evaluator=evaluator, budget=Budget(evaluations=num_evaluations), seed=seed)


def planned(policy: Improver, seed: int = 0) -> PlanResult:
    return LocalSearch(led_by(policy)).plan(problem(60, seed))


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    leads: list[Recorder] = []

    def lead(search: Search) -> Recorder:
        leads.append(Recorder(search, every=4, width=16))
        return leads[-1]

    LocalSearch(lead).plan(problem(900))
    found = leads[0].recorded()
    assert found is not None
    return found


def test_a_led_search_is_recorded_too(recorded: Recorded) -> None:
    search = Search(problem())
    recorder = Recorder(search, Improver.untrained(0), every=2, width=4)
    state = search.everywhere(0)
    for _ in range(8):
        state = recorder.of(state)
    found = recorder.recorded()
    assert found is not None
    assert found.moves.shape == (4, 4, recorded.moves.shape[2])


def test_blind_moves_are_those_of_before() -> None:
    search = Search(problem())
    moves, digest = search.neighbours, hashlib.sha256()
    moves.may_team = moves.may_shard = True
    row = np.zeros(search.num_groups, np.int32)
    state = start = State(row, DEFAULT_BUCKET_BYTES, Order.RANK)
    for step in range(600):
        state = start if step % 50 == 0 else moves.of(state)
        told = (*state.key[:2], int(state.order), *state.key[3:-1])  # what there was then
        digest.update(repr(told).encode())
    assert digest.hexdigest()[:8] == WALK


def test_a_led_search_is_repeated_at_a_seed_and_keeps_its_budget() -> None:
    policy = Improver.untrained(0)
    first, second = planned(policy), planned(policy)
    assert first == second
    assert first.candidates
    assert first.num_evaluations <= 61
    assert planned(policy, seed=1) != first


def test_scores_in_a_search_are_those_of_a_batch() -> None:
    search = Search(problem())
    search.neighbours.may_team = True
    policy = Improver.untrained(3)
    led = LedMoves(search, policy)
    recorder = Recorder(search, width=8)
    state = search.everywhere(0)
    while led.view is None:  # of two kinds of moves, one looks at the point
        led.of(state)
    state_before = search.neighbours.rng.bit_generator.state
    moves = drawn_moves(search.neighbours, PlanMoves(search.neighbours), led.view, 8)
    search.neighbours.rng.bit_generator.state = state_before
    recorder._rng = search.neighbours.rng
    recorder.of(state)
    found = recorder.recorded()
    assert found is not None
    points, _ = points_of([(found, 0)])
    with torch.inference_mode():
        batch = policy(points).numpy()[: len(moves)]
    np.testing.assert_allclose(led.scores(led.view, moves), batch, atol=1e-5)


def test_candidates_are_described_when_they_are_used() -> None:
    """A point and its moves look as if all candidates had been described before."""
    search = Search(problem())
    search.neighbours.may_team = True
    state = search.everywhere(3)
    looked = search.looked_at(state)
    assert looked is not None
    of_used, of_all = (MoveFeatures(search.evaluator, search.space) for _ in range(2))
    view = of_used.view(state, *looked)
    moves = drawn_moves(search.neighbours, PlanMoves(search.neighbours), view, 64)
    of_all._decisions.fill(np.arange(len(search.space.candidates), dtype=np.int32))
    seen = of_all.view(state, *looked)
    assert np.array_equal(view.groups, seen.groups)
    assert np.array_equal(view.whole, seen.whole)
    assert np.array_equal(of_used.of(view, moves)[0], of_all.of(seen, moves)[0])
    assert not of_used._decisions._is_filled[: len(search.space.candidates)].all()


def test_what_gains_more_for_its_cost_is_drawn_more_often_and_nothing_never() -> None:
    payoff, rng = Payoff(2), np.random.default_rng(0)
    for _ in range(300):
        payoff.add(0, 0.0, 1.0)
        payoff.add(1, 0.01, 1.5)
    drawn = np.bincount([payoff.drawn(rng) for _ in range(2000)], minlength=2) / 2000
    assert drawn[1] > 0.6
    assert drawn[0] > LEAST_PART


def test_learns_which_moves_gain(recorded: Recorded) -> None:
    before = gaining_shares(Improver.untrained(0), [recorded])
    after = gaining_shares(imitate([recorded], num_steps=60), [recorded])
    assert after.blind == before.blind
    assert after.best > max(2.0 * after.blind, before.best)
    assert after.best <= after.possible


def test_loss_is_lowest_where_the_best_move_comes_first() -> None:
    gains, of = torch.tensor([0.0, 0.2, -0.1, 0.05]), torch.zeros(4, dtype=torch.long)
    right = loss_of(torch.tensor([-3.0, 4.0, -3.0, 3.0]), gains, of)
    assert right < loss_of(torch.tensor([-3.0, 3.0, -3.0, 4.0]), gains, of)
    assert right < loss_of(torch.tensor([4.0, -3.0, 3.0, -3.0]), gains, of)


def test_without_the_timeline_it_is_not_read(recorded: Recorded) -> None:
    blind = Improver.untrained(0, ImproverConfig(sees_timeline=False, num_rounds=0))
    points, _ = points_of([(recorded, 0)])
    first = blind(points)
    points.groups[:, 0] += 1.0  # seconds of compute
    assert torch.equal(blind(points), first)
    assert not torch.equal(Improver.untrained(0)(points), first)


def test_the_shipped_policy_is_small_and_says_how_it_was_made() -> None:
    folder = ROOT / "heterog" / "agents" / "improvers"
    assert (folder / "default.pt").stat().st_size < 5e6
    card = json.loads((folder / "default.json").read_text())
    assert card["command"].startswith("python experiments/train_improver.py")
    assert not set(card["learned_from"]) & set(card["validated_on"])
    assert load_improver().config.width == card["config"]["width"]


def test_policies_of_before_score_as_they_did(recorded: Recorded) -> None:
    """Those that did not see rules of ops: what they did not see has no weight."""
    old = Improver.untrained(5)
    weights = dict(old.state_dict())
    unseen = [len(MoveKind) - 1, *range(NUM_MOVE_FEATURES - 3, NUM_MOVE_FEATURES)]
    weights["groups.0.weight"][:, -1] = 0.0
    weights["moves.0.weight"][:, unseen] = 0.0
    weights["groups.0.weight"] = weights["groups.0.weight"][:, :-1]
    seen = [n for n in range(weights["moves.0.weight"].shape[1]) if n not in unseen]
    weights["moves.0.weight"] = weights["moves.0.weight"][:, seen]
    new = Improver()
    new.load_state_dict(of_today(weights))
    points, _ = points_of([(recorded, 0)])
    assert torch.equal(new.eval()(points), old(points))


def test_what_is_written_is_read(tmp_path: Path, recorded: Recorded) -> None:
    policy, path = Improver.untrained(7), tmp_path / "policy.pt"
    save_improver(path, policy, {"name": "random"})
    points, _ = points_of([(recorded, 0), (recorded, 1)])
    assert torch.equal(load_improver(str(path))(points), policy(points))
    recorded.save(tmp_path / "moves.npz")
    again = Recorded.load(tmp_path / "moves.npz")
    np.testing.assert_array_equal(again.gains, recorded.gains)
    (tmp_path / "other.pt").write_text("no policy")
    with pytest.raises(InputFileError, match="is no policy"):
        load_improver(str(tmp_path / "other.pt"))
