"""The step of a model has the same ops on batches of all sizes: a plan is made for one of them."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from heterog.graph.capture import CapturedStep, capture_step
from heterog.graph.op_graph import OpGraph, same_ops
from heterog.graph.workload import Workload
from tests.thorough import one_in

LENGTH = 4
WORDS = 16


def llama() -> nn.Module:
    model: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=WORDS,
            use_cache=False,
        )
    )
    return model


def gpt2() -> nn.Module:
    model: nn.Module = GPT2LMHeadModel(
        GPT2Config(
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=8,
            vocab_size=WORDS,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    return model


def bert() -> nn.Module:
    model: nn.Module = BertForMaskedLM(
        BertConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            vocab_size=WORDS,
        )
    )
    return model


def t5() -> nn.Module:
    """Its position biases have one sample, whatever the batch has."""
    options: dict[str, Any] = {"decoder_start_token_id": 0, "pad_token_id": 0}
    config = T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2,
        dropout_rate=0.0, **options,
    )  # fmt: skip
    model: nn.Module = T5ForConditionalGeneration(config)
    return model


def step_of(
    make: Callable[[], nn.Module], samples: int, planned: OpGraph | None = None
) -> CapturedStep:
    generator = torch.Generator().manual_seed(samples)
    tokens = torch.randint(0, WORDS, (samples, LENGTH), generator=generator)
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    workload = Workload(make, lambda: batch, None, torch.optim.SGD, {"lr": 0.1})
    return capture_step(workload, planned)


@cache
def step_planned(make: Callable[[], nn.Module]) -> CapturedStep:
    return step_of(make, 3)


@one_in(3)
@pytest.mark.parametrize("make", [llama, gpt2, bert])
def test_ranges_of_samples_and_of_positions_stay_two(make: Callable[[], nn.Module]) -> None:
    """There are as many samples as positions in the second batch."""
    planned = step_planned(make).graph
    assert same_ops(planned, step_of(make, LENGTH).graph)


@one_in(4)
@pytest.mark.parametrize("make", [llama, gpt2, bert, t5])
def test_one_sample_is_copied_and_summed_as_several_are(make: Callable[[], nn.Module]) -> None:
    planned = step_planned(make)
    alone = step_of(make, 1)
    same = step_of(make, 1, planned.graph)
    assert not same_ops(planned.graph, alone.graph)
    assert same_ops(planned.graph, same.graph)
    assert values(same) == pytest.approx(values(alone))


class ByBatch(nn.Module):
    """Other ops for one sample than for several: nothing that a copy or a sum makes up for."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(LENGTH), nn.Linear(LENGTH, LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            x = self.norm(torch.cat(x.chunk(2, dim=1), dim=1)).sum(0, keepdim=True)
        y = self.layer(x).transpose(0, 1).contiguous().view(-1)
        loss: Tensor = (y + x.sum(0, keepdim=True).sum()).square().mean()
        return loss


def test_other_ops_stay_other_ops() -> None:
    def step(samples: int, planned: OpGraph | None = None) -> OpGraph:
        x = torch.zeros(samples, LENGTH)
        workload = Workload(ByBatch, lambda: (x,), None, torch.optim.SGD, {"lr": 0.1})
        return capture_step(workload, planned).graph

    for one, other in ((3, 1), (1, 3)):
        planned = step(one)
        assert not same_ops(planned, step(other, planned))


def values(step: CapturedStep) -> list[float]:
    """The loss and the sum of each gradient, on numbers made up from each input's shape."""
    inputs: list[Tensor] = []
    for node in step.module.graph.nodes:
        if node.op == "placeholder":
            value = node.meta["val"]
            made = torch.linspace(-1.0, 1.0, value.numel()).view(value.shape)
            inputs.append(made if value.is_floating_point() else torch.ones_like(made).long())
    torch.manual_seed(0)  # of dropout
    loss, gradients, *_ = step.module(*inputs)
    tensors: list[Tensor] = [each for each in (loss, *gradients) if each is not None]
    return [float(each.double().square().sum()) for each in tensors]
