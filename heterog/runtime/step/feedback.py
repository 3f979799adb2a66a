"""Error feedback: what a codec leaves out of a gradient is added to the next one.

So is what it leaves out of the changes that an island sends when parameters are averaged.

    m_t = encode(g_t + e_t),   e_{t+1} = g_t + e_t - decode(m_t),   e_0 = 0

(Seide et al. 2014 for one bit, Stich et al. 2018 for top-k.) Each rank keeps what its own messages
left out, in the gradient's dtype. Activations have none: their elements belong to other samples in
every step.
"""

import torch
from torch import Tensor

from heterog.modes.mode import MessageCodec

Key = tuple[int, tuple[int, ...]]
"""A bucket, or a row of ``graph.updates``, and the devices that exchange its messages."""


class ErrorFeedback:
    """Parts of gradients that this rank's messages have left out so far.

    Attributes:
        left_out: Flat tensors that were left out, by bucket or row and devices.
    """

    def __init__(self) -> None:
        self.left_out: dict[Key, Tensor] = {}

    def encode(self, key: Key, gradient: Tensor, codec: MessageCodec) -> Tensor:
        """Encode a gradient together with what earlier messages left out of it.

        Args:
            key: Key of the gradient: its bucket or row, and its devices.
            gradient: Flat gradient; it is not changed.
            codec: Codec of the message.
        """
        kept = self.left_out.get(key)
        whole = gradient if kept is None else kept.add_(gradient)
        message: Tensor = codec.encode(whole)
        if not message.is_meta:
            meant = codec.decode(message, whole.numel(), whole.dtype)
            self.left_out[key] = torch.sub(whole, meant, out=meant)
        return message
