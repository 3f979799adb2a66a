"""Blocks of a model that train by losses of their own, so that no gradient crosses a boundary.

Parallel training with local updates (Laskin et al., "Parallel Training of Deep Networks with Local
Updates", 2020, arXiv 2012.03837) cuts the backward pass at boundaries between blocks of layers.
Each block but the last has a *head* that makes a prediction from the block's output, and follows
the loss of that prediction alone. A stage of a pipeline then never waits for gradients of the next
one, and only activations travel: of K equal blocks with m micro-batches, forward f, backward b and
heads of h, a step takes (K - 1) f + m (f + b + h) instead of (m + K - 1) (f + b).

This is other mathematics than training the whole model: it is a model of its own, which planning,
simulation and execution treat as any other. The numbers equal those of one device that trains the
same blocks.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from torch import Tensor, nn

from heterog.errors import HeterogError

Loss = Callable[[Any, Tensor], Tensor]


def local_blocks(
    model: nn.Module,
    boundaries: Sequence[str],
    *,
    head: Callable[[str], nn.Module],
    loss: Loss,
    returns_loss: bool = False,
) -> "LocalBlocks":
    """Cut a model into blocks that train by losses of their own.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> blocks = local_blocks(
    ...     net, ["1"], head=lambda name: nn.Linear(8, 2), loss=nn.functional.mse_loss
    ... )
    >>> blocks(torch.zeros(3, 4), torch.zeros(3, 2)).shape
    torch.Size([])

    Args:
        model: Any module, which is not changed for other uses.
        boundaries: Names of submodules, in the order in which they run. The output of each ends a
            block. Everything that later blocks read of the model has to go through it.
        head: Function that makes the module that predicts from a boundary's output, by name. It
            may return the same module for several.
        loss: ``loss(prediction, target) -> scalar``, of the heads and of the model itself.
        returns_loss: Whether the model computes its own loss from the whole batch (a scalar, or an
            object with ``.loss``), as in ``transformers``; ``loss`` is then of heads only.

    Returns:
        A module that is called with the whole batch, ``(*inputs, target)`` or a dict with the key
        ``"labels"``, and returns the sum of all losses: ``Workload(blocks, batch, None, ...)``.

    Raises:
        HeterogError: a boundary is no submodule of the model, or named twice.
    """
    known = dict(model.named_modules())
    for name in boundaries:
        if not name or name not in known:
            near = ", ".join(each for each in known if each)[:300]
            raise HeterogError(f"'{name}' is no submodule of the model; there are {near}.")
    if len(set(boundaries)) != len(boundaries):
        raise HeterogError(f"boundaries {list(boundaries)} name a submodule twice.")
    return LocalBlocks(model, boundaries, head, loss, returns_loss)


class LocalBlocks(nn.Module):
    """A model in blocks; see ``local_blocks``.

    Attributes:
        model: Model that is cut; its parameters are the same objects.
        heads: One for each boundary, by its name with underscores for dots.
    """

    def __init__(
        self,
        model: nn.Module,
        boundaries: Sequence[str],
        head: Callable[[str], nn.Module],
        loss: Loss,
        returns_loss: bool,
    ) -> None:
        super().__init__()
        self.model = model
        self.heads = nn.ModuleDict({_key(name): head(name) for name in boundaries})
        self._boundaries = tuple(boundaries)
        self._loss = loss
        self._returns_loss = returns_loss
        self._step: _Step | None = None
        self._is_checked = False
        for name in boundaries:
            model.get_submodule(name).register_forward_hook(self._end_block(name))

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """The sum of the losses of all blocks.

        Raises:
            HeterogError: a boundary was not reached, was reached twice or in another order, or a
                gradient passes beside it.
        """
        target = named["labels"] if named else inputs[-1]
        self._step = step = _Step(target)
        try:
            if self._returns_loss:
                made = self.model(*inputs, **named)
                last = made if isinstance(made, Tensor) else made.loss
            else:
                given = {key: value for key, value in named.items() if key != "labels"}
                last = self._loss(self.model(*(inputs if named else inputs[:-1]), **given), target)
        finally:
            self._step = None
        if tuple(step.names) != self._boundaries:
            raise HeterogError(
                f"boundaries {list(self._boundaries)} were reached as {step.names}; name each one "
                "that the model calls once, in the order in which it calls them."
            )
        losses = [*step.losses, last]
        if not self._is_checked:
            self._check(step, losses)
            self._is_checked = True
        return reduce(operator.add, losses)

    def _end_block(self, name: str) -> Callable[[nn.Module, Any, Any], Any]:
        """Hook that runs when a boundary's module is done, while a step of ours runs."""

        def end(module: nn.Module, inputs: Any, output: Any) -> Any:
            step = self._step
            if step is None:
                return output
            made = output if isinstance(output, Tensor) else output[0]
            step.names.append(name)
            step.ends.append(made)
            step.losses.append(self._loss(self.heads[_key(name)](made), step.target))
            if isinstance(output, Tensor):
                return output.detach()
            return tuple(each.detach() if isinstance(each, Tensor) else each for each in output)

        return end

    def _check(self, step: "_Step", losses: Sequence[Tensor]) -> None:
        """Refuse a model in which gradients of a later block reach an earlier one."""
        for block, end in enumerate(step.ends):
            before = set(_graph(end))
            for later in losses[block + 1 :]:
                if any(node in before for node in _graph(later)):
                    raise HeterogError(
                        f"something passes beside boundary '{step.names[block]}': a later loss "
                        "has gradients for what lies before it. Choose boundaries that all of the "
                        "model goes through (no skip connection around them)."
                    )


@dataclass
class _Step:
    """State of one forward pass.

    Attributes:
        target: Target of all losses.
        names: Names of boundaries that were reached.
        ends: Outputs of their modules, with their history.
        losses: Losses of their heads.
    """

    target: Tensor
    names: list[str] = field(default_factory=list)
    ends: list[Tensor] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)


def _graph(tensor: Tensor) -> Iterator[Any]:
    """Backward functions that a gradient of a tensor passes, without those of leaves.

    Leaves are left out because a parameter that blocks share (an embedding tied to heads) is no
    path between them.
    """
    waiting, seen = [tensor.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or hasattr(node, "variable"):
            continue
        seen.add(node)
        yield node
        waiting += [function for function, _ in node.next_functions]


def _key(name: str) -> str:
    return name.replace(".", "_")
