"""Ops on some words of a vocabulary: look-ups, and cross entropies that a team shares.

A member of a team has some columns of the logits, and all of their rows. Log-softmax and its
gradient need a number of each row (``numbers_of_rows``); members gather these, and make their
columns with the numbers of all (``completed``). Labels among other members' words add nothing to
the loss here, which is a part of a sum (Megatron-LM's vocab_parallel_cross_entropy, Shoeybi et
al. 2019, section 3).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from heterog.graph.placement import OpCall
from heterog.graph.sharding_rules.reduction import LABEL_COUNTING_LOSSES, MEAN, SUM
from heterog.graph.sharding_rules.table import dimension, integer, positions

_OF_NO_WORD = -100

Run = Callable[[Sequence[Tensor], Mapping[str, Any]], Sequence[Tensor]]
"""Runs an op's kernel on inputs, with some arguments instead of its own."""


def on_own_words(
    call: OpCall, run: Run, inputs: Sequence[Tensor], words: range, *, is_mean: bool = True
) -> list[Tensor]:
    """Run a look-up, or the choice of the labels' logits, on some words.

    Args:
        call: The op.
        run: Its kernel.
        inputs: Tensor inputs of the op: what it has of those words, and words among all.
        words: The words.
        is_mean: Whether a mean is divided by the weight of the labels here.
    """
    if "target" in call.args:
        return _choose_own_words(call, run, inputs, words, is_mean)
    if "index" in call.args:
        return _of_own_columns(call, run, inputs, words)
    table, wanted = positions(call, "weight", "indices")
    own = inputs[wanted] - words.start
    elsewhere = (own < 0) | (own >= len(words))
    given = list(inputs)
    given[wanted] = own.masked_fill(elsewhere, 0)
    if not len(inputs[table]):
        given[table] = inputs[table].new_zeros(1, inputs[table].shape[1])
    return [found.masked_fill(elsewhere.unsqueeze(-1), 0.0) for found in run(given, {})]


def _of_own_columns(
    call: OpCall, run: Run, inputs: Sequence[Tensor], words: range
) -> list[Tensor]:
    """Elements that an index names in some columns, or sums that it adds to them."""
    (columns,), (wanted,) = positions(call, "self"), positions(call, "index")
    added = positions(call, "src")
    if not len(words):
        return [inputs[columns] if added else inputs[columns].new_zeros(inputs[wanted].shape)]
    own = inputs[wanted] - words.start
    elsewhere = (own < 0) | (own >= len(words))
    given = list(inputs)
    given[wanted] = own.masked_fill(elsewhere, 0)
    for source in added:
        given[source] = inputs[source].masked_fill(elsewhere, 0.0)
    return [made if added else made.masked_fill(elsewhere, 0.0) for made in run(given, {})]


def _choose_own_words(
    call: OpCall, run: Run, inputs: Sequence[Tensor], words: range, is_mean: bool
) -> list[Tensor]:
    """The labels' part of a loss, or the gradient of that; the weight of all labels is whole."""
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
    total = _label_weight(call, inputs, loss)
    return [loss / total if is_mean and reduction == MEAN else loss, total]


def _label_weight(call: OpCall, inputs: Sequence[Tensor], like: Tensor) -> Tensor:
    """Weight of all labels that count."""
    (target,) = positions(call, "target")
    counts = torch.ne(inputs[target], integer(call, "ignore_index"))
    total = counts
    for weight in positions(call, "weight"):
        total = inputs[weight][inputs[target].where(counts, 0)] * counts
    return total.sum().to(like.dtype)


def numbers_of_rows(call: OpCall, inputs: Sequence[Tensor]) -> Tensor:
    """The number of each row that a member finds in its columns.

    Args:
        call: The op.
        inputs: Its tensor inputs, of this member.
    """
    along, columns = _along(call), _wide(inputs[0])
    if len(inputs) > 1:
        return columns.sum(along, keepdim=True)
    return torch.logsumexp(columns, along, keepdim=True)


def completed(call: OpCall, inputs: Sequence[Tensor], numbers: Sequence[Tensor]) -> Tensor:
    """A member's columns of an op's output.

    Args:
        call: The op.
        inputs: Its tensor inputs, of this member.
        numbers: What each member has found.
    """
    columns, of_all = _wide(inputs[0]), torch.stack(list(numbers))
    if len(inputs) > 1:
        made = columns - _wide(inputs[1]).exp() * of_all.sum(0)
    else:
        made = columns - torch.logsumexp(of_all, 0)
    dtype: torch.dtype = getattr(torch, call.outputs[0].dtype)
    return made.to(dtype).contiguous()  # as the kernel's, whatever lay along the columns


def _along(call: OpCall) -> int:
    return dimension(call, "dim", len(call.inputs[0].shape), default=-1)


def _wide(tensor: Tensor) -> Tensor:
    """In float32 at least: a row has many words."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
