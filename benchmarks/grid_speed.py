"""How long one evaluation of a large grid takes: Llama-3-8B on 64 devices.

    python benchmarks/grid_speed.py --json

Tensor parallelism 4 inside hosts, 4 pipeline stages, 4 replicas, 32 micro-batches per replica in
1F1B order, bfloat16, 4,096 tokens. Every replica is lowered and simulated. Kernels come from
numba's cache on disk; one thread.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from heterog.cluster.spec import parse_cluster
from heterog.graph.capture import capture
from heterog.graph.workload import Workload
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.layouts.layout import Layout
from heterog.strategy.layouts.placed import place_layout
from heterog.strategy.lowering.tape import NUM_TASKS

BATCH, TOKENS, VOCABULARY = 128, 4096, 128_256


def llama_8b(layers: int) -> Workload:
    """Llama 3 8B (Grattafiori et al. 2024) without weights."""
    hub: Any = transformers  # its configurations take more than their types say

    def model() -> nn.Module:
        config = hub.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=layers,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=8192,
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation="sdpa",
        )
        return _Logits(hub.LlamaForCausalLM(config)).bfloat16()

    def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shape = BATCH, TOKENS
        return (
            torch.randint(VOCABULARY, shape, generator=generator),
            torch.randint(VOCABULARY, (BATCH * TOKENS,), generator=generator),
        )

    return Workload(model, batch(0), nn.functional.cross_entropy, torch.optim.AdamW, {"lr": 1e-4})


class _Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(tokens).logits
        return logits.flatten(0, 1)


def measure(num_evaluations: int, layers: int) -> dict[str, object]:
    """Time encoding, lowering and simulation together."""
    hosts = "\n".join(
        f"  - name: h{number}\n"
        "    devices: [{type: A100-80GB, count: 8}]\n"
        "    intra: nvlink_a100\n"
        "    nic: {line_rate: 400 Gbit/s}"
        for number in range(8)
    )
    text = f"schema_version: 1\nname: grid\nhosts:\n{hosts}\n"
    cluster = parse_cluster(text, Path("grid.yaml"))
    begin = time.perf_counter()
    graph = capture(llama_8b(layers))
    captured = time.perf_counter()
    placed = place_layout(Layout(tp=4, pp=4, dp=4, num_micro=32), graph, cluster)
    evaluator = Evaluator(graph, cluster)
    choice = evaluator.encode(placed.strategy)
    evaluator.evaluate_choice(choice, Order.FIFO)
    seconds = []
    for _ in range(num_evaluations):
        start = time.perf_counter()
        found = evaluator.evaluate_choice(choice, Order.FIFO)
        seconds.append(time.perf_counter() - start)
    return {
        "num_tasks": int(evaluator._tape.counts[NUM_TASKS]),
        "capture_s": captured - begin,
        "min_ms_per_evaluation": min(seconds) * 1e3,
        "step_time_s": found.step_time_s,
    }


def main() -> None:
    """Print the row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--evaluations", type=int, default=5)
    parser.add_argument("--layers", type=int, default=32)
    arguments = parser.parse_args()
    row = measure(arguments.evaluations, arguments.layers)
    print(json.dumps(row) if arguments.json else "\n".join(f"{k}: {v}" for k, v in row.items()))


if __name__ == "__main__":
    main()
