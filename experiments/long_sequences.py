"""Step time by length of sequence on a mixed cluster: sequences cut or not, evenly or not.

    python experiments/long_sequences.py --json
    python experiments/long_sequences.py --cluster mixed_32 --lengths 4096,131072 --layers 8

One sequence in a batch, a decoder as Llama is built (grouped keys, rotary positions), bfloat16.
"uncut" is the best of the methods that leave sequences whole: one device, consecutive layers on
consecutive devices, the grid of tensor, pipeline and data parallelism with ZeRO and recomputation
(it finds no layout for one sequence where every kind has several hosts), and tensor parallelism
with sequence-parallel norms on the first host, or over two hosts as stages. "unequal" is the
method ``sequences``; "even" are equal runs (``cp`` of a layout) over the devices that it chose,
over those of the first host, or over all, in the kinds of synchronisation that it tries:
whichever is best. All are judged by the referee.
"""

import argparse
import importlib
import json
import sys
from dataclasses import replace
from itertools import product
from typing import Any

from torch import nn

from heterog.cluster import Cluster
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph
from heterog.planners.planner import Budget, MethodRow
from heterog.planners.portfolio import best_row, run_methods
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.layouts.layout import parse_layout
from heterog.strategy.layouts.placed import place_layout
from heterog.strategy.strategy import Strategy, Sync
from heterog.zoo.tokens import token_workload

LENGTHS = tuple(1024 * size for size in (4, 8, 16, 32, 64, 128))
UNCUT = ("single_device", "model_parallel", "megatron_grid")
VOCABULARY = 32_000
SYNCS = (Sync.RING, Sync.HIERARCHICAL, Sync.ZERO1, Sync.ZERO3)


def decoder(length: int, layers: int, width: int) -> OpGraph:
    """One training step of a decoder on one sequence."""
    hub: Any = importlib.import_module("transformers")
    name = "unmasked"  # transformers then makes no mask: causal attention is a flag of the kernel
    hub.AttentionInterface.register(name, hub.AttentionInterface()["sdpa"])

    def model() -> nn.Module:
        config = hub.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            num_key_value_heads=width // 256,
            max_position_embeddings=length,
            use_cache=False,
            attn_implementation=name,
        )
        made: nn.Module = hub.LlamaForCausalLM(config).bfloat16()
        return made

    lengths = {"input_ids": length, "labels": length}
    return capture(token_workload("decoder", model, 1, VOCABULARY, lengths))


def best_even_s(evaluator: Evaluator, chosen: Strategy) -> float | None:
    """Seconds of a step with equal runs, the best of all that are tried; ``None``: none fits."""
    decision, cluster = chosen.decisions[0], evaluator.cluster
    hosts = [tuple(cluster.host_devices(host)) for host in range(cluster.num_hosts)]
    teams = {decision.devices, hosts[0], tuple(range(cluster.num_devices))}
    found = []
    for team, sync, recompute in product(sorted(teams), SYNCS, (False, True)):
        even = replace(
            decision,
            devices=team,
            shares=(evaluator.graph.batch_size, *(0,) * (len(team) - 1)),
            teams=(team,),
            parts=(1,) * len(team),
            sync=sync,
            recompute=recompute,
        )
        strategy = replace(chosen, decisions=(even,) * len(chosen.decisions))
        found += [evaluator.referee(strategy, order) for order in (Order.FIFO, Order.RANK)]
    return min((each.step_time_s for each in found if each.is_ok), default=None)


def best_layout_s(evaluator: Evaluator) -> tuple[float, str] | None:
    """(seconds of a step, layout) of the best tensor-parallel layout of the first hosts."""
    graph, cluster, found = evaluator.graph, evaluator.cluster, []
    size = len(cluster.host_devices(0))
    for tp, pp, recompute in product((2, 4, 8), (1, 2), ("none", "full")):
        if tp <= size and tp * pp <= cluster.num_devices:
            text = f"tp={tp},pp={pp},dp=1,sp=true,recompute={recompute}"
            given = place_layout(parse_layout(text), graph, cluster)
            for order in (Order.FIFO, Order.RANK):
                judged = evaluator.referee(given.strategy, order)
                if judged.is_ok:
                    found.append((judged.step_time_s, text))
    return min(found, default=None)


def measure(graph: OpGraph, cluster: Cluster, length: int, budget: Budget) -> dict[str, Any]:
    """The row of one length."""
    evaluator = Evaluator(graph, cluster)
    orders = tuple(Order)

    def found(methods: tuple[str, ...]) -> list[MethodRow]:
        return run_methods(evaluator, methods, budget=budget, step_barrier=True, orders=orders)

    uncut = best_row(found(UNCUT))
    tensor = best_layout_s(evaluator)
    best = [(uncut.step_time_s, uncut.method)] if uncut.step_time_s is not None else []
    best += [tensor] if tensor is not None else []
    uncut_s, uncut_method = min(best, default=(None, uncut.outcome))
    (cut,) = found(("sequences",))
    even_s: float | None = None
    parts: tuple[int, ...] = ()
    if cut.candidate is not None:
        chosen = cut.candidate.strategy
        parts = chosen.decisions[0].parts
        even_s = best_even_s(evaluator, chosen)
    return {
        "length": length,
        "uncut_s": uncut_s,
        "uncut_method": uncut_method,
        "even_s": even_s,
        "unequal_s": cut.step_time_s,
        "unequal_outcome": cut.outcome,
        "parts": list(parts),
        "note": cut.note,
    }


def main() -> None:
    """Measure every length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", default="mixed_16")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--budget", default="200e")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    cluster, budget = Cluster.load(args.cluster), Budget.parse(args.budget)
    rows = []
    for length in map(int, args.lengths.split(",")):
        row = measure(decoder(length, args.layers, args.width), cluster, length, budget)
        rows.append(row)
        times = (row[name] for name in ("uncut_s", "even_s", "unequal_s"))
        said = ["-" if each is None else f"{each:.3f} s" for each in times]
        sys.stderr.write(f"{length:>7} positions: {' '.join(said)} ({row['note']})\n")
    if args.json:
        settings = {name: value for name, value in vars(args).items() if name != "json"}
        print(json.dumps(settings | {"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
