"""Profiling: what is measured is all there, takes about the time of a step, and is kept."""

import copy
import math
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from heterog.cluster import Cluster
from heterog.cluster.topology import Execution
from heterog.errors import HeterogError, InputFileError
from heterog.graph.axis_plan import axis_plan
from heterog.graph.capture import CapturedStep, capture, capture_step
from heterog.graph.op_graph import OpGraph, Phase
from heterog.graph.workload import Workload
from heterog.pricing.device_models.fusion import parts_of
from heterog.pricing.op_fits import LinkMeasurement, OpMeasurement, op_signature
from heterog.runtime.deploy import DeployedStep, deploy
from heterog.runtime.measure import op_profiler, profiler
from heterog.runtime.measure.link_profiler import profile_links
from heterog.runtime.measure.op_profiler import LoopbackCommunicator, peak_bytes, peak_during
from heterog.runtime.measure.profiler import (
    own_journal,
    profile_as_rank,
    profile_cluster,
    profile_here,
    profile_local,
    remove_journal,
)
from heterog.runtime.step import compiled
from heterog.runtime.step.local_op import local_ops
from heterog.search.plan import Plan, load_plan
from heterog.simulator.evaluator import MEMORY_MARGIN
from heterog.zoo import load_workload
from tests.runtime.ranks import Ranks
from tests.runtime.test_segments import traced
from tests.search.asking import make_plan
from tests.simulator.builders import cluster_of
from tests.thorough import THOROUGH

MODEL = """
import torch, heterog
from torch import nn

def workload(batch_size: int = 192) -> heterog.Workload:
    batch = (torch.randn(batch_size, 384), torch.randn(batch_size, 128))
    model = lambda: nn.Sequential(nn.Linear(384, 512), nn.ReLU(), nn.Linear(512, 128))
    return heterog.Workload(model, batch, nn.functional.mse_loss, torch.optim.Adam)

def tiny(batch_size: int = 4) -> heterog.Workload:
    batch = (torch.randn(batch_size, 6), torch.randn(batch_size, 6))
    return heterog.Workload(lambda: nn.Linear(6, 6), batch, nn.functional.mse_loss,
                            torch.optim.SGD, {"lr": 0.1})
"""
SHARES = (1.0, 0.5)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "SHARES", SHARES)
    monkeypatch.setattr(op_profiler, "_LEAST_SECONDS", 0.05)


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return f"{path}:workload"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The shares that are really measured."""
    found: list[int] = []
    real = op_profiler.profile_ops

    def counted(
        captured: CapturedStep, workload: Workload, samples: int, *rest: Any
    ) -> list[OpMeasurement]:
        found.append(samples)
        return real(captured, workload, samples, *rest)

    monkeypatch.setattr(profiler, "profile_ops", counted)
    return found


def kernels(graph: OpGraph) -> list[int]:
    return [
        op
        for op in range(graph.num_ops)
        if not graph.is_view[op] and graph.ops[op].phase != Phase.UPDATE
    ]


def eager_s(source: str) -> float:
    """CPU seconds of a step on one device, without the optimizer."""
    workload = load_workload(source, None)
    model, batch = workload.make_model(), workload.make_batch()
    seconds = []
    for _ in range(10):
        begin = time.thread_time()
        workload.step_loss(model, batch).backward()  # type: ignore[no-untyped-call]
        seconds.append(time.thread_time() - begin)
    return sorted(seconds)[len(seconds) // 2]


def test_every_op_is_measured_and_their_sum_is_about_a_step(tmp_path: Path, model: str) -> None:
    torch.set_num_threads(1)
    rows = profile_local([model], own_journal(tmp_path / "journal", "CPU"), "CPU")
    graph = capture(load_workload(model, None))
    assert all(row.seconds > 0 and row.count > 0 for row in rows)
    found = {(row.signature, row.samples): row for row in rows if row.signature}
    signatures = [op_signature(graph, op) for op in kernels(graph)]
    for samples in (192, 96):
        assert set(signatures) <= {name for name, size in found if size == samples}
    whole = sum(found[name, 192].seconds for name in signatures)
    assert 0.5 < whole / eager_s(model) < 2.0
    half = sum(found[name, 96].seconds for name in signatures)
    assert half < 1.5 * whole  # seconds of a busy machine; every row is of its own size


def test_a_segments_seconds_are_divided_in_proportion_to_its_ops() -> None:
    """Tasks 1, 2 and 4 are ops; 0 is a copy by itself, 3 a view, and 5 sends."""
    apart = {0: [7.0], 1: [1.0, 1.0], 2: [3.0], 3: [5.0], 4: [2.0], 5: [1.0]}
    segments = {0: [9.0], 1: [8.0, 16.0], 5: [4.0]}
    found = op_profiler.parts_of_segments(segments, apart, [0, 1, -1, 2, 3, 5, 4], {1, 2, 4})
    assert found == {0: [9.0], 1: [2.0, 4.0], 2: [6.0, 12.0], 4: [4.0]}


def test_compiled_segments_are_measured_whole(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "_inductor", traced)
    kept: list[tuple[float, float]] = []
    divide = op_profiler.parts_of_segments

    def noted(segments: Any, apart: Any, *rest: Any) -> dict[int, list[float]]:
        found = divide(segments, apart, *rest)
        assert len(segments) < len(apart) / 2, "several ops at once"
        kept.append((sum(map(sum, segments.values())), sum(map(sum, found.values()))))
        return found

    monkeypatch.setattr(op_profiler, "parts_of_segments", noted)
    journal = tmp_path / "journal"
    found = profile_here([model], journal, "CPU", compiles=True)
    assert found.compiled
    names = {(row.signature, row.samples) for row in found.ops}
    graph = capture(load_workload(model, None))
    assert {(op_signature(graph, op), n) for op in kernels(graph) for n in (192, 96)} <= names
    assert len(kept) == len(SHARES)
    assert all(0.5 * whole < divided <= 1.001 * whole for whole, divided in kept)
    with pytest.raises(InputFileError, match=r"measurements of a CPU, .*, compiled, not of a CPU"):
        profile_here([model], journal, "CPU")


def test_updates_are_measured_once_for_every_size_of_parameter(tmp_path: Path, model: str) -> None:
    rows = profile_local([model], own_journal(tmp_path / "journal", "CPU"), "CPU")
    graph = capture(load_workload(model, None))
    updates = [row for row in rows if row.kind == "update.Adam" and row.samples == 192]
    sizes = {math.prod(graph.tensors[parameter].shape) for _, parameter, _ in graph.updates}
    assert len(updates) == len(sizes) == 4
    by_bytes = sorted(updates, key=lambda row: row.num_bytes)
    assert by_bytes[-1].seconds > by_bytes[0].seconds


def test_gradients_of_a_part_of_the_batch_are_copied_too(tmp_path: Path, model: str) -> None:
    rows = profile_local([model], own_journal(tmp_path / "journal", "CPU"), "CPU")
    copies = [row for row in rows if row.kind == "copy"]
    assert copies, "half of the batch is data parallel: gradients are flattened"
    assert all(row.num_bytes > 0 and row.flops == 0 for row in copies)


def test_what_is_done_is_not_measured_again(tmp_path: Path, model: str, calls: list[int]) -> None:
    journal = tmp_path / "journal"
    first = profile_local([model, model], own_journal(journal, "CPU"), "CPU")
    assert calls == [192, 96]
    assert profile_local([model], own_journal(journal, "CPU"), "CPU") == first
    assert calls == [192, 96]
    others = profile_local([model], own_journal(journal, "CPU"), "CPU", batch_size=64)
    assert calls == [192, 96, 64, 32]
    assert {row.samples for row in others} == {64, 32}, "rows of other sizes are not mixed in"
    Path(model.partition(":")[0]).write_text(MODEL.replace("512", "256"))
    profile_local([model], own_journal(journal, "CPU"), "CPU")
    assert calls[4:] == [192, 96], "another model under the same name"


def test_a_journal_that_was_cut_off_goes_on(tmp_path: Path, model: str, calls: list[int]) -> None:
    journal = tmp_path / "journal"
    profile_local([model], own_journal(journal, "CPU"), "CPU")
    journal.write_bytes(journal.read_bytes()[:-30])
    again = profile_local([model], own_journal(journal, "CPU"), "CPU")
    assert calls == [192, 96, 96]
    assert profile_local([model], own_journal(journal, "CPU"), "CPU") == again
    assert calls == [192, 96, 96], "the line after the cut is whole"


def test_somebody_elses_journal_is_refused(tmp_path: Path, model: str) -> None:
    journal = tmp_path / "journal"
    profile_local([], own_journal(journal, "CPU"), "CPU")
    with pytest.raises(InputFileError, match=r"holds measurements of a CPU, .* not of a T4"):
        profile_local([model], own_journal(journal, "T4"), "T4")


def test_a_small_batch_is_measured_once_per_size(
    tmp_path: Path, model: str, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler, "SHARES", (1.0, 0.25, 0.125))
    told: list[str] = []
    tiny = model.replace(":workload", ":tiny")
    profile_local([tiny], own_journal(tmp_path / "journal", "CPU"), "CPU", tell=told.append)
    assert calls == [4, 1]
    assert told[0] == "ops 1 of 3: tiny, batch 4"


def test_a_share_that_does_not_fit_is_left_out(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> list[OpMeasurement]:
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(profiler, "profile_ops", fail)
    told: list[str] = []
    assert (
        profile_local([model], own_journal(tmp_path / "journal", "CPU"), "CPU", tell=told.append)
        == []
    )
    assert "workload: batch 192 does not fit on CPU; left out" in told


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_not_measured(tmp_path: Path, model: str) -> None:
    with pytest.raises(HeterogError, match=r"V100-16GB cannot be measured: .* `device_type` CPU"):
        profile_here([model], tmp_path / "journal", "V100-16GB")
    assert not (tmp_path / "journal").exists()


def test_a_folder_of_journals_is_removed_but_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "m.json.partial"
    profile_here([], folder, "CPU")
    (folder / "mine.txt").write_text("")
    remove_journal(folder)
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]
    (folder / "mine.txt").unlink()
    remove_journal(folder)
    assert not folder.exists()
    remove_journal(folder)


def test_nobody_answers_a_loopback() -> None:
    alone, tensor = LoopbackCommunicator(), torch.ones(3)
    alone.send(tensor, 1, 0)
    alone.flush()
    assert alone.receive(tensor, 1, 0).wait() is tensor
    assert alone.all_reduce(tensor, (0, 1)).wait() is tensor


# --- links --------------------------------------------------------------------------------------


def two_devices() -> Cluster:
    return cluster_of((1.0, ["T4", "T4"]))


def links(rank: int, payloads: tuple[int, ...], num_done: int) -> list[LinkMeasurement]:
    return list(profile_links(two_devices(), payloads, num_done=num_done))


@THOROUGH
@pytest.mark.distributed
def test_all_pairs_and_all_collectives_are_measured(two_ranks: Ranks) -> None:
    payloads = (4096, 65536)
    every, others = two_ranks.run(links, payloads, 0)
    assert every == others, "all ranks know all rows"
    rows = [row for row in every if not row.while_computing]
    transfers = [row for row in rows if row.kind == "point_to_point"]
    assert {row.devices for row in transfers} == {("A:0", "A:1"), ("A:1", "A:0")}
    collectives = ("all_reduce_ring", "reduce_scatter", "all_gather")
    assert len(rows) == len(payloads) * (2 + len(collectives))
    for kind in collectives:
        assert [row.num_bytes for row in rows if row.kind == kind] == list(payloads)
    busy = [row for row in every if row.while_computing]
    assert sorted(row.kind for row in busy) == sorted([*collectives, *["point_to_point"] * 2])
    assert all(seconds > 0 for row in busy for seconds in row.device_seconds)
    assert all(row.seconds > 0 and len(row.device_seconds) == 2 for row in every)
    left = two_ranks.run(links, payloads, 7)[0]
    assert [(row.kind, row.num_bytes) for row in left] == [
        (row.kind, row.num_bytes) for row in every[7:]
    ]


@pytest.mark.distributed
def test_a_job_of_ranks_measures_and_resumes(tmp_path: Path, model: str) -> None:
    folder, cluster, told = tmp_path / "journal", two_devices(), list[str]()
    first = profile_cluster([], cluster, folder, testbed=False, tell=told.append)
    assert first.ops == ()
    assert first.cluster is not None
    assert Cluster.from_dict(first.cluster).describe_difference(cluster) is None
    assert any(text.startswith("links ") for text in told)
    journal = folder / "rank0.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:-2]))
    again = profile_cluster([], cluster, folder, testbed=False)
    assert again.links[:-2] == first.links[:-2], "known from the journal"
    assert len(again.links) == len(first.links)
    assert again.links[-2:] != first.links[-2:], "measured again"


def test_there_is_one_rank_per_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "RANK", "0")
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "3")
    with pytest.raises(HeterogError, match="has 2 devices, but 3 ranks are running"):
        profile_as_rank([], two_devices(), tmp_path / "journal")


# --- memory -------------------------------------------------------------------------------------

WIDTH, HIDDEN, BATCH = 256, 1024, 256


def wide() -> Workload:
    torch.manual_seed(0)
    return Workload(
        lambda: nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH)),
        (torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)),
        nn.functional.mse_loss,
        torch.optim.SGD,
        {"lr": 0.1},
    )


def peak_of_a_step(rank: int, path: str) -> int:
    step = deploy(wide(), load_plan(path))
    batch = wide().make_batch()
    step(batch)
    return peak_bytes(step, batch)


def check_peaks(peaks: list[int], path: Path) -> None:
    """Weights and their gradients; a share of the batch and the gradient of the hidden layer."""
    weights = 4 * (2 * WIDTH * HIDDEN + WIDTH + HIDDEN)
    share = BATCH // len(peaks)
    for measured, predicted in zip(peaks, load_plan(path).peak_memory_bytes, strict=True):
        assert measured >= 2 * weights + 4 * share * (WIDTH + HIDDEN)
        assert predicted == pytest.approx(measured, rel=0.25)


def planned(tmp_path: Path, cluster: Cluster) -> Path:
    path = tmp_path / "plan.json"
    graph = capture_step(wide()).graph
    make_plan(graph, cluster, methods=["ddp"], budget="1e").save(path)
    return path


def test_peak_bytes_of_one_rank(tmp_path: Path) -> None:
    path = planned(tmp_path, cluster_of((1.0, ["T4"])))
    with profiler._alone():
        check_peaks([peak_of_a_step(0, str(path))], path)


@pytest.mark.distributed
def test_peak_bytes_of_two_ranks(tmp_path: Path, two_ranks: Ranks) -> None:
    path = planned(tmp_path, two_devices())
    check_peaks(two_ranks.run(peak_of_a_step, str(path)), path)


def test_the_gradient_of_a_mean_takes_no_more_than_its_result() -> None:
    captured = capture_step(wide())
    graph = captured.graph
    ops = local_ops(captured, axis_plan(graph), torch.device("cpu"))
    op = [each.kind for each in graph.ops].index("mse_loss_backward.default")
    share = ops[op].whole._replace(samples=BATCH // 2)
    made, label = torch.randn(2, BATCH // 2, WIDTH)
    results: list[torch.Tensor] = []
    peak = peak_during(lambda: results.extend(ops[op]([torch.ones(()), made, label], share)))
    assert made.nbytes <= peak < 1.01 * made.nbytes
    # This half's part of the mean over the whole batch.
    torch.testing.assert_close(results[0], 2.0 * (made - label) / (BATCH * WIDTH))


def classifier() -> Workload:
    """A step whose memory is activations: 2 MiB of each layer."""
    torch.manual_seed(0)
    layers = [each for _ in range(3) for each in (nn.Linear(256, 256), nn.GELU(), nn.ReLU())]
    return Workload(
        lambda: nn.Sequential(*copy.deepcopy(layers), nn.Linear(256, 512)),
        (torch.randn(2048, 256), torch.randint(0, 512, (2048,))),
        nn.functional.cross_entropy,
        torch.optim.SGD,
        {"lr": 0.1},
    )


class Reversed(nn.Module):
    """A layer whose result a kernel moves, so that it cannot be written over it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(x).flip(1) @ torch.ones(1024, 4)
        return made


class Tempered(nn.Module):
    """Logits over a temperature: the gradient's kernel reads the log-softmax to its end."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(x) / 0.7
        return made


class Gated(nn.Module):
    """SwiGLU: a kernel of its backward pass has two results, and reads four inputs to its end."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(256, 1024), nn.Linear(256, 1024)
        self.down = nn.Linear(1024, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return made


class Dropped(nn.Module):
    """A kernel after drawn numbers has two results, one for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 1024), nn.Linear(1024, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.second(nn.functional.dropout(self.first(x).tanh(), 0.1))
        return made


class Deep(nn.Module):
    """Inductor makes the gradient of a weight before that of its layer's input."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (256, 1024), (1024, 1024), (1024, 4)
        self.layers = nn.ModuleList(nn.Linear(*size) for size in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = nn.functional.gelu(layer(x))
        made: torch.Tensor = self.layers[-1](x)
        return made


@pytest.fixture
def empty_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inductor allocates as ever, but its kernels do nothing, as they take long to compile."""
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_, **__: lambda *_: None)
    with config.patch(force_disable_caches=True):
        yield


def peak_of_the_second_step(workload: Workload, plan: Plan, captured: CapturedStep) -> int:
    with profiler._alone():
        step = DeployedStep(workload, plan, captured=captured)
        step(workload.make_batch())
        return peak_bytes(step, workload.make_batch())


@pytest.mark.usefixtures("empty_kernels")
@pytest.mark.parametrize("model", [Reversed, Tempered, Gated, Dropped, Deep])
def test_peak_bytes_of_a_compiled_step_are_not_too_low(
    model: type[nn.Module],
) -> None:
    batch = torch.randn(2048, 256), torch.randint(0, 4, (2048,))
    workload = Workload(model, batch, nn.functional.cross_entropy, torch.optim.SGD, {"lr": 0.1})
    captured = capture_step(workload)
    cluster = replace(cluster_of((1.0, ["T4"])), execution=Execution.COMPILED)
    plan = make_plan(captured.graph, cluster, methods=["ddp"], budget="1e")
    measured = peak_of_the_second_step(workload, plan, captured)
    (predicted,) = plan.peak_memory_bytes
    assert measured < predicted == pytest.approx(measured * (1 + MEMORY_MARGIN), rel=0.02)


class Images(nn.Module):
    """On a CPU, kernels of convolutions and ``Upsample`` copy what they read and make."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(4, 32, 3, 1, 1), nn.SiLU(), nn.Upsample(scale_factor=2), nn.Conv2d(32, 16, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layers(x).mean((2, 3))
        return made


def test_peak_bytes_of_kernels_that_copy_on_a_cpu() -> None:
    batch = torch.randn(16, 4, 16, 16), torch.randint(0, 4, (16,))
    workload = Workload(Images, batch, nn.functional.cross_entropy, torch.optim.SGD, {"lr": 0.1})
    captured = capture_step(workload)
    plan = make_plan(captured.graph, cluster_of((1.0, ["CPU"])), methods=["ddp"], budget="1e")
    measured = peak_of_the_second_step(workload, plan, captured)
    (predicted,) = plan.peak_memory_bytes
    assert predicted == pytest.approx(measured * (1 + MEMORY_MARGIN), rel=0.06)
    # That of a GPU's kernels, which copy nothing.
    other = make_plan(captured.graph, cluster_of((1.0, ["T4"])), methods=["ddp"], budget="1e")
    assert other.peak_memory_bytes[0] < 0.9 * predicted


@pytest.mark.usefixtures("empty_kernels")
def test_peak_bytes_of_a_compiled_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor allocates as predicted."""
    captured = capture_step(classifier())
    parts: list[int] = []
    part = compiled.Compiler.part

    def noted(own: compiled.Compiler, *given: Any) -> compiled.Part:
        parts.append(given[-1])
        return part(own, *given)

    monkeypatch.setattr(compiled.Compiler, "part", noted)
    peaks = {}
    for execution in (Execution.EAGER, Execution.COMPILED):
        cluster = replace(cluster_of((1.0, ["T4"])), execution=execution)
        plan = make_plan(captured.graph, cluster, methods=["ddp"], budget="1e")
        peaks[execution] = peak_of_the_second_step(classifier(), plan, captured)
        (predicted,) = plan.peak_memory_bytes
        assert predicted == pytest.approx(peaks[execution] * (1 + MEMORY_MARGIN), rel=0.01)
    assert peaks[Execution.COMPILED] < 0.9 * peaks[Execution.EAGER]
    # The simulator's parts are those that are compiled; the loss between two is not.
    graph = captured.graph
    of_op = parts_of(graph).copy()
    of_op[graph.producer[graph.storage[graph.loss]]] = -1
    assert sorted(parts) == sorted(np.unique(of_op[of_op >= 0], return_counts=True)[1].tolist())


def test_the_profilers_own_notes_are_left_out_and_nothing_else(
    capfd: pytest.CaptureFixture[str],
) -> None:
    early = torch.ones(10)

    def call() -> None:
        nonlocal early
        os.write(2, b"what the model says\n")
        early = torch.ones(1000)

    assert peak_during(call) >= 4000
    assert capfd.readouterr().err == "what the model says\n"
