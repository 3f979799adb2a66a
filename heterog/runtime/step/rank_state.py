"""What a rank runs a program with, as one value."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from heterog.runtime.step.collectives import Communicator
from heterog.runtime.step.local_op import LocalOp
from heterog.runtime.step.rank_program import RankProgram
from heterog.runtime.step.slices import Slices
from heterog.runtime.step.special_ops import RandomStream

if TYPE_CHECKING:
    from heterog.runtime.step.optimizer import Masters

Push = Callable[[Sequence[int], Sequence[Tensor]], None]
"""Takes the gradients of some rows of ``graph.updates``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankState:
    """What a rank runs a program with.

    Attributes:
        part: The program as this rank sees it.
        ops: Local op of every index, see ``local_ops``.
        communicator: Communicator with process groups of every device set in the program.
        parameters: Parameters of this rank, by tensor id.
        buffers: Buffers and constants of the model, by tensor id.
        slices: Slices of parameters that this rank owns.
        optimizer: Optimizer of the parameters that this rank updates.
        masters: The optimizer's copies of the tensors that it steps.
        push: Takes gradients for a server's optimizer; ``None`` if the optimizer steps here.
        random: Random numbers of ops.
        device: Device on which this rank computes; all given tensors are there.
    """

    part: RankProgram
    ops: Mapping[int, LocalOp]
    communicator: Communicator
    parameters: Mapping[int, nn.Parameter]
    buffers: Mapping[int, Tensor]
    slices: Slices
    optimizer: torch.optim.Optimizer
    masters: "Masters"
    random: RandomStream
    device: torch.device
    push: Push | None = None
