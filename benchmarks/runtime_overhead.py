"""What does our executor cost beside plain PyTorch?

    python benchmarks/runtime_overhead.py --json

On two even gloo ranks: our step against the real DistributedDataParallel for the same split. On
one device: our step against plain eager. They are measured in turn, and plain PyTorch once more:
how far that is from itself says what a ratio of this machine is worth. A ratio is that of medians
of one start of the processes; five starts give their mean and the upper end of its interval of
95 % (Student's t). On a machine that others use, ratios of processor time say more than those of
time. ``tiny`` has twelve layers that take next to no time: what is left is what the host takes for
an op, as in steps of small kernels on a GPU.
"""

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from scipy import stats
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from heterog.cluster import Cluster
from heterog.graph.capture import capture
from heterog.graph.workload import Workload
from heterog.methods.planner import Budget
from heterog.runtime.deploy import deploy
from heterog.runtime.rank import end_together
from heterog.search.plan import load_plan, make_plan
from heterog.search.request import Request
from heterog.zoo import load_workload

WORKLOADS = Path(__file__).parents[1] / "experiments" / "testbed_workloads.py"
BATCH_SIZES = {"mlp": 64, "gpt": 16, "tiny": 2}


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


def workload_of(name: str) -> Workload:
    """One of the measured workloads."""
    if name == "tiny":
        return load_workload(f"{__file__}:{name}", BATCH_SIZES[name])
    return load_workload(f"{WORKLOADS}:{name}", BATCH_SIZES[name])


def cluster_of(num_devices: int) -> Cluster:
    """Equal CPUs, one per host."""
    hosts = [
        {
            "name": f"h{i}",
            "devices": [{"type": "CPU", "count": 1}],
            "nic": {"line_rate": "10 Gbit/s"},
        }
        for i in range(num_devices)
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.yaml"
        document = {"schema_version": 1, "name": "even", "hosts": hosts}
        path.write_text(json.dumps(document))  # JSON is YAML
        return Cluster.load(path)


def serve(rank: int, folder: str, name: str, num_ranks: int, num_steps: int) -> None:
    """One rank: both steps in turn; rank 0 writes the seconds."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks
    )
    workload = workload_of(name)
    ours = deploy(workload, load_plan(f"{folder}/plan.json"))
    batch = workload.make_batch()
    assert isinstance(batch, tuple)
    model = workload.make_model()
    plain = DistributedDataParallel(model) if num_ranks > 1 else model
    optimizer = workload.optimizer(model.parameters(), **dict(workload.optimizer_options))
    part = BATCH_SIZES[name]
    begin = rank * part // num_ranks
    local = tuple(each[begin : begin + part // num_ranks] for each in batch)

    def step() -> None:
        loss = workload.step_loss(plain, local)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()

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
            busy = time.process_time() - start[1]
            dist.barrier()
            if number >= 3:
                seconds[key].append((time.perf_counter() - start[0], busy))
    if rank == 0:
        Path(f"{folder}/seconds.json").write_text(json.dumps(seconds))
    end_together()


def bounded(ratios: Sequence[float]) -> dict[str, float]:
    """Mean of some ratios, and the upper end of its interval of 95 %."""
    mean, count = statistics.mean(ratios), len(ratios)
    if count < 2:
        return {"mean": mean}
    error = statistics.stdev(ratios) / math.sqrt(count)
    return {"mean": mean, "upper": mean + float(stats.t.ppf(0.975, count - 1)) * error}


def measure(name: str, num_ranks: int, num_steps: int, num_starts: int) -> dict[str, Any]:
    """Medians of some starts, and their ratios to plain PyTorch."""
    graph = capture(workload_of(name))
    medians: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        method = "ddp" if num_ranks > 1 else "single_device"
        plan = make_plan(
            Request(
                graph=graph,
                cluster=cluster_of(num_ranks),
                methods=(method,),
                budget=Budget.parse("1e"),
            )
        )
        plan.save(f"{folder}/plan.json")
        for _ in range(num_starts):
            Path(f"{folder}/store").unlink(missing_ok=True)
            spawn(serve, (folder, name, num_ranks, num_steps), num_ranks)  # type: ignore[no-untyped-call]
            found = json.loads(Path(f"{folder}/seconds.json").read_text())
            for key, each in found.items():
                both = statistics.median(x for x, _ in each), statistics.median(x for _, x in each)
                medians.setdefault(key, []).append(both)

    def ratios(key: str, clock: int) -> list[float]:
        pairs = zip(medians[key], medians["plain"], strict=True)
        return [one[clock] / other[clock] for one, other in pairs]

    return {
        "model": name,
        "num_ranks": num_ranks,
        "num_steps": num_steps,
        "num_starts": num_starts,
        **{f"{key}_s": statistics.median(x for x, _ in each) for key, each in medians.items()},
        **{f"ratio_of_{key}": bounded(ratios(key, 0)) for key in medians if key != "plain"},
        **{f"cpu_ratio_of_{key}": bounded(ratios(key, 1)) for key in medians if key != "plain"},
    }


def main() -> None:
    """Measure all workloads on one and on two ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--models", nargs="*", default=list(BATCH_SIZES))
    arguments = parser.parse_args()
    rows = [
        measure(name, num_ranks, arguments.steps, arguments.starts)
        for name in arguments.models
        for num_ranks in (1, 2)
    ]
    if arguments.json:
        print(json.dumps({"rows": rows}, indent=2))
        return
    for row in rows:
        of = {key: value for key, value in row.items() if "ratio" in key}
        told = ", ".join(
            f"{key} " + " to ".join(f"{number:.3f}" for number in value.values())
            for key, value in of.items()
        )
        print(f"{row['model']:4} {row['num_ranks']} ranks: {row['ours_s'] * 1e3:.1f} ms; {told}")


if __name__ == "__main__":
    main()
