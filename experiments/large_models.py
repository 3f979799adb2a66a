"""Large language models without weights: the second wave of cases.

Each function is a workload for the command line: ``experiments/large_models.py:llama_8b``. Weights
are bfloat16, sequences have 4,096 tokens (OPT 2,048), the optimizer is AdamW. Attention is causal
without a mask, as fused kernels expect; a traced model of ``transformers`` would make a mask of
the whole global batch, 8 GiB at these sizes.
"""

from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from heterog import Workload

_HUB: Any = transformers  # its configurations take more than their types say
_CAUSAL = "causal_without_mask"
_HUB.AttentionInterface.register(_CAUSAL, sdpa_attention_forward)
_HUB.AttentionMaskInterface.register(_CAUSAL, lambda *arguments, **keywords: None)


class Logits(nn.Module):
    """A model of ``transformers`` whose output is its logits, one row per token."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps tokens ``[batch, length]`` to logits ``[batch x length, vocabulary]``."""
        return self.model(tokens).logits.flatten(0, 1)


def _workload(kind: str, config: Any, batch_size: int, tokens: int) -> Workload:
    def example() -> tuple[Tensor, Tensor]:
        return torch.zeros(batch_size, tokens).long(), torch.zeros(batch_size * tokens).long()

    return Workload(
        model=lambda: Logits(getattr(_HUB, kind)(config)).bfloat16(),
        example_batch=example,
        loss=functional.cross_entropy,
        optimizer=torch.optim.AdamW,
    )


def llama_3(batch_size: int, *, width: int, inner: int, layers: int, heads: int) -> Workload:
    """A Llama 3 (Grattafiori et al. 2024, table 3) with 8 heads of keys and values."""
    config = _HUB.LlamaConfig(
        vocab_size=128_256,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation=_CAUSAL,
    )
    return _workload("LlamaForCausalLM", config, batch_size, 4096)


llama_8b = partial(llama_3, batch_size=256, width=4096, inner=14336, layers=32, heads=32)
llama_70b = partial(llama_3, batch_size=256, width=8192, inner=28672, layers=80, heads=64)
# OPT 350M (Zhang et al. 2022, table 1).
opt_350m = partial(
    _workload,
    "OPTForCausalLM",
    _HUB.OPTConfig(
        vocab_size=50272,
        hidden_size=1024,
        word_embed_proj_dim=512,
        ffn_dim=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        max_position_embeddings=2048,
        do_layer_norm_before=False,
        use_cache=False,
        attn_implementation=_CAUSAL,
    ),
    batch_size=1024,
    tokens=2048,
)
# GPT-3 6.7B (Brown et al. 2020, table 2.1).
gpt_6b = partial(
    _workload,
    "GPT2LMHeadModel",
    _HUB.GPT2Config(
        vocab_size=50257,
        n_positions=2048,
        n_embd=4096,
        n_layer=32,
        n_head=32,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation=_CAUSAL,
    ),
    batch_size=128,
    tokens=2048,
)
