"""The program that runs steps, as far as predictions depend on it."""

from enum import StrEnum


class Sends(StrEnum):
    """Whether the executing program computes while its messages are being sent."""

    OVERLAPPED = "overlapped"
    """It computes meanwhile: heterog's own runtime."""
    BLOCKING = "blocking"
    """It waits until activations and their gradients are sent: Megatron-LM's 1F1B."""


class Execution(StrEnum):
    """The program that runs steps, on which the time of kernels depends."""

    EAGER = "eager"
    """PyTorch op by op, as in heterog's own runtime and in FSDP."""
    MEGATRON = "megatron"
    """Megatron-LM under DeepSpeed, of 2022, whose host takes longer."""
    COMPILED = "compiled"
    """PyTorch with ``torch.compile``: inductor makes one kernel of several ops."""


class Tf32(StrEnum):
    """Which products of float32 the program makes with TF32, where the hardware has it."""

    NONE = "none"
    """None: ``torch.backends.cudnn.allow_tf32 = False``."""
    CONVOLUTIONS = "convolutions"
    """Convolutions, as PyTorch does by default."""
    EVERYTHING = "everything"
    """Matrix products too: ``torch.backends.cuda.matmul.allow_tf32 = True``."""
