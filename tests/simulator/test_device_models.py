"""Device models: closed forms, sizes of parts, and errors on kernels that were not fitted."""

import math
import warnings
from dataclasses import replace
from functools import lru_cache
from importlib import resources
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from heterog.cluster.catalog import device_type, listed_type, listed_types
from heterog.cluster.hardware import DeviceType
from heterog.cluster.spec import load_cluster
from heterog.cluster.topology import Cluster, Execution
from heterog.errors import GraphError, InputFileError
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph, Phase
from heterog.graph.serialize import graph_from_dict, graph_to_dict
from heterog.graph.workload import Workload
from heterog.lowering.channels import Channel, ChannelTable
from heterog.pricing.calibration import cost_model_of
from heterog.pricing.device_models.kernels import local_sizes, products_of, streams_of
from heterog.pricing.device_models.laws import (
    Chip,
    CollectiveModel,
    ProductModel,
    StreamModel,
    product_bytes,
)
from heterog.pricing.device_models.model import (
    DeviceModels,
    launch_seconds,
    product_unit,
    provenance,
)
from heterog.pricing.device_models.parameters import (
    ANY_TYPE,
    PRODUCTS,
    STREAMS,
    InTraining,
    chip_of,
    collectives_of,
    families_of,
    host_of,
    in_training_of,
)
from heterog.pricing.roofline import Roofline
from heterog.simulator.evaluator import Evaluator
from heterog.yaml_files import load_shipped
from heterog.zoo import build
from tests.thorough import cases, few_of, one_in

CHIP = Chip(
    peak_flops_per_s=1e14, bandwidth_bytes_per_s=1e12, multiprocessors=100, cache_bytes=0.0
)
PLAIN = ProductModel(
    launch_s=1e-6, efficiency=1.0, tile_loss=0.0, ramp=0.0, memory_efficiency=1.0,
    cache_speedup=1.0,
)  # fmt: skip


def seconds(model: ProductModel, *sizes: float, num_bytes: float = 1.0) -> float:
    return float(model.seconds(CHIP, np.array([sizes], np.float64), np.array([num_bytes]))[0])


def test_a_product_of_whole_waves_runs_at_the_peak() -> None:
    # 100 tiles of 256 x 128, one for each multiprocessor.
    flops = 2.0 * 2560 * 1280 * 4096
    assert seconds(PLAIN, 1, 2560, 1280, 4096) == pytest.approx(1e-6 + flops / 1e14)


def test_one_tile_more_than_a_wave_costs_a_wave_more() -> None:
    model = PLAIN
    whole = seconds(model, 100, 32, 32, 96) - model.launch_s  # 100 of the smallest tiles
    more = seconds(model, 101, 32, 32, 96) - model.launch_s
    assert more == pytest.approx(2.0 * whole)


def test_a_deep_product_of_few_tiles_is_split_along_its_depth() -> None:
    one_tile = 2.0 * 128 * 128 * 65536 / 1e12  # what one multiprocessor would take
    assert seconds(PLAIN, 1, 128, 128, 65536) < 0.2 * one_tile
    assert seconds(PLAIN, 1, 32, 32, 96) == pytest.approx(1e-6 + 2.0 * 32 * 32 * 96 / 1e12)


def test_a_product_of_vectors_takes_what_its_bytes_take() -> None:
    sizes = np.array([[1.0, 1.0, 65536.0, 8192.0]])
    (num_bytes,) = product_bytes(sizes, 2.0, 2.0)
    assert num_bytes == 2.0 * (8192 + 8192 * 65536 + 65536)
    assert seconds(PLAIN, *sizes[0], num_bytes=1e12) == pytest.approx(1.0, rel=1e-3)


def test_the_ramp_of_a_tile_costs_as_much_as_so_much_depth() -> None:
    ramped = ProductModel(1e-6, 1.0, 0.0, 64.0, 1.0, 1.0)
    assert seconds(ramped, 100, 32, 32, 96) == pytest.approx(seconds(PLAIN, 100, 32, 32, 160))


def test_a_board_short_of_power_takes_what_the_energy_of_the_flops_takes() -> None:
    # 2e-12 J for a FLOP on 50 W are 25 TFLOP/s, where the clock would allow 100.
    frugal = replace(CHIP, board_w=50.0, energy=0.5)
    model = replace(PLAIN, joules_per_flop=4e-12)
    sizes, num_bytes = np.array([[1.0, 2560.0, 1280.0, 4096.0]]), np.ones(1)
    flops = 2.0 * sizes.prod()
    assert model.seconds(frugal, sizes, num_bytes)[0] == pytest.approx(1e-6 + flops / 25e12)
    # With enough of it, and for what fills a tenth of the chip only, the clock is the bound.
    ample = replace(frugal, board_w=500.0)
    assert model.seconds(ample, sizes, num_bytes) == PLAIN.seconds(CHIP, sizes, num_bytes)
    few = np.array([[10.0, 32.0, 32.0, 96.0]])
    assert model.seconds(frugal, few, num_bytes) == PLAIN.seconds(CHIP, few, num_bytes)


def test_outputs_with_many_columns_take_longer_where_a_type_loses_there() -> None:
    lossy = replace(PLAIN, wide_loss=2.0)
    narrow, wide = (1, 2560, 1280, 4096), (1, 1280, 20000, 4096)
    assert seconds(lossy, *narrow) == seconds(PLAIN, *narrow)
    plain = seconds(PLAIN, *wide) - PLAIN.launch_s
    assert seconds(lossy, *wide) - lossy.launch_s == pytest.approx(plain * (1.0 + 2.0 * 0.75))
    # What counts is columns: rows may be as many as there are.
    assert seconds(lossy, 1, 20000, 1280, 4096) == seconds(PLAIN, 1, 20000, 1280, 4096)


def test_kernels_that_do_not_cut_the_depth_leave_multiprocessors_idle() -> None:
    whole = replace(PLAIN, most_splits=1.0, least_rows=128.0)
    assert seconds(whole, 1, 128, 16, 65536) == pytest.approx(
        1e-6 + 2.0 * 128 * 16 * 65536 / 1e12  # one tile on one multiprocessor
    )
    # A tile of 128 rows for a single one.
    assert seconds(whole, 1, 1, 16, 65536) == seconds(whole, 1, 128, 16, 65536)


def test_a_result_stays_in_the_cache_where_it_has_room() -> None:
    chip = replace(CHIP, cache_bytes=2e6)
    cached = replace(PLAIN, cache_speedup=4.0)
    sizes, num_bytes = np.array([[1.0, 8.0, 8.0, 8.0]]), np.array([5e6])
    # Of the result 1 MB at most, half of the cache; of the factors 0.3 MB, 0.15 of it.
    for result, quick in ((0.5e6, 0.5e6 + 0.3e6), (3e6, 1e6 + 0.3e6)):
        took = cached.seconds(chip, sizes, num_bytes, np.array([result]))[0]
        assert took == pytest.approx(1e-6 + (5e6 - quick * 0.75) / 1e12, rel=1e-3)


def sustained(name: str, dtype: str) -> float:
    """FLOP/s of a large product, in share of the sheet's."""
    kind = device_type(name)
    peak = kind.peak_flops_per_s[dtype]
    family = families_of(name)["float32" if dtype == "float32" else "16 bit"]
    assert isinstance(family.model, ProductModel)
    sizes = np.array([[1.0, 8192.0, 8192.0, 8192.0]])
    took = family.model.seconds(chip_of(kind, peak), sizes, product_bytes(sizes, 2.0, 2.0))
    return float(2.0 * sizes.prod() / took[0] / peak)


def test_types_that_nobody_measured_sustain_what_the_power_of_their_boards_allows() -> None:
    assert sustained("L4", "float32") == pytest.approx(10.1 / 30.3, rel=0.03)
    assert sustained("L4", "bfloat16") < 0.55 < 0.65 < sustained("RTX-4090", "bfloat16")
    assert sustained("T4", "float16") < 0.5
    assert sustained("A100-PCIe-40GB", "bfloat16") == pytest.approx(158 / 312, rel=0.06)
    # Boards of data centres with as much power as their peaks need.
    for name in ("A100-80GB", "H100", "H200", "V100-32GB", "B200"):
        assert sustained(name, "float16") > 0.65, name


def test_streams_count_bytes_and_long_rows_are_slower() -> None:
    model = StreamModel(launch_s=1e-6, efficiency=0.8, long_row_efficiency=0.5, cached_share=0.25)
    # A multiprocessor has 16 KiB of the cache, and a row may take a quarter of it.
    chip = replace(CHIP, cache_bytes=100 * 16384.0)
    row = np.array([0.0, 1024.0, 1536.0, 2048.0, 4096.0])
    took = model.seconds(chip, np.full(5, 8e9), row)
    expected = [1e-2, 1e-2, 1.3e-2, 1.6e-2, 1.6e-2]
    assert took.tolist() == pytest.approx([1e-6 + each for each in expected])


# --- graphs --------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(4, 8, 3, padding=1, groups=2)
        self.norm = nn.LayerNorm(64)
        self.linear = nn.Linear(64, 32)
        self.dropout = nn.Dropout(0.1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.convolution(image).flatten(2)
        return torch.softmax(self.dropout(self.linear(self.norm(made))), -1).mean(1)


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    data = torch.zeros(16, 4, 8, 8), torch.zeros(16, 32)
    return capture(Workload(Model, data, functional.mse_loss, torch.optim.Adam, name="small"))


def ops(graph: OpGraph, kind: str) -> list[int]:
    return [index for index, op in enumerate(graph.ops) if op.kind.startswith(kind)]


def test_convolutions_and_linears_are_products_of_these_sizes(graph: OpGraph) -> None:
    products = products_of(graph)
    sizes = {
        graph.ops[op].kind: size.tolist()
        for op, size in zip(products.op, products.sizes, strict=True)
        if graph.ops[op].phase == Phase.FORWARD
    }
    assert sizes["convolution.default"] == [2, 16 * 8 * 8, 4, 2 * 3 * 3]
    assert sizes["addmm.default"] == [1, 16 * 8, 32, 64]


def test_flops_of_products_are_those_of_the_graph(graph: OpGraph) -> None:
    products = products_of(graph)
    flops = np.zeros(graph.num_ops)
    np.add.at(flops, products.op, products.count * 2.0 * products.sizes.prod(axis=1))
    chosen = np.unique(products.op)
    np.testing.assert_allclose(flops[chosen], graph.flops[chosen], rtol=0.02)


def test_the_mask_of_a_dropout_is_no_kernel_and_views_are_none(graph: OpGraph) -> None:
    drawn = ops(graph, "bernoulli")
    assert drawn
    priced = set(streams_of(graph).op.tolist()) | set(products_of(graph).op.tolist())
    assert priced.isdisjoint(drawn)
    assert priced.isdisjoint(np.flatnonzero(graph.is_view).tolist())
    for kind, family in (("native_layer_norm", 1), ("_softmax", 2), ("update", 0)):
        streams = streams_of(graph)
        found = {int(f) for o, f in zip(streams.op, streams.family, strict=True)
                 if graph.ops[o].kind.startswith(kind)}  # fmt: skip
        assert found == {family}, kind


class Batched(nn.Module):
    """Each sample has a matrix of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.right = nn.Parameter(torch.zeros(24, 880, 336))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, self.right)


@one_in(3)
@pytest.mark.parametrize("cut", [(1,), (2,), (3,), (0,), (1, 2), (1, 3), (2, 3), (0, 1)])
@pytest.mark.parametrize("part", [0.5, 0.125])
def test_sizes_of_a_part_follow_from_its_flops_and_bytes(
    cut: tuple[int, ...], part: float
) -> None:
    products = products_of(
        capture(
            Workload(Batched, (torch.zeros(24, 208, 880), torch.zeros(24, 208, 336)),
                     functional.mse_loss, torch.optim.SGD, {"lr": 0.1}, name="product")
        )
    )  # fmt: skip
    assert products.sizes[0].tolist() == [24, 208, 336, 880]
    whole = products.sizes[:1]
    sizes = whole.copy()
    sizes[:, list(cut)] *= part
    share = (product_bytes(sizes, 4, 4) / product_bytes(whole, 4, 4)).astype(np.float64)
    first = np.zeros(1, np.int32)
    found = local_sizes(products, first, np.array([part ** len(cut)]), share)
    np.testing.assert_allclose(found, sizes)


def test_a_share_of_the_batch_takes_less_and_nothing_takes_no_work(graph: OpGraph) -> None:
    model, kind = DeviceModels(host_s=0.0), device_type("A100-80GB")
    whole = model.op_seconds(graph, kind, 16)
    half = model.op_seconds(graph, kind, 8)
    assert (half <= whole + 1e-12).all()
    assert half.sum() < whole.sum()
    nothing = model.work_seconds(graph, kind, np.zeros(graph.num_ops), np.zeros(graph.num_ops))
    assert nothing.max() == launch_seconds(kind)


@lru_cache(maxsize=1)
def zoo_step(name: str) -> OpGraph:
    return capture(build(name, 24))


@one_in(2)
@pytest.mark.parametrize(
    ("name", "host_s"),
    few_of(
        [
            *(("mobilenet_v2", 0.0), ("bert_moe", 1e-4), ("gpt2", 0.0), ("gpt2", 1e-4)),
            *(("mobilenet_v2", 1e-4), ("bert_moe", 0.0)),
            *product(("inception_v3", "transformer_6l"), (0.0, 1e-4)),
        ],
        2,
    ),
)
def test_more_samples_never_take_less_time(name: str, host_s: float) -> None:
    """Bounds rest on it: a part of a kernel must not be guessed to be of another shape."""
    step, kind = zoo_step(name), device_type("V100-16GB")
    model = DeviceModels(host_s=host_s)
    before = np.zeros(step.num_ops)
    for samples in range(1, step.batch_size + 1):
        took = model.op_seconds(step, kind, samples)
        assert (took >= before * (1.0 - 1e-9)).all()
        before = took


def test_a_pass_takes_what_the_host_or_the_kernels_take(graph: OpGraph) -> None:
    """Short kernels catch up behind long ones: only the sums over the queue matter.

    The optimizer takes half of the seconds of a kernel for each parameter.
    """
    kind, is_of = device_type("A100-80GB"), np.array([op.phase for op in graph.ops])
    kernels = DeviceModels(host_s=0.0).op_seconds(graph, kind, 16)
    for phase in Phase:
        ops = np.flatnonzero((is_of == phase) & (kernels > 0.0))
        part = DeviceModels().host.update if phase == Phase.UPDATE else 1.0
        assert len(ops) <= 17, "the whole pass is one queue, so that the sums are exact"
        alone = kernels[ops].sum() / len(ops)
        for host_s in (0.5 * alone, 0.999 * alone, 1.001 * alone, 5.0 * alone):
            issued = DeviceModels(host_s=host_s).op_seconds(graph, kind, 16)
            assert issued[ops].sum() == pytest.approx(len(ops) * max(alone, part * host_s))


def test_passes_wait_for_the_host_each_on_its_own(graph: OpGraph) -> None:
    """Where autograd issues kernels faster, a step may wait for the host in one pass only."""
    kind = device_type("A100-80GB")
    kernels = DeviceModels(host_s=0.0).op_seconds(graph, kind, 16)
    is_of = np.array([op.phase for op in graph.ops])
    forward, backward = (
        np.flatnonzero((is_of == phase) & (kernels > 0.0))
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    )
    longest = float(kernels[backward].sum() / len(backward))
    model = DeviceModels(host_s=4.0 * longest)
    model.host = replace(model.host, backward=0.2)
    took = model.op_seconds(graph, kind, 16)
    assert took[forward].sum() == pytest.approx(4.0 * longest * len(forward))
    assert took[backward].sum() == pytest.approx(kernels[backward].sum())


def test_kernels_far_from_a_long_one_wait_for_the_host() -> None:
    """A queue holds a layer, not a whole pass: the head does not hide the first layers."""
    layers = [nn.Linear(8, 8) for _ in range(60)]
    model = nn.Sequential(*layers, nn.Linear(8, 200_000))
    data = torch.zeros(512, 8), torch.zeros(512, 200_000)
    with torch.device("meta"):
        step = capture(Workload(lambda: model, data, functional.mse_loss, torch.optim.SGD,
                                {"lr": 0.1}, name="long"))  # fmt: skip
    took = DeviceModels(host_s=1e-4).op_seconds(step, device_type("A100-80GB"), 512)
    first = [op for op in ops(step, "addmm") if step.ops[op].phase == Phase.FORWARD][:20]
    np.testing.assert_allclose(took[first], 1e-4, rtol=0.2)


def test_tensor_cores_want_rows_that_begin_at_multiples_of_16_bytes() -> None:
    """A vocabulary of 50,257 makes the last layer slower than one of 50,304."""
    kind = device_type("A100-80GB")

    def head(words: int, dtype: torch.dtype) -> float:
        data = torch.zeros(96, 64, dtype=dtype), torch.zeros(96, words, dtype=dtype)
        step = capture(
            Workload(lambda: nn.Linear(64, words, bias=False).to(dtype), data,
                     functional.mse_loss, torch.optim.SGD, {"lr": 0.1}, name="head")
        )  # fmt: skip
        return float(DeviceModels(host_s=0.0).op_seconds(step, kind, 96)[ops(step, "mm")].sum())

    assert head(50_257, torch.bfloat16) > 1.5 * head(50_304, torch.bfloat16)
    assert head(50_257, torch.float32) < 1.1 * head(50_304, torch.float32)
    # The number of samples is how many rows there are, not where they begin.
    odd, even = (
        capture(Workload(lambda: nn.Linear(64, 64).to(torch.bfloat16),
                         (torch.zeros(size, 64).bfloat16(), torch.zeros(size, 64).bfloat16()),
                         functional.mse_loss, torch.optim.SGD, {"lr": 0.1}, name="linear"))
        for size in (97, 96)
    )  # fmt: skip
    assert (products_of(odd).alignment == 16).all()
    assert (products_of(even).alignment == 16).all()


def test_runs_slow_16_bit_kernels_down_and_no_others() -> None:
    kind = device_type("H100")

    def step(dtype: torch.dtype) -> OpGraph:
        data = torch.zeros(64, 64, dtype=dtype), torch.zeros(64, 64, dtype=dtype)
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh())
        return capture(Workload(lambda: model.to(dtype), data, functional.mse_loss,
                                torch.optim.SGD, {"lr": 0.1}, name="short"))  # fmt: skip

    slower = InTraining(products=2.0, fused_attention=1.0, streams=3.0)
    for dtype, factors in ((torch.bfloat16, (2.0, 3.0)), (torch.float32, (1.0, 1.0))):
        graph = step(dtype)
        alone, in_run = (
            DeviceModels(host_s=0.0, in_training={"H100": each}).op_seconds(graph, kind, 64)
            for each in (InTraining(), slower)
        )
        launches = (launch_seconds(kind), 0.0)  # of products the launch is no slower
        for name, factor, launch in zip(("mm", "tanh.default"), factors, launches, strict=True):
            chosen = ops(graph, name)
            np.testing.assert_allclose(in_run[chosen] - launch, factor * (alone[chosen] - launch))
    assert in_training_of("GH200") == in_training_of("H100")
    assert in_training_of("RTX-4090").measured_on == ANY_TYPE


@pytest.mark.parametrize("execution", [Execution.MEGATRON, Execution.COMPILED])
def test_what_runs_a_step_is_said_in_a_cluster_file(execution: Execution, tmp_path: Path) -> None:
    text = (
        f"schema_version: 1\nname: lab\nexecution: {execution}\nhosts:\n"
        "  - {name: A, devices: [{type: H100}], intra: nvlink4, nic: {line_rate: 1 Gbit/s}}\n"
    )
    (tmp_path / "lab.yaml").write_text(text)
    cluster = load_cluster(tmp_path / "lab.yaml")
    model = cost_model_of(cluster)
    assert isinstance(model, DeviceModels)
    assert model.execution == cluster.execution == execution
    assert model.host.spread > DeviceModels().host.spread
    cluster.save(tmp_path / "again.yaml")
    assert load_cluster(tmp_path / "again.yaml").execution == cluster.execution
    assert Cluster.from_dict(cluster.to_dict()).execution == cluster.execution
    (tmp_path / "lab.yaml").write_text(text.replace(execution, f"{execution}n"))
    with pytest.raises(InputFileError, match="execution"):
        load_cluster(tmp_path / "lab.yaml")


def test_each_distinct_product_is_priced_as_if_alone(graph: OpGraph) -> None:
    """What is priced once for all of a kind equals the plain formula for each."""
    kind = device_type("V100-32GB")
    found = DeviceModels(host_s=0.0).op_seconds(graph, kind, 16)
    products, family = products_of(graph), families_of(kind.name)["float32"]
    assert isinstance(family.model, ProductModel)
    _, copy_s = DeviceModels().copy_seconds(kind)
    for op in np.unique(products.op):
        expected = 0.0
        for number in np.flatnonzero(products.op == op):
            took = family.model.seconds(
                chip_of(kind, kind.peak_flops_per_s["float32"]),
                products.sizes[[number]],
                products.num_bytes[[number]],
            )[0]
            expected += launch_seconds(kind) + took - family.model.launch_s
            expected += products.added[number] * products.num_bytes[number] * copy_s
        assert found[op] == pytest.approx(expected)


def test_every_listed_type_is_priced_and_no_gpu_by_the_roofline(graph: OpGraph) -> None:
    for each in listed_types():
        took = DeviceModels().op_seconds(graph, each.type, 16)
        assert np.isfinite(took).all()
        assert (took[graph.is_view] == 0.0).all()
        as_roofline = np.array_equal(took, Roofline().op_seconds(graph, each.type, 16))
        assert as_roofline == (each.type.name == "CPU"), each.type.name


def test_own_efficiencies_and_unknown_types(graph: OpGraph) -> None:
    def own(**more: float) -> DeviceType:
        return DeviceType(
            name="own", peak_flops_per_s={"float32": 2e13},
            memory_bandwidth_bytes_per_s=1e12, memory_bytes=2**34, source="a test", **more,
        )  # fmt: skip

    stated = own(compute_efficiency=0.5)
    roofline = Roofline().op_seconds(graph, stated, 16)
    np.testing.assert_array_equal(DeviceModels().op_seconds(graph, stated, 16), roofline)
    assert {each.measured_on for each in families_of("own").values()} == {ANY_TYPE}
    assert chip_of(own(), 2e13).multiprocessors == round(2e13 / 0.18e12)
    assert not np.array_equal(DeviceModels().op_seconds(graph, own(), 16), roofline)


def test_tf32_as_a_declared_peak_takes_the_tensor_cores(graph: OpGraph) -> None:
    listed = listed_type("A100-80GB")
    assert listed is not None
    assert listed.tf32_flops_per_s is not None
    plain = listed.type
    fast = DeviceType(
        name=plain.name,
        peak_flops_per_s={**plain.peak_flops_per_s, "float32": listed.tf32_flops_per_s},
        memory_bandwidth_bytes_per_s=plain.memory_bandwidth_bytes_per_s,
        memory_bytes=plain.memory_bytes,
        source=plain.source,
    )
    large = capture(
        Workload(lambda: nn.Linear(4096, 4096), (torch.zeros(4096, 4096),) * 2,
                 functional.mse_loss, torch.optim.SGD, {"lr": 0.1}, name="large")
    )  # fmt: skip
    op = ops(large, "addmm")[0]
    ratio = (
        DeviceModels().op_seconds(large, plain, 4096)[op]
        / DeviceModels().op_seconds(large, fast, 4096)[op]
    )
    assert 4.0 < ratio < 9.0


def test_a_type_with_a_stated_peak_is_still_that_type(tmp_path: Path) -> None:
    """TF32, as a cluster file declares it, runs on the tensor cores that were measured."""
    (tmp_path / "lab.yaml").write_text(
        "schema_version: 1\nname: lab\nhosts:\n  - name: A\n    devices:\n"
        "      - {type: GH200, peak_flops: {float32: 494.7 TFLOP/s}}\n"
        "    nic: {line_rate: 1 Gbit/s}\n"
    )
    (stated,) = load_cluster(tmp_path / "lab.yaml").device_types
    assert stated.name != "GH200"
    large = capture(
        Workload(lambda: nn.Linear(4096, 4096), (torch.zeros(4096, 4096),) * 2,
                 functional.mse_loss, torch.optim.SGD, {"lr": 0.1}, name="large")
    )  # fmt: skip
    op = ops(large, "addmm")[0]
    ratio = (
        DeviceModels().op_seconds(large, device_type("GH200"), 4096)[op]
        / DeviceModels().op_seconds(large, stated, 4096)[op]
    )
    assert 3.0 < ratio < 9.0
    assert DeviceModels().in_training(stated.name) == in_training_of("H100", is_alone=True)
    named = DeviceModels(in_training={"GH200": InTraining(products=3.0)})
    assert named.in_training(stated.name).products == 3.0
    assert chip_of(stated, 1.0).multiprocessors == 132


def test_a_cluster_file_asks_for_them_by_name(graph: OpGraph, tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text(
        "schema_version: 1\nname: lab\ncalibration: device-models\nhosts:\n"
        "  - {name: A, devices: [{type: H100, count: 2}], intra: nvlink4, "
        "nic: {line_rate: 100 Gbit/s}}\n"
    )
    cluster = load_cluster(path)
    assert cost_model_of(cluster).name == "device models"
    cluster.save(tmp_path / "again.yaml")
    assert load_cluster(tmp_path / "again.yaml").calibration == cluster.calibration
    found = Evaluator(graph, cluster)
    kind = cluster.device_types[0]
    np.testing.assert_array_equal(
        found.cost_model.op_seconds(graph, kind, 8), DeviceModels().op_seconds(graph, kind, 8)
    )


def test_ops_of_imported_graphs_are_priced_by_their_work() -> None:
    """Nothing is known of them but FLOPs and bytes, whatever their kind is called."""
    record = {
        "schema_version": 1, "name": "imported", "batch_size": 8, "loss": "y", "optimizer": "SGD",
        "optimizer_state_ratio": 0.0,
        "tensors": [{"name": "x", "shape": [8, 4], "dtype": "float32", "kind": "batch"},
                    {"name": "y", "shape": [8], "dtype": "float32"}],
        "ops": [{"kind": "mm.default", "inputs": ["x"], "outputs": ["y"], "batch_dims": [0],
                 "flops": 1e12}],
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = graph_from_dict(record, "a test")
    kind = device_type("V100-16GB")
    took = DeviceModels().op_seconds(step, kind, 8)[0]
    assert took == pytest.approx(Roofline().op_seconds(step, kind, 8)[0], rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("native_layer_norm.", "normalized_shape", ["wide"]),
        ("_softmax.", "dim", 7),
        ("convolution.", "groups", "two"),
        ("convolution.", "groups", 0),
    ],
)
def test_an_imported_op_that_claims_nonsense_is_refused(
    graph: OpGraph, kind: str, name: str, value: object
) -> None:
    document = graph_to_dict(graph)
    (op,) = ops(graph, kind)
    document["ops"]["args"][op] = {**document["ops"]["args"][op], name: value}
    with pytest.raises(GraphError, match="do not fit"):
        DeviceModels().op_seconds(graph_from_dict(document, "it"), device_type("H100"), 16)


def test_attention_is_the_products_inside_it() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.keys = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            queries = x.view(2, 32, 4, 16).transpose(1, 2)
            keys = self.keys(x).view(2, 32, 4, 16).transpose(1, 2)[:, :, :24]
            seen = functional.scaled_dot_product_attention(queries, keys, keys)
            return seen.transpose(1, 2).flatten(2)

    step = capture(
        Workload(Attention, (torch.zeros(2, 32, 64), torch.zeros(2, 32, 64)), functional.mse_loss,
                 torch.optim.SGD, {"lr": 0.1}, name="attention")
    )  # fmt: skip
    products = products_of(step)
    found = {
        step.ops[op].kind: (size.tolist(), count)
        for op, size, count in zip(products.op, products.sizes, products.count, strict=True)
    }
    assert found["attention"] == ([8, 32, 16, 24], pytest.approx(2.0))
    assert found["attention_backward"] == ([8, 32, 16, 24], pytest.approx(5.0))


def test_a_name_written_otherwise_is_no_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text(
        "schema_version: 1\nname: lab\ncalibration: device_models\nhosts:\n"
        "  - {name: A, devices: [{type: H100}], intra: nvlink4, nic: {line_rate: 1 Gbit/s}}\n"
    )
    with pytest.raises(InputFileError, match=r"line 3.*is called 'device-models'"):
        load_cluster(path)


def test_a_plan_says_whose_measurements_price_its_kernels() -> None:
    types = [device_type(name) for name in ("H100", "T4", "MI300X", "CPU", "P40")]
    assert provenance(types) == (
        "H100: float32, 16 bit, 8 bit products measured, the rest inferred from other types; "
        "T4: float32, 16 bit products, elementwise, layer norm, softmax measured, the rest "
        "inferred from other types; MI300X, P40: inferred from other types; CPU: roofline"
    )


# --- collectives ---------------------------------------------------------------------------------


def test_a_collective_by_hand() -> None:
    model = CollectiveModel(
        rounds=2.0, latency_s=1e-5, hop_s=1e-6, fill_s=3e-5, fill_hop_s=0.0, fill_s_per_byte=1e-11,
        efficiency=0.5, growth=1.0,
    )  # fmt: skip
    members = np.full(3, 4.0)
    took = model.seconds(np.array([0.0, 1e6, 1e9]), members, 100e9)
    # 1.5 bytes over each link per byte, at 100 x 0.5 x 4 / 8 = 25 GB/s.
    expected = [1.3e-5, 1.3e-5 + 1.5e-5 + 6e-5, 1.3e-5 + 3e-5 + 6e-2]
    np.testing.assert_allclose(took, expected)


def ring(cluster: Cluster, devices: tuple[int, ...]) -> Channel:
    table = ChannelTable(cluster)
    return table[table.all_reduce(devices, hierarchical=False)]


def test_collectives_behind_a_switch_are_as_measured_and_others_as_the_links() -> None:
    switched = load_cluster("homogeneous_8xa100")
    channel = ring(switched, (0, 1, 2, 3))
    found, by_links = (
        model.channel_seconds(switched, channel) for model in (DeviceModels(), Roofline())
    )
    model = collectives_of("A100-80GB")["all_reduce_ring"]
    rate = switched.hosts[0].intra.bandwidth_bytes_per_s
    for payload in (1e3, 1e6, 1e9):
        told = found.latency(payload) + payload * found.seconds_per_byte
        assert told == pytest.approx(model.seconds(np.array(payload), np.array(4.0), rate))
    assert found.seconds_per_byte == pytest.approx(by_links.seconds_per_byte, rel=0.2)
    assert max(found.held.values()) == pytest.approx(found.seconds_per_byte)
    # Neither between hosts nor among unlike cards has anybody measured.
    mixed = load_cluster("a100_v100_16")
    for devices in ((0, 8), (8, 9)):
        apart = ring(mixed, devices)
        found, by_links = (
            model.channel_seconds(mixed, apart)._replace(drag={})
            for model in (DeviceModels(), Roofline())
        )
        assert found == by_links


def test_a_collective_is_issued_and_fills_more_slowly_in_a_step_than_alone() -> None:
    cluster = load_cluster("homogeneous_8xa100")
    host = host_of(Execution.MEGATRON)
    for size in (2, 4, 8):
        channel = ring(cluster, tuple(range(size)))
        alone, in_a_step = (
            DeviceModels(execution).channel_seconds(cluster, channel)
            for execution in (Execution.EAGER, Execution.MEGATRON)
        )
        sent = 2.0 * (size - 1) / size
        assert in_a_step.latency(0.0) == alone.latency(0.0) + host.collective_s
        longer = in_a_step.latency(8e6) - in_a_step.latency(0.0)
        assert longer == pytest.approx(8e6 * sent * host.ramp_s_per_byte)
        assert in_a_step.latency(1e12) == pytest.approx(in_a_step.latency(0.0) + host.ramp_s)
        assert in_a_step.seconds_per_byte == alone.seconds_per_byte


# --- parameters ----------------------------------------------------------------------------------


def test_fitted_parameters_have_errors_and_every_family_serves_any_type() -> None:
    for name in (*PRODUCTS, *STREAMS):
        family = families_of("a type that nobody knows")[name]
        assert family.measured_on == ANY_TYPE
        assert family.errors.rows > 0
        assert 0.0 < family.errors.median < family.errors.p90
    assert families_of("H100")["16 bit"].measured_on == "H100"
    assert families_of("A100-40GB")["16 bit"].measured_on == "A100-80GB"
    assert families_of("A100-40GB")["softmax"].measured_on.startswith("A100-PCIe")
    for name in ("GH200", "H800", "H100-PCIe"):
        assert families_of(name)["float32"].measured_on == "H100"
    assert families_of("V100-16GB")["float32"].measured_on == "V100-PCIe-32GB"
    # 80 multiprocessors and 6 MiB as a V100, but Ampere's.
    assert families_of("RTX-3090")["float32"].measured_on == "A10G"
    # An A10G's chip, whose tensor cores sum at full rate.
    assert families_of("RTX-A6000")["16 bit"].measured_on == ANY_TYPE
    assert families_of("L40")["16 bit"].measured_on == ANY_TYPE
    assert families_of("H100-NVL")["16 bit"].measured_on == "H100"


def test_cards_of_a_kind_take_half_of_what_one_measured_card_of_it_showed() -> None:
    def gain(name: str, family: str) -> float:
        of_any = families_of("a type that nobody knows")[family].model
        found = families_of(name)[family].model
        assert isinstance(found, ProductModel)
        assert isinstance(of_any, ProductModel)
        return found.efficiency / of_any.efficiency

    for name, family in (("RTX-4090", "16 bit"), ("RTX-A6000", "float32")):
        assert gain(name, family) == pytest.approx(gain("A10G", family) ** 0.5, rel=1e-3)
    assert gain("RTX-A6000", "16 bit") == 1.0
    assert gain("P40", "float32") == 1.0


@pytest.mark.parametrize("name", ["P100-16GB", "P40", "GTX-1080-Ti"])
def test_products_of_16_bits_run_in_float32_without_tensor_cores(name: str) -> None:
    kind = device_type(name)
    half, single = (product_unit(kind, dtype) for dtype in ("float16", "float32"))
    assert half == single
    assert not half.is_tensor_core
    assert half.peak_flops_per_s == kind.peak_flops_per_s["float32"]


def test_a_gpu_alone_takes_what_its_kernels_take() -> None:
    """Factors of training on several GPUs hold what exchanges and other libraries do there."""
    two = load_cluster("homogeneous_8xa100")
    assert DeviceModels().in_training("A100-80GB").products == 1.0
    assert DeviceModels().on(two).in_training("A100-80GB").products > 1.2


def test_attention_takes_no_longer_alone_than_beside_exchanges() -> None:
    """By what was fitted itself: of types alone, the smaller of both factors is taken."""
    fitted = load_shipped(resources.files("heterog.pricing.device_models") / "fitted.yaml")
    for name, alone in fitted["alone"].items():
        assert alone["fused_attention"] <= fitted["in_training"][name]["fused_attention"]
    assert in_training_of("V100-16GB").fused_attention == 2.111
    assert in_training_of("RTX-3090").fused_attention == 0.528


MEASURED = Path(__file__).parents[3] / "shared" / "data" / "measured"


@pytest.mark.skipif(not MEASURED.is_dir(), reason="the shared measurements are not here")
def test_shipped_parameters_predict_the_rows_that_were_not_fitted() -> None:
    import importlib.util

    path = Path(__file__).parents[2] / "experiments" / "device_models.py"
    spec = importlib.util.spec_from_file_location("device_models_experiment", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = module.csv_rows(MEASURED / "gemm_16bit.csv.gz")
    for name in ("A100-80GB", "H100", "H200", "L40S")[: cases(4, 2)]:
        chosen = [row for row in rows if row["split"] == "test" and row["dtype"] == "bfloat16"
                  and device_type(row["device"]).name == name]  # fmt: skip
        family = families_of(name)["16 bit"]
        errors = module.errors_of(module.products_16bit(chosen, "16 bit").log_errors(family.model))
        assert errors.median <= 0.12
        assert errors.p90 <= 0.35
        assert math.isclose(errors.median, family.errors.median, rel_tol=0.05)
