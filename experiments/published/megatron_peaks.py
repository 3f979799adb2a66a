"""Peaks of memory of Megatron-LM's functional tests on 8 A100, beside what plans say.

Rows have the columns of NVIDIA/Megatron-LM's golden values (BSD-style), ``megatron_golden.csv``:
settings of a case and ``mem_max_alloc_bytes``, which the last rank writes. Dense GPTs are
compared, each setting once; experts, context parallelism, Megatron's own FSDP, frozen parts and
runs that resume (which allocate in another order) are left out. Of a table that the head shares,
the last stage has a copy, so that there it is as large as one of its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from heterog.cluster.topology import Execution
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.layouts.layout import Layout, Recompute
from heterog.strategy.layouts.placed import place_layout
from published.models import Model, graph_of
from published.runs import a100_nodes

Row = Mapping[str, str]

_DEVICES, _HEADS, _WORDS, _PADDED = 8, 8, 50257, 128
_APART = (
    "release", "memory_speed", "resume", "frozen", "cross_entropy_loss_fusion",
    "account_for_embedding", "defer_embedding",
)  # fmt: skip
_NOT_DENSE = ("num-experts", "use-megatron-fsdp", "optimizer-cpu-offload")


def _number(row: Row, name: str) -> int:
    return int(row.get(name) or 1)


def layout_of(row: Row) -> Layout | None:
    """The layout of a case, ``None`` if it is left out."""
    if row["family"] != "gpt" or not row["hidden-size"] or not row["seq-length"]:
        return None
    if any(row.get(name) for name in _NOT_DENSE) or _number(row, "context-parallel-size") > 1:
        return None
    if any(word in row["case"] for word in _APART) or not row["mem_max_alloc_bytes"]:
        return None
    tp, pp = (
        _number(row, "tensor-model-parallel-size"),
        _number(row, "pipeline-model-parallel-size"),
    )
    of_chunk = row.get("num-layers-per-virtual-pipeline-stage")
    chunks = _number(row, "num-layers") // pp // int(of_chunk) if of_chunk and pp > 1 else 0
    return Layout(
        tp=tp,
        pp=pp,
        dp=_DEVICES // tp // pp,
        micro_batch=_number(row, "micro-batch-size"),
        zero=int(row.get("use-distributed-optimizer") == "true"),
        chunks=chunks if chunks > 1 else 0,
        sequence_parallel=row.get("sequence-parallel") == "true" and tp > 1,
        recompute=Recompute.FULL if row.get("recompute-granularity") == "full" else Recompute.NONE,
    )


def predicted_bytes(row: Row, layout: Layout) -> float:
    """Peak of the last device, by the plan's memory model."""
    vocabulary = -(-_WORDS // (_PADDED * layout.tp)) * _PADDED * layout.tp
    model = Model(
        family="gpt",
        hidden=_number(row, "hidden-size"),
        heads=_number(row, "num-attention-heads"),
        layers=_number(row, "num-layers"),
        sequence=_number(row, "seq-length"),
        vocabulary=vocabulary,
        dtype="float16" if row.get("fp16") == "true" else "bfloat16",
        is_tied=layout.pp == 1,
        is_fused=True,
        works_in_place=True,
    )
    batch = layout.dp * layout.micro_batch * max(2 * layout.pp, 2)
    graph = graph_of(model, batch)
    cluster = replace(a100_nodes(_DEVICES), execution=Execution.MEGATRON)
    strategy = place_layout(layout, graph, cluster).strategy
    found = Evaluator(graph, cluster).evaluate(strategy, Order.FIFO)
    return float(found.peak_memory_bytes[-1])


def peak_errors(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Each case, measured and predicted."""
    seen = set()
    for row in rows:
        layout = layout_of(row)
        if layout is None or row["case"] in seen:
            continue
        seen.add(row["case"])
        measured, predicted = float(row["mem_max_alloc_bytes"]), predicted_bytes(row, layout)
        yield {"case": row["case"], "tp": layout.tp, "layout": str(layout),
               "measured_bytes": measured, "predicted_bytes": predicted,
               "error": predicted / measured - 1.0}  # fmt: skip
