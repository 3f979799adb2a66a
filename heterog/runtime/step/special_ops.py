"""Ops that run differently on a part: words, attention, causal rows, random numbers.

**Words**: look-ups, and cross entropies that a team shares. A member of a team has some columns of
the logits, and all of their rows. Log-softmax and its gradient need one number per row
(``numbers_of_rows``); members gather these numbers, and each makes its columns from all of them
(``completed``). A member's loss is a part of a sum, to which labels among other members' words add
nothing (Megatron-LM's vocab_parallel_cross_entropy, Shoeybi et al. 2019, section 3).

**Fused attention** on devices other than that of the capture: the graph holds one canonical pair
of ops, with the arguments of the CPU's kernels. FlashAttention's kernels on GPUs keep what the
CPU's keep and are called themselves. Others keep other tensors for the backward pass, so there the
backward op runs the forward pass again under autograd: right on every device, at the cost of one
more forward pass.

**Causal rows**: causal attention of the queries in one device's part of a sequence. The queries
``[first, first + n)`` see all keys before ``first``; of the next ``n`` keys each query sees those
up to its own. So two calls of the captured kernel suffice, one without a mask and one causal, and
no mask tensor is made. The kernel also returns the logarithms of the sums of exponents, which
weight the two outputs; given their combination, the backward kernel finds each part's gradients
alone (the two identities of ring attention, Liu et al. 2023). Keys behind the last query are never
read: early positions cost less. Kernels of other devices return other tensors. There one call
suffices, with a mask that ends at the last query; torch's fused kernels know this kind of mask
without a mask tensor.

**Random numbers** of ops on several ranks (dropout masks, noise): every op of every step gets a
seed made from its identity. So a run with the same seed repeats, whatever the order of its ops,
and resuming needs only the number of the step. The default generator, from which the user's own
code draws, is not changed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from heterog.graph.placement import OpCall
from heterog.graph.sharding_rules.reduction import LABEL_COUNTING_LOSSES, MEAN, SUM
from heterog.graph.sharding_rules.table import dimension, integer, positions
from heterog.runtime.accelerators import default_generator, has_flash_attention

_OF_NO_WORD = -100  # for labels among other members' words, which the call then ignores

Run = Callable[[Sequence[Tensor], Mapping[str, Any]], Sequence[Tensor]]
"""Runs an op's kernel on inputs, with some arguments instead of its own."""


def on_own_words(
    call: OpCall, run: Run, inputs: Sequence[Tensor], words: range, *, is_mean: bool = True
) -> list[Tensor]:
    """Run a look-up, or the choice of the labels' logits, on some words.

    Args:
        call: The op.
        run: Its kernel.
        inputs: Tensor inputs of the op: columns or rows of these words, and ids of any words.
        words: The words of this member.
        is_mean: Whether a mean is divided by the weight of the local labels.
    """
    if "target" in call.args:
        return _choose_own_words(call, run, inputs, words, is_mean)
    if "index" in call.args:
        return _of_own_columns(call, run, inputs, words)
    table, wanted = positions(call, "weight", "indices")
    given, elsewhere = _among(words, inputs, wanted)
    if not len(inputs[table]):
        given[table] = inputs[table].new_zeros(1, inputs[table].shape[1])
    return [found.masked_fill(elsewhere.unsqueeze(-1), 0.0) for found in run(given, {})]


def _among(words: range, inputs: Sequence[Tensor], wanted: int) -> tuple[list[Tensor], Tensor]:
    """Inputs with numbers of words counted from the first of some, and where these are others."""
    own, given = inputs[wanted] - words.start, list(inputs)
    elsewhere = (own < 0) | (own >= len(words))
    given[wanted] = own.masked_fill(elsewhere, 0)
    return given, elsewhere


def _of_own_columns(
    call: OpCall, run: Run, inputs: Sequence[Tensor], words: range
) -> list[Tensor]:
    """Elements that an index names in some columns, or sums that it adds to them."""
    (columns,), (wanted,) = positions(call, "self"), positions(call, "index")
    added = positions(call, "src")
    if not len(words):
        return [inputs[columns] if added else inputs[columns].new_zeros(inputs[wanted].shape)]
    given, elsewhere = _among(words, inputs, wanted)
    for source in added:
        given[source] = inputs[source].masked_fill(elsewhere, 0.0)
    return [made if added else made.masked_fill(elsewhere, 0.0) for made in run(given, {})]


def _choose_own_words(
    call: OpCall, run: Run, inputs: Sequence[Tensor], words: range, is_mean: bool
) -> list[Tensor]:
    """The local labels' part of a loss, or its gradient; the weight is that of all labels."""
    (target,) = positions(call, "target")
    labels, given = inputs[target], list(inputs)
    own = labels - words.start
    elsewhere = (own < 0) | (own >= len(words)) | (labels == call.args["ignore_index"])
    given[target] = own.masked_fill(elsewhere, _OF_NO_WORD)
    for weight in positions(call, "weight"):
        given[weight] = inputs[weight][words.start : words.stop]
    instead: dict[str, Any] = {"ignore_index": _OF_NO_WORD}
    reduction = call.args["reduction"]
    if call.kind not in LABEL_COUNTING_LOSSES or not reduction:
        return list(run(given, instead))
    loss, _ = run(given, instead | {"reduction": SUM})
    weights = [inputs[position] for position in positions(call, "weight")]
    total = weight_of_labels(call, labels, *weights).to(loss.dtype)
    return [loss / total if is_mean and reduction == MEAN else loss, total]


def weight_of_labels(call: OpCall, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Weight of all labels that a loss counts: their number, or the sum of their weights."""
    counts = torch.ne(labels, integer(call, "ignore_index"))
    # Not by a mask that selects elements: shapes would depend on data.
    return (counts if weights is None else weights[labels.where(counts, 0)] * counts).sum()


def numbers_of_rows(call: OpCall, inputs: Sequence[Tensor]) -> Tensor:
    """One number per row, from the columns of this member.

    Args:
        call: The op.
        inputs: Its tensor inputs, of this member.
    """
    along = dimension(call, "dim", len(call.inputs[0].shape), default=-1)
    columns = _wide(inputs[0])
    if len(inputs) > 1:
        return columns.sum(along, keepdim=True)
    return torch.logsumexp(columns, along, keepdim=True)


def completed(call: OpCall, inputs: Sequence[Tensor], numbers: Sequence[Tensor]) -> Tensor:
    """A member's columns of an op's output.

    Args:
        call: The op.
        inputs: Its tensor inputs, of this member.
        numbers: The numbers per row of each member.
    """
    columns, of_all = _wide(inputs[0]), torch.stack(list(numbers))
    if len(inputs) > 1:
        made = columns - _wide(inputs[1]).exp() * of_all.sum(0)
    else:
        made = columns - torch.logsumexp(of_all, 0)
    dtype: torch.dtype = getattr(torch, call.outputs[0].dtype)
    return made.to(dtype).contiguous()  # like the kernel's own output, for any strides of inputs


def _wide(tensor: Tensor) -> Tensor:
    """In float32 at least, as a sum over a row has many words."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _calls_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
) -> bool:
    """Whether its kernels run; the backward op, which reads what they keep, must decide alike."""
    if attn_mask is not None or dropout_p:
        return False
    return has_flash_attention(query, key, value, is_causal=is_causal)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The output, and what the backward op gets from the forward op.

    These are the logarithms of sums of exponents [B, H, S], or a placeholder of their shape, so
    that it can be split alike, where the backward op makes them again.
    """
    if _calls_flash_attention(query, key, value, attn_mask, dropout_p, is_causal):
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        output, sums, *_ = flash(query, key, value, 0.0, is_causal, False, scale=scale)
        return output, sums
    output = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale=scale,
        # Must be asked for: the CPU's kernels accept several query heads for one of keys anyway.
        enable_gqa=query.shape[-3] != key.shape[-3],
    )
    return output, query.new_zeros(query.shape[:-1], dtype=torch.float32)


def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of query, key and value."""
    if _calls_flash_attention(query, key, value, attn_mask, dropout_p, is_causal):
        unused = torch.empty(2, dtype=torch.uint64, device=query.device)  # no dropout
        backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
        lengths = None, None, query.shape[-2], key.shape[-2]
        how = 0.0, is_causal, unused, unused
        made: tuple[Tensor, ...] = backward(
            grad_out, query, key, value, out, logsumexp, *lengths, *how, scale=scale
        )
        return made
    with torch.enable_grad():
        query, key, value = (each.detach().requires_grad_() for each in (query, key, value))
        output, _ = attention(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )
        return torch.autograd.grad(output, (query, key, value), grad_out)


ATTENTION: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"attention": attention, "attention_backward": attention_backward}
)
"""Functions that run canonical ops; arguments are in the order of the CPU kernels'."""


_CAUSAL, _FULL = {"is_causal": True}, {"is_causal": False}
_ROWS = 2  # of queries, keys and values [B, H, S, D]


def on_causal_rows(call: OpCall, run: Run, inputs: Sequence[Tensor], first: int) -> list[Tensor]:
    """Run causal attention, or its backward, on some of the queries and all keys.

    Args:
        call: The op.
        run: Its kernel.
        inputs: Its tensor inputs; those that belong to queries hold only the local ones.
        first: Position of the first local query.

    Returns:
        The outputs of the op: for queries the local rows, for keys and values parts of a sum.
    """
    on_rows = _backward if "grad_out" in call.args else _forward
    return on_rows(call, run, list(inputs), first)


def on_masked_rows(call: OpCall, run: Run, inputs: Sequence[Tensor], first: int) -> list[Tensor]:
    """Like ``on_causal_rows``, with one call of a kernel that takes masks.

    Args:
        call: The op.
        run: Its kernel, which takes a mask.
        inputs: Its tensor inputs; those that belong to queries hold only the local ones.
        first: Position of the first local query.
    """
    (query,), (key,) = positions(call, "query"), positions(call, "key")
    num, rows = inputs[query].shape[_ROWS], inputs[key].shape[_ROWS]
    # Imported here, because it imports torch's compiler: a second of CPU time for every rank.
    from torch.nn.attention.bias import causal_lower_right

    seen = first + num
    masked = {"is_causal": False, "attn_mask": causal_lower_right(num, seen)}
    made = list(run(_with_keys(call, list(inputs), 0, seen), masked))
    if "grad_out" not in call.args:
        return made
    unseen = [0, 0, 0, rows - seen]
    return [made[0], *(pad(each, unseen) for each in made[1:])]


def _forward(call: OpCall, run: Run, inputs: list[Tensor], first: int) -> list[Tensor]:
    (query,) = positions(call, "query")
    own = run(_with_keys(call, inputs, first, inputs[query].shape[_ROWS]), _CAUSAL)
    if first == 0:
        return list(own)
    before = run(_with_keys(call, inputs, 0, first), _FULL)
    (out, sums), (earlier, earlier_sums) = own, before
    total = torch.logaddexp(sums, earlier_sums)
    wide = torch.promote_types(out.dtype, total.dtype)
    parts = ((out, sums), (earlier, earlier_sums))
    mixed = sum(each.to(wide) * (of - total).exp().unsqueeze(-1) for each, of in parts)
    assert isinstance(mixed, Tensor)
    return [torch.empty_like(out).copy_(mixed), total]


def _backward(call: OpCall, run: Run, inputs: list[Tensor], first: int) -> list[Tensor]:
    (query,), (key,) = positions(call, "query"), positions(call, "key")
    num, rows = inputs[query].shape[_ROWS], inputs[key].shape[_ROWS]
    of_query, of_key, of_value = run(_with_keys(call, inputs, first, num), _CAUSAL)
    if first > 0:
        earlier = run(_with_keys(call, inputs, 0, first), _FULL)
        of_query = of_query + earlier[0]
        of_key = torch.cat((earlier[1], of_key), _ROWS)
        of_value = torch.cat((earlier[2], of_value), _ROWS)
    unseen = [0, 0, 0, rows - first - num]
    return [of_query, pad(of_key, unseen), pad(of_value, unseen)]


def _with_keys(call: OpCall, inputs: list[Tensor], first: int, num: int) -> list[Tensor]:
    """The inputs with only some of the keys and values."""
    keys = positions(call, "key", "value")
    return [
        each.narrow(_ROWS, first, num) if where in keys else each
        for where, each in enumerate(inputs)
    ]


_EVERY_RANK = 0


class RandomStream:
    """Seeds for the ops of a rank.

    Args:
        seed: Seed of the run; the same on all ranks.
        device: Device on which its ops draw.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._generator = default_generator(device)

    @contextmanager
    def drawing(self, step: int, op: int, micro: int, *, rank: int | None) -> Iterator[None]:
        """Draw the random numbers of the body from the stream of one op.

        Args:
            step: Number of the step.
            op: Index of the op.
            micro: Number of the micro-batch. An op that all ranks share ignores it and draws for
                whole step.
            rank: Rank whose numbers these are; ``None`` if every rank draws the same.
        """
        own = (_EVERY_RANK, 0) if rank is None else (1 + rank, micro)
        mixed = np.random.SeedSequence((self._seed, step, op, *own)).generate_state(1, np.uint64)
        state = self._generator.get_state()
        # torch takes seeds as signed numbers of 64 bits.
        self._generator.manual_seed(int(mixed[0]) >> 1)
        try:
            yield
        finally:
            self._generator.set_state(state)
