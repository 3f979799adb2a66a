"""Predicted steps held against published runs on real GPUs.

    python experiments/published_runs.py --data DIR --json

DIR holds files with the names and columns of the public sets, or some of them:

``training_steps_one_gpu.csv`` (sitar-lab/NeuSight, MIT): forward and backward of language models
    of ``transformers`` in float32 without TF32, on one GPU and on four. Nothing is fitted to them:
    kernels are priced by the device models that ship.
``vtrain_one_node.csv`` (VIA-Research/vTrain, MIT): iterations of Megatron-DeepSpeed on 2 to 8
    A100, rows whose ``split`` is ``test``. One number was fitted to the rows of ``fit``: what the
    host takes to issue a kernel (``MEGATRON_HOST_S``).

What the rows do not say is chosen. NeuSight's GPT-3 XL has a hidden size of 3072 (24 heads of
128): with the 2048 of the GPT-3 paper it would run at half the rate of all other models of the
set. Rows whose forward pass takes more than 0.7 of the backward pass contradict physics and are
marked; all of the A100's do. Attention of that time is written out (``eager``). Megatron's fused
kernels are one op each: GELU with its bias, softmax with scale and mask. vTrain's runs recompute
nothing: with full recomputation, hidden 2048 and micro-batch 4 would run at 65 % of the peak of
the tensor cores.
"""

import argparse
import csv
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import published_layouts as layouts
import torch
import transformers
from scipy.stats import spearmanr
from torch import Tensor
from torch.nn import functional

from heterog.cluster import Cluster
from heterog.cluster.catalog import device_type
from heterog.cluster.spec import parse_cluster
from heterog.cluster.topology import Execution
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph
from heterog.graph.workload import Workload
from heterog.simulator.device_models.model import DeviceModels
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.layouts.layout import Recompute, parse_layout
from heterog.strategy.layouts.placed import place_layout

_SIZES = {
    "bert_large": ("bert", 1024, 24, 16),
    "gpt2_large": ("gpt2", 1280, 36, 20),
    "gpt3_xl": ("gpt2", 3072, 24, 24),
    "gpt3_27": ("gpt2", 2560, 32, 32),
    "opt_13": ("opt", 2048, 24, 32),
}
"""Family, hidden size, layers and heads of NeuSight's models."""
_INSIDE = {"A100": "nvlink_a100", "H100": "nvlink4"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One run.

    Attributes:
        family: whose errors are reported together.
        name: of the run.
        measured_s: seconds of a step.
        predicted_s: the same, predicted.
        is_doubtful: the row contradicts physics; errors are given with and without it.
    """

    family: str
    name: str
    measured_s: float
    predicted_s: float
    is_doubtful: bool = False


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


def _loss(output: Any, labels: Tensor) -> Tensor:
    return functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())


@lru_cache(maxsize=2)
def _step(name: str, sequence: int, batch: int) -> OpGraph:
    tokens = torch.zeros(batch, sequence, dtype=torch.int64)
    return capture(
        Workload(
            model=lambda: _language_model(name, sequence),
            example_batch=(tokens, tokens),
            loss=_loss,
            optimizer=torch.optim.SGD,
            optimizer_options={"lr": 0.1},
            name=name,
        )
    )


def _neusight_cluster(kind: str, count: int) -> Cluster:
    inside = next((link for key, link in _INSIDE.items() if key in kind), "pcie3")
    text = (
        "schema_version: 1\nname: one_host\nhosts:\n"
        f"  - {{name: h, devices: [{{type: {kind}, count: {count}}}], intra: {inside}, "
        "nic: {line_rate: 100 Gbit/s}}\n"
    )
    return parse_cluster(text, Path("one_host.yaml"))


def one_gpu(path: Path) -> Iterable[Compared]:
    """NeuSight's training steps; mixtures of experts are left out (their routing is not known)."""
    for row in _read(path):
        model, _, sequence, batch, *layout = row["run"].split("-")
        if model not in _SIZES:
            print(f"{row['run']}: left out", file=sys.stderr)
            continue
        graph = _step(model, int(sequence), int(batch))
        kind = device_type(row["device"]).name
        cluster = _neusight_cluster(kind, 4 if layout else 1)
        said = "".join(f",{word[:2]}=4" for word in layout)  # dp4, tp4, pp4_1
        placed = place_layout(parse_layout("num_micro=1" + said), graph, cluster)
        evaluator = Evaluator(graph, cluster, DeviceModels())
        found = evaluator.evaluate(placed.strategy, Order.FIFO)
        # The optimizer's step, the last thing that every device does, was not measured.
        updates = [op.kind == "update" for op in graph.ops]
        own = evaluator.cost_model.op_seconds(graph, cluster.device_types[0], graph.batch_size)
        update_s = float(own[updates].sum()) / (4 if "tp" in said or "pp" in said else 1)
        yield Compared(
            family="four GPUs" if layout else f"one GPU, {kind}",
            name=f"{kind} {row['run']}",
            measured_s=float(row["total_ms"]) / 1e3,
            predicted_s=found.step_time_s - update_s,
            is_doubtful=float(row["forward_ms"]) > _MOST_FORWARD * float(row["backward_ms"]),
        )


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# --- vTrain --------------------------------------------------------------------------------------


def vtrain(path: Path, split: str, every: int) -> Iterable[Compared]:
    """One of so many of vTrain's rows; rows of one model and batch share a capture."""
    rows = [row for row in _read(path) if row["split"] == split][::every]
    runs = [as_megatron_ran_it(layouts.vtrain_run(row, number)) for number, row in enumerate(rows)]
    for run in sorted(runs, key=lambda run: (str(run.model), run.batch)):
        graph = layouts.graph_of(run.model, run.batch)
        evaluator = Evaluator(graph, run.cluster, DeviceModels(Execution.MEGATRON))
        found = evaluator.evaluate(run.build(graph, run.cluster), Order.FIFO)
        yield Compared(
            family="vTrain, one node",
            name=f"{run.model.hidden}x{run.model.layers} batch {run.batch} {run.layout}",
            measured_s=run.measured_s,
            predicted_s=found.step_time_s,
        )


def as_megatron_ran_it(run: layouts.Run) -> layouts.Run:
    """With Megatron's fused kernels, its padded vocabulary, and nothing recomputed."""
    layout = replace(parse_layout(run.layout), recompute=Recompute.NONE)
    padded = 128 * layout.tp if layout.tp > 1 else 1
    vocabulary = -(-run.model.vocabulary // padded) * padded
    return replace(
        run,
        model=replace(run.model, is_fused=True, vocabulary=vocabulary),
        layout=str(layout),
        build=lambda graph, cluster: place_layout(layout, graph, cluster).strategy,
    )


# --- errors --------------------------------------------------------------------------------------


def summarised(name: str, runs: Sequence[Compared]) -> dict[str, Any]:
    """Errors of a family, as shares of the measured seconds."""
    measured = np.array([run.measured_s for run in runs])
    predicted = np.array([run.predicted_s for run in runs])
    error = predicted / measured - 1.0
    order = float(spearmanr(measured, predicted).statistic) if len(runs) > 2 else None
    return {
        "name": name,
        "num_runs": len(runs),
        "mape": float(np.abs(error).mean()),
        "median": float(np.median(np.abs(error))),
        "p90": float(np.quantile(np.abs(error), 0.9)),
        "bias": float(np.median(error)),
        "spearman": order,
    }


def main() -> None:
    """Predict every run of the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--split", default="test", help="of vTrain's rows")
    parser.add_argument("--every", type=int, default=1, help="one of so many of vTrain's rows")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sources: list[Iterable[Compared]] = []
    if (path := arguments.data / "training_steps_one_gpu.csv").is_file():
        sources.append(one_gpu(path))
    if (path := arguments.data / "vtrain_one_node.csv").is_file():
        sources.append(vtrain(path, arguments.split, arguments.every))
    families: dict[str, list[Compared]] = defaultdict(list)
    for source in sources:
        for run in source:
            families[run.family].append(run)
            off = run.predicted_s / run.measured_s - 1.0
            print(f"{run.name}: measured {run.measured_s:.4f} s, predicted {run.predicted_s:.4f} "
                  f"({off:+.0%})", file=sys.stderr, flush=True)  # fmt: skip
    found = [summarised(name, runs) for name, runs in sorted(families.items())]
    one = [run for name, runs in families.items() if name.startswith("one GPU") for run in runs]
    if one:
        found.append(summarised("one GPU", one))
        sound = [run for run in one if not run.is_doubtful]
        found.append(summarised("one GPU, sound rows", sound))
    if arguments.json:
        runs = [asdict(run) for each in families.values() for run in each]
        print(json.dumps({"families": found, "runs": runs}, indent=2))
        return
    for row in found:
        order = "" if row["spearman"] is None else f", rank agreement {row['spearman']:.3f}"
        print(
            f"{row['name']:28} {row['num_runs']:4} runs, MAPE {row['mape']:5.1%}, median "
            f"{row['median']:5.1%}, p90 {row['p90']:5.1%}, bias {row['bias']:+5.1%}{order}"
        )


if __name__ == "__main__":
    main()
