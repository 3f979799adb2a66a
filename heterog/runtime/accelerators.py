"""The one place that knows accelerators: their names in torch, and how their ranks communicate.

Other modules ask here for a device, a stream, a clock or a generator and get torch's own for the
accelerator of this machine, or for the CPU. A new kind of accelerator is a row of ``_KNOWN``,
because torch's module of each kind (``torch.get_device_module``) has the same functions. In torch
ROCm's GPUs are CUDA devices, and RCCL is NCCL.
"""

import ctypes
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from heterog.cluster import Cluster
from heterog.cluster.schema import is_cpu
from heterog.errors import HeterogError

CPU = torch.device("cpu")
CPU_BACKEND = "gloo"
"""Backend of ``torch.distributed`` for tensors in the memory of a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """A kind of accelerator.

    Attributes:
        device_type: Torch's name for it.
        backend: Backend of ``torch.distributed`` for tensors in its memory.
        visible_devices: Environment variables that limit which of them a process sees.
    """

    device_type: str
    backend: str
    visible_devices: tuple[str, ...]

    @property
    def module(self) -> Any:
        """Torch's module for it, for example ``torch.cuda``."""
        return torch.get_device_module(self.device_type)


_KNOWN = (
    Accelerator(
        device_type="cuda",
        backend="nccl",
        visible_devices=("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    ),
    Accelerator(device_type="xpu", backend="xccl", visible_devices=("ZE_AFFINITY_MASK",)),
)
_CPU_INSTEAD = frozenset({"mps"})
"""Accelerators without a backend that sends from their memory: ranks use the CPU instead."""
_WIDEST_HEAD = 128
"""Elements of a head for which FlashAttention has backward kernels on all GPUs that it runs on."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Numbers of two options in glibc's ``malloc.h``."""
_LARGEST_MMAP_THRESHOLD = 32 * 2**20
"""Bytes; the largest value that glibc accepts on 64 bits."""


def accelerator() -> Accelerator | None:
    """The accelerator of this machine; ``None`` if ranks run on its CPU.

    Raises:
        HeterogError: torch sees an accelerator of an unknown kind.
    """
    # Not torch's current accelerator: torch names the one it was built for, present or not.
    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    assert found is not None
    if found.type in _CPU_INSTEAD:
        return None
    for known in _KNOWN:
        if known.device_type == found.type:
            return known
    names = ", ".join(each.device_type for each in _KNOWN)
    raise HeterogError(
        f"PyTorch sees an accelerator '{found.type}' here, and ranks can use {names} or the CPU. "
        "Train without a PyTorch that is built for it, or add its row to "
        "heterog.runtime.accelerators."
    )


def _own() -> Accelerator:
    """The kind of accelerator of this machine, which has one."""
    known = accelerator()
    assert known is not None
    return known


def has_accelerator() -> bool:
    """Whether ranks of this machine can run on something other than its CPU."""
    return accelerator() is not None


def is_on_cpus(cluster: Cluster) -> bool:
    """Whether all devices of a cluster are processors."""
    return all(is_cpu(device.type.name) for device in cluster.devices)


def device_count() -> int:
    """Number of accelerators that this process sees."""
    return torch.accelerator.device_count() if has_accelerator() else 0


def own_device() -> torch.device:
    """This process's accelerator, or the CPU."""
    known = accelerator()
    if known is None:
        return CPU
    return torch.device(known.device_type, torch.accelerator.current_device_index())


def device_of(index: int) -> torch.device:
    """One of the accelerators of this machine."""
    return torch.device(_own().device_type, index)


def is_accelerated(where: torch.device | Tensor) -> bool:
    """Whether a device, or that of a tensor, is an accelerator: its kernels run behind a queue."""
    device = where.device if isinstance(where, Tensor) else where
    # Not merely "no CPU": rehearsals run on shapes, on torch's device "meta".
    return any(device.type == each.device_type for each in _KNOWN)


def backends(num_local_ranks: int) -> str:
    """The backends of ``torch.distributed`` for the ranks of this machine, as torch writes them.

    Tensors on accelerators have their own backend if each rank has an accelerator to itself, as
    libraries of collectives require.
    """
    known = accelerator()
    if known is None or num_local_ranks > device_count():
        return CPU_BACKEND
    return f"{CPU.type}:{CPU_BACKEND},{known.device_type}:{known.backend}"


def rank_device() -> torch.device:
    """Device on which this rank computes: its accelerator, if its process group supports that."""
    known = accelerator()
    if known is None or f"{known.device_type}:" not in dist.get_backend_config():
        return CPU
    return own_device()


def keep_freed_memory() -> None:
    """Have the C library keep freed memory, as the allocators of accelerators do.

    A step frees its gradients at its end. glibc gives the end of the heap back to the system, and
    in the next step gets it again page by page: 13 MB in each step of a perceptron of 3.8 M
    parameters, which cost a fifth of its processor time (``docs/notebook/compiled.md``). Peaks do
    not change. Other C libraries are left alone.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    library = ctypes.CDLL(None)
    library.mallopt(_TRIM_THRESHOLD, -1)  # never
    library.mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)


def wire_device() -> torch.device:
    """Device of tensors that are sent: the accelerator, if its own backend carries them."""
    known = accelerator()
    if known is None or f"{known.device_type}:{known.backend}" not in dist.get_backend_config():
        return CPU
    return own_device()


def from_every_rank(own: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """A tensor of every rank, by rank; all of them have one shape. All ranks call it.

    Args:
        own: This rank's tensor.
        group: A group of all ranks; by default their first.
    """
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own, group)
    return every


def synchronize(device: torch.device) -> None:
    """Wait for everything that was issued to a device."""
    if is_accelerated(device):
        torch.accelerator.synchronize(device)


def queue_mark(device: torch.device) -> Any:
    """Record an event in an accelerator's queue; ``elapsed_time`` of a later one is in ms."""
    module = torch.get_device_module(device)
    event = module.Event(enable_timing=True)
    event.record(module.current_stream())
    return event


def has_flash_attention(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> bool:
    """Whether torch would choose FlashAttention for these [B, H, S, D], forward and backward."""
    if query.device.type != "cuda" or query.shape[-1] % 8 or query.shape[-1] > _WIDEST_HEAD:
        return False
    is_grouped = query.shape[-3] != key.shape[-3]
    asked = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, is_causal, is_grouped)
    return torch.backends.cuda.can_use_flash_attention(asked)


def graph_pool() -> Any:
    """A pool of memory for recorded graphs of kernels."""
    return _own().module.graph_pool_handle()


def recorded_graph(pool: Any, run: Callable[[], Sequence[Tensor]]) -> tuple[Any, Sequence[Tensor]]:
    """Record the kernels that a function issues, without running them.

    Args:
        pool: Where tensors are made; from ``graph_pool``.
        run: The function; its kernels must have been loaded before.

    Returns:
        The graph, with a method ``replay``, and what the function returned.
    """
    module = _own().module
    graph, stream = module.CUDAGraph(), module.current_stream()
    try:
        # Threads of NCCL ask for events meanwhile.
        with module.graph(graph, pool=pool, capture_error_mode="thread_local"):
            made = run()
    except RuntimeError:
        module.set_stream(stream)  # torch leaves its own where the recording fails to end
        raise
    return graph, made


def same_memory(value: Tensor) -> Tensor:
    """A tensor with the memory of another one, which it does not own."""
    storage = value.untyped_storage()
    named = {
        "nbytes": storage.nbytes(),
        "data_ptr": storage.data_ptr(),
        "size": value.shape,
        "stride": value.stride(),
        "dtype": value.dtype,
        "device": value.device,
        "storage_offset": value.storage_offset(),
    }
    borrowed = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), value.device, storage.nbytes()
    )
    made: Tensor = torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(named, borrowed)
    return made


@contextmanager
def num_threads(number: int) -> Iterator[None]:
    """Let torch use so many threads of the CPU in the body."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def stream_of_priority(device: torch.device, *, high: bool) -> Iterator[None]:
    """Run kernels of the body before, or behind, those of other streams of this process."""
    if not is_accelerated(device):
        yield
        return
    module = torch.get_device_module(device)
    stream = module.Stream(device, priority=-1 if high else 0)
    stream.wait_stream(module.current_stream(device))
    with module.stream(stream):
        yield
    stream.synchronize()  # the next body may not run ahead of the device


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Run kernels of the body in a stream that does not wait for this process's present one."""
    module = torch.get_device_module(device)
    with module.stream(module.Stream(device)):
        yield


def default_generator(device: torch.device) -> torch.Generator:
    """The generator of random numbers that ops on a device use by default."""
    if not is_accelerated(device):
        return torch.default_generator
    index = device.index if device.index is not None else own_device().index
    generator = torch.get_device_module(device).default_generators[index]
    assert isinstance(generator, torch.Generator)
    return generator


def device_label(index: int | None = None) -> str:
    """Name of an accelerator as its driver reports it; by default that of this process."""
    return str(_own().module.get_device_name(index))


def device_memory_bytes(index: int) -> int:
    """Total memory of an accelerator."""
    return int(_own().module.get_device_properties(index).total_memory)


def computes_bfloat16() -> bool:
    """Whether the accelerators of this machine support bfloat16."""
    known = accelerator()
    return known is not None and bool(known.module.is_bf16_supported())


def are_peers(index: int, other: int) -> bool:
    """Whether an accelerator can read the memory of another one."""
    return bool(_own().module.can_device_access_peer(index, other))


def why_none() -> str:
    """A clause that says that there is no accelerator, and which variables may hide one."""
    names = [name for each in _KNOWN for name in each.visible_devices]
    hiding = [f"{name}={os.environ[name]!r}" for name in names if name in os.environ]
    return "PyTorch sees no accelerator here" + (f" ({', '.join(hiding)})" if hiding else "")
