"""A step of nanotron: its model and stages, its memory, messages and waits.

Kernels are those of nanotron: fused attention, rotary positions and norms in one kernel each, a
gated MLP without biases, cross entropy over the parts of the vocabulary in float32. Parameters in
bfloat16, gradients added up and reduced in float32, AdamW on float32 copies. Teams keep
activations by position.

With pipelines the head has a table of its own: nanotron keeps one on the first and one on the last
stage. The cast to float32 and the loss run beside the head.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from heterog.cluster import Cluster
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph
from heterog.graph.workload import Workload
from heterog.lowering.channels import ChannelTable
from heterog.pricing.device_models.model import DeviceModels
from heterog.pricing.device_models.parameters import InTraining
from heterog.strategy.layouts.layout import Layout
from heterog.strategy.layouts.placed import place_layout
from heterog.strategy.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a model."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocabulary: int
    length: int
    is_tied: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run.

    Attributes:
        model: its name.
        sizes: its sizes.
        batch: sequences of a step.
        num_gpus: GPUs that it ran on.
        layout: how, in nanotron's stages.
        num_micro: micro-batches of a step.
        measured_s: seconds of a step; ``None`` where the run failed.
        measured_bytes: peak of rank 0; ``None`` if it is not known.
        is_host_bound: whether the host decides how long a micro-batch takes.
        has_tied_table: whether head and embedding are one, on whatever stages they are.
        empty_stages: stages of the pipeline without a layer or head.
    """

    model: str
    sizes: Sizes
    batch: int
    num_gpus: int
    layout: Layout
    num_micro: int
    measured_s: float | None
    measured_bytes: float | None
    is_host_bound: bool
    has_tied_table: bool
    empty_stages: int

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.model} on {self.num_gpus}, {self.num_micro} x {self.layout}"


# --- the model -----------------------------------------------------------------------------------


class _Block(nn.Module):
    """One layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, self.heads = sizes.hidden, sizes.heads
        self.norm_1, self.norm_2 = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, sizes.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.ffn, width, bias=False)

    def forward(self, x: Tensor, turned: Tensor) -> Tensor:
        """Attention and MLP.  # [batch, tokens, width]"""
        batch, length, width = x.shape
        merged = self.queries_keys_values(self.norm_1(x))
        heads = merged.view(batch, length, self.heads, -1).transpose(1, 2)
        queries, keys, values = heads.chunk(3, -1)
        seen = functional.scaled_dot_product_attention(
            queries * turned, keys * turned, values, is_causal=True
        )
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        normed = self.norm_2(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class _Head(nn.Module):
    """Logits by a table, of its own or the embedding's."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(table) if not isinstance(table, nn.Parameter) else table

    def forward(self, x: Tensor) -> Tensor:
        """Logits.  # [batch, tokens, vocabulary]"""
        return functional.linear(x, self.weight)


class _Llama(nn.Module):
    """The language model."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.words = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.blocks = nn.ModuleList(_Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.hidden, bias=False)
        own = self.words.weight if sizes.is_tied else nn.Parameter(self.words.weight.clone())
        self.head = _Head(own)
        self.width_of_heads = sizes.hidden // sizes.heads

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits.  # [batch, tokens, vocabulary]"""
        x = self.words(tokens)
        turned = torch.ones(tokens.shape[1], self.width_of_heads, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, turned)
        return self.head(self.norm(x))


class _CrossEntropy(torch.autograd.Function):
    """The passes of nanotron's sharded cross entropy over the vocabulary, in float32.

    The largest logits and the wanted ones, one of each row, are left out. Only priced, never run.
    """

    @staticmethod
    def forward(context: Any, logits: Tensor) -> Tensor:
        exponentials = (logits.float() - 1.0).exp()
        sums = exponentials.sum(-1, keepdim=True)
        context.save_for_backward(exponentials / sums)
        context.dtype = logits.dtype
        return sums.log().mean()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        (shares,) = context.saved_tensors
        return (shares * (gradient / shares.shape[0] / shares.shape[1])).to(context.dtype)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    del labels
    apply: Any = _CrossEntropy.apply
    return apply(logits)


@lru_cache(maxsize=16)
def graph_of(sizes: Sizes, batch: int) -> OpGraph:
    """One captured training step of a model without memory."""
    tokens = torch.zeros(batch, sizes.length, dtype=torch.int64)

    def make() -> nn.Module:
        with torch.device("meta"):
            return _Llama(sizes).bfloat16()

    return capture(
        Workload(
            model=make,
            example_batch=(tokens, tokens),
            loss=_loss,
            optimizer=torch.optim.AdamW,
            optimizer_options={"fused": True},
            master_dtype=torch.float32,
            reduce_dtype=torch.float32,
            name=f"nanotron_{sizes.hidden}x{sizes.layers}",
        )
    )


# --- how it runs ---------------------------------------------------------------------------------


def stages(sizes: Sizes, pp: int) -> tuple[str, ...]:
    """Modules at which all stages but the first begin; fewer than ``pp`` if some have no layer.

    nanotron gives layers to a stage until their work reaches the stage's share of all work, which
    includes the product of the head. This agrees with runs of 1B: the first of 2, 4 and 8 stages
    kept as much memory as 10, 5 and 3 layers, and 8 stages took as long as if the last one had the
    head and its loss without a layer, also on hosts of their own.

    >>> sizes = Sizes(layers=16, hidden=2048, heads=32, ffn=8192, vocabulary=131072, length=4096,
    ...     is_tied=False)
    >>> stages(sizes, 4)
    ('blocks.5', 'blocks.10', 'blocks.15')
    >>> stages(sizes, 8)[-2:]
    ('blocks.15', 'norm')
    """
    layer = 4 * sizes.hidden**2 + 3 * sizes.ffn * sizes.hidden
    work = layer * sizes.layers + sizes.vocabulary * sizes.hidden
    begins: list[str] = []
    before = 0
    for block in range(sizes.layers):
        stage = block * layer * pp // work
        if stage > before:
            begins.append(f"blocks.{block}")
        before = stage
    return (*begins, "norm") if before < pp - 1 else tuple(begins)


PROGRAM = DeviceModels(
    host_s=8.4e-5,
    per_member=0.56,
    in_training={
        "H100": InTraining(
            products=1.23, fused_attention=1.92, streams=0.95, spread=0.077, measured_on="H100"
        )
    },
)
"""Nanotron's host and kernels, fitted to 27 runs of 1B with ZeRO-1 on 8 to 64 GPUs.

With this spread intervals on one host hold four of five of the 30 runs there (conformal).

Where stages lie on several hosts, each member of a team adds to the time to issue a kernel: a
layer took 8.5, 12.5 and 20.5 ms there with tp 2, 4 and 8.
"""


def strategy_of(row: Row, graph: OpGraph, cluster: Cluster) -> Strategy:
    """The row's layout as nanotron runs it: with ZeRO all gradients are reduced at the end.

    Raises:
        HeterogError: the layout does not fit the model or the cluster.
    """
    num_devices = row.layout.tp * row.layout.pp * row.layout.dp
    placed = place_layout(row.layout, graph, cluster, devices=range(num_devices))
    bucket_bytes = _ALL_GRADIENTS if row.layout.zero else _OF_DDP * row.layout.tp
    return replace(placed.strategy, bucket_bytes=bucket_bytes)


_ALL_GRADIENTS = 1 << 50
"""Bytes of a bucket so large that it is never full before the last gradient."""
_OF_DDP = 50 << 20
"""Of gradients in float32, of parameters in bfloat16 that fill DDP's 25 MB; a strategy counts
those of a whole team."""


def kept_bytes(row: Row) -> float:
    """Memory of nanotron's rank 0 beyond that of a strategy, by the slopes of 1B's peaks.

    Each part was found in ``fit`` rows, by size and number of micro-batches. Members of a team
    keep gathered inputs of the two column-parallel products of a layer, and of the head: one a
    layer for each micro-batch in flight, and one more for two of these while kernels lag behind
    the host; in a pipeline that waits for its host, two less. (By the slopes of 1B's peaks: 2 a
    micro-batch with 1 and 2 stages, 1.5 with 4, 1 with 8; where the host decides 0, 0.2 and 1 with
    2, 4 and 8.) DDP keeps buckets in the parameters' dtype, which one replica lacks. Gradients are
    added up in float32 also where there is one micro-batch to add. The loss overwrites its
    exponentials, and those of the previous micro-batch live until the next has run; a strategy has
    two in any case.

    >>> from published.nanotron import row_of
    >>> row = {"model": "1B", "layers": 16, "hidden": 2048, "heads": 32, "ffn": 8192, "seq": 4096,
    ...     "vocab": 131072, "embeddings": "tied", "tp": 8, "pp": 1, "dp": 2, "mbs": 16,
    ...     "gpus": 16, "grad_acc": 8, "gbs": 256, "zero": 0, "status": "ok", "step_s": 2.353,
    ...     "mem_gb": 40.2}
    >>> round(kept_bytes(row_of({name: str(is_) for name, is_ in row.items()}, is_bound=False))
    ...     / 2**30, 2)
    8.56
    """
    sizes, layout = row.sizes, row.layout
    is_last = not layout.split
    num_layers, parameters = _edges(row)[1], _parameters(row)[0]
    tokens = layout.micro_batch * sizes.length
    found = 2.0 * parameters * (layout.dp > 1)
    if layout.tp > 1:
        in_flight = min(layout.pp, row.num_micro)
        waits = row.is_host_bound and layout.pp > 1
        number = in_flight + min(in_flight, 2) * (-1 if waits else 1)
        found += (number * num_layers + is_last) * tokens * sizes.hidden * 2.0
    if row.num_micro == 1:
        found += 4.0 * parameters
        found -= is_last * tokens * sizes.vocabulary / layout.tp * 4.0
    return found


def can_run(row: Row, peak_bytes: float, memory_bytes: float) -> bool:
    """Whether nanotron can run a row with this predicted peak.

    ``_RESERVED_BYTES`` is memory outside tensors (CUDA's context, NCCL's buffers, fragments): 1B
    ran with at most 68.3 GiB, and all but two of the runs that failed for memory have predicted
    peaks of at least 71.5 GiB. All 80 runs of 1B with two or more stages without a layer failed,
    however little memory they needed; a single such stage can have the loss.
    """
    return row.empty_stages < _EMPTY_STAGES and peak_bytes <= memory_bytes - _RESERVED_BYTES


_RESERVED_BYTES = 9 << 30
_EMPTY_STAGES = 2


def beside_s(row: Row, models: DeviceModels, cluster: Cluster, step_s: float) -> float:
    """Seconds of nanotron's step that are not in its strategy's step.

    Its ZeRO-1 reduces all gradients to all replicas after the last backward pass, though each
    updates its slice alone (issue 261 of huggingface/nanotron); the strategy reduces and scatters
    them then. Its parameters are copied together before they are gathered, and apart afterwards,
    for each tensor and replica, as long as 1B took more on 64 to 256 GPUs. Where the first and the
    last stage each keep a table, its gradients are added up after that. Teams keep the gathered
    inputs of products, which the strategy gathers again for the backward pass: two of each layer,
    and the head's.

    In pipelines without ZeRO, stages reduce one after another, while one micro-batch goes back
    through all of them: a stage sends its gradient on when its own are reduced. Beside that, 1B
    took 0.1 to 0.5 s longer the more hosts a stage lay on (4 to 16), whatever its size and their
    number; it is not known why. With one large micro-batch both are hidden.

    Args:
        row: The run.
        models: Prices of collectives.
        cluster: Where it ran.
        step_s: Seconds of the strategy's step.
    """
    layout, sizes, channels = row.layout, row.sizes, ChannelTable(cluster)

    def of(number: int, payload: float) -> float:
        return models.channel_seconds(cluster, channels[number]).seconds(payload)

    def of_stage(stage: int, parameters: float, *, members: int) -> tuple[float, float]:
        first, step = stage * layout.dp * layout.tp, layout.tp // members
        devices = tuple(range(first, first + layout.dp * layout.tp, step))
        payload = 4.0 * parameters * members
        scattered_s = of(channels.reduce_scatter(devices, ()), payload)
        return of(channels.all_reduce(devices, hierarchical=False), payload), scattered_s

    found = 0.0
    turns = row.num_micro + layout.pp - 1
    if layout.tp > 1:
        gathers = 2 * max(end - begin for begin, end in pairwise(_edges(row))) + (layout.pp == 1)
        payload = 2.0 * layout.micro_batch * sizes.length * sizes.hidden
        found -= turns * gathers * of(channels.all_gather(tuple(range(layout.tp)), ()), payload)
    if layout.zero:
        pairs = (of_stage(*each, members=1) for each in enumerate(_parameters(row)))
        found += _OF_COPIES_S + max(whole_s - scattered_s for whole_s, scattered_s in pairs)
    elif layout.pp > 1 and layout.dp * layout.tp > _IN_A_HOST:
        pairs = (of_stage(*each, members=layout.tp) for each in enumerate(_parameters(row)))
        reduced_s = sum(whole_s for whole_s, _ in pairs)
        reduced_s += _OF_A_HOST_S * layout.dp * layout.tp / _IN_A_HOST
        found += max(reduced_s - _OF_BACKWARD * step_s * layout.pp / turns, 0.0)
    if layout.pp > 1 and row.has_tied_table:
        ends = 0, (layout.pp - 1) * layout.dp * layout.tp
        table = sizes.vocabulary * sizes.hidden / layout.tp
        found += of(channels.all_reduce(ends, hierarchical=False), 4.0 * table)
    return found


_IN_A_HOST = 8
_OF_COPIES_S = 0.02
_OF_A_HOST_S = 0.033
_OF_BACKWARD = 2.0 / 3.0
"""Share of a micro-batch's time that its backward pass takes."""


def _edges(row: Row) -> list[int]:
    """Layers before each stage, and all of them at the end."""
    begins = [name.removeprefix("blocks.") for name in row.layout.split]
    layers = row.sizes.layers
    return [0, *(int(name) if name.isdigit() else layers for name in begins), layers]


def _parameters(row: Row) -> list[float]:
    """Parameters of each stage that a member of a team keeps."""
    sizes = row.sizes
    layer = 4 * sizes.hidden**2 + 3 * sizes.ffn * sizes.hidden
    found = [float(layer * (end - begin)) for begin, end in pairwise(_edges(row))]
    found[0] += sizes.vocabulary * sizes.hidden
    if not sizes.is_tied:
        found[-1] += sizes.vocabulary * sizes.hidden
    return [each / row.layout.tp for each in found]
