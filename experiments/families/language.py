"""Causal and sequence-to-sequence language models and encoders of ``transformers``."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from families.family import (
    BATCH,
    BFLOAT16,
    FLOAT32,
    FLOAT64,
    Batch,
    Family,
    enter,
    family,
    sgd,
    trained,
)
from heterog.graph.workload import Workload

VOCABULARY = 50
TOKENS = 6
PADDING = 1


def tokens(length: int = TOKENS) -> Tensor:
    """Token numbers ``[batch, length]`` without the special ones."""
    return torch.randint(5, VOCABULARY, (BATCH, length))


def labels_of(length: int = TOKENS) -> Tensor:
    """Labels of which unevenly many samples ignore some."""
    found = tokens(length)
    keep = torch.ones(BATCH, length, dtype=torch.bool)
    keep[:3, 1:4] = False
    keep[5, 2:] = False
    return torch.where(keep, found, torch.full_like(found, -100))


def causal_batch() -> Batch:
    """Tokens and labels, as a data collator for language models makes them."""
    return {"input_ids": tokens(), "labels": labels_of()}


def padded_batch() -> Batch:
    """The same with an attention mask: some samples are shorter."""
    mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
    mask[2:4, 4:] = 0
    mask[6, 3:] = 0
    return {"input_ids": tokens(), "attention_mask": mask, "labels": labels_of()}


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
    "pad_token_id": PADDING,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
"""What most configurations call their sizes."""
NO_DROPOUT = {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "classifier_dropout": 0.0,
    "classifier_dropout_prob": 0.0,
    "dropout": 0.0,
    "activation_dropout": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}


def config_of(kind: str, **options: Any) -> Any:
    """A configuration of ``transformers``."""
    return getattr(transformers, f"{kind}Config")(**options)


def small(kind: str, **options: Any) -> Any:
    """A configuration of ``transformers`` whose sizes have their usual names, in small."""
    return config_of(kind, **(SIZES | NO_DROPOUT | options))


def hugging_face(
    config: Callable[[], Any],
    head: str,
    batch: Callable[[], Batch],
    *,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Workload:
    """The workload of a model of ``transformers`` with its own loss."""

    def model() -> nn.Module:
        made: nn.Module = getattr(transformers, head)(config())
        return made.to(dtype)

    return sgd(model, batch, **options)


def causal(
    kind: str,
    *,
    head: str = "",
    batch: Callable[[], Batch] = causal_batch,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Workload:
    """A causal language model."""  # fmt: skip
    return hugging_face(lambda: small(kind, **options), head or f"{kind}ForCausalLM", batch,
                        dtype=dtype)  # fmt: skip


GPT2 = {
    **NO_DROPOUT, "vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2,
    "n_positions": 32, "initializer_range": 0.2, "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
MIXTRAL: dict[str, Any] = {
    "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2,
    "dtype": torch.float32,
}  # fmt: skip


@family("gpt2_classifier", is_quick=True)
def gpt2_classifier() -> Workload:
    """GPT-2 that classifies each sequence by its last token that is no padding."""

    def batch() -> Batch:
        mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
        mask[2:4, 4:] = 0
        words = torch.where(mask > 0, tokens(), PADDING)
        wanted = torch.randint(0, 3, (BATCH,))
        return {"input_ids": words, "attention_mask": mask, "labels": wanted}

    return hugging_face(
        lambda: config_of("GPT2", **GPT2, num_labels=3, pad_token_id=PADDING),
        "GPT2ForSequenceClassification",
        batch,
    )


def seq2seq_batch() -> Batch:
    """Sources and labels; decoder inputs are the labels shifted by the model."""
    return {"input_ids": tokens(), "labels": labels_of(5)}


ENCODER_DECODER = {
    "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32, "max_position_embeddings": 32, "dropout": 0.0,
    "attention_dropout": 0.0, "activation_dropout": 0.0, "init_std": 0.2, "pad_token_id": 1,
    "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 3, "forced_eos_token_id": 3,
}  # fmt: skip


def classes_batch(classes: int, *shape: int) -> Batch:
    """Tokens, and a class of each sequence or of each place."""
    return {"input_ids": tokens(), "labels": torch.randint(0, classes, (BATCH, *shape))}


@family("electra")
def electra() -> Workload:
    """ELECTRA's discriminator: which tokens were replaced."""
    return hugging_face(
        lambda: small("Electra", embedding_size=8),
        "ElectraForPreTraining",
        lambda: classes_batch(2, TOKENS),
    )


@family("distilbert_qa")
def distilbert_qa() -> Workload:
    """DistilBERT for questions: two classifications over positions."""

    def batch() -> Batch:
        ends = torch.randint(0, TOKENS, (2, BATCH))
        return {"input_ids": tokens(), "start_positions": ends[0], "end_positions": ends[1]}

    return hugging_face(lambda: small("DistilBert", dim=16, n_layers=2, n_heads=2, hidden_dim=32,
                                      qa_dropout=0.0),
                        "DistilBertForQuestionAnswering", batch)  # fmt: skip


@family("bert_classifier_dropout", is_random=True)
def bert_classifier_dropout() -> Workload:
    """BERT for classification with dropout outside attention."""
    return hugging_face(
        lambda: small("Bert", num_labels=3, hidden_dropout_prob=0.3, classifier_dropout=0.5),
        "BertForSequenceClassification",
        lambda: classes_batch(3),
    )


@trained(
    "t5_encoder_regression",
    lambda: {
        "encoder": transformers.T5EncoderModel(
            config_of("T5", vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=2,
                      num_heads=2, dropout_rate=0.0)
        ),
        "head": nn.Linear(16, 1),
    },
    lambda: (tokens(), torch.randn(BATCH)),
    tolerance=FLOAT32,
    dtype=None,
)  # fmt: skip
def t5_encoder_regression(net: Any, words: Tensor, scores: Tensor) -> Tensor:
    """A regression on a T5 encoder: squared error of the model's own head."""
    hidden = net.encoder(input_ids=words).last_hidden_state
    return ((net.head(hidden.mean(1)).squeeze(-1) - scores) ** 2).mean()


def decoder(
    name: str, says: str, kind: str, *, tolerance: float = FLOAT32, **options: Any
) -> Family:
    """A family of causal language models; options as for ``causal``."""
    return Family(name, says, lambda: causal(kind, **options), tolerance=tolerance)


def encoder(
    name: str, says: str, kind: str, *, tolerance: float = FLOAT64, **options: Any
) -> Family:
    """A family of encoders that guess words; options are those of the configuration."""
    return Family(
        name,
        says,
        lambda: hugging_face(lambda: small(kind, **options), f"{kind}ForMaskedLM", padded_batch),
        tolerance=tolerance,
    )


def translator(name: str, says: str, kind: str) -> Family:
    """A family of models that turn sequences into others."""
    return Family(
        name,
        says,
        lambda: hugging_face(
            lambda: config_of(kind, **ENCODER_DECODER),
            f"{kind}ForConditionalGeneration",
            seq2seq_batch,
        ),
    )


enter(
    Family(
        "gpt2",
        "GPT-2: tied embedding, learned positions, Conv1D instead of Linear.",
        lambda: hugging_face(lambda: config_of("GPT2", **GPT2), "GPT2LMHeadModel", causal_batch),
        is_quick=True,
    ),
    decoder(
        "llama", "Llama: rotary positions, grouped-query attention, gated feed-forward.", "Llama",
        num_key_value_heads=1,
    ),
    decoder(
        "qwen2", "Qwen2 with padding: biases in attention.", "Qwen2",
        num_key_value_heads=1, batch=padded_batch,
    ),
    decoder(
        "qwen3", "Qwen3: queries and keys are normalised.", "Qwen3",
        num_key_value_heads=1, head_dim=8,
    ),
    decoder(
        "mistral", "Mistral with a sliding window.", "Mistral",
        num_key_value_heads=1, sliding_window=3,
    ),
    decoder(
        "gemma2", "Gemma 2: soft caps, norms before and after, tied embedding.", "Gemma2",
        num_key_value_heads=1, head_dim=8, sliding_window=4,
    ),
    decoder("phi", "Phi: attention and feed-forward side by side, partly rotary.", "Phi"),
    decoder(
        "opt", "OPT: positions from the cumulated attention mask.", "OPT",
        ffn_dim=32, word_embed_proj_dim=16, batch=padded_batch, tolerance=FLOAT64,
    ),
    decoder(
        "bloom", "BLOOM: linear biases of distance instead of positions.", "Bloom",
        n_layer=2, n_head=2, tolerance=FLOAT64,
    ),
    decoder("gpt_neox", "GPT-NeoX: parallel residual.", "GPTNeoX"),
    decoder(
        "gptj", "GPT-J: rotary positions in pairs.", "GPTJ",
        n_embd=16, n_layer=2, n_head=2, n_positions=32, rotary_dim=4,
    ),
    decoder("falcon", "Falcon: one key and value for all heads.", "Falcon"),
    decoder("olmo2", "OLMo 2: norms after attention and feed-forward.", "Olmo2"),
    decoder("stablelm", "StableLM.", "StableLm", num_key_value_heads=1),
    decoder("mixtral", "Mixtral: sparse experts, picked by value.", "Mixtral", **MIXTRAL),
    decoder(
        "mixtral_grouped",
        "Mixtral with experts by grouped matrix products, in single precision.", "Mixtral",
        **MIXTRAL, experts_implementation="grouped_mm",
    ),
    decoder(
        "qwen2_moe_dense",
        "Qwen2-MoE with shared experts, every expert by batched products.", "Qwen2Moe",
        num_key_value_heads=1, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, experts_implementation="batched_mm",
        dtype=torch.float32,
    ),
    decoder(
        "mamba", "Mamba: a selective state space, scanned token by token.", "Mamba",
        state_size=4, time_step_rank=4, use_mambapy=False,
    ),
    Family(
        "llama_bf16",
        "Llama with weights in bf16; steps are large, or rounding would be all there is to see.",
        lambda: hugging_face(
            lambda: small("Llama", num_key_value_heads=1), "LlamaForCausalLM", causal_batch,
            dtype=torch.bfloat16, optimizer_options={"lr": 0.5},
        ),
        tolerance=BFLOAT16,
    ),
    Family(
        "t5",
        "T5: relative positions shared by the layers, tied embeddings.",
        lambda: hugging_face(
            lambda: config_of(
                "T5", vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=2,
                num_heads=2, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0,
                eos_token_id=1,
            ),
            "T5ForConditionalGeneration",
            seq2seq_batch,
        ),
        tolerance=FLOAT32,
    ),
    translator("bart", "BART: one embedding for encoder, decoder and head.", "Bart"),
    translator("pegasus", "Pegasus: fixed positions.", "Pegasus"),
    encoder("bert_mlm", "BERT, masked language model: tied head.", "Bert"),
    encoder(
        "roberta_mlm", "RoBERTa: positions from the tokens that are not padding.", "Roberta"
    ),
    encoder(
        "deberta_v2", "DeBERTa: content and position attend to each other.", "DebertaV2",
        relative_attention=True, position_buckets=4, max_relative_positions=8,
        pos_att_type=["p2c", "c2p"], norm_rel_ebd="layer_norm", share_att_key=True,
        tolerance=FLOAT32,
    ),
    encoder(
        "modernbert",
        "ModernBERT: local and global attention, masks made by ``where``.", "ModernBert",
        local_attention=4, global_attn_every_n_layers=2, cls_token_id=2, sep_token_id=3,
        mlp_dropout=0.0, embedding_dropout=0.0, tolerance=FLOAT32,
    ),
    encoder("albert", "ALBERT: all layers share their weights.", "Albert", embedding_size=8),
    Family(
        "xlnet",
        "XLNet: two-stream relative attention.",
        lambda: hugging_face(
            lambda: config_of(
                "XLNet", vocab_size=VOCABULARY, d_model=16, n_layer=2, n_head=2, d_inner=32,
                dropout=0.0, summary_last_dropout=0.0, initializer_range=0.2,
            ),
            "XLNetLMHeadModel",
            causal_batch,
        ),
        tolerance=FLOAT32,
    ),
)  # fmt: skip
