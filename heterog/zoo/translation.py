"""The encoder-decoder transformer for translation (Vaswani et al. 2017), in plain torch.

Widths of the paper's base model; one embedding serves source, target and output. There is no
dropout, so that a training step is deterministic. Unlike the paper, every sub-layer normalises its
input and not its output, because 24 + 24 layers do not train the other way.

BERT-base with a mixture of experts in every second layer, in plain torch.

The experts follow GShard (Lepikhin et al. 2021, section 2.2 and algorithm 1): top-2 gating, a
fixed capacity per expert, and dispatch by einsum, so that every shape is static. Each sequence is
one group: capacity, dropped tokens and the balance loss never look at another sequence, and a
batch split in parts gives exactly the whole batch's outputs. There is no dropout, so that a
training step is deterministic.

Unlike GShard, the second expert is always used and never drawn at random. Unlike BERT, there are
no token types, as every sequence is one segment.

Common parts of the workloads on token sequences: the example batch and the loss.

Attention layers that the zoo's own transformers share, in plain torch and without dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from heterog.graph.workload import Workload

if TYPE_CHECKING:
    from heterog.graph.workload import Batch
import math
from typing import NamedTuple


def token_cross_entropy(output: Any, labels: Tensor) -> Tensor:
    """The mean cross-entropy over all positions whose label is not -100.

    Args:
        output: Logits ``[batch, tokens, vocabulary]``, or an object that has them as ``logits``.
        labels: Wanted tokens ``[batch, tokens]``.
    """
    logits: Tensor = getattr(output, "logits", output)
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def token_workload(
    name: str,
    model: Callable[[], nn.Module],
    batch_size: int,
    vocabulary: int,
    num_tokens: Mapping[str, int],
    loss: Callable[[Any, Tensor], Tensor] = token_cross_entropy,
) -> Workload:
    """A workload on random tokens, trained with Adam.

    Args:
        name: Name of the workload.
        model: Function that makes the model, which is called with the inputs by name.
        batch_size: Number of sequences in a batch.
        vocabulary: Number of different tokens.
        num_tokens: Length of each input, and of ``"labels"``.
        loss: Loss function, ``loss(output, labels)``.
    """

    def example_batch() -> Batch:
        random = torch.Generator().manual_seed(0)
        return {
            key: torch.randint(vocabulary, (batch_size, length), generator=random)
            for key, length in num_tokens.items()
        }

    return Workload(
        model=model,
        example_batch=example_batch,
        loss=loss,
        optimizer=torch.optim.Adam,
        name=name,
        source=name,
    )


class MultiHeadAttention(nn.Module):
    """Scaled dot-product attention with several heads (Vaswani et al. 2017, section 3.2)."""

    def __init__(self, width: int, num_heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.causal = causal
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """Lets ``x`` attend to ``memory``, or to itself; both ``[batch, tokens, width]``."""
        memory = x if memory is None else memory
        heads = functional.scaled_dot_product_attention(
            self._split(self.query(x)),
            self._split(self.key(memory)),
            self._split(self.value(memory)),
            is_causal=self.causal,
        )
        out: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        return out

    def _split(self, x: Tensor) -> Tensor:
        batch_size, num_tokens, width = x.shape
        heads = x.view(batch_size, num_tokens, self.num_heads, width // self.num_heads)
        return heads.transpose(1, 2)  # [batch, heads, tokens, width / heads]


class FeedForward(nn.Sequential):
    """Two linear layers with an activation between them."""

    def __init__(self, width: int, inner_width: int, activation: type[nn.Module]) -> None:
        super().__init__(
            nn.Linear(width, inner_width), activation(), nn.Linear(inner_width, width)
        )


class EncoderLayer(nn.Module):
    """Self-attention, then a feed-forward layer, each on its normalised input."""

    def __init__(
        self,
        width: int,
        inner_width: int,
        num_heads: int,
        activation: type[nn.Module],
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, eps=eps)
        self.attention = MultiHeadAttention(width, num_heads)
        self.feed_forward_norm = nn.LayerNorm(width, eps=eps)
        self.feed_forward = FeedForward(width, inner_width, activation)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[batch, tokens, width]`` to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


VOCABULARY = 50_000
NUM_TOKENS = 32
WIDTH = 512
INNER_WIDTH = 2048
NUM_HEADS = 8


def transformer_6l(batch_size: int) -> Workload:
    """The transformer with 6 + 6 layers, 32 source and 32 target tokens per sentence."""
    return _workload("transformer_6l", 6, batch_size)


def transformer_24l(batch_size: int) -> Workload:
    """The transformer with 24 + 24 layers, 32 source and 32 target tokens per sentence."""
    return _workload("transformer_24l", 24, batch_size)


def _workload(name: str, num_layers: int, batch_size: int) -> Workload:
    num_tokens = dict.fromkeys(("input_ids", "decoder_input_ids", "labels"), NUM_TOKENS)
    return token_workload(
        name, lambda: Transformer(num_layers), batch_size, VOCABULARY, num_tokens
    )


class DecoderLayer(nn.Module):
    """Causal attention over the target, attention over the source, a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention = MultiHeadAttention(WIDTH, NUM_HEADS, causal=True)
        self.cross_norm = nn.LayerNorm(WIDTH)
        self.cross_attention = MultiHeadAttention(WIDTH, NUM_HEADS)
        self.feed_forward_norm = nn.LayerNorm(WIDTH)
        self.feed_forward = FeedForward(WIDTH, INNER_WIDTH, nn.ReLU)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """Maps the target ``x`` and the encoded source ``memory`` to the shape of ``x``."""
        x = x + self.attention(self.attention_norm(x))
        x = x + self.cross_attention(self.cross_norm(x), memory)
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class Transformer(nn.Module):
    """The whole encoder-decoder model with its one tied embedding."""

    positions: Tensor

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.embedding.weight, std=WIDTH**-0.5)
        self.register_buffer("positions", sinusoids(NUM_TOKENS, WIDTH), persistent=False)
        self.encoder = nn.ModuleList(
            EncoderLayer(WIDTH, INNER_WIDTH, NUM_HEADS, nn.ReLU) for _ in range(num_layers)
        )
        self.encoder_norm = nn.LayerNorm(WIDTH)
        self.decoder = nn.ModuleList(DecoderLayer() for _ in range(num_layers))
        self.decoder_norm = nn.LayerNorm(WIDTH)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        """Maps source and target ``[batch, tokens]`` to logits ``[batch, tokens, 50000]``."""
        memory = self._embed(input_ids)
        for layer in self.encoder:
            memory = layer(memory)
        memory = self.encoder_norm(memory)
        x = self._embed(decoder_input_ids)
        for layer in self.decoder:
            x = layer(x, memory)
        return functional.linear(self.decoder_norm(x), self.embedding.weight)

    def _embed(self, token_ids: Tensor) -> Tensor:
        embedded: Tensor = self.embedding(token_ids)
        return embedded * math.sqrt(WIDTH) + self.positions


def sinusoids(num_tokens: int, width: int) -> Tensor:
    """The position codes of the paper's section 3.5, ``[num_tokens, width]``.

    PE[pos, 2i] = sin(pos / 10000^(2i/width)) and PE[pos, 2i+1] = cos of the same.
    """
    frequency = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000) / width))
    angle = torch.arange(num_tokens)[:, None] * frequency  # [num_tokens, width / 2]
    return torch.stack([angle.sin(), angle.cos()], dim=2).flatten(1)


MOE_VOCABULARY = 30_522
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


def bert_moe(batch_size: int) -> Workload:
    """BERT-base with 16 experts in every second layer, a masked language model, 128 tokens."""
    num_tokens = {"input_ids": 128, "labels": 128}
    return token_workload("bert_moe", BertMoe, batch_size, MOE_VOCABULARY, num_tokens, moe_loss)


def moe_loss(output: MoeOutput, labels: Tensor) -> Tensor:
    """The mean cross-entropy plus 0.01 times the mean balance loss of the sequences."""
    return token_cross_entropy(output.logits, labels) + BALANCE_WEIGHT * output.balance.mean()


class MixtureOfExperts(nn.Module):
    """Feed-forward experts of which every token uses two.

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
        vocabulary: int = MOE_VOCABULARY,
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
