"""Workloads on token sequences: language models, a transformer for translation, common layers.

All weights are random: nothing is ever downloaded. There is no dropout, so that a training step is
deterministic. Labels hold the wanted token of every position, already shifted where a model
predicts the next token; positions with the label -100 do not count in the mean.

BERT, XLNet, GPT-2 and Llama are built from configurations of the package ``transformers``, which
is optional (``pip install 'heterog[zoo]'``) and imported when a workload is built.

The encoder-decoder transformer for translation (Vaswani et al. 2017) is in plain torch, with the
widths of the paper's base model; one embedding serves source, target and output. Unlike the
paper, every sub-layer normalises its input and not its output, because 24 + 24 layers do not
train the other way. Other transformers of the zoo share its attention layers.
"""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from heterog.errors import HeterogError
from heterog.graph.workload import Batch, Workload
from heterog.zoo.registry import Builders


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


def _of_hub(
    name: str,
    batch_size: int,
    *,
    kind: str,
    head: str,
    vocabulary: int,
    num_tokens: int,
    is_unmasked: bool = False,
    **settings: Any,
) -> Workload:
    """A model of the package ``transformers``, with random weights.

    Args:
        name: Name of the workload.
        batch_size: Number of sequences in a batch.
        kind: Name of the model in that package, as in ``GPT2Config``.
        head: The rest of its class's name, as in ``GPT2LMHeadModel``.
        vocabulary: Number of different tokens.
        num_tokens: Length of a sequence.
        is_unmasked: Whether its attention is the one of ``_attention``.
        settings: Further settings of its configuration.
    """
    hub = _transformers(name)

    def model() -> nn.Module:
        own = copy.deepcopy(settings)  # configurations keep and complete what they are given
        if is_unmasked:
            own["attn_implementation"] = _attention(hub)
        config = getattr(hub, f"{kind}Config")(vocab_size=vocabulary, **own)
        made = getattr(hub, f"{kind}{head}")(config)
        assert isinstance(made, nn.Module)
        return made

    lengths = {"input_ids": num_tokens, "labels": num_tokens}
    return token_workload(name, model, batch_size, vocabulary, lengths)


def _transformers(name: str) -> Any:
    """The package ``transformers``, or a clear error that names the extra it comes with."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise HeterogError(
            f"the model '{name}' needs the package transformers, which cannot be imported "
            f"({error}); run: pip install 'heterog[zoo]'"
        ) from error


def _attention(hub: Any) -> str:
    """The name of an attention that is torch's own and never gets a mask tensor.

    No sequence of the zoo is padded. ``transformers`` makes no mask for an implementation that it
    does not know, and causal attention stays a flag of the kernel. For its own ``"sdpa"``, while a
    step is captured, ``transformers`` would make a mask that finds packed sequences by indexing
    over the batch.
    """
    name = "heterog_unmasked"
    hub.AttentionInterface.register(name, hub.AttentionInterface()["sdpa"])
    return name


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
# Widths of the paper's base model.
WIDTH = 512
INNER_WIDTH = 2048
NUM_HEADS = 8


def _translation(name: str, batch_size: int, *, num_layers: int) -> Workload:
    """The transformer, 32 source and 32 target tokens per sentence."""
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


# Masked language models (Devlin et al. 2019), 128 tokens.
_BERT = partial(
    _of_hub,
    kind="Bert",
    head="ForMaskedLM",
    vocabulary=30_522,
    num_tokens=128,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    # As in the published results: the cards of those clusters (Pascal, Volta) have no flash
    # attention, so the matrix products and the softmax are separate kernels.
    attn_implementation="eager",
)
_BERT_LARGE = partial(_BERT, hidden_size=1024, num_attention_heads=16, intermediate_size=4 * 1024)
# XLNet-large (Yang et al. 2019) on its content stream, 128 tokens. As in fine-tuning, there is no
# permutation mask, no segment and no query stream; their parameters (``mask_emb``, ``seg_embed``,
# ``r_s_bias``) exist and get no gradient.
_XLNET = partial(
    _of_hub,
    kind="XLNet",
    head="LMHeadModel",
    vocabulary=32_000,
    num_tokens=128,
    d_model=1024,
    n_head=16,
    d_inner=4096,
    dropout=0.0,
    use_mems_eval=False,
    use_mems_train=False,
)

WORKLOADS: Builders = {
    "bert_base": partial(
        _BERT,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        intermediate_size=4 * 768,
    ),
    "bert_large_24l": partial(_BERT_LARGE, num_hidden_layers=24),
    "bert_large_48l": partial(_BERT_LARGE, num_hidden_layers=48),
    "xlnet_large_24l": partial(_XLNET, n_layer=24),
    "xlnet_large_48l": partial(_XLNET, n_layer=48),
    # GPT-2 with 124 million parameters (Radford et al. 2019), 512 tokens.
    "gpt2": partial(
        _of_hub,
        kind="GPT2",
        head="LMHeadModel",
        vocabulary=50_257,
        num_tokens=512,
        is_unmasked=True,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    ),
    # A decoder with the widths of Llama 3.2 1B (Grattafiori et al. 2024), 512 tokens. Rotary
    # positions are the plain ones with base 500,000, without the scaling for long texts.
    "llama_1b": partial(
        _of_hub,
        kind="Llama",
        head="ForCausalLM",
        vocabulary=128_256,
        num_tokens=512,
        is_unmasked=True,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attention_dropout=0.0,
        use_cache=False,
    ),
    "transformer_6l": partial(_translation, num_layers=6),
    "transformer_24l": partial(_translation, num_layers=24),
}
"""Makers of the workloads by name; those of 48 layers have twice the layers of the papers."""
