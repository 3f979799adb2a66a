"""Large language models without weights.

Each function is a workload for the command line: ``experiments/large_models.py:llama_8b``. Weights
are bfloat16, sequences have 4,096 tokens, the optimizer is AdamW. Attention is causal
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
_TOKENS = 4096
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

    def example() -> tuple[Tensor, Tensor]:
        tokens = torch.zeros(batch_size, _TOKENS, dtype=torch.int64)
        return tokens, tokens.flatten()

    return Workload(
        model=lambda: Logits(_HUB.LlamaForCausalLM(config)).bfloat16(),
        example_batch=example,
        loss=functional.cross_entropy,
        optimizer=torch.optim.AdamW,
    )


llama_8b = partial(llama_3, batch_size=256, width=4096, inner=14336, layers=32, heads=32)
llama_70b = partial(llama_3, batch_size=256, width=8192, inner=28672, layers=80, heads=64)
