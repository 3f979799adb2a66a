"""How many kernels does heterog count in compiled training steps, and how many does inductor make?

    python experiments/compiled_kernels.py --json

Inductor's scheduler hands over its kernels once it has fused them (its option
``_post_fusion_custom_pass``), and they are then compiled and run. Beside them stands
``metrics.generated_kernel_count``, which counts every loop nest inside a C++ kernel. Dynamo cuts
some models into several graphs, each with its own numbers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rows import asked_of, finish, option, progress
from torch import Tensor, nn
from torch.nn import functional

from heterog.graph.capture import capture
from heterog.graph.op_graph import Phase
from heterog.graph.workload import Workload
from heterog.pricing.device_models.fusion.fused import fused_kernels
from heterog.zoo import build


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


def kernel_row(name: str, workload: Workload) -> dict[str, Any]:
    """Kernels of one model by heterog (forward, backward) and by inductor."""
    fused = fused_kernels(capture(workload), on_gpu=False)
    ours = [fused.count(phase) for phase in (Phase.FORWARD, Phase.BACKWARD)]
    return {"model": name, "heterog": ours} | inductor_kernels(workload)


def main() -> None:
    """Print a row for each model."""
    arguments = asked_of(
        __doc__, option("--models", default="", help="by commas; name:batch for one of the zoo")
    )
    own = models()
    rows = []
    for name in arguments.models.split(",") if arguments.models else own:
        known, _, batch = name.partition(":")
        workload = own[name] if name in own else build(known, int(batch) if batch else None)
        rows.append(kernel_row(name, workload))
        progress(rows[-1])
    finish(arguments, {"torch": torch.__version__, "rows": rows})


if __name__ == "__main__":
    main()
