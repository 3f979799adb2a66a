"""Zorse's published plan for two sites, said in our language and simulated beside its estimate.

    python experiments/zorse_groups.py --json

The notebook zorse_2nodes of benson-guo/zorse (MIT) plans a Llama of 3.5 billion parameters (128
samples of 512 tokens) on 2 P100 and 4 V100: stages of 1, 12, 1 and 12 layers, breadth first,
ZeRO-2, recomputation, 16 bits with sums in float32. Its planner says 10.724 s and prices messages
between the sites at nothing ("Interpolated latency: 0.000000 ms"). So the links that it measured
(``zorse_groups.yaml``) are simulated, the same without time between the sites, and the same with
one bus for all GPUs of a host, of which it measured pairs alone. Its P100s take two samples at a
time; here they take four, as their half of the eight that the V100s take.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from rows import asked_of, finish
from torch import Tensor, nn
from torch.nn import functional

from heterog.cluster import Cluster
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph
from heterog.graph.workload import Workload
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.layouts.layout import Recompute
from heterog.strategy.layouts.pipelines import Manner, Pipeline, strategy_of_pipelines
from heterog.strategy.layouts.stages import layers_of, stages_by_counts

ESTIMATE_S = 10.724252924266668
"""The latency in the notebook's training_config.json, there in ms."""
_GIB = 1024**3


def causal(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *others: Any, **more: Any
) -> tuple[Tensor, None]:
    """Zorse's attention: the fused kernel that knows the mask."""
    del module, others, more
    output = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return output.transpose(1, 2).contiguous(), None


def make_model() -> nn.Module:
    """Zorse's deepspeedllamav2_3b (models/hub.py) in 16 bits."""
    transformers.AttentionInterface.register("causal", causal)
    make_config: Any = transformers.LlamaConfig
    config = make_config(
        vocab_size=49152, hidden_size=3200, intermediate_size=8640, num_hidden_layers=26,
        num_attention_heads=32, use_cache=False, attn_implementation="causal",
    )  # fmt: skip
    model: Any = transformers.LlamaForCausalLM(config)
    half: nn.Module = model.half()
    return half


def loss(output: Any, labels: Tensor) -> Tensor:
    """Cross-entropy of all tokens."""
    return functional.cross_entropy(output.logits.flatten(0, 1).float(), labels.flatten())


def graph_of_llama() -> OpGraph:
    """The step of 128 samples."""
    tokens = torch.zeros(128, 512, dtype=torch.int64)
    return capture(
        Workload(
            model=make_model,
            example_batch={"input_ids": tokens, "labels": tokens},
            loss=loss,
            optimizer=torch.optim.Adam,
            master_dtype=torch.float32,
            reduce_dtype=torch.float32,
        )
    )


def simulated(graph: OpGraph, cluster: Cluster) -> dict[str, float]:
    """Seconds of Zorse's plan, and GiB of its fullest V100."""
    pipeline = Pipeline(
        stages=stages_by_counts(layers_of(graph), (1, 12, 1, 12)),
        teams=(((0,), (1,)), ((2,), (3,), (4,), (5,))),
        micro_batches=(8,) * 16,
    )
    manner = Manner(zero=2, recompute=Recompute.FULL, schedule="breadth_first", num_chunks=2)
    strategy = strategy_of_pipelines(graph, cluster, [pipeline], manner)
    found = Evaluator(graph, cluster).evaluate(strategy)
    return {
        "step_time_s": found.step_time_s,
        "over_estimate": found.step_time_s / ESTIMATE_S,
        "v100_gib": max(found.peak_memory_bytes[2:]) / _GIB,
    }


def with_other(old: str, new: str) -> Cluster:
    """The two sites with something else in their file."""
    text = Path(__file__).with_suffix(".yaml").read_text()
    assert old in text
    with TemporaryDirectory() as folder:
        (file := Path(folder) / "sites.yaml").write_text(text.replace(old, new))
        return Cluster.load(file)


def main() -> None:
    """Simulate and print."""
    asked = asked_of(__doc__)
    graph = graph_of_llama()
    variants = {
        "stated links": ("", ""),
        "nothing between sites": ("bandwidth: 0.3 GB/s, latency: 133 us", "bandwidth: 1 TB/s"),
        "one bus on each host": ("shared: false", "shared: true"),
    }
    found = {name: simulated(graph, with_other(*edit)) for name, edit in variants.items()}
    finish(asked, found, (f"{name}: {each}" for name, each in found.items()))


if __name__ == "__main__":
    main()
