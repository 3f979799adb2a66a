"""BERT-base with a mixture of experts in every second layer, in plain torch.

The experts follow GShard (Lepikhin et al. 2021, section 2.2 and algorithm 1): top-2 gating, a
fixed capacity per expert, and dispatch by einsum, so that every shape is static. Each sequence is
one group: capacity, dropped tokens and the balance loss never look at another sequence, and a
batch split in parts gives exactly the whole batch's outputs. There is no dropout, so that a
training step is deterministic.

Unlike GShard, the second expert is always used and never drawn at random. Unlike BERT, there are
no token types, as every sequence is one segment.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from heterog.graph.workload import Workload
from heterog.zoo.language import (
    FeedForward,
    MultiHeadAttention,
    token_cross_entropy,
    token_workload,
)
from heterog.zoo.registry import Builders

VOCABULARY = 30_522
MAX_TOKENS = 512
BALANCE_WEIGHT = 0.01
"""Weight of the balance loss, as in Fedus et al. 2022, section 2.2."""


class MoeOutput(NamedTuple):
    """Output of the model.

    Attributes:
        logits: Scores ``[batch, tokens, vocabulary]``.
        balance: Balance losses ``[batch]``, summed over the mixture layers; a layer that spreads a
            sequence evenly over its experts adds one.
    """

    logits: Tensor
    balance: Tensor


def _bert_moe(name: str, batch_size: int) -> Workload:
    """BERT-base with 16 experts in every second layer, a masked language model, 128 tokens."""
    num_tokens = {"input_ids": 128, "labels": 128}
    return token_workload(name, BertMoe, batch_size, VOCABULARY, num_tokens, moe_loss)


WORKLOADS: Builders = {"bert_moe": _bert_moe}
"""Makers of the workloads by name."""


def moe_loss(output: MoeOutput, labels: Tensor) -> Tensor:
    """The mean cross-entropy plus 0.01 times the mean balance loss of the sequences."""
    return token_cross_entropy(output.logits, labels) + BALANCE_WEIGHT * output.balance.mean()


class MixtureOfExperts(nn.Module):
    """Feed-forward experts; every token uses two of them.

    Args:
        width: Size of a token's vector.
        inner_width: Hidden size of each expert.
        num_experts: Number of experts, E.
    """

    def __init__(self, width: int, inner_width: int, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate = nn.Linear(width, num_experts, bias=False)
        self.weight_in = nn.Parameter(torch.empty(num_experts, width, inner_width))
        self.bias_in = nn.Parameter(torch.zeros(num_experts, 1, 1, inner_width))
        self.weight_out = nn.Parameter(torch.empty(num_experts, inner_width, width))
        self.bias_out = nn.Parameter(torch.zeros(num_experts, 1, 1, width))
        nn.init.normal_(self.weight_in, std=0.02)
        nn.init.normal_(self.weight_out, std=0.02)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Maps ``[batch, tokens, width]`` to the same shape and the balance loss ``[batch]``."""
        combine, balance = self._route(x)
        dispatch = (combine > 0).to(x.dtype)
        inputs = torch.einsum("bsec,bsm->ebcm", dispatch, x)
        hidden = torch.einsum("ebcm,emh->ebch", inputs, self.weight_in) + self.bias_in
        hidden = functional.gelu(hidden)
        outputs = torch.einsum("ebch,ehm->ebcm", hidden, self.weight_out) + self.bias_out
        return torch.einsum("bsec,ebcm->bsm", combine, outputs), balance

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The combine weights ``[batch, tokens, experts, capacity]`` and the balance loss.

        A token's place in an expert's queue is the number of tokens before it that chose the same
        expert, all first choices before all second ones. A place at or above the capacity
        C = 2 S / E, rounded up, matches no slot: the token is dropped there.

        The balance loss of a sequence is E sum_e c_e m_e (Fedus et al. 2022, equation 4), with
        c_e the fraction of tokens whose first choice is e and m_e the mean gate of e.
        """
        num_tokens = x.shape[1]
        capacity = -(-2 * num_tokens // self.num_experts)
        gates: Tensor = self.gate(x).softmax(dim=-1)  # [batch, tokens, experts]
        first = self._one_hot_of_largest(gates)
        second = self._one_hot_of_largest(gates * (1 - first))

        first_place = first.cumsum(dim=1) - first
        second_place = second.cumsum(dim=1) - second + first.sum(dim=1, keepdim=True)
        first_gate = (gates * first).sum(dim=-1, keepdim=True)
        second_gate = (gates * second).sum(dim=-1, keepdim=True)
        total = first_gate + second_gate

        slots = torch.arange(capacity, device=x.device)

        def weights(chosen: Tensor, place: Tensor, gate: Tensor) -> Tensor:
            in_slot = place.unsqueeze(-1) == slots
            return (chosen * gate / total).unsqueeze(-1) * in_slot.to(x.dtype)

        combine = weights(first, first_place, first_gate)
        combine = combine + weights(second, second_place, second_gate)
        balance = self.num_experts * (first.mean(dim=1) * gates.mean(dim=1)).sum(dim=-1)
        return combine, balance

    def _one_hot_of_largest(self, gates: Tensor) -> Tensor:
        largest = gates.argmax(dim=-1, keepdim=True)
        experts = torch.arange(self.num_experts, device=gates.device)
        return (largest == experts).to(gates.dtype)


class BertLayer(nn.Module):
    """A layer of BERT; its feed-forward part is dense or a mixture of experts."""

    def __init__(self, width: int, num_heads: int, num_experts: int | None) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(width, num_heads)
        self.attention_norm = nn.LayerNorm(width, eps=1e-12)
        self.feed_forward: nn.Module
        if num_experts is None:
            self.feed_forward = FeedForward(width, 4 * width, nn.GELU)
        else:
            self.feed_forward = MixtureOfExperts(width, 4 * width, num_experts)
        self.feed_forward_norm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Maps ``[batch, tokens, width]`` to the same shape and the experts' balance loss."""
        x = self.attention_norm(x + self.attention(x))
        out = self.feed_forward(x)
        change, balance = out if isinstance(out, tuple) else (out, None)
        return self.feed_forward_norm(x + change), balance


class BertMoe(nn.Module):
    """The masked language model; its second, fourth, ... layers are mixtures of experts."""

    def __init__(
        self,
        width: int = 768,
        num_layers: int = 12,
        num_heads: int = 12,
        num_experts: int = 16,
        vocabulary: int = VOCABULARY,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.empty(MAX_TOKENS, width))
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.02)
        self.embedding_norm = nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.ModuleList(
            BertLayer(width, num_heads, num_experts if index % 2 else None)
            for index in range(num_layers)
        )
        self.head = nn.Sequential(
            nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width, eps=1e-12)
        )
        self.head_bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, input_ids: Tensor) -> MoeOutput:
        """Maps tokens ``[batch, tokens]`` to logits and the balance loss of each sequence."""
        x = self.embedding(input_ids) + self.positions[: input_ids.shape[1]]
        x = self.embedding_norm(x)
        balances = []
        for layer in self.layers:
            x, balance = layer(x)
            if balance is not None:
                balances.append(balance)
        logits = functional.linear(self.head(x), self.embedding.weight, self.head_bias)
        return MoeOutput(logits, torch.stack(balances).sum(dim=0))
