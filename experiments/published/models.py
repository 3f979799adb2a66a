"""Models of published training runs as they are captured: GPT-2 in any size, OPT and GPT-Neo.

Attention is written out (no flash kernel), Sailor's with its mask filled in place as in its
sources, and the loss sums over the vocabulary so that no logits have to be gathered, as in
Megatron-LM.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from heterog.graph.capture import capture
from heterog.graph.op_graph import OpGraph
from heterog.graph.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is captured: sizes, which library's model it is, and whether kernels are fused.

    ``fuses_softmax`` matters to fused kernels alone: whether scale, mask and softmax are one.
    """

    family: str
    hidden: int
    heads: int
    layers: int
    sequence: int
    vocabulary: int
    dtype: str
    is_tied: bool
    is_fused: bool = False
    fuses_softmax: bool = True


def summed_loss(output: Any, labels: Tensor) -> Tensor:
    """Cross-entropy by sums over the vocabulary, which teams that split it can add up.

    The largest logit is not subtracted first, because the graph is captured, never run.
    """
    logits: Tensor = output.logits.float()
    is_wanted = labels.unsqueeze(-1) == torch.arange(logits.shape[-1])
    wanted = (logits * is_wanted).sum(-1)
    return (logits.exp().sum(-1).log() - wanted).mean()


class _InPlace(torch.autograd.Function):
    """Cross-entropy in Megatron's few passes: one over the exponentials forward, one backward.

    The wanted logits, one of each row, are left out. It is priced, never run.
    """

    @staticmethod
    def forward(context: Any, logits: Tensor) -> Tensor:
        exponentials = logits.float().exp()
        sums = exponentials.sum(-1, keepdim=True)
        context.save_for_backward(exponentials, sums)
        context.dtype = logits.dtype
        return sums.log().mean()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        exponentials, sums = context.saved_tensors
        return (exponentials * (gradient / sums / sums.numel())).to(context.dtype)


def fused_loss(output: Any, labels: Tensor) -> Tensor:
    """Cross-entropy whose kernels work in place."""
    del labels
    apply: Any = _InPlace.apply
    return apply(output.logits)


def written_out(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Causal attention by two products and a softmax, [batch, heads, tokens, width] each.

    It has one mask for all samples; for its own ``"eager"`` the library makes one for each sample
    of the whole batch.
    """
    del module, attention_mask, dropout, others
    length = query.shape[-2]
    later = torch.full((length, length), -1e4, dtype=query.dtype).triu(1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    weights = ((query @ key.transpose(2, 3)) * scale + later).softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def fused_softmax(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *others: Any, **more: Any
) -> tuple[Tensor, Tensor]:
    """Attention whose softmax scales and masks in the same kernel: neither is an op of its own.

    It is priced, never run.
    """
    del others, more
    weights = (query @ key.transpose(2, 3)).softmax(-1)
    weights = functional.dropout(weights, _DROPOUT, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class _MaskedOnAView(torch.autograd.Function):
    """Scores masked in place where they are a view, with the cost of that in autograd.

    Filling a view in place records ``CopySlices`` and ``AsStridedBackward0``. In the backward pass
    the gradient is written into zeros, copied, cloned, masked in another clone, and copied back:
    13 reads and writes of the scores in seven kernels, where masking not in place takes four in
    two (``masked_fill`` is a clone and a fill). Five clones and a masking cost as much, but for
    one write of zeros. It is priced, never run.
    """

    @staticmethod
    def forward(context: Any, scores: Tensor, later: Tensor) -> Tensor:
        context.save_for_backward(later)
        return scores.masked_fill(later, -1e4)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (later,) = context.saved_tensors
        for _ in range(_COPIES_OF_SLICES):
            gradient = gradient.clone()
        return gradient.masked_fill(later, 0.0), None


_COPIES_OF_SLICES = 5


def masked_in_place(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *others: Any, **more: Any
) -> tuple[Tensor, Tensor]:
    """Attention as Megatron does it in float32, where it has no fused softmax.

    One product makes scaled scores, and a view of them is masked in place. There is no dropout,
    because Sailor's counts of memory have no mask of it. It is priced, never run.
    """
    del module, others, more
    length, width = query.shape[-2:]
    later = torch.ones((length, length), dtype=torch.bool).triu(1)
    scores = (query * width**-0.5) @ key.transpose(2, 3)
    apply: Any = _MaskedOnAView.apply
    weights: Tensor = apply(scores, later).softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def softmax_of_torch(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *others: Any, **more: Any
) -> tuple[Tensor, Tensor]:
    """Attention as Megatron does it where its fused softmax does not apply: in float32, by ops.

    With one mask for all samples. It is priced, never run.
    """
    del others, more
    length = query.shape[-2]
    later = torch.ones((length, length), dtype=torch.bool).triu(1)
    scores = (query @ key.transpose(2, 3)).float() * query.shape[-1] ** -0.5
    weights = scores.masked_fill(later, -1e4).softmax(-1).to(query.dtype)
    weights = functional.dropout(weights, _DROPOUT, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


_DROPOUT = 0.1
_GELU = {False: "gelu_new", True: "gelu_pytorch_tanh"}
"""Written out as ops, or one kernel."""


def make_model(model: Model) -> nn.Module:
    """The library's GPT-2 in the sizes of a model, without weights of its own.

    Also for OPT and GPT-Neo, as Megatron-DeepSpeed ran them: queries, keys and values in one
    product. OPT has ReLU, two rows of positions more and (OPT-350M) no last norm.
    """
    attention = _attention(model)
    transformers.AttentionInterface.register(attention.__name__, attention)
    is_opt = model.family == "opt"
    config: Any = transformers.GPT2Config
    config = config(
        vocab_size=model.vocabulary,
        n_positions=model.sequence + 2 * is_opt,
        n_embd=model.hidden,
        n_layer=model.layers,
        n_head=model.heads,
        activation_function="relu" if is_opt else _GELU[model.is_fused],
        resid_pdrop=_DROPOUT * model.is_fused,
        embd_pdrop=_DROPOUT * model.is_fused,
        attn_pdrop=0.0,
        attn_implementation=attention.__name__,
        use_cache=False,
        tie_word_embeddings=model.is_tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    made: Any = transformers.GPT2LMHeadModel(config)
    if is_opt:
        made.transformer.ln_f = nn.Identity()
    return made.to(getattr(torch, model.dtype))


def _attention(model: Model) -> Any:
    if model.family != "gpt":
        return masked_in_place
    if not model.is_fused:
        return written_out
    return fused_softmax if model.fuses_softmax else softmax_of_torch


@lru_cache(maxsize=4)
def graph_of(model: Model, batch: int) -> OpGraph:
    """One captured training step."""
    tokens = {name: torch.zeros(batch, model.sequence, dtype=torch.int64) for name in _INPUTS}
    return capture(
        Workload(
            model=lambda: make_model(model),
            example_batch=tokens,
            loss=fused_loss if model.is_fused else summed_loss,
            optimizer=torch.optim.Adam,
            # As Megatron and DeepSpeed update models of 16 bits.
            master_dtype=None if model.dtype == "float32" else torch.float32,
            name=f"{model.family}_{model.hidden}x{model.layers}",
        )
    )


_INPUTS = ("input_ids", "labels")
