"""How much slower is our executor than plain PyTorch?

    python benchmarks/runtime_overhead.py --json
    python benchmarks/runtime_overhead.py --gpu H100 --json

On two even gloo ranks: our step against the real DistributedDataParallel for the same split, or
with ``--sharded`` our ZeRO-3 against FSDP2 of each layer. On one device: our step against plain
PyTorch. Each pair runs eagerly and compiled: our ``execution: compiled`` against ``torch.compile``
of the model. Both are measured in turn, and plain PyTorch a second time: the ratio of its two runs
shows the noise of this machine. A ratio is that of medians of one start of the processes; five
starts give the mean ratio and the upper end of its 95 % interval (Student's t). On a machine with
other work, ratios of processor time are more reliable than ratios of wall time. ``tiny`` has
twelve layers that take almost no time, so it measures the host's time for an op, as in steps of
small kernels on a GPU.

``--gpu TYPE`` measures ResNet-50, GPT-2 and a Llama of 1 B in bfloat16 on one GPU instead, beside
the predictions for that type; with CUDA graphs small batches, beside ``mode="reduce-overhead"``.
It ends after ten minutes: no row begins after seven.
"""

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from scipy import stats
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from heterog.api import layout
from heterog.cluster import Cluster
from heterog.graph.capture import capture
from heterog.graph.workload import Workload
from heterog.methods.planner import Budget
from heterog.runtime.accelerators import rank_device, synchronize
from heterog.runtime.deploy import deploy
from heterog.runtime.rank import end_together
from heterog.search.plan import Plan, load_plan, make_plan
from heterog.search.request import Request
from heterog.zoo import load_workload

WORKLOADS = Path(__file__).parents[1] / "experiments" / "testbed_workloads.py"
BATCH_SIZES = {"mlp": 64, "gpt": 16, "tiny": 2, "resnet18": 8, "llama": 8}
HERE = ("tiny", "resnet18", "llama")
ON_GPU = {"gpt2": 8, "resnet50": 64, "llama_1b": 4}
SMALL_ON_GPU = {"gpt2": 1, "resnet50": 4, "llama_1b": 1}
_LAST_BEGIN_S = 420.0


class Row(NamedTuple):
    """One measurement: a model on some ranks, run as an execution says, on CPUs or a GPU type.

    With ``is_sharded`` ranks keep slices of the parameters.
    """

    model: str
    num_ranks: int
    execution: str
    gpu: str = ""
    is_sharded: bool = False

    @property
    def batch_size(self) -> int:
        """Samples of all ranks."""
        if self.execution == "graphs":
            return SMALL_ON_GPU[self.model]
        return (ON_GPU if self.gpu else BATCH_SIZES)[self.model]


def tiny(batch_size: int = 2) -> Workload:
    """Twelve transformer layers of 16 numbers."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(12))
        )

    torch.manual_seed(1)  # alike on all ranks
    batch = torch.randn(batch_size, 8, 16), torch.randn(batch_size, 8, 16)
    return Workload(model, batch, nn.functional.mse_loss, torch.optim.Adam, name="tiny")


def resnet18(batch_size: int = 8) -> Workload:
    """ResNet-18 of transformers, on images of 64 x 64."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        made: nn.Module = transformers.ResNetForImageClassification(
            transformers.ResNetConfig(
                layer_type="basic", hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2]
            )
        )
        return made

    torch.manual_seed(1)
    batch = {
        "pixel_values": torch.randn(batch_size, 3, 64, 64),
        "labels": torch.randint(0, 2, (batch_size,)),
    }
    return Workload(model, batch, None, torch.optim.SGD, {"lr": 0.01}, name="resnet18")


def llama(batch_size: int = 8) -> Workload:
    """A Llama of transformers of four layers and 1.3 M parameters."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        made: nn.Module = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=2048,
                hidden_size=128,
                intermediate_size=352,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                use_cache=False,
            )
        )
        return made

    torch.manual_seed(1)
    words = torch.randint(0, 2048, (batch_size, 64))
    return Workload(model, {"input_ids": words, "labels": words}, None, torch.optim.AdamW)


def workload_of(row: Row) -> Workload:
    """One of the measured workloads."""
    if row.gpu:
        return in_bfloat16(load_workload(row.model, row.batch_size))
    path = __file__ if row.model in HERE else WORKLOADS
    return load_workload(f"{path}:{row.model}", row.batch_size)


def in_bfloat16(workload: Workload) -> Workload:
    """A workload whose parameters, and numbers of the batch that are no integers, are bfloat16."""

    def narrow(value: Any) -> Any:
        return value.bfloat16() if value.is_floating_point() else value

    return replace(
        workload,
        model=lambda: workload.make_model().bfloat16(),
        example_batch=lambda: tree_map(narrow, workload.make_batch()),
    )


def cluster_of(row: Row) -> Cluster:
    """Equal devices, one per host."""
    hosts = [
        {
            "name": f"h{i}",
            "devices": [{"type": row.gpu or "CPU", "count": 1}],
            "nic": {"line_rate": "10 Gbit/s"},
        }
        for i in range(row.num_ranks)
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.yaml"
        named = {"schema_version": 1, "name": "even", "execution": row.execution}
        path.write_text(json.dumps({**named, "hosts": hosts}))  # JSON is YAML
        return Cluster.load(path)


def plain_step(row: Row, workload: Workload, rank: int, device: torch.device) -> Callable[[], Any]:
    """A step of plain PyTorch: the module itself or DistributedDataParallel, maybe compiled."""
    batch, size = workload.make_batch(), row.batch_size // row.num_ranks
    if row.num_ranks > 1:
        batch = tree_map(lambda each: each[rank * size : (rank + 1) * size], batch)
    module = workload.make_model().to(device)
    model: Any = module
    if row.is_sharded:
        shard(module)
    elif row.num_ranks > 1:
        model = DistributedDataParallel(module)
    if row.execution != "eager":
        mode = "reduce-overhead" if row.execution == "graphs" else "default"
        model = torch.compile(model, mode=mode)
    optimizer = workload.optimizer(module.parameters(), **dict(workload.optimizer_options))

    def step() -> None:
        loss = workload.step_loss(model, tree_map(lambda each: each.to(device), batch))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()

    return step


def shard(module: nn.Module) -> None:
    """Apply FSDP2 to each layer of the outermost list of layers, and to the rest of the model."""
    lists = [each for each in module.modules() if isinstance(each, nn.ModuleList | nn.Sequential)]
    mesh = init_device_mesh(rank_device().type, (dist.get_world_size(),))
    for each in (*lists[0], module):
        fully_shard(each, mesh=mesh)


def serve(rank: int, folder: str, row: Row, num_steps: int) -> None:
    """Run both steps in turn as one rank; rank 0 writes the seconds."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "cpu:gloo,cuda:nccl" if row.gpu else "gloo"
    store = f"file://{folder}/store"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=row.num_ranks)
    workload, device = workload_of(row), rank_device()
    ours = deploy(workload, load_plan(f"{folder}/plan.json"))
    batch = workload.make_batch()
    step = plain_step(row, workload, rank, device)
    contenders: dict[str, Callable[[], Any]] = {
        "ours": lambda: ours(batch),
        "plain": step,
        "plain_again": step,
    }
    seconds: dict[str, list[tuple[float, float]]] = {key: [] for key in contenders}
    for number in range(num_steps + 3):
        for key, run in contenders.items():
            dist.barrier()
            start = time.perf_counter(), time.process_time()
            run()
            synchronize(device)
            busy = time.process_time() - start[1]
            dist.barrier()
            if number >= 3:
                seconds[key].append((time.perf_counter() - start[0], busy))
    if rank == 0:
        compiler = ours.compiler
        found = {
            "seconds": seconds,
            "compile_s": compiler.seconds if compiler else 0.0,
            "num_graphs": compiler.replays.num_recorded if compiler and compiler.replays else 0,
            "card": torch.cuda.get_device_name() if row.gpu else "",
        }
        Path(f"{folder}/seconds.json").write_text(json.dumps(found))
    end_together()


def bounded(ratios: Sequence[float]) -> dict[str, float]:
    """Mean of some ratios, and the upper end of its interval of 95 %."""
    mean, count = statistics.mean(ratios), len(ratios)
    if count < 2:
        return {"mean": mean}
    error = statistics.stdev(ratios) / math.sqrt(count)
    return {"mean": mean, "upper": mean + float(stats.t.ppf(0.975, count - 1)) * error}


def plan_of(row: Row) -> Plan:
    """The plan that does the same work as plain PyTorch."""
    if row.is_sharded:
        return layout(workload_of(row), cluster_of(row), zero=3)
    request = Request(
        graph=capture(workload_of(row)),
        cluster=cluster_of(row),
        methods=("ddp" if row.num_ranks > 1 else "single_device",),
        budget=Budget.parse("1e"),
    )
    return make_plan(request)


def measure(row: Row, num_steps: int, num_starts: int) -> dict[str, Any]:
    """Medians of some starts, and their ratios to plain PyTorch."""
    medians: dict[str, list[tuple[float, float]]] = {}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        plan = plan_of(row)
        plan.save(f"{folder}/plan.json")
        for _ in range(num_starts):
            Path(f"{folder}/store").unlink(missing_ok=True)
            spawn(serve, (folder, row, num_steps), row.num_ranks)  # type: ignore[no-untyped-call]
            found = json.loads(Path(f"{folder}/seconds.json").read_text())
            for key, each in found.pop("seconds").items():
                both = statistics.median(x for x, _ in each), statistics.median(x for _, x in each)
                medians.setdefault(key, []).append(both)

    def ratios(key: str, clock: int) -> list[float]:
        pairs = zip(medians[key], medians["plain"], strict=True)
        return [one[clock] / other[clock] for one, other in pairs]

    return {
        **row._asdict(),
        "num_steps": num_steps,
        "num_starts": num_starts,
        **found,
        "predicted_s": plan.step_time_s,
        **{f"{key}_s": statistics.median(x for x, _ in each) for key, each in medians.items()},
        **{f"ratio_of_{key}": bounded(ratios(key, 0)) for key in medians if key != "plain"},
        **{f"cpu_ratio_of_{key}": bounded(ratios(key, 1)) for key in medians if key != "plain"},
    }


def main() -> None:
    """Measure all workloads, on one and on two ranks, eagerly and compiled."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--executions", nargs="*", help="eager, compiled, graphs (on a GPU)")
    parser.add_argument("--sharded", action="store_true", help="two ranks, ZeRO-3 and FSDP2")
    parser.add_argument("--gpu", default="", metavar="TYPE", help="one GPU, starts once")
    arguments = parser.parse_args()
    begin = time.monotonic()
    models = arguments.models or list(ON_GPU if arguments.gpu else BATCH_SIZES)
    ranks = [1] if arguments.gpu else [2] if arguments.sharded else arguments.ranks
    starts = 1 if arguments.gpu else arguments.starts
    every = ["eager", "compiled", *(["graphs"] if arguments.gpu else [])]
    for execution, name, num_ranks in product(arguments.executions or every, models, ranks):
        if arguments.gpu and time.monotonic() - begin > _LAST_BEGIN_S:
            return
        row = Row(name, num_ranks, execution, arguments.gpu, arguments.sharded)
        found = measure(row, arguments.steps, starts)
        # As soon as it is measured, because later rows may be cut off.
        print(json.dumps(found) if arguments.json else found, flush=True)


if __name__ == "__main__":
    main()
