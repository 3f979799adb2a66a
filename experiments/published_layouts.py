"""Can every published layout be said, and does its program do what the textbook says?

    python experiments/published_layouts.py --vtrain FILE.csv --sailor FILE.json --json

For every row of measured training runs (Megatron-DeepSpeed GPT on A100 nodes as vTrain published
them; OPT and GPT-Neo on GH200 nodes and mixed cards as Sailor did) the layout is built for the
captured model, lowered and simulated. What each device then keeps, computes and sends is counted
in the lowered program and compared with ``layout_oracle.py``, which knows formulas only. Simulated
seconds stand beside the measured ones; nothing is fitted to them.

What the rows do not say is chosen here: vTrain's vocabulary (50257), bfloat16 and full
recomputation (its own settings), 8 GPUs per A100 node behind 400 Gbit/s; Sailor's float32, 2048
tokens, the vocabulary padded to 50304 (its own parameter counts), one host per tensor-parallel
group, 800 Gbit/s per GH200 node and 10 Gbit/s for other cards. Attention is written out (no flash
kernel), Sailor's with its mask filled in place as in its sources, and the loss sums over the
vocabulary so that no logits have to be gathered, as in Megatron-LM. The head is tied to the
embedding where one device holds both; in a team or a pipeline there are two tables, whose
gradients Megatron-LM sums and we do not.
"""

import csv
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import layout_oracle as oracle
import numpy as np
import torch
import transformers
from rows import finish, progress, script_parser
from torch import Tensor, nn
from torch.nn import functional

from heterog.cluster import Cluster
from heterog.cluster.execution import Sends
from heterog.cluster.spec import parse_cluster
from heterog.errors import HeterogError
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph
from heterog.graph.workload import Workload
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.channels import ChannelKind
from heterog.strategy.layouts.layout import Layout, Recompute
from heterog.strategy.layouts.pipelines import Manner, Pipeline, strategy_of_pipelines
from heterog.strategy.layouts.placed import place_layout
from heterog.strategy.layouts.stages import layers_of, stages_by_counts
from heterog.strategy.lowering import lower
from heterog.strategy.program import Program, TaskKind
from heterog.strategy.strategy import Strategy
from heterog.strategy.tables import graph_tables

TOLERANCE = 0.01
PRODUCTS = frozenset({"mm.default", "addmm.default", "bmm.default", "baddbmm.default"})
_TEAM_KINDS = (TaskKind.REDUCE_VALUE, TaskKind.GATHER_VALUE)
_DATA_KINDS = (TaskKind.ALL_REDUCE, TaskKind.REDUCE_SCATTER, TaskKind.ALL_GATHER,
               TaskKind.GATHER_PARAMETERS)  # fmt: skip


Teams = tuple[tuple[tuple[int, ...], ...], ...]
"""Devices of each team of each stage of a pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is captured: sizes, which library's model it is, and whether kernels are fused.

    ``fuses_softmax`` matters to fused kernels alone: whether scale, mask and softmax are one.
    """

    family: str
    hidden: int
    heads: int
    layers: int
    sequence: int
    vocabulary: int
    dtype: str
    is_tied: bool
    is_fused: bool = False
    fuses_softmax: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One row.

    Attributes:
        name: where it comes from.
        model: what is trained.
        batch: samples of a step.
        cluster: that it ran on, as we describe it.
        pipelines: their stages, for the oracle.
        teams: devices of every team of every stage of every pipeline.
        num_micro: micro-batches.
        recompute: whether layers recompute.
        measured_s: seconds of a step.
        measured_bytes: largest peak of a device, if recorded.
        layout: as text.
        build: makes the strategy for the captured graph.
        shortened: the same with so many micro-batches; ``None`` where programs are never large.
    """

    name: str
    model: Model
    batch: int
    cluster: Cluster
    pipelines: tuple[tuple[oracle.Stage, ...], ...]
    teams: tuple[Teams, ...]
    num_micro: int
    recompute: bool
    measured_s: float
    layout: str
    measured_bytes: float | None = None
    build: Callable[[OpGraph, Cluster], Strategy]
    shortened: "Callable[[int], Run] | None" = None


# --- models -------------------------------------------------------------------------------------


def summed_loss(output: Any, labels: Tensor) -> Tensor:
    """Cross-entropy by sums over the vocabulary, which teams that split it can add up.

    Without the largest logit taken off first: it is captured, never run.
    """
    logits: Tensor = output.logits.float()
    is_wanted = labels.unsqueeze(-1) == torch.arange(logits.shape[-1])
    wanted = (logits * is_wanted).sum(-1)
    return (logits.exp().sum(-1).log() - wanted).mean()


class _InPlace(torch.autograd.Function):
    """Cross-entropy in Megatron's few passes: one over the exponentials forward, one backward.

    The wanted logits, one of each row, are left out. It is priced, never run.
    """

    @staticmethod
    def forward(context: Any, logits: Tensor) -> Tensor:
        exponentials = logits.float().exp()
        sums = exponentials.sum(-1, keepdim=True)
        context.save_for_backward(exponentials, sums)
        context.dtype = logits.dtype
        found: Tensor = sums.log().mean()
        return found

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        exponentials, sums = context.saved_tensors
        made: Tensor = exponentials * (gradient / sums / sums.numel())
        return made.to(context.dtype)


def fused_loss(output: Any, labels: Tensor) -> Tensor:
    """Cross-entropy whose kernels work in place."""
    del labels
    apply: Any = _InPlace.apply
    loss: Tensor = apply(output.logits)
    return loss


def written_out(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Causal attention by two products and a softmax, [batch, heads, tokens, width] each.

    With one mask for all samples: for its own ``"eager"``, the library makes one for each, of the
    whole batch.
    """
    del module, attention_mask, dropout, others
    length = query.shape[-2]
    later = torch.full((length, length), -1e4, dtype=query.dtype).triu(1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    weights = ((query @ key.transpose(2, 3)) * scale + later).softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def fused_softmax(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *others: Any, **more: Any
) -> tuple[Tensor, Tensor]:
    """Attention whose softmax scales and masks in the same kernel: neither is an op of its own.

    It is priced, never run.
    """
    del others, more
    weights = (query @ key.transpose(2, 3)).softmax(-1)
    weights = functional.dropout(weights, _DROPOUT, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class _MaskedOnAView(torch.autograd.Function):
    """Scores masked in place where they are a view, and what autograd does about it.

    Filling a view in place leaves ``CopySlices`` and ``AsStridedBackward0`` behind. On the way
    back the gradient is written into zeros, copied, cloned, masked in another clone, and copied
    back: 13 readings and writings of the scores in seven kernels, where one not in place takes
    four in two (``masked_fill`` is a clone and a fill). Five clones and a masking are as much but
    for a writing of zeros. It is priced, never run.
    """

    @staticmethod
    def forward(context: Any, scores: Tensor, later: Tensor) -> Tensor:
        context.save_for_backward(later)
        return scores.masked_fill(later, -1e4)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (later,) = context.saved_tensors
        for _ in range(_COPIES_OF_SLICES):
            gradient = gradient.clone()
        return gradient.masked_fill(later, 0.0), None


_COPIES_OF_SLICES = 5


def masked_in_place(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *others: Any, **more: Any
) -> tuple[Tensor, Tensor]:
    """Attention as Megatron does it in float32, where it has no fused softmax.

    One product makes scaled scores, of which a view is masked in place. Without dropout, of which
    no mask is in Sailor's counts of memory. It is priced, never run.
    """
    del module, others, more
    length, width = query.shape[-2:]
    later = torch.ones((length, length), dtype=torch.bool).triu(1)
    scores = (query * width**-0.5) @ key.transpose(2, 3)
    apply: Any = _MaskedOnAView.apply
    weights: Tensor = apply(scores, later).softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def softmax_of_torch(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *others: Any, **more: Any
) -> tuple[Tensor, Tensor]:
    """Attention as Megatron does it where its fused softmax does not apply: in float32, by ops.

    With one mask for all samples. It is priced, never run.
    """
    del others, more
    length = query.shape[-2]
    later = torch.ones((length, length), dtype=torch.bool).triu(1)
    scores = (query @ key.transpose(2, 3)).float() * query.shape[-1] ** -0.5
    weights = scores.masked_fill(later, -1e4).softmax(-1).to(query.dtype)
    weights = functional.dropout(weights, _DROPOUT, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


_DROPOUT = 0.1
_GELU = {False: "gelu_new", True: "gelu_pytorch_tanh"}
"""Written out as ops, or one kernel."""


def make_model(model: Model) -> nn.Module:
    """The library's GPT-2 in the sizes of a model, without weights of its own.

    Also for OPT and GPT-Neo, as Megatron-DeepSpeed ran them: queries, keys and values in one
    product. OPT has ReLU, two rows of positions more and (OPT-350M) no last norm.
    """
    transformers.AttentionInterface.register("written_out", written_out)
    transformers.AttentionInterface.register("fused_softmax", fused_softmax)
    transformers.AttentionInterface.register("softmax_of_torch", softmax_of_torch)
    transformers.AttentionInterface.register("masked_in_place", masked_in_place)
    is_opt = model.family == "opt"
    config: Any = transformers.GPT2Config
    config = config(
        vocab_size=model.vocabulary,
        n_positions=model.sequence + 2 * is_opt,
        n_embd=model.hidden,
        n_layer=model.layers,
        n_head=model.heads,
        activation_function="relu" if is_opt else _GELU[model.is_fused],
        resid_pdrop=_DROPOUT * model.is_fused,
        embd_pdrop=_DROPOUT * model.is_fused,
        attn_pdrop=0.0,
        attn_implementation=_attention(model),
        use_cache=False,
        tie_word_embeddings=model.is_tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    made: Any = transformers.GPT2LMHeadModel(config)
    if is_opt:
        made.transformer.ln_f = nn.Identity()
    cast: nn.Module = made.to(getattr(torch, model.dtype))
    return cast


def _attention(model: Model) -> str:
    if model.family != "gpt":
        return "masked_in_place"
    if not model.is_fused:
        return "written_out"
    return "fused_softmax" if model.fuses_softmax else "softmax_of_torch"


@lru_cache(maxsize=4)
def graph_of(model: Model, batch: int) -> OpGraph:
    """One captured training step."""
    tokens = {name: torch.zeros(batch, model.sequence, dtype=torch.int64) for name in _INPUTS}
    return capture(
        Workload(
            model=lambda: make_model(model),
            example_batch=tokens,
            loss=fused_loss if model.is_fused else summed_loss,
            optimizer=torch.optim.Adam,
            # As Megatron and DeepSpeed update models of 16 bits.
            master_dtype=None if model.dtype == "float32" else torch.float32,
            name=f"{model.family}_{model.hidden}x{model.layers}",
        )
    )


_INPUTS = ("input_ids", "labels")


# --- rows ---------------------------------------------------------------------------------------


def vtrain_rows(path: Path) -> list[Run]:
    """Rows of vTrain's tables."""
    with path.open(newline="") as file:
        return [vtrain_run(row, number) for number, row in enumerate(csv.DictReader(file))]


def vtrain_run(row: dict[str, str], number: int) -> Run:
    """A row of vTrain's tables."""
    count, batch, micro = (int(row[key]) for key in ("# GPUs", "global batch", "micro batch"))
    tp, dp, pp = (int(row[f"{kind} parallelism"]) for kind in ("tensor", "data", "pipeline"))
    model = Model(
        family="gpt",
        hidden=int(row["hidden size"]),
        heads=int(row["attention heads"]),
        layers=int(row["# layers"]),
        sequence=int(row["sequence length"]),
        vocabulary=50257,
        dtype="bfloat16",
        is_tied=tp == pp == 1,
    )
    layout = Layout(
        tp=tp, pp=pp, dp=dp, micro_batch=micro, recompute=Recompute.FULL, schedule="1f1b"
    )
    teams = tuple(
        tuple(
            tuple((rank * dp + replica) * tp + member for member in range(tp))
            for replica in range(dp)
        )
        for rank in range(pp)
    )
    return Run(
        name=f"vtrain:{number}",
        model=model,
        batch=batch,
        cluster=a100_nodes(count),
        pipelines=(_stages(teams, [model.layers // pp] * pp, batch),),
        teams=(teams,),
        num_micro=batch // (dp * micro),
        recompute=True,
        measured_s=float(row["iteration time (ms)"]) / 1e3,
        layout=str(layout),
        build=lambda graph, cluster: place_layout(layout, graph, cluster).strategy,
        shortened=lambda count: vtrain_run(
            row | {"global batch": str(count * micro * dp)}, number
        ),
    )


def _stages(teams: Teams, layers: Sequence[int], samples: int) -> tuple[oracle.Stage, ...]:
    """The stages of a pipeline whose teams share its samples evenly."""
    return tuple(
        oracle.Stage(
            teams=tuple(
                oracle.Team(size=len(team), samples=samples / len(replicas)) for team in replicas
            ),
            layers=layers[index],
            first_layer=sum(layers[:index]),
            is_first=index == 0,
            is_last=index == len(layers) - 1,
        )
        for index, replicas in enumerate(teams)
    )


def a100_nodes(count: int) -> Cluster:
    """As many A100 as a row says, 8 on each node."""
    inside = min(count, 8)
    hosts = f"count: {-(-count // 8)}, " if count > 8 else ""
    return _cluster(
        f"a100_x{count}",
        [
            f"{{name: N, {hosts}devices: [{{type: A100-40GB, count: {inside}}}], "
            "intra: nvlink_a100, nic: {line_rate: 400 Gbit/s}}"
        ],
    )


def _cluster(name: str, hosts: Iterable[str]) -> Cluster:
    listed = "\n".join(f"  - {host}" for host in hosts)
    text = f"schema_version: 1\nname: {name}\nhosts:\n{listed}\n"
    return parse_cluster(text, Path(f"{name}.yaml"))


SAILOR_MODELS = {
    "OPT-350": ("opt", 1024, 16, 24),
    "OPT-30": ("opt", 7168, 56, 48),
    "GPT-Neo-2.7": ("neo", 2560, 20, 32),
}
SAILOR_CARDS = {
    "GH-96": ("GH200", "nvlink4", "800 Gbit/s"),
    "A100-40": ("A100-40GB", "nvlink_a100", "10 Gbit/s"),
    "A100-80": ("A100-80GB", "nvlink_a100", "10 Gbit/s"),
    "V100-16": ("V100-16GB", "nvlink_v100", "10 Gbit/s"),
    "Titan-RTX": ("Titan-RTX", "pcie3", "10 Gbit/s"),
    "RTX-2080": ("RTX-2080-Ti", "pcie3", "10 Gbit/s"),
    "RTX-3090": ("RTX-3090", "pcie3", "10 Gbit/s"),
}


def sailor_rows(path: Path) -> list[Run]:
    """Rows of Sailor's validation results."""
    return [_sailor_run(row, number) for number, row in enumerate(json.loads(path.read_text()))]


def _sailor_run(row: dict[str, Any], number: int) -> Run:
    family, hidden, heads, layers = _sailor_model(row)
    size, batch = int(row["mbs"]), int(row["gbs"])
    hosts: list[str] = []
    first = 0
    plans = []
    for plan in row["pipeline_list"]:
        of_stages: list[tuple[tuple[int, ...], ...]] = []
        for replicas in plan["tmp_per_stage"]:
            made = []
            for entries, tp in replicas:
                made.append(tuple(range(first, first + tp)))
                hosts += _hosts_of_team(entries, tp, len(hosts))
                first += tp
            of_stages.append(tuple(made))
        plans.append(
            (tuple(of_stages), [_own_layers(each, layers) for each in plan["layers_per_stage"]])
        )
    per_column = [size * len(teams[0]) for teams, _ in plans]
    num_micro = max(-(-batch // sum(per_column)), 1)
    micro = _columns(batch, per_column, num_micro)
    model = Model(
        family=family,
        hidden=hidden,
        heads=heads,
        layers=layers,
        sequence=2048,
        vocabulary=50304,
        dtype="float32",
        is_tied=False,
    )
    manner = Manner()

    def build(graph: OpGraph, cluster: Cluster) -> Strategy:
        found = layers_of(graph)
        pipelines = [
            Pipeline(
                stages=stages_by_counts(found, counts),
                teams=teams,
                micro_batches=tuple(column for column in own if column),
            )
            for (teams, counts), own in zip(plans, micro, strict=True)
        ]
        return strategy_of_pipelines(graph, cluster, pipelines, manner)

    return Run(
        name=f"sailor:{number}:{row.get('file', '')}",
        model=model,
        batch=batch,
        cluster=_cluster(f"sailor_{number}", hosts),
        pipelines=tuple(
            _stages(teams, counts, sum(own))
            for (teams, counts), own in zip(plans, micro, strict=True)
        ),
        teams=tuple(teams for teams, _ in plans),
        num_micro=num_micro,
        recompute=False,
        measured_s=float(row["real"]),
        measured_bytes=float(row["max_mem"]) if row.get("max_mem") else None,
        layout="; ".join(
            f"layers {counts}, teams {[[len(team) for team in stage] for stage in teams]}"
            for teams, counts in plans
        )
        + f"; micro_batch {size}",
        build=build,
    )


def _sailor_model(row: dict[str, Any]) -> tuple[str, int, int, int]:
    """Family, hidden size, heads and layers, by the file's name or the number of layers.

    Raises:
        HeterogError: neither is known.
    """
    for name, sizes in SAILOR_MODELS.items():
        if name in str(row.get("file", "")):
            return sizes
    count = sum(map(len, row["pipeline_list"][0]["layers_per_stage"]))
    for sizes in SAILOR_MODELS.values():
        if sizes[3] + 2 == count:
            return sizes
    raise HeterogError(f"no model of {count} layers is known: {row.get('file', 'no file')}.")


def _hosts_of_team(entries: Sequence[Sequence[Any]], size: int, first: int) -> list[str]:
    """One host for each node that a team has GPUs on, with as many as the team uses."""
    hosts: list[str] = []
    for card, count, _ in entries:
        used = min(size, int(count)) if len(entries) > 1 else size
        name, link, nic = SAILOR_CARDS.get(card, (card, "pcie3", "10 Gbit/s"))
        hosts.append(
            f"{{name: H{first + len(hosts)}, devices: [{{type: {name}, count: {used}}}], "
            f"intra: {link}, nic: {{line_rate: {nic}}}}}"
        )
        size -= used
        if not size:
            break
    return hosts


def _own_layers(named: Sequence[int], layers: int) -> int:
    """Repeated layers of a stage; 0 is the embedding, the last number the head."""
    return sum(1 <= number <= layers for number in named)


def _columns(batch: int, per_column: Sequence[int], num_micro: int) -> list[list[int]]:
    """Samples of each pipeline in each micro-batch; the last ones take what is left."""
    left = batch
    columns: list[list[int]] = [[] for _ in per_column]
    for _ in range(num_micro):
        for own, most in zip(columns, per_column, strict=True):
            own.append(min(most, left))
            left -= own[-1]
    return columns


# --- counting in programs -----------------------------------------------------------------------


@dataclass(slots=True)
class Counted:
    """What a device keeps, computes and sends, by a lowered program."""

    parameters: float = 0.0
    flops: float = 0.0
    tensor_bytes: float = 0.0
    data_bytes: float = 0.0
    pipeline_bytes: float = 0.0


def count(program: Program, graph: OpGraph, run: Run) -> list[Counted]:
    """Add up the tasks of a program by device."""
    found = [Counted() for _ in range(program.num_devices)]
    team_of = {
        device: team for own in run.teams for stage in own for team in stage for device in team
    }
    # Tasks of a kind on a channel send the same multiple of their payload: add these up first.
    sent: dict[tuple[int, int], float] = defaultdict(float)
    rows = _Rows(program, graph)
    flops, kept = np.zeros(program.num_devices), np.zeros(program.num_devices)
    for begin in range(0, program.num_tasks, _CHUNK):
        tasks = slice(begin, begin + _CHUNK)
        flops += rows.flops(tasks)
        kept += rows.parameters(tasks)
        for key, payload in rows.payloads(tasks).items():
            sent[key] += payload
    for device, each in enumerate(found):
        each.flops, each.parameters = float(flops[device]), float(kept[device])
    for (code, number), payload in sent.items():
        channel = program.channels[number]
        if code == TaskKind.SEND:
            source, target = channel.devices
            if target in team_of.get(source, ()):
                found[source].tensor_bytes += payload
            else:
                found[source].pipeline_bytes += payload
            continue
        size = len(channel.devices)
        reduces = channel.kind in (
            ChannelKind.ALL_REDUCE_RING,
            ChannelKind.ALL_REDUCE_HIERARCHICAL,
        )
        each_bytes = payload * (2.0 if reduces else 1.0) * (size - 1) / size
        team = team_of.get(channel.devices[0], ())
        in_team = all(device in team for device in channel.devices)
        for device in channel.devices:
            if in_team:
                found[device].tensor_bytes += each_bytes
            else:
                found[device].data_bytes += each_bytes
    return found


_CHUNK = 1 << 22
_SENDING = tuple(map(int, (*_TEAM_KINDS, *_DATA_KINDS, TaskKind.SEND)))


class _Rows:
    """The tasks of a program, some at a time: there may be a hundred million.

    Args:
        program: of one step.
        graph: that it was lowered from.
    """

    def __init__(self, program: Program, graph: OpGraph) -> None:
        self.program = program
        tables = graph_tables(graph, program.op_rules, program.blocks)
        axes = tables.axis_units[tables.op_axis].astype(np.float64)
        products = [graph.ops[op].kind in PRODUCTS for op in tables.op_id.tolist()]
        flops = np.array([graph.ops[op].flops for op in tables.op_id.tolist()])
        self._flops = np.where(products, flops, 0.0) / graph.batch_size
        self._axis_units = np.where(axes > 0, axes, 1.0)
        elements = [graph.tensors[p].meta.num_elements for _, p, _ in graph.updates]
        self._elements = np.array(elements, np.float64)
        self._is_cut = tables.parameter_axis >= 0
        self._parameter_units = tables.parameter_units

    def flops(self, tasks: slice) -> Any:
        """FLOPs of matrix products by device: of the whole op, by samples and units.

        Returns:
            # [num_devices]
        """
        program = self.program
        kind = program.kind[tasks]
        mine = np.flatnonzero((kind == TaskKind.COMPUTE) | (kind == TaskKind.RECOMPUTE))
        row = program.subject[tasks][mine]
        units = program.units[tasks][mine].astype(np.float64)
        part = np.where(units > 0, units / self._axis_units[row], 1.0)
        work = self._flops[row] * program.samples[tasks][mine] * part
        return np.bincount(program.device[tasks][mine], work, program.num_devices)

    def parameters(self, tasks: slice) -> Any:
        """Numbers of the parameters that each device updates.  # [num_devices]"""
        program = self.program
        mine = np.flatnonzero(program.kind[tasks] == TaskKind.UPDATE)
        row = program.subject[tasks][mine]
        units = program.units[tasks][mine]
        part = np.where(self._is_cut[row], units / self._parameter_units[row], 1.0)
        return np.bincount(
            program.device[tasks][mine], self._elements[row] * part, program.num_devices
        )

    def payloads(self, tasks: slice) -> dict[tuple[int, int], float]:
        """Bytes of payload by kind and channel."""
        program = self.program
        kind = program.kind[tasks]
        found = {}
        for code in _SENDING:
            mine = np.flatnonzero(kind == code)
            numbers, place = np.unique(program.channel[tasks][mine], return_inverse=True)
            payload = np.bincount(place, program.num_bytes[tasks][mine], len(numbers))
            for number, amount in zip(numbers.tolist(), payload.tolist(), strict=True):
                found[code, number] = amount
        return found


# --- comparing ----------------------------------------------------------------------------------

FIELDS = ("parameters", "flops", "tensor_bytes", "data_bytes", "pipeline_bytes")


def expected(run: Run, place: tuple[int, int], team: oracle.Team) -> oracle.Costs:
    """What the textbook says about a device of a team of a stage."""
    model = run.model
    sizes = oracle.Transformer(
        hidden=model.hidden,
        layers=model.layers,
        sequence=model.sequence,
        vocabulary=model.vocabulary,
        positions=model.sequence + 2 * (model.family == "opt"),
        wide=4 * model.hidden,
        has_final_norm=model.family != "opt",
        is_tied=model.is_tied,
        item_bytes=4 if model.dtype == "float32" else 2,
        loss_bytes=4,
    )
    return oracle.costs(
        sizes, run.pipelines, place, team, recompute=run.recompute, num_micro=run.num_micro
    )


def compared(run: Run, found: Sequence[Counted]) -> dict[str, dict[str, float]]:
    """For each quantity the stage where program and oracle differ most.

    The mean over the devices in teams of one size; of what crosses stages over all devices, for
    which of them sends to a larger or smaller team is no matter of the textbook.
    """
    worst: dict[str, dict[str, float]] = {}
    for number, (stages, of_stages) in enumerate(zip(run.pipelines, run.teams, strict=True)):
        for index, (stage, teams) in enumerate(zip(stages, of_stages, strict=True)):
            for size in {len(members) for members in teams}:
                like = [device for members in teams if len(members) == size for device in members]
                everyone = [device for members in teams for device in members]
                team = next(each for each in stage.teams if each.size == size)
                textbook = expected(run, (number, index), team)
                for field in FIELDS:
                    devices = everyone if field == "pipeline_bytes" else like
                    mean = sum(getattr(found[d], field) for d in devices) / len(devices)
                    wanted = getattr(textbook, field)
                    off = abs(mean - wanted) / wanted if wanted else float(mean > 0.0)
                    if field not in worst or off > worst[field]["off"]:
                        worst[field] = {
                            "program": mean,
                            "oracle": wanted,
                            "off": off,
                            "pipeline": number,
                            "stage": index,
                        }
    return worst


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What was simulated and counted; numbers that follow the number of micro-batches."""

    seconds: float
    outcome: str
    peak_memory_bytes: int
    tasks: int
    found: list[Counted]


def lowered(run: Run, sends: Sends) -> Judged:
    """Build, lower and simulate one row."""
    graph = graph_of(run.model, run.batch)
    evaluator = Evaluator(graph, replace(run.cluster, sends=sends))
    strategy = run.build(graph, run.cluster)
    evaluation = evaluator.evaluate(strategy, Order.FIFO)
    del evaluator  # its arrays have room for every task, and the program will need as much
    program = lower(graph, run.cluster, strategy)
    return Judged(
        seconds=evaluation.step_time_s,
        outcome=str(evaluation.outcome),
        peak_memory_bytes=max(evaluation.peak_memory_bytes),
        tasks=program.num_tasks,
        found=count(program, graph, run),
    )


def tasks_of(run: Run) -> float:
    """About as many tasks as the program of a row has."""
    ops = sum(op.kind != "update" for op in graph_of(run.model, run.batch).ops)
    devices = max(sum(map(len, stage)) for own in run.teams for stage in own)
    return run.num_micro * ops * devices


def extended(run: Run, few: tuple[int, Judged], more: tuple[int, Judged]) -> Judged:
    """A row by two programs with fewer micro-batches: everything grows by each in equal steps."""
    (low, first), (high, second) = few, more
    steps = (run.num_micro - low) / (high - low)

    def at(before: float, after: float) -> float:
        return before + steps * (after - before)

    found = [
        Counted(**{field: at(getattr(a, field), getattr(b, field)) for field in FIELDS})
        for a, b in zip(first.found, second.found, strict=True)
    ]
    return Judged(
        seconds=at(first.seconds, second.seconds),
        outcome=second.outcome,
        peak_memory_bytes=second.peak_memory_bytes,
        tasks=round(at(first.tasks, second.tasks)),
        found=found,
    )


def judge(run: Run, most_tasks: float, sends: Sends = Sends.OVERLAPPED) -> dict[str, Any]:
    """Build, lower, simulate and compare one row."""
    row: dict[str, Any] = {
        "row": run.name,
        "model": asdict(run.model),
        "batch": run.batch,
        "devices": run.cluster.num_devices,
        "layout": run.layout,
        "measured_s": run.measured_s,
        "expressible": False,
    }
    counts = [run.num_micro]
    try:
        graph_of(run.model, run.batch)
        begin = time.perf_counter()
        few = max(2 * len(run.teams[0]), 8)
        if run.shortened is not None and few + 2 < run.num_micro and tasks_of(run) > most_tasks:
            counts = [few, few + max(few // 2, 1)]
            first, second = (lowered(run.shortened(number), sends) for number in counts)
            judged = extended(run, (counts[0], first), (counts[1], second))
        else:
            judged = lowered(run, sends)
        differences = compared(run, judged.found)
    except HeterogError as error:
        return row | {"problem": str(error)}
    return row | {
        "expressible": True,
        "problem": "",
        "outcome": judged.outcome,
        "simulated_s": judged.seconds,
        "peak_memory_bytes": judged.peak_memory_bytes,
        "tasks": judged.tasks,
        "micro_batches": run.num_micro,
        "lowered_micro_batches": counts,
        "compared": differences,
        "agrees": all(each["off"] <= TOLERANCE for each in differences.values()),
        "seconds": time.perf_counter() - begin,
    }


def main() -> None:
    """Judge every row of the files."""
    parser = script_parser(__doc__)
    parser.add_argument("--vtrain", type=Path, help="CSV with vTrain's columns")
    parser.add_argument("--sailor", type=Path, help="JSON with Sailor's fields")
    parser.add_argument("--only", default="", help="texts that rows' layouts have, with ; between")
    parser.add_argument("--every", type=int, default=1, help="judge one row of so many")
    parser.add_argument(
        "--most-tasks",
        type=float,
        default=4e7,
        help="of a program; larger ones are lowered with two smaller numbers of micro-batches, by "
        "which everything grows in equal steps",
    )
    parser.add_argument(
        "--sends", default="overlapped", choices=list(map(str, Sends)), help="of who executed"
    )
    arguments = parser.parse_args()
    runs = vtrain_rows(arguments.vtrain) if arguments.vtrain else []
    runs += sailor_rows(arguments.sailor) if arguments.sailor else []
    only = [text for text in arguments.only.split(";") if text]
    chosen = [run for run in runs if not only or any(text in run.layout for text in only)]
    chosen = chosen[:: arguments.every]
    # Rows of one model and batch share a capture.
    chosen.sort(key=lambda run: (str(run.model), run.batch))
    rows = []
    for number, run in enumerate(chosen, 1):
        row = judge(run, arguments.most_tasks, Sends(arguments.sends))
        rows.append(row)
        said = row["problem"] or "  ".join(
            f"{name} {each['off']:.2%}" for name, each in row["compared"].items()
        )
        progress(f"{number}/{len(chosen)} {run.name} {run.layout}: {said}")
    document = {
        "rows": rows,
        "num_rows": len(rows),
        "expressible": sum(row["expressible"] for row in rows) / max(len(rows), 1),
        "agreeing": sum(row.get("agrees", False) for row in rows) / max(len(rows), 1),
        "extended": sum(len(row.get("lowered_micro_batches", ())) > 1 for row in rows),
        "tolerance": TOLERANCE,
    }
    finish(
        arguments,
        document,
        [
            f"{len(rows)} rows, expressible {document['expressible']:.3f}, "
            f"agreeing {document['agreeing']:.3f}"
        ],
    )


if __name__ == "__main__":
    main()
