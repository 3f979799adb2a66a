"""Steps of one rank on a GPU beside those of plain PyTorch there.

    pytest -m gpu

With ``HETEROG_RANKS_BACKEND=cpu:gloo,cuda:gloo`` the tests of several ranks compute on it, too.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from heterog.cluster import Cluster
from heterog.cluster.topology import Execution
from heterog.graph.capture import capture
from heterog.graph.workload import Workload
from heterog.methods.planner import Budget
from heterog.runtime.accelerators import backends, own_device
from heterog.runtime.deploy import DeployedStep, deploy
from heterog.runtime.step.alike import compared_after, compared_at
from heterog.search.plan import make_plan
from heterog.search.request import Request
from tests.runtime.cases import Normalised, TinyGpt, TinyMoe, moe_loss, token_loss
from tests.runtime.grids import grid_cluster

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
STEPS = 6


def of_transformers(model: str, config: str, sizes: dict[str, Any]) -> nn.Module:
    """A small model of that library, without weights."""
    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**sizes))
    return made


SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
GPT2 = {
    **{"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 97, "n_positions": 32},
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    "use_cache": False,
}
LLAMA = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
BERT = {
    **SIZES,
    **{"num_attention_heads": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
RESNET = {"layer_type": "basic", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
gpt2 = partial(of_transformers, "GPT2LMHeadModel", "GPT2Config", GPT2)
llama = partial(of_transformers, "LlamaForCausalLM", "LlamaConfig", LLAMA)
bert = partial(of_transformers, "BertForMaskedLM", "BertConfig", BERT)
resnet = partial(of_transformers, "ResNetForImageClassification", "ResNetConfig", RESNET)


def words(count: int = 97) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, count, (8, 16), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def images() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(8, 3, 32, 32, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 2, (8,), generator=generator)}


def tokens_and_labels() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 13, (8, 5), generator=generator)
    return tokens, tokens.roll(1, 1)


def double_images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(8, 3, 8, 8, generator=generator, dtype=torch.float64)
    return pixels, torch.randint(0, 5, (8,), generator=generator)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], Any]] = {
    "gpt2": (gpt2, words, None),
    "llama": (llama, words, None),
    "bert": (bert, words, None),
    "resnet": (resnet, images, None),
    "normalised": (Normalised, double_images, functional.cross_entropy),
    "tiny gpt": (TinyGpt, tokens_and_labels, token_loss),
    "moe": (TinyMoe, tokens_and_labels, moe_loss),
    "dropout": (partial(TinyGpt, 0.2), tokens_and_labels, token_loss),
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "AdamW": {"lr": 1e-3},
    "Adafactor": {"lr": 1e-2},
}


def workload_of(name: str, optimizer: str, dtype: torch.dtype | None = None) -> Workload:
    make, batch, loss = MODELS[name]

    def narrow(value: Any) -> Any:
        return value.to(dtype) if dtype is not None and value.is_floating_point() else value

    def model() -> nn.Module:
        torch.manual_seed(0)
        return make().to(dtype)

    return Workload(
        model,
        lambda: tree_map(narrow, batch()),
        loss,
        getattr(torch.optim, optimizer),
        OPTIMIZERS[optimizer],
        name=name,
    )


def one_gpu(execution: str) -> Cluster:
    return replace(grid_cluster(1), execution=Execution(execution))


def deployed(workload: Workload, execution: str) -> DeployedStep:
    request = Request(
        graph=capture(workload),
        cluster=one_gpu(execution),
        methods=("single_device",),
        budget=Budget.parse("1e"),
    )
    return deploy(workload, make_plan(request))


def batch_of(workload: Workload, number: int) -> Any:
    """Another batch in each step, in other memory."""
    return tree_map(lambda each: each.roll(number, -1), workload.make_batch())


def plain(workload: Workload) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of plain PyTorch."""
    device = own_device()
    model = workload.make_model().to(device)
    stepper = workload.optimizer(model.parameters(), **dict(workload.optimizer_options))
    losses = []
    for number in range(STEPS):
        batch = tree_map(lambda each: each.to(device), batch_of(workload, number))
        loss = workload.step_loss(model, batch)
        stepper.zero_grad()
        torch.autograd.backward(loss)
        stepper.step()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


@pytest.fixture(scope="module", autouse=True)
def _as_one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process is the one rank of a process group, as one launched on a GPU is."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = tmp_path_factory.mktemp("rank") / "store"
    torch.backends.cudnn.allow_tf32 = False
    dist.init_process_group(backends(1), init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("execution", ["eager", "compiled", "graphs"])
@pytest.mark.parametrize(
    ("name", "optimizer", "dtype"),
    [
        ("gpt2", "AdamW", None),
        ("gpt2", "SGD", torch.bfloat16),
        ("llama", "AdamW", torch.float64),
        ("bert", "Adafactor", None),
        ("resnet", "SGD", torch.float64),
        ("normalised", "SGD", None),
        ("tiny gpt", "AdamW", None),
        ("moe", "SGD", torch.float64),
        ("dropout", "SGD", None),
    ],
)
def test_a_step_has_the_numbers_of_plain_pytorch(
    name: str, optimizer: str, dtype: torch.dtype | None, execution: str
) -> None:
    workload = workload_of(name, optimizer, dtype)
    step = deployed(workload, execution)
    losses = [float(step(batch_of(workload, number))) for number in range(STEPS)]
    weights = step.state_dict()
    assert weights is not None
    compiler = step.compiler
    assert not compiler or not compiler.refused, compiler.refused
    if execution == "graphs":
        assert compiler is not None
        assert compiler.replays is not None
        assert compiler.replays.num_recorded
    if name == "dropout":  # other numbers are drawn
        return
    wanted_losses, wanted = plain(workload)
    exact = dtype is None and execution == "eager"
    rtol = 2e-2 if dtype is torch.bfloat16 else 1e-5 if exact else 1e-4
    assert losses == pytest.approx(wanted_losses, rel=rtol)
    for key, value in wanted.items():
        largest = float(value.double().abs().max())
        off = float((weights[key].to(value) - value).double().abs().max())
        assert off <= 10 * rtol * max(largest, 1e-2), f"{key}: {off} of {largest}"


@pytest.mark.parametrize("execution", ["eager", "compiled", "graphs"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "resnet", "moe", "dropout"])
def test_the_host_waits_for_the_gpu_nowhere_in_a_step(name: str, execution: str) -> None:
    workload = workload_of(name, "AdamW")
    step = deployed(workload, execution)
    batch = tree_map(lambda each: each.pin_memory(), workload.make_batch())
    for number in range(10):
        is_compared = compared_at(number) or compared_after(number)
        torch.cuda.set_sync_debug_mode("error" if number > 4 and not is_compared else "default")
        try:
            loss = step(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(loss)


def test_memory_is_at_most_that_of_plain_pytorch() -> None:
    """A step's peak is at most that of plain PyTorch, which keeps gradients until the next one."""
    workload = workload_of("gpt2", "AdamW")
    plain(workload)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    plain(workload)
    wanted = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    step = deployed(workload, "eager")
    torch.cuda.reset_peak_memory_stats()
    batch = workload.make_batch()
    for _ in range(STEPS):
        step(batch)
    used = torch.cuda.max_memory_allocated() - before
    assert used <= 1.1 * wanted, f"{used} bytes, plain {wanted}"
