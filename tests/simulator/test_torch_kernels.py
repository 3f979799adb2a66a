"""What PyTorch's kernels do beyond one pass over their bytes, by closed forms."""

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from heterog.cluster.catalog import device_type
from heterog.cluster.execution import Execution, Tf32
from heterog.graph.capture import capture
from heterog.graph.op_graph import FloatArray, OpGraph, Phase
from heterog.graph.workload import Workload
from heterog.pricing.device_models.kernels import Use, products_of, streams_of
from heterog.pricing.device_models.model import DeviceModels
from heterog.pricing.device_models.torch_kernels import stream_of

BATCH = 32


def graph_of(
    model: Callable[[], nn.Module],
    inputs: Callable[[], Tensor],
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    **options: float,
) -> OpGraph:
    return capture(
        Workload(
            model=model,
            example_batch=lambda: (inputs(), torch.zeros(BATCH)),
            loss=lambda out, wanted: functional.mse_loss(out.flatten(1).mean(1), wanted),
            optimizer=optimizer,
            optimizer_options={"lr": 0.1, **options},
            name="small",
        )
    )


@cache
def convolutions(dtype: torch.dtype = torch.float32, channels: int = 64) -> OpGraph:
    """A stem, a convolution with a bias, a depthwise one, norms and both kinds of pooling."""
    return graph_of(
        lambda: nn.Sequential(
            nn.Conv2d(3, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels),
            nn.Conv2d(channels, channels, 3, padding=1), nn.MaxPool2d(2), nn.AvgPool2d(3, 1, 1),
            nn.Conv2d(channels, channels, 5, padding=2, groups=channels, bias=False),
        ).to(dtype),
        lambda: torch.randn(BATCH, 3, 64, 64, dtype=dtype),
    )  # fmt: skip


def seconds(graph: OpGraph, kind: str, tf32: Tf32 = Tf32.CONVOLUTIONS) -> FloatArray:
    return DeviceModels(host_s=0.0, tf32=tf32).op_seconds(graph, device_type(kind), BATCH)


def of(graph: OpGraph, kind: str, phase: Phase = Phase.FORWARD) -> list[int]:
    return [
        index
        for index, op in enumerate(graph.ops)
        if op.kind.startswith(kind) and op.phase == phase
    ]


def test_convolutions_use_tf32_by_default_and_only_where_the_hardware_has_it() -> None:
    """As PyTorch does: ``torch.backends.cudnn.allow_tf32`` is set, that of products is not."""
    graph = convolutions()
    _, wide, _ = of(graph, "convolution.default")
    without, default, everything = (
        seconds(graph, "A100-80GB", each)
        for each in (Tf32.NONE, Tf32.CONVOLUTIONS, Tf32.EVERYTHING)
    )
    assert default[wide] < 0.7 * without[wide]
    np.testing.assert_array_equal(default, everything)  # no matrix product here
    np.testing.assert_array_equal(
        seconds(graph, "V100-32GB", Tf32.NONE), seconds(graph, "V100-32GB")
    )


def test_matrix_products_use_tf32_where_it_is_declared() -> None:
    graph = graph_of(lambda: nn.Linear(2048, 2048), lambda: torch.randn(BATCH, 512, 2048))
    products = of(graph, "addmm") + of(graph, "mm.default", Phase.BACKWARD)
    default, everything = (
        seconds(graph, "H100", each)[products].sum()
        for each in (Tf32.CONVOLUTIONS, Tf32.EVERYTHING)
    )
    assert everything < 0.4 * default


def test_what_has_too_few_channels_stays_on_vector_units() -> None:
    products = products_of(convolutions())
    used = [products.kinds[number].use for number in products.factors]
    assert used.count(Use.FEW_CHANNELS) == 2  # forward, and the gradient of the weights
    assert used.count(Use.CONVOLUTION) == 3
    assert len(used) == 5, "the depthwise convolution is no product"


def test_images_are_copied_and_biases_added_apart() -> None:
    graph = convolutions()
    products = products_of(graph)
    _, wide, _ = of(graph, "convolution.default")
    (number,) = np.flatnonzero(products.op == wide)
    image = result = BATCH * 64 * 64 * 64 * 4.0
    assert products.copied[number] * products.num_bytes[number] == 2.0 * (image + result)
    assert products.added[number] * products.num_bytes[number] == pytest.approx(3.3 * result)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_of_their_own_take_as_long_in_16_bits(dtype: torch.dtype) -> None:
    """Each visit of an element takes its time: 25 in a window of 5 x 5, 9 in one of 3 x 3."""
    graph = convolutions(dtype)
    wide = 1.0 if dtype == torch.float32 else 2.0
    depthwise = of(graph, "convolution.default")[2]
    assert stream_of(graph, depthwise).passes == pytest.approx(0.39 * 25 * wide, rel=0.01)
    (averaged,) = of(graph, "avg_pool2d")
    assert stream_of(graph, averaged).passes == pytest.approx(0.65 * 9 * wide)


def test_batch_norms_fill_a_multiprocessor_for_each_channel() -> None:
    """An A100 has 108: a norm of 32 channels has a third of them busy, of 256 all."""
    few, many = convolutions(channels=32), convolutions(channels=256)
    (narrow,), (wide,) = (of(graph, "native_batch_norm") for graph in (few, many))
    per_byte = [
        seconds(graph, "A100-80GB")[op] / graph.bytes_moved[op]
        for graph, op in ((few, narrow), (many, wide))
    ]
    assert per_byte[0] / per_byte[1] == pytest.approx(108 / 32, rel=0.03)


@pytest.mark.parametrize(
    ("optimizer", "options", "passes"),
    [
        (torch.optim.Adam, {}, 18 / 7),
        (torch.optim.AdamW, {}, 20 / 7),
        (torch.optim.Adam, {"amsgrad": True}, 21 / 9),
        (torch.optim.SGD, {}, 1.0),
        (torch.optim.SGD, {"momentum": 0.9}, 8 / 5),
        (torch.optim.Adagrad, {}, 1.0),  # not counted: as one kernel that does it all
    ],
)
def test_optimizers_move_parameters_in_passes(
    optimizer: type[torch.optim.Optimizer], options: dict[str, float], passes: float
) -> None:
    graph = graph_of(
        lambda: nn.Linear(1024, 4096), lambda: torch.randn(BATCH, 1024), optimizer, **options
    )
    updates = of(graph, "update", Phase.UPDATE)
    assert stream_of(graph, updates[0]).passes == pytest.approx(passes)
    kind = device_type("H200")
    work = graph.flops, graph.bytes_moved
    eager, fused = (
        DeviceModels(each, host_s=0.0).kernel_seconds(graph, kind, *work)[updates].sum()
        for each in (Execution.EAGER, Execution.MEGATRON)
    )
    assert eager / fused == pytest.approx(passes)


def test_short_rows_of_layer_norms_take_their_time() -> None:
    """As many bytes in rows of 32 numbers as in rows of 1,024."""

    def norm(row: int) -> float:
        graph = graph_of(
            lambda: nn.LayerNorm(row), lambda: torch.randn(BATCH, 1 << 22 >> row.bit_length(), row)
        )
        (op,) = of(graph, "native_layer_norm")
        return float(seconds(graph, "H200")[op] / graph.bytes_moved[op])

    short, long = norm(32), norm(1024)
    rows = 1.1e-7 / 132 / 8  # seconds of a row, per byte of each of its numbers
    assert short - long == pytest.approx(rows * (1 / 32 - 1 / 1024), rel=0.02)


def test_the_gradient_of_an_embedding_is_many_kernels_for_the_host() -> None:
    graph = graph_of(
        lambda: nn.Embedding(100, 8), lambda: torch.zeros(BATCH, 4, dtype=torch.int64)
    )
    streams = streams_of(graph)
    (op,) = of(graph, "embedding_dense_backward", Phase.BACKWARD)
    assert streams.issued[streams.op == op].tolist() == [8.0]
