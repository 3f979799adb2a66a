"""Standard transformers, built from the configurations of the package ``transformers``.

All weights are random: nothing is ever downloaded. There is no dropout, so that a training step is
deterministic. Labels hold the wanted token of every position, already shifted where a model
predicts the next token; positions with the label -100 do not count in the mean.

``transformers`` is optional (``pip install 'heterog[zoo]'``) and imported when a workload is
built.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from heterog.errors import HeterogError
from heterog.graph.workload import Workload
from heterog.zoo.tokens import token_workload

BERT_VOCABULARY = 30_522
XLNET_VOCABULARY = 32_000
GPT2_VOCABULARY = 50_257
LLAMA_VOCABULARY = 128_256


class MissingExtraError(HeterogError):
    """A model that needs a package of an optional extra which is not installed."""


def bert_base(batch_size: int) -> Workload:
    """BERT-base as a masked language model (Devlin et al. 2019), 128 tokens."""
    return _bert("bert_base", batch_size, width=768, num_layers=12, num_heads=12)


def bert_large_24l(batch_size: int) -> Workload:
    """BERT-large as a masked language model (Devlin et al. 2019), 128 tokens."""
    return _bert("bert_large_24l", batch_size, width=1024, num_layers=24, num_heads=16)


def bert_large_48l(batch_size: int) -> Workload:
    """BERT-large with twice its layers, 128 tokens."""
    return _bert("bert_large_48l", batch_size, width=1024, num_layers=48, num_heads=16)


def xlnet_large_24l(batch_size: int) -> Workload:
    """XLNet-large (Yang et al. 2019) on its content stream, 128 tokens.

    Without a permutation mask, segments or a query stream, as when the model is fine-tuned; the
    parameters of those (``mask_emb``, ``seg_embed``, ``r_s_bias``) exist and get no gradient.
    """
    return _xlnet("xlnet_large_24l", batch_size, num_layers=24)


def xlnet_large_48l(batch_size: int) -> Workload:
    """XLNet-large with twice its layers, otherwise as ``xlnet_large_24l``."""
    return _xlnet("xlnet_large_48l", batch_size, num_layers=48)


def gpt2(batch_size: int) -> Workload:
    """GPT-2 with 124 million parameters (Radford et al. 2019), 512 tokens."""
    hub = _transformers("gpt2")

    def model() -> nn.Module:
        config = hub.GPT2Config(
            vocab_size=GPT2_VOCABULARY,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            attn_implementation=_attention(hub),
        )
        return _module(hub.GPT2LMHeadModel(config))

    return token_workload("gpt2", model, batch_size, GPT2_VOCABULARY, _lengths(512))


def llama_1b(batch_size: int) -> Workload:
    """A decoder with the widths of Llama 3.2 1B (Grattafiori et al. 2024), 512 tokens.

    Rotary positions are the plain ones with base 500,000, without the scaling for long texts.
    """
    hub = _transformers("llama_1b")

    def model() -> nn.Module:
        config = hub.LlamaConfig(
            vocab_size=LLAMA_VOCABULARY,
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
            attn_implementation=_attention(hub),
        )
        return _module(hub.LlamaForCausalLM(config))

    return token_workload("llama_1b", model, batch_size, LLAMA_VOCABULARY, _lengths(512))


def _bert(name: str, batch_size: int, *, width: int, num_layers: int, num_heads: int) -> Workload:
    hub = _transformers(name)

    def model() -> nn.Module:
        config = hub.BertConfig(
            vocab_size=BERT_VOCABULARY,
            hidden_size=width,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            intermediate_size=4 * width,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            # As the published results had it: the cards of those clusters (Pascal, Volta) have
            # no flash attention, so the matrix products and the softmax are separate kernels.
            attn_implementation="eager",
        )
        return _module(hub.BertForMaskedLM(config))

    return token_workload(name, model, batch_size, BERT_VOCABULARY, _lengths(128))


def _xlnet(name: str, batch_size: int, *, num_layers: int) -> Workload:
    hub = _transformers(name)

    def model() -> nn.Module:
        config = hub.XLNetConfig(
            vocab_size=XLNET_VOCABULARY,
            d_model=1024,
            n_layer=num_layers,
            n_head=16,
            d_inner=4096,
            dropout=0.0,
            use_mems_eval=False,
            use_mems_train=False,
        )
        return _module(hub.XLNetLMHeadModel(config))

    return token_workload(name, model, batch_size, XLNET_VOCABULARY, _lengths(128))


def _lengths(num_tokens: int) -> dict[str, int]:
    return {"input_ids": num_tokens, "labels": num_tokens}


def _transformers(name: str) -> Any:
    """The package ``transformers``, or a clear error that names the extra it comes with."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise MissingExtraError(
            f"the model '{name}' needs the package transformers, which cannot be imported "
            f"({error}); run: pip install 'heterog[zoo]'"
        ) from error


def _attention(hub: Any) -> str:
    """The name of an attention that is torch's own and never gets a mask tensor.

    No sequence of the zoo is padded. For an implementation that it does not know,
    ``transformers`` makes no mask, and causal attention stays a flag of the kernel. For its own
    ``"sdpa"`` it would, while a step is captured, make a mask that finds packed sequences by
    indexing over the batch.
    """
    name = "heterog_unmasked"
    hub.AttentionInterface.register(name, hub.AttentionInterface()["sdpa"])
    return name


def _module(model: object) -> nn.Module:
    assert isinstance(model, nn.Module)
    return model
