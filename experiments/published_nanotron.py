"""Llama-like models in nanotron, as the sweep of the Ultra-Scale Playbook ran them on H100.

Columns: ``model, layers, hidden, heads, ffn, vocab, embeddings, seq, gpus, dp, tp, pp, zero, mbs,
grad_acc, gbs, status, step_s, mem_gb, polled, host_bound, split``.

Kernels are those of nanotron: fused attention, rotary positions and norms in one kernel each, a
gated MLP without biases, cross entropy over the parts of the vocabulary in float32. Parameters in
bfloat16, gradients added up and reduced in float32, AdamW on float32 copies. Teams keep
activations by position. Stages are those that nanotron cuts by the work of its blocks, of which
the head is one (``stages``). Hosts have 8 H100 behind EFA.

With pipelines the head has a table of its own: nanotron keeps one on the first and one on the last
stage, and adds up their gradients, which is left out. The cast to float32 and the loss run beside
the head, also where nanotron gives them a stage of their own.
"""

import csv
import gzip
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from rows import progress
from torch import Tensor, nn
from torch.nn import functional

from heterog.cluster import Cluster
from heterog.cluster.spec import parse_cluster
from heterog.errors import HeterogError
from heterog.fidelity.comparison import Compared, FamilyErrors, family_errors
from heterog.fidelity.run_fit import Case, fit_runs
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph
from heterog.graph.workload import Workload
from heterog.pricing.device_models.model import DeviceModels
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.layouts.layout import Layout
from heterog.strategy.layouts.placed import place_layout

_COLUMNS = {"hidden", "ffn", "vocab", "grad_acc", "step_s", "polled"}
_IN_A_HOST = 8


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
        made: Tensor = x + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return made


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
        logits: Tensor = self.head(self.norm(x))
        return logits


class _CrossEntropy(torch.autograd.Function):
    """The passes of nanotron's sharded cross entropy over the vocabulary, in float32.

    The largest logits and the wanted ones, one of each row, are left out. It is priced, never run.
    """

    @staticmethod
    def forward(context: Any, logits: Tensor) -> Tensor:
        exponentials = (logits.float() - 1.0).exp()
        sums = exponentials.sum(-1, keepdim=True)
        context.save_for_backward(exponentials / sums)
        context.dtype = logits.dtype
        found: Tensor = sums.log().mean()
        return found

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        (shares,) = context.saved_tensors
        made: Tensor = shares * (gradient / shares.shape[0] / shares.shape[1])
        return made.to(context.dtype)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    del labels
    apply: Any = _CrossEntropy.apply
    loss: Tensor = apply(logits)
    return loss


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


# --- rows ----------------------------------------------------------------------------------------


def sweeps(folder: Path) -> Iterator[Path]:
    """The tables of a folder that have the sweep's columns."""
    for path in sorted([*folder.glob("*.csv"), *folder.glob("*.csv.gz")]):
        with _opened(path) as file:
            if set(next(csv.reader(file), ())) >= _COLUMNS:
                yield path


def rows_of(path: Path, split: str) -> Iterator[Row]:
    """The rows of a split (all if there are none) but those in which a send slept."""
    with _opened(path) as file:
        rows = list(csv.DictReader(file))
    is_bound = _host_bound(rows)
    for row, bound in zip(rows, is_bound, strict=True):
        if row.get("split", split) in (split, "") and row["polled"] in ("", "0", "False"):
            yield _row(row, is_bound=bound)


def kept_bytes(row: Row) -> float:
    """What nanotron keeps on rank 0 beside what a strategy says, by the slopes of 1B's peaks.

    Each of it was found in ``fit`` rows, by size and number of micro-batches. Members of a team
    keep the gathered inputs of the two column-parallel products of a layer, and of the head
    (0.5 GiB a sample in 1B, whatever ``tp``). DDP keeps buckets in the parameters' dtype, which
    one replica lacks. Gradients are added up in float32 also where there is one micro-batch to
    add. The loss overwrites its exponentials, and those of the micro-batch before live on until
    the next has run; a strategy has two in any case.

    >>> row = {"model": "1B", "layers": 16, "hidden": 2048, "heads": 32, "ffn": 8192, "seq": 4096,
    ...     "vocab": 131072, "embeddings": "tied", "tp": 8, "pp": 1, "dp": 2, "mbs": 16,
    ...     "gpus": 16, "grad_acc": 8, "gbs": 256, "zero": 0, "status": "ok", "step_s": 2.353,
    ...     "mem_gb": 40.2}
    >>> round(kept_bytes(_row({name: str(is_) for name, is_ in row.items()}, is_bound=False))
    ...     / 2**30, 2)
    8.56
    """
    sizes, layout = row.sizes, row.layout
    is_last = not layout.split
    first = layout.split[0].removeprefix("blocks.") if layout.split else ""
    num_layers = int(first) if first.isdigit() else sizes.layers
    layer = 4 * sizes.hidden**2 + 3 * sizes.ffn * sizes.hidden
    tables = sizes.vocabulary * sizes.hidden * (1 + (is_last and not sizes.is_tied))
    parameters = (num_layers * layer + tables) / layout.tp
    tokens = layout.micro_batch * sizes.length
    found = 2.0 * parameters * (layout.dp > 1)
    if layout.tp > 1:
        in_flight = min(layout.pp, row.num_micro)
        found += in_flight * (2 * num_layers + is_last) * tokens * sizes.hidden * 2.0
    if row.num_micro == 1:
        found += 4.0 * parameters
        found -= is_last * tokens * sizes.vocabulary / layout.tp * 4.0
    return found


_CALIBRATION = ((16, 1, 1, 2), (4, 4, 1, 1), (2, 8, 1, 16), (4, 2, 2, 1), (2, 4, 2, 4))
"""(dp, tp, pp, micro-batch) of five runs of 1B on two hosts with ZeRO-1: one in which kernels
decide, one the host, one the sums of teams, and two the host of a pipeline."""


def calibration_rows(path: Path) -> list[Row]:
    """The five rows to which a fit may look, of whatever split; none if one is missing."""
    found = []
    with _opened(path) as file:
        for row in csv.DictReader(file):
            key = tuple(int(row[name]) for name in ("dp", "tp", "pp", "mbs"))
            is_one = (row["model"], row["gpus"], row["zero"]) == ("1B", "16", "1")
            if is_one and key in _CALIBRATION and row["status"] == "ok":
                found.append(_row(row, is_bound=False))
    return found if len(found) == len(_CALIBRATION) else []


def _opened(path: Path) -> Any:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _host_bound(rows: Sequence[dict[str, str]]) -> list[bool]:
    """The column, or where it is empty what siblings say.

    Those of the same model, teams and stages. Of the same micro-batch the majority counts; else
    one that is bound with more work, or not bound with less, tells the same of this one.
    """
    told: dict[tuple[str, ...], list[tuple[int, bool]]] = defaultdict(list)
    for row in rows:
        if row["host_bound"]:
            of = row["model"], row["tp"], row["pp"]
            told[of].append((int(row["mbs"]), row["host_bound"] == "True"))
    found = []
    for row in rows:
        if row["host_bound"]:
            found.append(row["host_bound"] == "True")
            continue
        size, siblings = int(row["mbs"]), told[row["model"], row["tp"], row["pp"]]
        same = [bound for of, bound in siblings if of == size]
        more = [bound for of, bound in siblings if of > size]
        found.append(2 * sum(same) > len(same) if same else any(more))
    return found


def _row(row: dict[str, str], *, is_bound: bool) -> Row:
    tp, pp, dp = (int(row[name]) for name in ("tp", "pp", "dp"))
    sizes = Sizes(
        layers=int(row["layers"]),
        hidden=int(row["hidden"]),
        heads=int(row["heads"]),
        ffn=int(row["ffn"]),
        vocabulary=-(-int(row["vocab"]) // tp) * tp,
        length=int(row["seq"]),
        is_tied=row["embeddings"] == "tied" and pp == 1,
    )
    begins = stages(sizes, pp)
    is_ok = row["status"] == "ok"
    return Row(
        model=row["model"],
        sizes=sizes,
        batch=int(row["gbs"]),
        num_gpus=int(row["gpus"]),
        layout=Layout(
            tp=tp,
            pp=len(begins) + 1,
            dp=dp,
            micro_batch=int(row["mbs"]),
            zero=int(row["zero"]),
            split=begins,
            sequence_parallel=tp > 1,
        ),
        num_micro=int(row["grad_acc"]),
        measured_s=float(row["step_s"]) if is_ok else None,
        measured_bytes=float(row["mem_gb"]) * 2**30 if is_ok and row["mem_gb"] else None,
        is_host_bound=is_bound,
    )


def stages(sizes: Sizes, pp: int) -> tuple[str, ...]:
    """Modules at which stages begin but the first: fewer than ``pp`` where the head is the last.

    nanotron gives blocks to a stage until their work together reaches its share of all; a head
    counts as its product, a layer as its products. A share that is met exactly ends the stage:
    1B in two and four stages took as long as 10 and 5 layers do, and kept as much.

    >>> stages(Sizes(layers=16, hidden=2048, heads=32, ffn=8192, vocabulary=131072, length=4096,
    ...     is_tied=False), 4)
    ('blocks.5', 'blocks.10', 'blocks.15')
    """
    layer = 4 * sizes.hidden**2 + 3 * sizes.ffn * sizes.hidden
    work = [layer] * sizes.layers + [0, sizes.vocabulary * sizes.hidden]
    names = [f"blocks.{number}" for number in range(sizes.layers)] + ["norm", "head"]
    begins: list[str] = []
    rank, done = 0, 0
    for block, name in enumerate(names[:-1]):
        done += work[block]
        if done * pp >= sum(work) * (rank + 1) and rank + 1 < pp:
            rank += 1
            begins.append(names[block + 1] if name != "norm" else "head")
    return tuple(begins)


def cluster_of(num_gpus: int) -> Cluster:
    """Hosts of 8 H100, the last of a small run with fewer."""
    hosts = -(-num_gpus // _IN_A_HOST)
    return parse_cluster(
        f"schema_version: 1\nname: h100_x{num_gpus}\nhosts:\n"
        f"  - {{name: h, count: {hosts}, devices: [{{type: H100, "
        f"count: {min(num_gpus, _IN_A_HOST)}}}], intra: nvlink4, nic: efa_p5}}\n",
        Path("hosts.yaml"),
    )


# --- comparison ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """A run of the sweep beside its prediction.

    Attributes:
        row: the run.
        compared: beside its prediction; ``None`` where it failed.
        fits: whether it was predicted to fit into memory.
    """

    row: Row
    compared: Compared | None
    fits: bool

    def words(self) -> str:
        """One line."""
        if self.compared is None:
            return f"{self.row.name}: failed, told to fit: {self.fits}"
        run = self.compared
        return (
            f"{run.name}: measured {run.measured_s:.4f} s, predicted {run.predicted_s:.4f} "
            f"({run.error:+.0%})"
        )


def calibrated(path: Path) -> DeviceModels | None:
    """The device models after a fit to five rows of the sweep, if it has them."""
    cases = []
    for row in calibration_rows(path):
        assert row.measured_s is not None
        graph, cluster = graph_of(row.sizes, row.batch), cluster_of(row.num_gpus)
        strategy = place_layout(row.layout, graph, cluster).strategy
        cases.append(
            Case(graph=graph, cluster=cluster, strategy=strategy, measured_s=row.measured_s)
        )
    if not cases:
        return None
    found = fit_runs(cases, DeviceModels())
    host, factors = found.models.host, found.models.in_training("H100")
    progress(f"after five runs: {host}, {factors}, {found.before} before, {found.after} after")
    return found.models


def swept(
    path: Path, split: str, every: int, models: DeviceModels | None = None
) -> Iterable[Swept]:
    """One of so many of the sweep's rows, by the device models that ship if ``models`` is None."""
    after = "" if models is None else ", after five runs"
    for row in sorted(rows_of(path, split), key=lambda row: str(row.sizes))[::every]:
        cluster = cluster_of(row.num_gpus)
        graph = graph_of(row.sizes, row.batch)
        evaluator = Evaluator(graph, cluster, models)
        try:
            placed = place_layout(
                row.layout, graph, cluster,
                devices=range(row.layout.tp * row.layout.pp * row.layout.dp),
            )  # fmt: skip
        except HeterogError as error:
            progress(f"{row.name}: {error}")
            continue
        found = evaluator.evaluate(placed.strategy, Order.FIFO)
        peak_bytes = found.peak_memory_bytes[0] + kept_bytes(row)
        compared = None
        if row.measured_s is not None:
            compared = Compared(
                family=f"ultrascale_{row.model}{after}",
                name=row.name,
                measured_s=row.measured_s,
                predicted_s=found.step_time_s,
                interval_s=evaluator.interval(found.step_time_s),
                measured_bytes=row.measured_bytes,
                predicted_bytes=round(peak_bytes),
                choice=f"{row.model} on {row.num_gpus}",
            )
        fits = found.is_ok and peak_bytes <= cluster.devices[0].usable_memory_bytes
        yield Swept(row=row, compared=compared, fits=fits)


_MANY_GPUS = 64
_LEAST_DIFFERENCE = 0.03


def swept_errors(runs: Sequence[Swept]) -> Iterable[FamilyErrors]:
    """Errors of a model's runs: those that the host decides apart, and by number of GPUs."""
    pairs = [(each.row, each.compared) for each in runs if each.compared is not None]
    parts = {
        "": [run for row, run in pairs if not row.is_host_bound],
        ", the host decides": [run for row, run in pairs if row.is_host_bound],
        f", all up to {_MANY_GPUS} GPUs": [r for row, r in pairs if row.num_gpus <= _MANY_GPUS],
        f", all above {_MANY_GPUS} GPUs": [r for row, r in pairs if row.num_gpus > _MANY_GPUS],
    }
    for words, members in parts.items():
        if members:
            name = f"{members[0].family}{words}"
            yield family_errors(name, members, least_difference=_LEAST_DIFFERENCE)


def told(runs: Sequence[Swept]) -> str:
    """How many runs that fit, and that failed, were told so.

    Why a run failed is not known; those with fewer micro-batches than stages but one are left out.
    """
    ran = [each.fits for each in runs if each.compared is not None]
    failed = [
        not each.fits
        for each in runs
        if each.compared is None and each.row.num_micro >= each.row.layout.pp - 1
    ]
    return (
        f"ultrascale_{runs[0].row.model}: {sum(ran)} of {len(ran)} that ran were told to fit, "
        f"{sum(failed)} of {len(failed)} that failed not to"
    )
