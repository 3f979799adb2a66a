"""How long one evaluation of a large grid takes: Llama-3-8B on 64 devices.

    python benchmarks/grid_speed.py --json

Tensor parallelism 4 inside hosts, 4 pipeline stages, 4 replicas, 32 micro-batches per replica in
1F1B order, bfloat16, 4,096 tokens. With every device lowered and simulated, and with devices that
do alike folded away, on hosts whose GPUs have NICs of their own or share one. Kernels come from
numba's cache on disk; one thread.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from torch import nn

from heterog.cluster import Cluster
from heterog.cluster.spec import parse_cluster
from heterog.graph.capture import capture
from heterog.graph.workload import Workload
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.layouts.layout import Layout
from heterog.strategy.layouts.placed import place_layout

Result = TypeVar("Result")
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


def cluster_of(nic: str) -> Cluster:
    """Eight hosts of eight A100."""
    hosts = "\n".join(
        f"  - name: h{number}\n"
        "    devices: [{type: A100-80GB, count: 8}]\n"
        "    intra: nvlink_a100\n"
        f"    nic: {nic}"
        for number in range(8)
    )
    return parse_cluster(f"schema_version: 1\nname: grid\nhosts:\n{hosts}\n", Path("grid.yaml"))


def replicas_apart(devices: int, tp: int, pp: int) -> list[int]:
    """Devices in the order of Megatron's ranks if every replica has hosts of its own."""
    dp = devices // (tp * pp)
    return [
        (replica * pp + stage) * tp + member
        for stage in range(pp)
        for replica in range(dp)
        for member in range(tp)
    ]


CASES = (
    ("8 NICs a host", "{line_rate: 200 Gbit/s, count: 8}", ()),
    ("1 NIC a host", "{line_rate: 400 Gbit/s}", ()),
    ("1 NIC a host, replicas on hosts of their own", "{line_rate: 400 Gbit/s}",
     tuple(replicas_apart(64, 4, 4))),
)  # fmt: skip


def measure(num_evaluations: int, layers: int) -> list[dict[str, object]]:
    """Time one evaluation of an encoded strategy, with and without twins folded away."""
    begin = time.perf_counter()
    graph = capture(llama_8b(layers))
    capture_s = time.perf_counter() - begin
    rows: list[dict[str, object]] = []
    for name, nic, devices in CASES:
        evaluator = Evaluator(graph, cluster_of(nic))
        layout = Layout(tp=4, pp=4, dp=4, num_micro=32)
        given = place_layout(layout, graph, evaluator.cluster, devices=devices)
        choice = evaluator.encode(given.strategy)
        unfolded, seconds = _timed(
            partial(evaluator.simulate, choice, Order.FIFO), num_evaluations
        )
        num_tasks = evaluator.num_tasks
        evaluate = partial(evaluator.evaluate, choice, Order.FIFO)
        folded, found = _timed(evaluate, num_evaluations)
        rows.append(
            {
                "cluster": name,
                "num_tasks": num_tasks,
                "num_tasks_folded": evaluator.num_tasks,
                "capture_s": capture_s,
                "min_ms_unfolded": min(unfolded) * 1e3,
                "min_ms_folded": min(folded) * 1e3,
                "median_ms_unfolded": statistics.median(unfolded) * 1e3,
                "median_ms_folded": statistics.median(folded) * 1e3,
                "step_time_s": found.step_time_s,
                "is_equal": found.step_time_s == seconds[0],
            }
        )
    return rows


def _timed(run: Callable[[], Result], count: int) -> tuple[list[float], Result]:
    """Seconds of some calls after a first one, and what the last one answered."""
    seconds, result = [], run()
    for _ in range(count):
        start = time.perf_counter()
        result = run()
        seconds.append(time.perf_counter() - start)
    return seconds, result


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--evaluations", type=int, default=5)
    parser.add_argument("--layers", type=int, default=32)
    arguments = parser.parse_args()
    rows = measure(arguments.evaluations, arguments.layers)
    if arguments.json:
        print(json.dumps({"rows": rows}))
        return
    for row in rows:
        print("\n".join(f"{key}: {value}" for key, value in row.items()), end="\n\n")


if __name__ == "__main__":
    main()
