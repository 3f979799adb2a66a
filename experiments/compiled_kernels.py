"""How many kernels does heterog count in compiled training steps, and how many does inductor make?

python experiments/compiled_kernels.py --json             # compiles each model on this CPU
python experiments/compiled_kernels.py --gpu --json       # inductor's scheduler told of an A100
python experiments/compiled_kernels.py --speed --json     # predicted: eager beside compiled

Inductor's scheduler hands over its kernels once it has fused them (its option
``_post_fusion_custom_pass``). On a CPU they are then compiled and run. Beside them stands
``metrics.generated_kernel_count``, which counts every loop nest inside a C++ kernel. With
``--gpu`` the same graphs are scheduled on fake tensors of a GPU, and nothing is compiled; see
``pretended_gpu``. Dynamo cuts some models into several graphs, each with its own numbers.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from rows import script_parser
from torch import Tensor, nn
from torch.nn import functional

from heterog.cluster.catalog import device_type
from heterog.cluster.execution import Execution
from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph, Phase
from heterog.graph.workload import Workload
from heterog.pricing.device_models.fusion.fused import fused_kernels
from heterog.pricing.device_models.model import DeviceModels
from heterog.zoo import build

SPEED_MODELS = ("resnet50", "vit_base", "bert_base", "gpt2")
SPEED_TYPES = {name: device_type(name) for name in ("V100-32GB", "A100-80GB")}
SPEED_TYPES["A100-80GB, TF32"] = replace(
    SPEED_TYPES["A100-80GB"],
    name="A100-80GB-custom",
    peak_flops_per_s={**SPEED_TYPES["A100-80GB"].peak_flops_per_s, "float32": 156e12},
)


class ResidualNet(nn.Module):
    """A stem and three residual blocks of two convolutions with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
                nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16),
            )
            for _ in range(3)
        )  # fmt: skip
        self.head = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Class scores of images [batch, 3, height, width]."""
        hidden = functional.relu(self.stem(images))
        for block in self.blocks:
            hidden = functional.relu(hidden + block(hidden))
        made: Tensor = self.head(hidden.mean((2, 3)))
        return made


class Recommender(nn.Module):
    """Embeddings of six categories beside numbers, their products, and a tower on top."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(1000, 32) for _ in range(6))
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(32 + 49, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        """Scores of clicks from numbers [batch, 13] and categories [batch, 6]."""
        dense = self.bottom(numbers)
        rows = [table(categories[:, number]) for number, table in enumerate(self.tables)]
        stacked = torch.stack([dense, *rows], 1)
        products = torch.bmm(stacked, stacked.transpose(1, 2)).flatten(1)
        made: Tensor = self.top(torch.cat([dense, products], 1)).squeeze(1)
        return made


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 128), nn.ReLU(),
        nn.Linear(128, 10),
    )  # fmt: skip


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=512, n_positions=64, n_embd=64, n_layer=2, n_head=4, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    model: nn.Module = GPT2LMHeadModel(config)
    return model


def _words() -> dict[str, Tensor]:
    tokens = torch.randint(512, (4, 64))
    return {"input_ids": tokens, "labels": tokens.clone()}


def models() -> dict[str, Workload]:
    """The four small models of the comparison."""
    classes = torch.randint(10, (32,))
    clicks = torch.rand(64)
    entropy = functional.binary_cross_entropy_with_logits
    looked_up = torch.rand(64, 13), torch.randint(1000, (64, 6)), clicks
    return {
        "mlp": _workload(_mlp, (torch.rand(32, 64), classes), functional.cross_entropy),
        "small gpt2": _workload(_gpt2, _words(), None),
        "residual net": _workload(
            ResidualNet, (torch.rand(32, 3, 16, 16), classes), functional.cross_entropy
        ),
        "recommender": _workload(Recommender, looked_up, entropy),
    }


def _workload(model: Callable[[], nn.Module], batch: Any, loss: Any) -> Workload:
    return Workload(model, batch, loss, torch.optim.Adam, name="small")


def inductor_kernels(workload: Workload) -> dict[str, Any]:
    """Kernels of one step that inductor compiles and runs on this CPU.

    Returns:
        ``scheduled`` of each graph, and ``generated`` (forward, backward).
    """
    from torch._inductor import metrics

    torch._dynamo.reset()
    metrics.reset()
    model, batch = workload.make_model(), workload.make_batch()
    step = torch.compile(lambda: workload.step_loss(model, batch))
    with scheduled_kernels() as found:
        loss = step()
        forward = metrics.generated_kernel_count
        torch.autograd.backward(loss)
    return {
        "scheduled": [count_of(nodes) for nodes in found],
        "generated": [forward, metrics.generated_kernel_count - forward],
    }


@contextmanager
def scheduled_kernels() -> Iterator[list[Sequence[Any]]]:
    """Collects what inductor's scheduler makes of each graph; nothing comes from a cache."""
    from torch._inductor import config

    found: list[Sequence[Any]] = []

    def keep(nodes: Sequence[Any]) -> Sequence[Any]:
        found.append(nodes)
        return nodes

    with config.patch(_post_fusion_custom_pass=keep, force_disable_caches=True):
        yield found


def count_of(nodes: Sequence[Any]) -> int:
    """Kernels that the compiler writes, without library calls and memory that is set aside."""
    from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

    others = (ExternKernelSchedulerNode, NopKernelSchedulerNode)
    return sum(not isinstance(node, others) for node in nodes)


def counted(graph: OpGraph, *, on_gpu: bool) -> list[int]:
    """(forward, backward) kernels as heterog counts them."""
    fused = fused_kernels(graph, on_gpu=on_gpu)
    return [fused.count(Phase.FORWARD), fused.count(Phase.BACKWARD)]


def speed_row(name: str) -> dict[str, Any]:
    """Predicted seconds of the step of a zoo model on one device, eager and compiled."""
    graph = capture(build(name))
    fused = fused_kernels(graph)
    row: dict[str, Any] = {
        "model": name,
        "batch_size": graph.batch_size,
        "kernels": sum(not each.is_own for each in fused.kernels),
        "fused_ops": int(fused.is_fused.sum()),
        "bytes": float(graph.bytes_moved[fused.is_fused].sum()),
        "bytes_fused": float(fused.num_bytes.sum()),
    }
    for name_of_type, kind in SPEED_TYPES.items():
        eager, compiled = (
            float(DeviceModels(each).op_seconds(graph, kind, graph.batch_size).sum())
            for each in (Execution.EAGER, Execution.COMPILED)
        )
        row[name_of_type] = {"eager_s": eager, "compiled_s": compiled, "faster": eager / compiled}
    return row


def kernel_row(name: str, workload: Workload, *, on_gpu: bool) -> dict[str, Any]:
    """Kernels of one model by heterog and by inductor."""
    row: dict[str, Any] = {"model": name, "heterog": counted(capture(workload), on_gpu=on_gpu)}
    if not on_gpu:
        return row | inductor_kernels(workload)
    from pretended_gpu import kernels_on_gpu

    return row | {"scheduled": [count_of(nodes) for nodes in kernels_on_gpu(workload)]}


def main() -> None:
    """Print a row for each model."""
    parser = script_parser(__doc__)
    parser.add_argument("--gpu", action="store_true", help="schedule for an A100, compile nothing")
    parser.add_argument("--speed", action="store_true", help="predict eager and compiled steps")
    parser.add_argument("--models", default="", help="by commas; name:batch for one of the zoo")
    arguments = parser.parse_args()
    rows = []
    if arguments.speed:
        rows = [speed_row(name) for name in SPEED_MODELS]
    else:
        own = models()
        for name in arguments.models.split(",") if arguments.models else own:
            known, _, batch = name.partition(":")
            workload = own[name] if name in own else build(known, int(batch) if batch else None)
            rows.append(kernel_row(name, workload, on_gpu=arguments.gpu))
            if not arguments.json:
                print(rows[-1], flush=True)
    if arguments.json:
        print(json.dumps({"torch": torch.__version__, "rows": rows}, indent=2))
    elif arguments.speed:
        print(*rows, sep="\n")


if __name__ == "__main__":
    main()
