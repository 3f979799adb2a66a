"""Sailor's rules: values that its own simulator printed, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sailor.inputs import Inputs, Plan, Replica, Stage, read_inputs, read_plan, seconds_of
from sailor.score import memory_of, ring_s, score_of, sync_s, timing_of

from heterog.errors import InputFileError, StrategyError

MEASURED = Path(__file__).parents[3] / "shared" / "data" / "measured"
A1, V1 = Replica(card="A100-40", tensor=1), Replica(card="V100-16", tensor=1)
A4, V4 = Replica(card="A100-40", tensor=4), Replica(card="V100-16", tensor=4)
GH = Replica(card="GH-96", tensor=4)


def plan_of(micro_batch: int, *stages: tuple[int, list[Replica]], batch: int = 1024) -> Plan:
    """A plan of stages by their numbers of layers and their replicas."""
    made = []
    first = 0
    for count, replicas in stages:
        made.append(Stage(first_layer=first, num_layers=count, replicas=tuple(replicas)))
        first += count
    return Plan(stages=tuple(made), micro_batch=micro_batch, batch=batch)


G1 = plan_of(2, (26, 8 * [A1] + 2 * [V4]))
G2 = plan_of(2, (7, 16 * [V1]), (19, 16 * [A1]))
G3 = plan_of(2, (13, 3 * [A1] + 24 * [V4]), (13, 27 * [A1]))
G4 = plan_of(4, (13, 6 * [A1] + 4 * [V4]), (13, 10 * [A1]))
G5 = plan_of(4, (26, 4 * [A4] + 4 * [V4]))
G6 = plan_of(1, (26, [GH]), batch=32)
G7 = plan_of(8, *((count, 4 * [GH]) for count in (5, 7, 7, 7)))
G8 = plan_of(8, (12, 16 * [GH]), (14, 16 * [GH]))

# Name: plan, micro-batches, compute, sends, straggler, update, rings, total; seconds.
GOLDEN: dict[str, tuple[Plan, int, list[float], list[float], float, float, list[float], float]] = {
    "G1": (G1, 52, [0.397556], [0.0], 0.397556, 0.002930, [2.315001], 22.990843),
    "G2": (G2, 32, [0.289364, 0.300101], [0.014693, 0.029386], 0.329487, 0.004843,
           [0.804416, 1.209433], 12.061932),
    "G3": (G3, 19, [0.190422, 0.205319], [0.010171, 0.020342], 0.225661, 0.002930,
           [1.392664, 0.955755], 5.883749),
    "G4": (G4, 26, [0.371934, 0.402012], [0.018978, 0.037956], 0.439968, 0.002941,
           [1.171595, 0.809328], 13.004622),
    "G5": (G5, 32, [0.757893], [0.0], 0.757893, 0.001298, [0.554768], 24.808642),
    "G6": (G6, 32, [0.082512], [0.0], 0.082512, 0.000447, [0.0], 2.640831),
    "G7": (G7, 32, [0.037872, 0.064071, 0.064071, 0.064876], 4 * [0.001483], 0.066359, 0.000479,
           [0.007352, 0.006324, 0.006324, 0.008842], 2.303263),
    "G8": (G8, 8, [0.101943, 0.128947], [0.000741, 0.001483], 0.130430, 0.000479,
           [0.018351, 0.020290], 1.166891),
}  # fmt: skip

PRINTED = 0.51e-6
"""Half of the last digit that is printed."""


def approx(value: Any, digit: float = PRINTED) -> Any:
    return pytest.approx(value, rel=0.0, abs=digit)


@pytest.mark.parametrize("name", GOLDEN)
def test_times_are_those_of_sailors_simulator(name: str, inputs: Inputs) -> None:
    plan, num_micro, compute, send, straggler, update, sync, total = GOLDEN[name]
    found = timing_of(plan, inputs)
    assert plan.num_micro == num_micro
    assert found.compute_s == approx(compute)
    assert found.send_s == approx(send)
    assert found.straggler_s == approx(straggler)
    assert found.update_s == approx(update)
    rings = tuple(sync_s(stage, inputs) for stage in plan.stages)
    assert rings == approx(sync)
    assert found.sync_s == max(rings)
    assert found.total_s == approx(total)


# Plan, stage, card: 1e9 bytes by the validity check and by the other one.
HELD = [
    (G1, 0, "A100-40", 30.779387, 33.839387),
    (G1, 0, "V100-16", 11.179149, 13.239149),
    (G2, 0, "V100-16", 13.7915, 16.8515),
    (G2, 1, "A100-40", 23.3334, 26.3934),
    (G3, 0, "A100-40", 24.262743, 27.322743),
    (G3, 0, "V100-16", 9.541017, 11.601017),
    (G3, 1, "A100-40", 17.190858, 20.250858),
    (G4, 0, "A100-40", 41.611171, 44.671171),
    (G4, 0, "V100-16", 14.812020, 16.872020),
    (G4, 1, "A100-40", 27.517683, 30.577683),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "stage", "card", "check", "validation"), HELD)
def test_memory_is_that_of_sailors_simulator(
    plan: Plan, stage: int, card: str, check: float, validation: float, inputs: Inputs
) -> None:
    found = [each for each in memory_of(plan, inputs) if (each.stage, each.card) == (stage, card)]
    assert found
    printed = 0.51e-4 if plan is G2 else PRINTED
    for each in found:
        assert each.check_bytes / 1e9 == approx(check, digit=printed)
        assert each.validation_bytes / 1e9 == approx(validation, digit=printed)
        assert each.fits


@pytest.mark.parametrize(
    ("plan", "peak", "stage"), [(G6, 10.394447, 0), (G7, 23.913288, 1), (G8, 25.593246, None)]
)
def test_peaks_of_real_runs_are_those_of_sailors_simulator(
    plan: Plan, peak: float, stage: int | None, inputs: Inputs
) -> None:
    memory = memory_of(plan, inputs)
    fullest = max(memory, key=lambda each: each.validation_bytes)
    assert fullest.validation_bytes / 1e9 == approx(peak)
    assert stage is None or fullest.stage == stage


def test_pieces_by_hand(inputs: Inputs) -> None:
    """A ring's buckets and single messages, as the simulator's own functions gave them."""
    to_v100 = inputs.link(("V100-16", 1), ("V100-16", 1))
    to_a100 = inputs.link(("A100-40", 1), ("A100-40", 1))
    whole = 1_629_724_672
    assert inputs.sizes[1].params[26] * 4 == whole
    assert ring_s(to_v100, 5e8, 10) == approx(0.701662)
    assert ring_s(to_v100, whole - 1.5e9, 10) == approx(0.210015)
    assert ring_s(to_a100, whole, 10) == approx(1.617692)
    assert seconds_of(to_a100, 33_554_432) == approx(0.018978127, digit=1e-9)
    assert seconds_of(to_a100, 16_777_216) == approx(0.010171077, digit=1e-9)
    assert seconds_of(to_a100, 0) == 0.0
    assert inputs.link(("V100-16", 4), ("A100-40", 1)) == to_a100
    assert inputs.link(("V100-16", 1), ("A100-40", 1)) == to_v100
    assert [inputs.sizes[tensor].params[26] for tensor in (1, 2, 4, 8)] == [
        407_431_168, 204_969_984, 103_739_392, 53_124_096,
    ]  # fmt: skip


def test_real_runs_are_predicted_as_well_as_published(inputs: Inputs) -> None:
    path = MEASURED / "sailor_gh200_opt.json"
    if not path.is_file():
        pytest.skip("the shared measurements are not here")
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    scores = [score_of(read_plan(row), inputs) for row in rows]
    times = [
        abs(score.timing.total_s / row["real"] - 1)
        for score, row in zip(scores, rows, strict=True)
    ]
    peaks = [
        abs(score.peak_validation_bytes / row["max_mem"] - 1)
        for score, row in zip(scores, rows, strict=True)
    ]
    assert len(rows) == 15
    assert sum(times) / 15 == approx(0.089238)
    assert sum(peaks) / 15 == approx(0.058683)


def test_samples_that_are_charged(inputs: Inputs) -> None:
    """52 micro-batches of 2 on 10 replicas are 1,040 samples of a batch of 1,024."""
    assert score_of(G1, inputs).samples == 1040
    assert score_of(G2, inputs).samples == 1024


@given(st.permutations(range(10)))
def test_order_decides_the_ring(inputs: Inputs, order: list[int]) -> None:
    """No pair of V100 and A100 side by side is ever avoided, so this ring stays the same."""
    (stage,) = G1.stages
    moved = replace(stage, replicas=tuple(stage.replicas[index] for index in order))
    found = timing_of(replace(G1, stages=(moved,)), inputs)
    assert found.total_s == approx(22.990843)


# --- refused -------------------------------------------------------------------------------------


def test_seconds_that_were_not_measured_are_refused(inputs: Inputs) -> None:
    """Sailor's simulator counts zero for them: G9, 2.8 s for 32 V100, and 0.31 s for A100."""
    with pytest.raises(StrategyError, match="8 were not measured on V100-16 in teams of 1"):
        score_of(plan_of(8, (26, 32 * [V1])), inputs)
    eight = Replica(card="A100-40", tensor=8)
    for size in (4, 8):
        with pytest.raises(StrategyError, match=r"teams of 8 \(no size at all\)"):
            score_of(plan_of(size, (26, 4 * [eight])), inputs)
    with pytest.raises(StrategyError, match=r"of 16 .* \(sizes 1, 2, 4, 8\); choose one"):
        score_of(plan_of(16, (26, 4 * [A1])), inputs)


def test_cards_without_links_or_sizes_are_refused(inputs: Inputs) -> None:
    alone = plan_of(1, (26, [Replica(card="A100-80", tensor=1)]))
    with pytest.raises(StrategyError, match="no rate from A100-80 x 1 to A100-80 x 1"):
        score_of(alone, inputs)
    with pytest.raises(StrategyError, match="no sizes are known of A100-40 in teams of 3"):
        memory_of(plan_of(1, (26, [Replica(card="A100-40", tensor=3)])), inputs)
    titan, other = Replica(card="Titan-RTX", tensor=2), Replica(card="RTX-2080", tensor=2)
    with pytest.raises(StrategyError, match="no rate from RTX-2080 x 2 to Titan-RTX x 2"):
        score_of(plan_of(1, (13, [titan]), (13, [other])), inputs)


def test_negative_rates_are_refused(inputs: Inputs) -> None:
    with pytest.raises(StrategyError, match="fitted rate of a message of 50000 B is -"):
        seconds_of(inputs.link(("GH-96", 1), ("GH-96", 1)), 50_000)


def in_sailors_form(entries: list[list[Any]], tensor: int) -> dict[str, Any]:
    pipeline = {
        "layers_per_stage": [list(range(26))],
        "dp": [1],
        "tmp_per_stage": [[[entries, tensor]]],
    }
    return {"pipeline_list": [pipeline], "mbs": 1}


def test_teams_over_nodes_and_several_pipelines_are_refused(inputs: Inputs) -> None:
    zone = "us-central1-a"
    whole = in_sailors_form([["V100-16", 4, zone]], 4)
    assert score_of(read_plan(whole), inputs).is_valid
    with pytest.raises(StrategyError, match="as 2 entries; Sailor's simulator counts no compute"):
        read_plan(in_sailors_form([["V100-16", 2, zone], ["V100-16", 2, zone]], 4))
    with pytest.raises(StrategyError, match="team of 4 GPUs on a node with 2 V100-16"):
        read_plan(in_sailors_form([["V100-16", 2, zone]], 4))
    with pytest.raises(StrategyError, match="has 2 pipelines; only one is scored"):
        read_plan(whole | {"pipeline_list": 2 * whole["pipeline_list"]})


def test_plans_that_make_no_sense_are_refused(inputs: Inputs) -> None:
    with pytest.raises(StrategyError, match="stages hold 25 layers, the model has 26"):
        score_of(plan_of(1, (25, [V4])), inputs)
    with pytest.raises(StrategyError, match="stage 1 begins with layer 12, not 13"):
        Plan(stages=(G4.stages[0], replace(G4.stages[1], first_layer=12)), micro_batch=1)
    with pytest.raises(StrategyError, match="stage 0 has no replica or no layer"):
        plan_of(1, (26, []))
    with pytest.raises(StrategyError, match="needs a stage and micro-batches"):
        plan_of(0, (26, [V4]))
    with pytest.raises(StrategyError, match="stages have 4, 8, 16 replicas; Sailor's"):
        plan_of(1, (7, 16 * [V1]), (10, 4 * [A1]), (9, 8 * [A1]))


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputFileError, match="profiles_tmp"):
        read_inputs(tmp_path)
    (tmp_path / "profiles_tmp.json.gz").write_text('{"BERT": {}}')
    with pytest.raises(InputFileError, match="has nothing about OPT-350"):
        read_inputs(tmp_path)
