"""Ops on some words of a vocabulary: look-ups, and cross entropies that a team adds up.

A member of a team has some columns of the logits, and all of their rows. What it adds to the sum
over its team (``row_sums``), and what follows from that sum (``with_row_sums``):

    log-softmax             logarithm of its exponentials' sum, in a slot of its own
    gradient of that        sum of its gradient
    choice of wanted words  its part of the loss, and the number of labels among its words

(Megatron-LM's ``vocab_parallel_cross_entropy``, Shoeybi et al. 2019, section 3.)
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from heterog.graph.placement import OpCall
from heterog.graph.sharding_rules.table import dimension, positions

_LOG_SOFTMAX = "_log_softmax.default"
_CHOICES = ("nll_loss_forward.default", "nll_loss2d_forward.default")
_OF_NO_WORD = -100
_MEAN, _SUM = 1, 2


def look_up_own_words(
    call: OpCall,
    run: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    inputs: Sequence[Tensor],
    first: int,
) -> list[Tensor]:
    """Look words up in some rows of a table, with zeros for words of other rows.

    Args:
        call: The op.
        run: Its kernel.
        inputs: Tensor inputs of the op: those rows, and words of the whole table.
        first: Number of the first row.
    """
    table, words = positions(call, "weight", "indices")
    own = inputs[words] - first
    elsewhere = (own < 0) | (own >= len(inputs[table]))
    given = list(inputs)
    given[words] = own.masked_fill(elsewhere, 0)
    if not len(inputs[table]):
        given[table] = inputs[table].new_zeros(1, inputs[table].shape[1])
    return [found.masked_fill(elsewhere.unsqueeze(-1), 0.0) for found in run(given)]


def on_own_columns(
    call: OpCall,
    run: Callable[[Sequence[Tensor], Mapping[str, Any]], Sequence[Tensor]],
    inputs: Sequence[Tensor],
    first: int,
) -> list[Tensor]:
    """Run an op of a cross entropy on some columns; labels of other columns do not count there.

    Args:
        call: The op.
        run: Its kernel, with arguments instead of its own.
        inputs: Tensor inputs of the op: columns, and labels among all of them.
        first: Number of the first column.
    """
    if not (target := positions(call, "target")):
        return list(run(inputs, {}))
    (columns,) = positions(call, "self")
    labels = inputs[target[0]]
    own = labels - first
    elsewhere = (own < 0) | (own >= inputs[columns].shape[1])
    elsewhere |= labels == call.args["ignore_index"]
    given = list(inputs)
    given[target[0]] = own.masked_fill(elsewhere, _OF_NO_WORD)
    instead: dict[str, Any] = {"ignore_index": _OF_NO_WORD}
    if call.kind in _CHOICES:
        instead["reduction"] = _SUM
    return list(run(given, instead))


def row_sums(
    call: OpCall, inputs: Sequence[Tensor], outputs: Sequence[Tensor], slot: tuple[int, int]
) -> Tensor | None:
    """What a member adds to the sum over its team; ``None`` if its columns are all that it needs.

    Args:
        call: The op.
        inputs: Tensor inputs of the op, of this member.
        outputs: Its outputs on them.
        slot: Number of this member, and of members.
    """
    if call.kind == _LOG_SOFTMAX:
        own = torch.logsumexp(_wide(inputs[0]), _along(call), keepdim=True)
        slots = own.new_zeros(slot[1], *own.shape)
        slots[slot[0]] = own
        return slots
    if call.kind in _CHOICES:
        return torch.stack([_wide(output) for output in outputs])
    if "target" in call.args:
        return None
    (gradient,) = positions(call, "grad_output")
    return _wide(inputs[gradient]).sum(_along(call), keepdim=True)


def with_row_sums(
    call: OpCall, inputs: Sequence[Tensor], outputs: Sequence[Tensor], total: Tensor,
    *, is_mean: bool,
) -> list[Tensor]:  # fmt: skip
    """The op's outputs, given the sum over the team.

    Args:
        call: The op.
        inputs: Tensor inputs of the op, of this member.
        outputs: Its outputs on them.
        total: The sum of all members' ``row_sums``.
        is_mean: Whether a loss is divided by the number of labels here.
    """
    if call.kind in _CHOICES:
        loss, weight = total.unbind()
        if is_mean and call.args["reduction"] == _MEAN:
            loss = loss / weight
        return [loss.to(outputs[0].dtype), weight.to(outputs[1].dtype)]
    if call.kind == _LOG_SOFTMAX:
        return [(_wide(inputs[0]) - torch.logsumexp(total, 0)).to(outputs[0].dtype)]
    gradient, shares = positions(call, "grad_output", "output")
    made = _wide(inputs[gradient]) - _wide(inputs[shares]).exp() * total
    return [made.to(outputs[0].dtype)]


def _along(call: OpCall) -> int:
    return dimension(call, "dim", len(call.inputs[0].shape), default=-1)


def _wide(tensor: Tensor) -> Tensor:
    """In float32 at least: a row has many words."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
