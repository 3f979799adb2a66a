"""What the table says of machines that are not here: one of each known kind, others, none."""

import platform
import resource

import pytest
import torch
import torch.distributed as dist

from heterog.errors import HeterogError
from heterog.runtime import accelerators
from heterog.runtime.accelerators import (
    CPU,
    accelerator,
    backends,
    default_generator,
    device_count,
    is_accelerated,
    keep_freed_memory,
    own_device,
    rank_device,
    stream_of_priority,
    synchronize,
    why_none,
    wire_device,
)


def machine_with(monkeypatch: pytest.MonkeyPatch, device_type: str, count: int = 2) -> None:
    """Let torch say that this machine has accelerators of a kind."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda: torch.device(device_type)
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("device_type", "backend"), [("cuda", "cpu:gloo,cuda:nccl"), ("xpu", "cpu:gloo,xpu:xccl")]
)
def test_each_known_kind_has_its_backend_if_every_rank_can_have_one(
    monkeypatch: pytest.MonkeyPatch, device_type: str, backend: str
) -> None:
    machine_with(monkeypatch, device_type)
    assert backends(2) == backend
    assert dist.distributed_c10d.BackendConfig(dist.Backend(backend)).device_backend_map
    assert backends(3) == "gloo", "two ranks on one device"
    assert own_device() == torch.device(device_type, 1)
    known = accelerator()
    assert known is not None
    assert known.module is getattr(torch, device_type)


@pytest.mark.parametrize("known", accelerators._KNOWN, ids=lambda known: known.device_type)
def test_torch_has_every_function_that_is_asked_for(known: accelerators.Accelerator) -> None:
    """Also in a build for CPUs, so that a renamed function is found without the hardware."""
    for name in (
        "Event", "Stream", "stream", "current_stream", "default_generators", "get_device_name",
        "get_device_properties", "is_bf16_supported", "can_device_access_peer",
    ):  # fmt: skip
        assert hasattr(known.module, name), name
    assert dist.Backend.default_device_backend_map[known.device_type] == known.backend


def test_ranks_compute_where_their_group_takes_tensors_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine_with(monkeypatch, "cuda")
    own = torch.device("cuda", 1)
    for config, rank, wire in (
        ("cpu:gloo,cuda:nccl", own, own),
        ("cpu:gloo,cuda:gloo", own, CPU),
        ("cpu:gloo", CPU, CPU),
        ("cpu:gloo,xpu:xccl", CPU, CPU),
    ):
        monkeypatch.setattr(dist, "get_backend_config", lambda config=config: config)
        assert (rank_device(), wire_device()) == (rank, wire), config


def test_an_unknown_kind_is_refused_by_name_and_one_that_cannot_send_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine_with(monkeypatch, "hpu")
    with pytest.raises(HeterogError, match=r"sees an accelerator 'hpu' here, .* cuda, xpu or the"):
        own_device()
    machine_with(monkeypatch, "mps")
    assert (own_device(), device_count(), backends(1)) == (CPU, 0, "gloo")


@pytest.mark.usefixtures("without")
def test_without_one_everything_is_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (own_device(), device_count(), backends(1)) == (CPU, 0, "gloo")
    assert default_generator(CPU) is torch.default_generator
    assert not is_accelerated(torch.ones(1))
    synchronize(CPU)
    with stream_of_priority(CPU, high=True):
        pass
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ZE_AFFINITY_MASK", "")
    assert why_none() == "PyTorch sees no accelerator here (ZE_AFFINITY_MASK='')"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc")
def test_freed_memory_is_kept_for_the_next_step() -> None:
    keep_freed_memory()

    def step() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        gradients = [torch.ones(2**20) for _ in range(8)]
        assert len(gradients) == 8
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    for _ in range(3):  # until there are gaps for all of them
        step()
    assert step() < 8 * 2**20 * 4 / 4096 / 10  # a tenth of all pages
