"""Inductor's scheduler on the graphs of a GPU that is not there.

A model is compiled on the CPU up to the two graphs that inductor gets. Their tensors are then made
fake tensors of an A100, inductor lowers and schedules them by its rules for GPUs, and is stopped
before it writes code. What a GPU would be asked is answered from its data sheet. It hangs on
private names of torch 2.13 and serves this comparison alone.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from heterog.graph.workload import Workload

_GPU = torch.device("cuda:0")
_SHEET = {
    "multi_processor_count": 108, "major": 8, "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024, "warp_size": 32,
}  # fmt: skip
"""Of an A100 (NVIDIA A100 Tensor Core GPU Architecture, 2020)."""


class _Scheduled(Exception):
    """Ends a compilation once its kernels are known."""


def kernels_on_gpu(workload: Workload) -> list[Sequence[Any]]:
    """Nodes of the scheduler after fusion: forward, then backward."""
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._inductor import compile_fx, config
    from torch._inductor.exc import InductorError

    found: list[Sequence[Any]] = []

    def stop(nodes: Sequence[Any]) -> Sequence[Any]:
        found.append(nodes)
        raise _Scheduled

    def schedule(graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        moved, values = _on_gpu(graph, inputs)
        with (
            config.patch(_post_fusion_custom_pass=stop, force_disable_caches=True),
            _answers(),
        ):
            try:
                compile_fx.compile_fx_inner(moved, values, **options)
            except (_Scheduled, InductorError) as error:
                if "_Scheduled" not in repr(error):
                    raise
        return make_boxed_func(graph)

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_fx.compile_fx(graph, inputs, inner_compile=schedule)

    torch._dynamo.reset()
    model, batch = workload.make_model(), workload.make_batch()
    step = torch.compile(lambda: workload.step_loss(model, batch), backend=backend)
    torch.autograd.backward(step())
    return found


def _on_gpu(graph: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.GraphModule, list[Any]]:
    """A copy of a graph whose tensors, and the devices that it names, are a GPU's."""
    from torch._guards import detect_fake_mode

    mode = detect_fake_mode(inputs)
    assert mode is not None

    def moved(value: Tensor) -> Tensor:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_GPU)

    def device(value: Any) -> Any:
        return _GPU if isinstance(value, torch.device) else value

    twin = copy.deepcopy(graph)
    with mode:
        for node in twin.graph.nodes:
            if node.op == "call_function":
                node.args = fx.node.map_aggregate(node.args, device)
                node.kwargs = fx.node.map_aggregate(node.kwargs, device)
            if "val" in node.meta:
                node.meta["val"] = pytree.tree_map_only(Tensor, moved, node.meta["val"])
        for name, value in list(twin.named_buffers()):
            setattr(twin, name, moved(value))
        twin.recompile()
        return twin, pytree.tree_map_only(Tensor, moved, list(inputs))


@contextmanager
def _answers() -> Iterator[None]:
    """Answers what inductor asks of a GPU, and keeps it from running ops on fake tensors again."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._guards import detect_fake_mode
    from torch._inductor import compile_fx, fx_utils, scheduler
    from torch._inductor.runtime.hints import DeviceProperties

    sheet = DeviceProperties(type="cuda", index=0, cc=80, **_SHEET)
    told = SimpleNamespace(**_SHEET, minor=0, name="A100", total_memory=80 * 2**30)
    answers: list[tuple[Any, str, Any]] = [
        (DeviceProperties, "create", classmethod(lambda cls, device: sheet)),
        (torch.cuda, "get_device_properties", lambda *_: told),
        (torch.cuda, "get_device_capability", lambda *_: (8, 0)),
        (torch.cuda, "current_device", lambda: 0),
        (CudaInterface.Worker, "get_device_properties", staticmethod(lambda *_: told)),
        (CudaInterface, "get_compute_capability", staticmethod(lambda *_: 80)),
        (CudaInterface, "is_available", staticmethod(lambda: True)),
        (CudaInterface, "current_device", staticmethod(lambda: 0)),
        (scheduler, "has_triton", lambda *_: True),
        (compile_fx, "fake_tensor_prop", lambda _, inputs, *__: detect_fake_mode(inputs)),
        (fx_utils.FakeTensorUpdater, "incremental_update", lambda *_, **__: None),
    ]
    with ExitStack() as stack:
        for owner, name, answer in answers:
            stack.enter_context(patch.object(owner, name, answer))
        yield
