"""Compares predicted steps with published runs on real GPUs.

    python experiments/published_runs.py --data DIR --json

DIR holds files with the names and columns of the public sets, or some of them:

``training_steps_one_gpu.csv`` (sitar-lab/NeuSight, MIT): forward and backward of language models
    of ``transformers`` in float32 without TF32, on one GPU and on four. Nothing is fitted to them:
    the shipped device models price the kernels.
``vtrain_one_node.csv``, ``vtrain_many_nodes.csv`` (VIA-Research/vTrain, MIT): iterations of
Megatron-DeepSpeed on A100. The times of its host were fitted to rows of ``fit`` on one node.
``mpt_fsdp.csv`` (mosaicml/llm-foundry, Apache-2): MPT with FSDP on A100 and H100;
    ``published/mpt.py`` says what is assumed. Factors on 16-bit kernels were fitted to rows of
    ``fit`` on 8 GPUs.
``sailor_*.json`` (eth-easl/sailor, MIT): OPT and GPT-Neo with Megatron-DeepSpeed. Nothing is
fitted to them; a second family is fitted to the runs of one and two nodes, and has the others.

Rows whose ``split`` is ``test`` are compared, or all of a file without splits.

Settings that the rows lack are chosen. NeuSight's GPT-3 XL has a hidden size of 3072 (24 heads of
128): with the 2048 of the GPT-3 paper it would run at half the rate of all other models of the
set. Rows whose forward pass takes more than 0.7 of the backward pass contradict physics and are
marked; all of the A100's do. Attention of that time is written out (``eager``). Megatron's fused
kernels are one op each: GELU with its bias, softmax with scale and mask (but where samples x heads
of a device are no multiple of four, its ``FusedScaleMaskSoftmax`` falls back to torch's ops in
float32); its dropouts are on, and the vocabulary is padded where a team shares it. vTrain's runs
on one node recompute nothing: with full recomputation, hidden 2048 and micro-batch 4 would run at
65 % of the peak of the tensor cores. Those on many nodes recompute whole layers where an A100 of
40 GB could not hold them otherwise. Sailor's products in float32 used TF32 where the card has it:
its own layer profiles show the last layer at 80 TFLOP/s on an A100 and 150 on a GH200, four and
two times what float32 can (its image, NVIDIA's of PyTorch 24.10, has TF32 on). Megatron has no
fused softmax for float32: scores are masked in place where they are a view, whose gradient
autograd copies five times more (``published.models.masked_in_place``).

1F1B pipelines of many micro-batches are not simulated in full: once the pipeline is in its steady
state, each further micro-batch takes as long as the last one.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import published.mpt as mpt
import torch
import transformers
from published.hosts import alike_hosts, in_tf32
from published.models import graph_of
from published.runs import Run, sailor_rows, vtrain_run
from rows import asked_of, csv_rows, finish, option, progress

from heterog.cluster.catalog import device_type
from heterog.cluster.topology import Execution
from heterog.fidelity.comparison import Compared, family_errors
from heterog.fidelity.run_fit import Case, fit_runs, largest_peak
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph
from heterog.graph.workload import Workload
from heterog.pricing.device_models.model import DeviceModels
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.layouts.layout import Recompute, parse_layout
from heterog.strategy.layouts.placed import place_layout
from heterog.zoo.language import token_cross_entropy

_SIZES = {
    "bert_large": ("bert", 1024, 24, 16),
    "gpt2_large": ("gpt2", 1280, 36, 20),
    "gpt3_xl": ("gpt2", 3072, 24, 24),
    "gpt3_27": ("gpt2", 2560, 32, 32),
    "opt_13": ("opt", 2048, 24, 32),
}
"""Family, hidden size, layers and heads of NeuSight's models."""
_INSIDE = {"A100": "nvlink_a100", "H100": "nvlink4"}


_MOST_FORWARD = 0.7
"""Of the backward pass's time: it has twice the FLOPs, so a half is expected."""


# --- one GPU -------------------------------------------------------------------------------------


def _language_model(name: str, sequence: int) -> Any:
    family, hidden, num_layers, heads = _SIZES[name]
    shared = {"attn_implementation": "eager", "use_cache": False}
    makers: dict[str, Any] = {
        "bert": (transformers.BertForMaskedLM, transformers.BertConfig, {
            "hidden_size": hidden, "num_hidden_layers": num_layers,
            "num_attention_heads": heads, "intermediate_size": 4 * hidden}),
        "gpt2": (transformers.GPT2LMHeadModel, transformers.GPT2Config, {
            "n_embd": hidden, "n_layer": num_layers, "n_head": heads, "n_positions": sequence}),
        "opt": (transformers.OPTForCausalLM, transformers.OPTConfig, {
            "hidden_size": hidden, "num_hidden_layers": num_layers, "ffn_dim": 4 * hidden,
            "num_attention_heads": heads, "max_position_embeddings": sequence}),
    }  # fmt: skip
    model, config, sizes = makers[family]
    return model(config(**sizes, **shared))


@lru_cache(maxsize=2)
def _step(name: str, sequence: int, batch: int) -> OpGraph:
    tokens = torch.zeros(batch, sequence, dtype=torch.int64)
    return capture(
        Workload(
            model=lambda: _language_model(name, sequence),
            example_batch=(tokens, tokens),
            loss=token_cross_entropy,
            optimizer=torch.optim.SGD,
            optimizer_options={"lr": 0.1},
            name=name,
        )
    )


def one_gpu(path: Path) -> Iterable[Compared]:
    """NeuSight's training steps; mixtures of experts are left out (their routing is not known)."""
    for row in csv_rows(path):
        model, _, sequence, batch, *layout = row["run"].split("-")
        if model not in _SIZES:
            progress(f"{row['run']}: left out")
            continue
        graph = _step(model, int(sequence), int(batch))
        kind = device_type(row["device"]).name
        inside = next((link for key, link in _INSIDE.items() if key in kind), "pcie3")
        cluster = alike_hosts(
            kind, 4 if layout else 1, intra=inside, nic="{line_rate: 100 Gbit/s}"
        )
        said = "".join(f",{word[:2]}=4" for word in layout)  # dp4, tp4, pp4_1
        placed = place_layout(parse_layout("num_micro=1" + said), graph, cluster)
        evaluator = Evaluator(graph, cluster)
        found = evaluator.evaluate(placed.strategy, Order.FIFO)
        # The optimizer's step, the last thing that every device does, was not measured.
        updates = [op.kind == "update" for op in graph.ops]
        own = evaluator.cost_model.op_seconds(graph, cluster.device_types[0], graph.batch_size)
        update_s = float(own[updates].sum()) / (4 if "tp" in said or "pp" in said else 1)
        predicted_s = found.step_time_s - update_s
        yield Compared(
            family="four GPUs" if layout else f"one GPU, {kind}",
            name=f"{kind} {row['run']}",
            measured_s=float(row["total_ms"]) / 1e3,
            predicted_s=predicted_s,
            interval_s=evaluator.interval(predicted_s),
            choice=f"{kind} {model} {batch}" if layout else "",
            is_doubtful=float(row["forward_ms"]) > _MOST_FORWARD * float(row["backward_ms"]),
        )


# --- vTrain --------------------------------------------------------------------------------------


def vtrain(
    path: Path, split: str, every: int, family: str, *, few_layers: bool
) -> Iterable[Compared]:
    """Every n-th of vTrain's rows; rows of one model and batch share a capture."""
    rows = [row for row in csv_rows(path) if row.get("split", split) == split][::every]
    for row in sorted(rows, key=by_capture):
        each = vtrain_run(row)
        run = as_megatron_ran_it(each, Recompute.NONE)
        if few_layers and len(run.cluster.hosts) == 1:
            predicted_s, evaluator, _ = step_seconds(few_layer_terms(row))
        else:
            predicted_s, evaluator, fits = step_seconds(terms_of(run))
            if not fits and len(run.cluster.hosts) > 1:
                run = as_megatron_ran_it(each, Recompute.FULL)
                predicted_s, evaluator, _ = step_seconds(terms_of(run))
        yield Compared(
            family=family,
            name=f"{run.model.hidden}x{run.model.layers} batch {run.batch} {run.layout}",
            measured_s=run.measured_s,
            predicted_s=predicted_s,
            interval_s=evaluator.interval(predicted_s),
            choice=f"{run.model.hidden}x{run.model.layers} batch {run.batch} on "
            f"{run.cluster.num_devices}",
        )


def by_capture(row: dict[str, str]) -> tuple[int, ...]:
    """Sizes that all rows with one capture have in common."""
    return tuple(
        int(row[name])
        for name in ("hidden size", "tensor parallelism", "pipeline parallelism", "global batch",
                     "micro batch", "# layers")
    )  # fmt: skip


Terms = list[tuple[float, Run]]
"""Runs to simulate: the weighted sum of their seconds is the time of a step. The last is the
largest."""


def few_layer_terms(row: dict[str, str]) -> Terms:
    """Steps of two models with fewer layers: each further layer takes the same."""
    few = max(int(row["pipeline parallelism"]), 2)
    more = int(row["# layers"]) / few - 1.0
    found: Terms = []
    for number, share in ((few, 1.0 - more), (2 * few, more)):
        run = vtrain_run(row | {"# layers": str(number)})
        terms = terms_of(as_megatron_ran_it(run, Recompute.NONE))
        found += [(share * weight, each) for weight, each in terms]
    return found


def as_megatron_ran_it(run: Run, recompute: Recompute) -> Run:
    """With Megatron's fused kernels and its padded vocabulary."""
    layout = replace(parse_layout(run.layout), recompute=recompute)
    padded = 128 * layout.tp if layout.tp > 1 else 1
    vocabulary = -(-run.model.vocabulary // padded) * padded
    rows = layout.micro_batch * run.model.heads // layout.tp
    shortened = run.shortened
    return replace(
        run,
        model=replace(
            run.model,
            is_fused=True,
            fuses_softmax=rows % _SOFTMAXES_OF_A_BLOCK == 0,
            vocabulary=vocabulary,
        ),
        layout=str(layout),
        cluster=replace(run.cluster, execution=Execution.MEGATRON),
        build=lambda graph, cluster: place_layout(layout, graph, cluster).strategy,
        shortened=None
        if shortened is None
        else lambda n: as_megatron_ran_it(shortened(n), recompute),
    )


_SOFTMAXES_OF_A_BLOCK = 4
"""Megatron's fused softmax takes so many heads of samples at a time, and no remainder."""


def terms_of(run: Run) -> Terms:
    """The run itself, or two with fewer micro-batches: each further one takes the same."""
    stages = run.num_stages
    if run.shortened is None or run.num_micro <= 2 * _STEADY * stages:
        return [(1.0, run)]
    few, many = run.shortened(_STEADY * stages), run.shortened(2 * _STEADY * stages)
    more = (run.num_micro - many.num_micro) / (many.num_micro - few.num_micro)
    return [(-more, few), (1.0 + more, many)]


_STEADY = 2
"""Micro-batches for each stage after which a 1F1B pipeline is in its steady state."""


def step_seconds(terms: Terms) -> tuple[float, Evaluator, bool]:
    """Seconds of a step, the evaluator of the largest run, and whether that one fits."""
    total_s = 0.0
    for weight, run in terms:
        graph = graph_of(run.model, run.batch)
        evaluator = Evaluator(graph, run.cluster)
        found = evaluator.evaluate(run.build(graph, run.cluster), Order.FIFO)
        total_s += weight * found.step_time_s
    return total_s, evaluator, found.is_ok


# --- MPT -----------------------------------------------------------------------------------------


def mpt_runs(path: Path, split: str) -> Iterable[Compared]:
    """MPT with FSDP, by type of card."""
    rows = mpt.rows_of(path, split)
    for row in sorted(rows, key=lambda row: (row.model, row.length, row.batch)):
        graph = mpt.graph_of(row.model, row.length, row.batch)
        evaluator = Evaluator(graph, row.cluster)
        strategy = place_layout(row.layout, graph, row.cluster).strategy
        predicted_s = evaluator.evaluate(strategy, Order.FIFO).step_time_s
        yield Compared(
            family=f"MPT with FSDP, {row.card}",
            name=row.name,
            measured_s=row.measured_s,
            predicted_s=predicted_s,
            interval_s=evaluator.interval(predicted_s, strategy),
        )


# --- Sailor --------------------------------------------------------------------------------------


def sailor(path: Path) -> Iterable[Compared]:
    """Sailor's runs without a fit, then those on more than two nodes with a fit to the others."""
    family = f"Sailor, {path.stem.removeprefix('sailor_')}"
    runs = sailor_runs(path)
    yield from (sailor_compared(run, family, None) for run in runs)
    few = [run for run in runs if len(run.cluster.hosts) <= _FEW_HOSTS]
    if 0 < len(few) < len(runs):
        models = fit_runs([*map(case_of, few)], DeviceModels(Execution.MEGATRON)).models
        more = [run for run in runs if len(run.cluster.hosts) > _FEW_HOSTS]
        fitted = f"{family}, fitted to one and two nodes"
        yield from (sailor_compared(run, fitted, models) for run in more)


def case_of(run: Run) -> Case:
    """A run as a fit takes it."""
    graph = graph_of(run.model, run.batch)
    strategy = run.build(graph, run.cluster)
    return Case(graph=graph, cluster=run.cluster, strategy=strategy, measured_s=run.measured_s)


_FEW_HOSTS = 2


def sailor_runs(path: Path) -> list[Run]:
    """The runs of a file as Megatron ran them, products in TF32 where the card has it."""
    return [_as_sailor_ran_it(run) for run in sailor_rows(path)]


def sailor_compared(run: Run, family: str, models: DeviceModels | None) -> Compared:
    """A run beside its prediction, by the device models that ship if ``models`` is ``None``."""
    graph = graph_of(run.model, run.batch)
    evaluator = Evaluator(graph, run.cluster, models)
    found = evaluator.evaluate(run.build(graph, run.cluster), Order.FIFO)
    predicted_bytes, interval_bytes = largest_peak(found.peak_memory_bytes, run.cluster)
    return Compared(
        family=family,
        name=run.name,
        measured_s=run.measured_s,
        predicted_s=found.step_time_s,
        interval_s=evaluator.interval(found.step_time_s),
        measured_bytes=run.measured_bytes,
        predicted_bytes=predicted_bytes,
        interval_bytes=interval_bytes,
        # Predictions by other models are no alternatives to each other.
        choice=f"{family}: {run.model.family} batch {run.batch} on {run.cluster.num_devices}",
    )


def _as_sailor_ran_it(run: Run) -> Run:
    """By Megatron, products in TF32 where the card has it."""
    devices = tuple(
        replace(each, usable_memory_bytes=each.type.memory_bytes - MEGATRON_RESERVES_BYTES)
        for each in map(in_tf32, run.cluster.devices)
    )
    cluster = replace(run.cluster, devices=devices, execution=Execution.MEGATRON)
    return replace(run, cluster=cluster)


MEGATRON_RESERVES_BYTES = int(4.1e9)
"""Bytes of context, communicators and buffers: memory of Sailor's runs on one and two nodes beyond
tensors."""


# --- all -----------------------------------------------------------------------------------------


def sources(
    data: Path, split: str, every: int, *, few_layers: bool = False
) -> Iterable[tuple[tuple[str, ...], Iterable[Compared]]]:
    """How families begin, and the runs, of each file that is there."""
    if (path := data / "training_steps_one_gpu.csv").is_file():
        yield ("one GPU", "four GPUs"), one_gpu(path)
    if (path := data / "mpt_fsdp.csv").is_file():
        yield ("MPT with FSDP",), mpt_runs(path, split)
    for path in sorted(data.glob("sailor_*.json")):
        yield (f"Sailor, {path.stem.removeprefix('sailor_')}",), sailor(path)
    for name in ("vtrain_one_node", "vtrain_many_nodes"):
        if (path := data / f"{name}.csv").is_file():
            family = f"vTrain, {name.removeprefix('vtrain_').replace('_', ' ')}"
            yield (family,), vtrain(path, split, every, family, few_layers=few_layers)


def main() -> None:
    """Predict every run of the files."""
    arguments = asked_of(
        __doc__,
        option("--data", type=Path, required=True),
        option("--split", default="test", help="of the files that have splits"),
        option("--every", type=int, default=1, help="one of so many of vTrain's rows"),
        option(
            "--few-layers",
            action="store_true",
            help="vTrain's rows on one node by two models with fewer layers, in a straight line",
        ),
        option("--only", default="", help="families that begin so"),
    )
    families: dict[str, list[Compared]] = defaultdict(list)
    only = arguments.only
    for begin, source in sources(
        arguments.data, arguments.split, arguments.every, few_layers=arguments.few_layers
    ):
        is_asked = any(each.startswith(only) or only.startswith(each) for each in begin)
        for run in source if is_asked else ():
            if not run.family.startswith(only):
                continue
            families[run.family].append(run)
            progress(asdict(run))
    found = [family_errors(name, runs) for name, runs in sorted(families.items())]
    one = [run for name, runs in families.items() if name.startswith("one GPU") for run in runs]
    every = [run for runs in families.values() for run in runs]
    sound = [run for run in one if not run.is_doubtful]
    for name, runs in (("one GPU", one), ("one GPU, sound rows", sound), ("all", every)):
        if runs:
            found.append(family_errors(name, runs))
    document = {
        "families": [asdict(each) for each in found],
        "runs": [asdict(run) for run in every],
    }
    finish(arguments, document)


if __name__ == "__main__":
    main()
