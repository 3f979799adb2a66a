"""Exported folders: run for real where that is possible, read and parsed where it is not."""

import ast
import contextlib
import gzip
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch.nn.parallel import DistributedDataParallel

import heterog
from heterog import cli
from heterog.cluster import Cluster
from heterog.errors import HeterogError, InputFileError, UnknownNameError
from heterog.export import TARGETS, Export, ExportError, export_plan, make_export
from heterog.export.folder import launch_command, launch_script, on_used_devices, ranks_of
from heterog.graph.capture import capture
from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.graph.workload import Workload
from heterog.modes.codecs.value import CodecRule, Traffic, parse_codec, with_rules
from heterog.runtime.launch import free_port
from heterog.runtime.ranks.testbed import load_testbed
from heterog.search.plan import Plan, load_plan
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.layouts.files import read_layout
from heterog.strategy.layouts.layout import Layout, Recompute
from heterog.strategy.strategy import REPLICATED, Decision, Strategy, Sync
from tests.export import tiny
from tests.forked_python import WITHOUT, ForkedPython
from tests.search.asking import make_plan
from tests.simulator.builders import plan_by_hand
from tests.thorough import THOROUGH

NUM_STEPS = 3
PYTHON = Path(sys.executable)
"""Not a forked one: ranks of DDP that were forked have waited for each other for ever."""
WORKLOAD = """
import heterog, tiny, torch

def workload() -> heterog.Workload:
    return heterog.Workload(tiny.make_model, tiny.global_batch(0), tiny.criterion,
                            torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
"""
BUILD = """
import sys, tiny

def build(rank):
    assert "heterog" not in sys.modules
    model = tiny.make_model()
    begin, end = rank.first_sample, rank.first_sample + rank.batch_size
    batches = (take(tiny.global_batch(step), begin, end) for step in range(NUM_STEPS))
    return model, tiny.make_optimizer(model), tiny.loss_of, batches

def loss_weight(batch):
    return float((batch[1] != -100).sum())

def evaluate(model, step):
    return {"weights": len(model.state_dict())}
"""
KILLED_ONCE = """
def killed(rank):
    import os, signal
    for step in range(NUM_STEPS):
        if step == 2 and rank == 1 and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        yield step
"""
BATCHES = """
import tiny

def batches(workload):
    return (tiny.global_batch(step) for step in range(NUM_STEPS))
"""


KILLED = """
import os, signal, torch

_all = batches

def batches(workload):
    for step, batch in enumerate(_all(workload)):
        if step == 1 and os.environ["RANK"] == "1" and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        yield batch

def evaluate(train, step):
    return {"ranks": torch.distributed.get_world_size()}
"""


# --- plans --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return capture(
        Workload(
            tiny.make_model,
            tiny.global_batch(0),
            tiny.criterion,
            torch.optim.SGD,
            {"lr": 0.1, "momentum": 0.9},
            name="tiny",
        )
    )


def cluster_of(
    folder: Path, *hosts: tuple[str, str, int], cpu_quotas: Sequence[float] = ()
) -> Cluster:
    """A cluster of (host name, device type, number of devices)."""
    lines = ["schema_version: 1", "name: small", "hosts:"]
    for index, (name, kind, count) in enumerate(hosts):
        lines += [
            f"  - name: {json.dumps(name)}",
            f"    devices: [{{type: {kind}, count: {count}}}]",
            "    nic: {line_rate: 1 Gbit/s}",
            "    intra: pcie3",
        ]
        if cpu_quotas:
            lines.append(f"    testbed: {{cpu_quota: {cpu_quotas[index]}}}")
    path = folder / "small.yaml"
    path.write_text("\n".join(lines) + "\n")
    return Cluster.load(path)


def plan_of(
    graph: OpGraph,
    cluster: Cluster,
    decisions: Decision | Sequence[Decision],
    *,
    micro_batches: tuple[tuple[int, ...], ...] = (),
    homes: tuple[int, ...] = (),
    step_barrier: bool = True,
    bucket_bytes: int = 0,
    first_bucket_bytes: int = 0,
) -> Plan:
    """A plan by hand; one decision stands for all groups."""
    num_groups = group_ops(graph).num_groups
    each = (decisions,) * num_groups if isinstance(decisions, Decision) else tuple(decisions)
    strategy = Strategy(
        graph=graph.fingerprint,
        cluster=cluster.fingerprint,
        decisions=each,
        homes=homes or (REPLICATED,) * len(graph.updates),
        micro_batches=micro_batches,
        step_barrier=step_barrier,
        bucket_bytes=bucket_bytes,
        first_bucket_bytes=first_bucket_bytes,
    )
    return plan_by_hand(graph, cluster, strategy)


@pytest.fixture(scope="module")
def uneven(graph: OpGraph) -> Plan:
    """Three hosts with one CPU each, uneven shares, all-reduce."""
    plan = make_plan(graph, load_testbed("skew_both"), methods=["cp_ar"], budget="10e")
    assert len(set(plan.strategy.decisions[0].shares)) > 1
    return plan


# --- running ------------------------------------------------------------------------------------


def fill_in(folder: Path, code: str) -> None:
    """Do what a person does: edit user.py, and put the model beside it."""
    user = folder / "user.py"
    user.write_text(user.read_text() + f"\n\nNUM_STEPS = {NUM_STEPS}\n{code}")
    (folder / "tiny.py").write_text(Path(tiny.__file__).read_text())


def launch(
    folder: Path,
    hosts: Sequence[str],
    python: Path,
    *options: str,
    without: str = "heterog",
    ranks: Path | None = None,
) -> str:
    """Run launch.sh for each host, all on this machine; what rank 0's host printed.

    Args:
        folder: that was exported.
        hosts: of the plan.
        python: what launch.sh starts.
        options: of train.py.
        without: package that is not there.
        ranks: what torchrun starts ranks with, if not ``python``.
    """
    environment = os.environ | {
        "PYTHON": str(python),
        "PYTHON_EXEC": str(ranks or python),
        WITHOUT: without,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    processes: list[subprocess.Popen[str]] = []
    try:
        for host in hosts:
            command = ["bash", str(folder / "launch.sh"), host, *options]
            processes.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )
        results = [process.communicate(timeout=600) for process in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for process, (_, errors) in zip(processes, results, strict=True):
        assert process.returncode == 0, errors
    return results[0][0]


def assert_trained_like_one_device(folder: Path, printed: str) -> None:
    losses, weights = tiny.reference(NUM_STEPS)
    found = [float(text) for text in re.findall(r"^step \d+ loss (\S+)$", printed, re.M)]
    assert found == pytest.approx(losses, rel=1e-5)
    state = torch.load(folder / "weights.pt", weights_only=True)
    assert set(state) == set(weights)
    for name, wanted in weights.items():
        torch.testing.assert_close(state[name], wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.distributed
def test_ddp_weighs_uneven_batches_and_ignored_labels(
    graph: OpGraph, tmp_path: Path, python: ForkedPython
) -> None:
    cluster = cluster_of(tmp_path, ("a", "CPU", 1), ("b", "CPU", 1), cpu_quotas=(0.8, 0.3))
    plan = make_plan(graph, cluster, methods=["cp_ar"], budget="10e")
    assert len(set(plan.strategy.decisions[0].shares)) == 2
    folder = tmp_path / "job"
    export_plan(plan, "ddp", folder)
    fill_in(folder, BUILD)
    # More steps than the data has: all ranks end together.
    options = ["--steps", "9", "--save", "weights.pt", "--checkpoint", "ckpt", "--every", "1"]
    options += ["--log", "log.jsonl", "--evaluate-every", "3"]
    printed = launch(folder, ["a", "b"], python.command, *options, ranks=PYTHON)
    assert_trained_like_one_device(folder, printed)
    told = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [each["step"] for each in told] == [1, 2, 3, 3]
    assert told[3] == {"step": 3, "weights": 8}
    steps = {file.name for file in (folder / "ckpt").glob("rank_1*")}
    assert steps == {"rank_1.step_2.pt", "rank_1.step_3.pt"}


@THOROUGH
@pytest.mark.distributed
def test_ddp_accumulates_and_leaves_out_devices(graph: OpGraph, tmp_path: Path) -> None:
    # GPUs in the plan, tried on CPUs; unequal hosts, because a device has no samples; no label of
    # the last rank counts in the second step.
    cluster = cluster_of(tmp_path, ("a", "T4", 2), ("b", "T4", 2))
    decision = Decision(devices=(0, 1, 2, 3), shares=(3, 2, 0, 3), sync=Sync.RING)
    micro = ((2, 1), (0, 2), (0, 0), (3, 0))
    plan = plan_of(graph, cluster, decision, micro_batches=micro, bucket_bytes=600)
    folder = tmp_path / "job"
    export_plan(plan, "ddp", folder)
    ranks = json.loads((folder / "ranks.json").read_text())
    assert ranks["not_started"] == ["b:0"]
    assert [
        (r["device"], r["local_device"], r["first_sample"], r["micro_batches"])
        for r in ranks["ranks"]
    ] == [("a:0", 0, 0, [2, 1]), ("a:1", 1, 3, [2]), ("b:1", 1, 5, [3])]
    fill_in(folder, BUILD.replace("range(NUM_STEPS)", "killed(rank.rank)") + KILLED_ONCE)
    options = ["--steps", str(NUM_STEPS), "--save", "weights.pt", "--device", "cpu"]
    options += ["--checkpoint", "ckpt", "--every", "1", "--log", "log.jsonl"]
    with pytest.raises(AssertionError, match="== 0"):
        launch(folder, ["a", "b"], PYTHON, *options)
    assert "step 3" in launch(folder, ["a", "b"], PYTHON, *options)
    told = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    lines = [f"step {each['step']} loss {each['loss']:.9g}" for each in told]
    assert_trained_like_one_device(folder, "\n".join(lines))


OWN_DATA = """
import sys, tiny

_build = build

def build(rank):
    sys.modules["heterog"] = None  # as where it is not installed
    model, optimizer, loss, _ = _build(rank)
    begin, end = rank.first_sample, rank.first_sample + rank.batch_size
    batches = (take(tiny.global_batch(step), begin, end) for step in range(NUM_STEPS))
    return model, optimizer, loss, batches
"""


@THOROUGH
@pytest.mark.distributed
def test_ddp_reuses_the_models_own_file(
    graph: OpGraph, tmp_path: Path, python: ForkedPython
) -> None:
    """Model, loss, optimizer and weights of labels without a line by the person."""
    model = tmp_path / "my_model.py"
    model.write_text(WORKLOAD)
    graph = replace(graph, source=f"{model}:workload")
    cluster = cluster_of(tmp_path, ("a", "CPU", 1), ("b", "CPU", 1), cpu_quotas=(0.8, 0.3))
    plan = make_plan(graph, cluster, methods=["cp_ar"], budget="10e")
    with pytest.raises(HeterogError, match="add `sources`"):
        make_export(plan, "ddp")
    folder = tmp_path / "job"
    export_plan(plan, "ddp", folder, sources=[str(model)])
    assert (folder / "model.py").read_text() == WORKLOAD
    assert "model.py is a copy of my_model.py" in (folder / "README.md").read_text()
    model.unlink()
    fill_in(folder, OWN_DATA)
    options = ("--steps", "9", "--save", "weights.pt")
    printed = launch(folder, ["a", "b"], python.command, *options, ranks=PYTHON)
    assert_trained_like_one_device(folder, printed)


def test_stock_batches_are_cut_along_their_own_dimension(graph: OpGraph, tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, ("a", "CPU", 4))
    plan = plan_of(replace(graph, source="gpt2"), cluster, EVEN)
    for target in ("ddp", "deepspeed"):
        user = make_export(plan, target).files["user.py"].decode()
        assert "return load_workload('gpt2', BATCH_SIZE)" in user
        scope: dict[str, Any] = {"__name__": "user"}
        exec(compile(user, "user.py", "exec"), scope)
        scope["BATCH_DIMS"].update({0: 0, 1: 1, 2: None})
        batch = (torch.arange(8), torch.arange(16).view(2, 8), torch.zeros(3))
        part = scope["take"](batch, 2, 5)
        assert [tuple(each.shape) for each in part] == [(3,), (2, 3), (3,)]
        assert part[0].tolist() == [2, 3, 4]
        assert part[1].tolist() == [[2, 3, 4], [10, 11, 12]]
        assert scope["num_samples"](part) == 3
        last = [scope["take"](batch, begin, begin + 6)[0].tolist() for begin in (6, 9)]
        assert last == [[6, 7], []], "the last batch of an epoch may be smaller"
        labels = torch.tensor([[1, -100], [2, 3]])
        assert scope["loss_weight"]((torch.zeros(2), labels)) == 3.0
        assert scope["loss_weight"]({"x": torch.zeros(2, 4), "labels": labels}) == 3.0
        scope["BATCH_DIMS"].clear()
        assert scope["loss_weight"]((torch.zeros(2), torch.zeros(2, 5))) == 2.0
        scope["workload"] = partial(
            scope["Workload"], torch.nn.Linear(3, 2), batch, None, torch.optim.SGD, {"lr": 0.1},
            parameter_groups=lambda model: [{"params": [model.bias], "lr": 0.2}],
        )  # fmt: skip
        rank = SimpleNamespace(rank=0, device="cpu", first_sample=0, batch_size=2)
        (only,) = scope["build"](rank)[1].param_groups
        assert (only["lr"], len(only["params"])) == (0.2, 1)


@pytest.mark.distributed
def test_torchrun_runs_any_plan(graph: OpGraph, tmp_path: Path, python: ForkedPython) -> None:
    model = tmp_path / "my_model.py"
    model.write_text(WORKLOAD)
    (tmp_path / "tiny.py").write_text(Path(tiny.__file__).read_text())
    graph = replace(graph, source=f"{model}:workload")
    shared = Decision(devices=(0, 1, 2), shares=(4, 3, 1))
    alone = Decision(devices=(1,), shares=(8,))
    decisions = [shared] * group_ops(graph).num_groups
    decisions[-1] = alone
    plan = plan_of(graph, cluster_of(tmp_path, ("a", "CPU", 2), ("b", "CPU", 1)), decisions)
    folder = tmp_path / "job"
    export_plan(plan, "torchrun", folder, sources=[str(model)])
    model.unlink()
    fill_in(folder, BATCHES + KILLED)
    options = ["--steps", str(NUM_STEPS), "--save", "weights.pt", "--checkpoint", "ckpt"]
    options += ["--every", "1", "--log", "log.jsonl", "--evaluate-every", "2"]
    with pytest.raises(AssertionError, match="== 0"):
        launch(folder, ["a", "b"], python.command, *options, without="")
    assert json.loads((folder / "ckpt" / "checkpoint.json").read_text())["extra"] == {"step": 1}
    launch(folder, ["a", "b"], python.command, *options, without="")
    told = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [each["step"] for each in told] == [1, 2, 2, 3]
    assert told[2] == {"step": 2, "ranks": 3}
    losses = [f"step {each['step']} loss {each['loss']:.9g}" for each in told if "loss" in each]
    assert_trained_like_one_device(folder, "\n".join(losses))


DRAWN = """
import heterog, tiny, torch

def workload() -> heterog.Workload:
    def drawn():
        tokens = torch.randint(0, 13, (tiny.BATCH, 5))
        return tokens, tokens.clone()
    return heterog.Workload(tiny.Tiny, drawn, tiny.criterion,
                            torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
"""


@pytest.mark.distributed
def test_ranks_of_an_export_draw_one_batch(
    graph: OpGraph, tmp_path: Path, python: ForkedPython
) -> None:
    """As exported, for an example batch that is drawn without a seed."""
    model = tmp_path / "my_model.py"
    model.write_text(DRAWN)
    (tmp_path / "tiny.py").write_text(Path(tiny.__file__).read_text())
    graph = replace(graph, source=f"{model}:workload")
    shared = Decision(devices=(0, 1), shares=(5, 3))
    cluster = cluster_of(tmp_path, ("a", "CPU", 1), ("b", "CPU", 1))
    plan = plan_of(graph, cluster, [shared] * group_ops(graph).num_groups)
    folder = tmp_path / "job"
    export_plan(plan, "torchrun", folder, sources=[str(model)])
    (folder / "tiny.py").write_text(Path(tiny.__file__).read_text())
    said = launch(folder, ["a", "b"], python.command, "--steps", "1", without="")
    assert said.startswith("step 1 loss ")


STREAM = """
import os, signal
import tiny, torch
from torch.utils.data import IterableDataset

class Stream(IterableDataset):
    def __iter__(self):
        for step in range(NUM_STEPS):
            if step == 2 and os.environ["RANK"] == "1" and not os.path.exists("killed"):
                open("killed", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            yield from zip(*tiny.global_batch(step))

def dataset(workload):
    return Stream()

def evaluate(accelerator, model, step):
    return {"ranks": accelerator.num_processes}
"""


@pytest.mark.distributed
def test_accelerate_deals_a_stream_and_goes_on(
    uneven: Plan, tmp_path: Path, python: ForkedPython
) -> None:
    """A rank is killed as it reads the third batch ahead; the second step is trained again."""
    model = tmp_path / "my_model.py"
    model.write_text(WORKLOAD)
    (tmp_path / "tiny.py").write_text(Path(tiny.__file__).read_text())
    plan = replace(uneven, graph=replace(uneven.graph, source=f"{model}:workload"))
    folder = tmp_path / "job"
    export_plan(plan, "accelerate", folder, sources=[str(model)])
    fill_in(folder, STREAM)
    hosts = list(json.loads((folder / "ranks.json").read_text())["ranks"])
    names = list(dict.fromkeys(each["host"] for each in hosts))
    options = ["--steps", str(NUM_STEPS), "--save", "weights.pt", "--every-minutes", "1e-9"]
    options += ["--evaluate-every", "3"]
    with pytest.raises(AssertionError, match="== 0"):
        launch(folder, names, python.command, *options, without="")
    assert json.loads((folder / "checkpoints" / "latest.json").read_text()) == {"step": 1}
    printed = launch(folder, names, python.command, *options, without="")
    losses, _ = tiny.reference(NUM_STEPS)
    assert_trained_like_one_device(folder, f"step 1 loss {losses[0]}\n{printed}")
    assert "step 3 ranks 3\n" in printed
    config = yaml.safe_load((folder / "accelerate.yaml").read_text())
    assert (config["num_machines"], config["num_processes"], config["use_cpu"]) == (3, 3, True)


STUB_DEEPSPEED = """
import os
import torch
import torch.distributed as dist

def init_distributed():
    torch.distributed.init_process_group("gloo")

class Engine:
    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.micro_steps = model, optimizer, 0
    def __call__(self, *inputs):
        return self.model(*inputs)
    def backward(self, loss):
        (loss / 2).backward()  # two accumulation steps, one rank
    def step(self):
        self.micro_steps += 1
        if self.micro_steps % 2 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
    def save_checkpoint(self, path, client_state=None):
        torch.save([self.model.state_dict(), self.optimizer.state_dict(), client_state], path)
    def load_checkpoint(self, path):
        if not os.path.exists(path):
            return None, None
        model, optimizer, client_state = torch.load(path)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        return path, client_state

def initialize(model, optimizer, config):
    return Engine(model, optimizer), optimizer, None, None
"""


@pytest.mark.distributed
def test_deepspeed_script_scales_losses(
    graph: OpGraph, tmp_path: Path, python: ForkedPython
) -> None:
    """DeepSpeed itself is not here: a stand-in that divides as it does."""
    decision = Decision(devices=(0,), shares=(8,))
    cluster = cluster_of(tmp_path, ("a", "CPU", 1))
    plan = plan_of(graph, cluster, decision, micro_batches=((4, 4),))
    folder = tmp_path / "job"
    export_plan(plan, "deepspeed", folder)
    fill_in(folder, BUILD)
    (folder / "deepspeed.py").write_text(STUB_DEEPSPEED)
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", WITHOUT: "heterog"}
    printed = ""
    for steps in (1, 9):
        done = subprocess.run(
            [python.command, "train.py", "--steps", str(steps), "--checkpoint", "ckpt"],
            cwd=folder,
            env=os.environ | environment | {"MASTER_PORT": str(free_port())},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        printed += done.stdout
    weights, _, client_state = torch.load(folder / "ckpt")
    assert client_state == {"step": NUM_STEPS}
    torch.save(weights, folder / "weights.pt")
    assert_trained_like_one_device(folder, printed)


# --- what is in the folders ---------------------------------------------------------------------


EVEN = Decision(devices=(0, 1, 2, 3), shares=(2, 2, 2, 2))


@pytest.fixture(scope="module")
def even(graph: OpGraph, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Two hosts with two GPUs each, even shares in two micro-batches."""
    folder = tmp_path_factory.mktemp("even")
    cluster = cluster_of(folder, ("Rack 1_A", "T4", 2), ("b", "V100-16GB", 2))
    return plan_of(graph, cluster, EVEN, micro_batches=((1, 1),) * 4)


@pytest.mark.parametrize("target", ["ddp", "torchrun", "slurm", "kubernetes"])
def test_scripts_are_well_formed(even: Plan, tmp_path: Path, target: str) -> None:
    folder = tmp_path / "job"
    written = export_plan(even, target, folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in written)
    for path in written:
        if path.suffix == ".py":
            ast.parse(path.read_text())
            assert "__doc__." not in path.read_text(), "python -OO leaves docstrings out"
        if path.suffix in (".sh", ".sbatch"):
            subprocess.run(["bash", "-n", str(path)], check=True)
        assert "{% " not in path.read_bytes().decode(errors="ignore") or path.suffix == ".gz"
    assert 5 <= len((folder / "README.md").read_text().splitlines()) <= 25
    assert not list(tmp_path.glob(".job*"))


def test_one_host_meets_itself(even: Plan) -> None:
    """Its name in the plan is often known to no name server."""
    ranks = ranks_of(even.cluster)
    alone = [entry for entry in ranks if entry.host == ranks[0].host]
    assert "first_host=127.0.0.1" in launch_script(alone).decode()
    assert "MASTER_ADDR" not in launch_command(alone)
    assert "MASTER_ADDR is" in launch_command(ranks)


def test_launch_uses_torchrun_where_hosts_are_equal(even: Plan, tmp_path: Path) -> None:
    export_plan(even, "torchrun", tmp_path / "job")
    done = subprocess.run(
        ["bash", str(tmp_path / "job" / "launch.sh"), "b", "--steps", "2"],
        env=os.environ | {"PYTHON": "echo", "MASTER_ADDR": "m", "MASTER_PORT": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (
        done.stdout.split()
        == (
            "-m torch.distributed.run --nnodes 2 --nproc-per-node 2 --node-rank 1 --master-addr m "
            "--master-port 1 -- train.py --steps 2"
        ).split()
    )
    wrong = subprocess.run(
        ["bash", str(tmp_path / "job" / "launch.sh"), "c"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert wrong.returncode == 2
    assert "the plan has: Rack 1_A, b" in wrong.stderr


@pytest.mark.distributed
def test_a_failing_rank_ends_launch(graph: OpGraph, tmp_path: Path) -> None:
    plan = plan_of(
        graph,
        cluster_of(tmp_path, ("a", "CPU", 2), ("b", "CPU", 1)),
        Decision(devices=(0, 1, 2), shares=(4, 3, 1)),
    )
    export_plan(plan, "ddp", tmp_path / "job")
    python = tmp_path / "python"
    python.write_text('#!/usr/bin/env bash\n[ "$RANK" = 1 ] && exit 7\nexec sleep 600\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", str(tmp_path / "job" / "launch.sh"), "a"],
        env=os.environ | {"PYTHON": str(python)},
        timeout=300,
        check=False,
    )
    assert done.returncode == 7


def test_slurm_gives_ranks_by_node(graph: OpGraph, tmp_path: Path) -> None:
    """A job whose nodes come in another order than the plan's hosts, under stand-ins for Slurm."""
    cluster = cluster_of(tmp_path, ("x", "T4", 1), ("y", "V100-16GB", 2), ("z", "T4", 1))
    decision = Decision(devices=(0, 1, 2, 3), shares=(2, 2, 2, 2))
    folder = tmp_path / "job"
    export_plan(plan_of(graph, cluster, decision), "slurm", folder)
    script = (folder / "job.sbatch").read_text()
    options = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert options == [
        "#SBATCH --job-name=heterog",
        "#SBATCH --nodes=2 --ntasks-per-node=1 --exclusive",
        "#SBATCH --gres=gpu:t4:1",
        "#SBATCH hetjob",
        "#SBATCH --nodes=1 --ntasks-per-node=2 --exclusive",
        "#SBATCH --gres=gpu:v100_16gb:2",
    ]
    assert "srun --het-group=0,1 --gpu-bind=none " in script
    stand_ins = tmp_path / "bin"
    stand_ins.mkdir()
    for name, body in {
        "scontrol": 'tr "," "\\n" <<< "$3"',
        "srun": 'while [ "$1" != bash ]; do shift; done\n'
        "for task in n9:0 n1:1 n1:0 n4:0; do\n"
        '  SLURMD_NODENAME="${task%:*}" SLURM_LOCALID="${task#*:}" "$@"\ndone',
        "python": 'echo "$SLURMD_NODENAME $SLURM_LOCALID $RANK $WORLD_SIZE $MASTER_ADDR $*"',
    }.items():
        (stand_ins / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (stand_ins / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{stand_ins}:{os.environ['PATH']}",
        "PYTHON": "python",
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "n4,n9",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "n1",
    }

    def run() -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            ["bash", str(folder / "job.sbatch"), "--steps", "2"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    done = run()
    assert done.stdout.splitlines() == [
        "n9 0 3 4 n4 train.py --steps 2",
        "n1 1 2 4 n4 train.py --steps 2",
        "n1 0 1 4 n4 train.py --steps 2",
        "n4 0 0 4 n4 train.py --steps 2",
    ], done.stderr
    environment["SLURM_JOB_NODELIST_HET_GROUP_1"] = "n4"
    assert "the plan needs 3 different nodes, got: n4 n4 n9" in run().stderr


@pytest.mark.parametrize("target", ["slurm", "kubernetes"])
def test_devices_without_work_are_not_reserved(
    graph: OpGraph, tmp_path: Path, target: str
) -> None:
    cluster = cluster_of(tmp_path, ("x", "T4", 2), ("y", "V100-16GB", 3), ("z", "T4", 2))
    plan = plan_of(graph, cluster, Decision(devices=(3, 4), shares=(6, 2)))
    made = make_export(plan, target)
    name = "plan.json" if target == "slurm" else "plan.json.gz"
    content = made.files[name]
    (tmp_path / "part.json").write_bytes(gzip.decompress(content) if ".gz" in name else content)
    part = load_plan(tmp_path / "part.json")  # checks the program, its order and peaks
    assert [device.name for device in part.cluster.devices] == ["y:1", "y:2"]
    assert part.strategy.decisions[0].shares == (6, 2)
    evaluator = Evaluator(graph, part.cluster)
    again = evaluator.referee(part.strategy, Order[part.order.upper()])
    assert again.step_time_s == pytest.approx(plan.step_time_s, rel=1e-12)
    assert any("4 T4, 1 V100-16GB not used" in each for each in made.not_expressed)
    script = made.files["job.sbatch" if target == "slurm" else "trainjob.yaml"].decode()
    assert "t4" not in script.lower().replace("trait4", "")
    assert ("gpu:v100_16gb:2" if target == "slurm" else "nvidia.com/gpu: 2") in script


def test_idle_devices_beside_others_of_another_type_stay(graph: OpGraph, tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, ("x", "T4", 2), ("y", "V100-16GB", 1))
    mixed = replace(
        cluster,
        devices=(*cluster.devices[:2], replace(cluster.devices[2], host_index=0)),
        hosts=cluster.hosts[:1],
    )
    plan = plan_of(graph, mixed, Decision(devices=(0, 2), shares=(4, 4)))
    assert on_used_devices(plan) == (plan, ())


def test_slurm_on_hosts_of_one_kind_is_a_plain_job(graph: OpGraph, tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, ("a", "CPU", 2), ("b", "CPU", 2))
    made = make_export(plan_of(graph, cluster, EVEN), "slurm")
    assert "Which node is" not in " ".join(made.not_expressed)
    script = made.files["job.sbatch"].decode()
    assert "hetjob" not in script
    assert "het-group" not in script
    assert "gres" not in script
    assert "#SBATCH --nodes=2 --ntasks-per-node=2 --exclusive" in script
    assert "$SLURM_JOB_NODELIST)" in script.replace('"', "")
    slower = replace(cluster.hosts[1], nic_line_rate_bytes_per_s=1e6)
    cluster = replace(cluster, hosts=(cluster.hosts[0], slower))
    made = make_export(plan_of(graph, cluster, EVEN), "slurm")
    assert "Which node is 'a' and which 'b'" in " ".join(made.not_expressed)


def manifests(files: Mapping[str, bytes]) -> list[Any]:
    """All resources, of which the published types of Kubernetes take every field."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    types = {
        "TrainJob": models.TrainerV1alpha1TrainJob,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
        "JobSet": models.JobsetV1alpha2JobSet,
    }
    found = [
        document
        for name in ("trainjob.yaml", "jobset.yaml")
        for document in yaml.safe_load_all(files[name])
    ]
    for document in found:
        assert types[document["kind"]].from_dict(document).to_dict() == document
        assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", document["metadata"]["name"])
    return found


def test_kubernetes_manifests(even: Plan) -> None:
    files = make_export(even, "kubernetes").files
    runtime, train, jobset = manifests(files)
    name = jobset["metadata"]["name"]
    assert [each["kind"] for each in (runtime, train)] == ["TrainingRuntime", "TrainJob"]
    assert train["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"] == name
    assert runtime["spec"]["template"]["spec"] == jobset["spec"]
    for each in (train, jobset):
        assert each["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "default"}
    jobs = jobset["spec"]["replicatedJobs"]
    assert [job["name"] for job in jobs] == ["rack-1-a", "b"]
    assert ["metadata" in job["template"] for job in jobs] == [True, False]
    for job, host, label in zip(jobs, ("Rack 1_A", "b"), ("rack-1-a", "b"), strict=True):
        assert job["template"]["spec"]["backoffLimit"] == 0
        pod = job["template"]["spec"]["template"]["spec"]
        assert pod["nodeSelector"] == {"heterog/host": label}
        assert pod["tolerations"][0]["key"] == "nvidia.com/gpu"
        (container,) = pod["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 2}
        assert container["command"] == ["bash", "/job/launch.sh", host]
        variables = {each["name"]: each["value"] for each in container["env"]}
        assert variables["MASTER_ADDR"] == f"{name}-rack-1-a-0-0.{name}"
        assert pod["volumes"][0]["configMap"] == {"name": name}
    (kustomization,) = yaml.safe_load_all(files["kustomization.yaml"])
    (generator,) = kustomization["configMapGenerator"]
    assert generator["name"] == name
    own = {"trainjob.yaml", "jobset.yaml", "kustomization.yaml", "Dockerfile"}
    assert set(generator["files"]) == set(files) - own
    assert '"plan.json.gz"' in files["train.py"].decode()
    assert f"heterog=={heterog.__version__}" in files["Dockerfile"].decode()


def test_kubernetes_needs_a_volume_for_large_plans(
    even: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("heterog.export.kubernetes.CONFIG_MAP_LIMIT_BYTES", 2**10)
    made = make_export(even, "kubernetes")
    assert any("PersistentVolumeClaim" in remark for remark in made.not_expressed)
    assert "PersistentVolumeClaim" in made.files["README.md"].decode()
    *_, jobset = manifests(made.files)
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"].startswith("heterog-")
    (kustomization,) = yaml.safe_load_all(made.files["kustomization.yaml"])
    assert "configMapGenerator" not in kustomization


def test_kubernetes_refuses_hosts_of_one_name(graph: OpGraph, tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, ("a_1", "CPU", 2), ("A-1", "CPU", 2))
    with pytest.raises(ExportError, match="'a_1' and 'A-1' would both be 'a-1'"):
        make_export(plan_of(graph, cluster, EVEN), "kubernetes")


def test_deepspeed_files(graph: OpGraph, tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, ("a", "T4", 2), ("b", "T4", 2))
    decision = Decision(devices=(0, 2, 3), shares=(4, 0, 4))
    micro = ((2, 2), (0, 0), (0, 0), (2, 2))
    files = make_export(plan_of(graph, cluster, decision, micro_batches=micro), "deepspeed").files
    config = json.loads(files["ds_config.json"])
    assert config["train_batch_size"] == 8
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert config["gradient_accumulation_steps"] == 2
    assert config["zero_optimization"] == {"stage": 0}
    assert files["hostfile"].decode() == "a slots=2\nb slots=2\n"
    assert '--include "a:0@b:1"' in files["launch.sh"].decode()


def test_skypilot_rents_alike_nodes(graph: OpGraph, tmp_path: Path) -> None:
    plan = plan_of(
        graph, cluster_of(tmp_path, ("a", "V100-16GB", 2), ("b c", "V100-16GB", 2)), EVEN
    )
    task = yaml.safe_load(make_export(plan, "skypilot").files["sky.yaml"])
    assert (task["num_nodes"], task["resources"]) == (2, {"accelerators": "V100:2"})
    assert "hosts=(a 'b c')" in task["run"]
    other = plan_of(graph, cluster_of(tmp_path, ("a", "T4", 2), ("b", "L4", 2)), EVEN)
    with pytest.raises(ExportError, match="'b' has L4, L4 where 'a' has T4, T4"):
        make_export(other, "skypilot")
    unlike = cluster_of(tmp_path, ("a", "T4}, {type: L4", 3))
    with pytest.raises(ExportError, match="devices are alike, and 'a' has T4, L4, L4, L4"):
        make_export(plan_of(graph, unlike, EVEN), "skypilot")


def test_ray_gets_a_node_for_each_host_by_its_devices(graph: OpGraph, tmp_path: Path) -> None:
    hosts = ("a", "V100-16GB", 1), ("b", "T4", 2), ("c", "V100-16GB", 1)
    plan = plan_of(graph, cluster_of(tmp_path, *hosts), EVEN)
    files = make_export(plan, "ray").files
    job = yaml.safe_load(files["rayjob.yaml"])
    groups = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert [(group["replicas"], group["rayStartParams"]["resources"]) for group in groups] == [
        (2, "'{\"V100-16GB\": 1}'"),
        (1, "'{\"T4\": 2}'"),
    ]
    assert "heterog run plan.json.gz" in job["spec"]["entrypoint"]
    assert "-- heterog run plan.json.gz" in files["submit.sh"].decode()
    assert not {"launch.sh", "train.py"} & set(files)


@pytest.mark.parametrize(
    ("sync", "recompute", "layout"),
    [
        (Sync.RING, False, Layout(dp=4, micro_batch=1)),
        (Sync.ZERO3, True, Layout(dp=4, micro_batch=1, zero=3, recompute=Recompute.FULL)),
        (Sync.ZERO2, False, Layout(dp=4, micro_batch=1, zero=2)),
    ],
)
def test_torchtitan_is_read_again_as_the_same_layout(
    graph: OpGraph, tmp_path: Path, sync: Sync, recompute: bool, layout: Layout
) -> None:
    decision = replace(EVEN, sync=sync, recompute=recompute)
    cluster = cluster_of(tmp_path, ("a", "T4", 2), ("b", "T4", 2))
    plan = plan_of(graph, cluster, decision, micro_batches=((1, 1),) * 4)
    export_plan(plan, "torchtitan", tmp_path / "job")
    found = read_layout(tmp_path / "job" / "torchtitan.toml")
    assert (found.layout, found.batch_size, found.remarks) == (layout, 8, ())
    launch = (tmp_path / "job" / "launch.sh").read_text()
    assert "-m torchtitan.train --job.config_file torchtitan.toml" in launch


def test_workloads_of_the_zoo_and_of_unknown_origin(graph: OpGraph, tmp_path: Path) -> None:
    plan = plan_of(graph, cluster_of(tmp_path, ("a", "CPU", 4)), EVEN)

    def export(source: str, *trusted: str) -> Export:
        named = replace(plan, graph=replace(graph, source=source))
        return make_export(named, "torchrun", sources=trusted)

    for source, text, remark in (
        ("gpt2", "return load_workload('gpt2', batch_size)", ""),
        ("", "fill in workload()", "does not name its source"),
        ("/nowhere/m.py:f", "fill in workload()", "/nowhere/m.py is not on this machine"),
    ):
        made = export(source)
        assert text in made.files["user.py"].decode()
        assert remark in " ".join(made.not_expressed)
    (tmp_path / "layers.py").write_text("")
    (tmp_path / "m.py").write_text("import json, layers\nfrom torch import nn\n")
    made = export(f"{tmp_path}/m.py:f", f"{tmp_path}/m.py")
    assert made.files["model.py"] == (tmp_path / "m.py").read_bytes()
    assert "The modules layers that m.py imports" in " ".join(made.not_expressed)


def test_files_that_nobody_named_are_not_copied(
    graph: OpGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan that named /etc/shadow as its source had it copied into the folder."""
    plan = plan_of(graph, cluster_of(tmp_path, ("a", "CPU", 4)), EVEN)
    work, other = tmp_path / "work", tmp_path / "other"
    for folder in (work, other):
        folder.mkdir()
        (folder / "m.py").write_text(f"# {folder.name}")
    (other / "secret").write_text("s3cret")
    (work / "link.py").symlink_to(other / "m.py")
    monkeypatch.chdir(work)

    def files(source: str, *trusted: str) -> str:
        named = replace(plan, graph=replace(graph, source=source))
        made = [make_export(named, target, sources=trusted) for target in TARGETS]
        return repr([each.files for each in made])

    assert "# work" in files(f"{work}/m.py:f")
    assert "# work" in files("m.py:f")
    for source in (f"{other}/m.py:f", "../other/m.py:f", "link.py:f"):
        with pytest.raises(InputFileError, match=r"if you trust it, add `sources` .*\.py\.$"):
            files(source)
    for source in (f"{other}/secret:f", f"{work}/m.py:f()", f'{work}/m.py:f"; import os; "'):
        with pytest.raises(InputFileError, match="is not a Python file and a function in it"):
            files(source, f"{other}/secret", f"{work}/m.py")
    assert "# other" in files(f"{other}/m.py:f", f"{other}/m.py")
    assert "# other" in files("/elsewhere/m.py:f", "../other/m.py:f"), "a file that has moved"


HOSTILE = 'x"""; import os; os.mkdir("pwned"); """ \\ `touch pwned` $(touch pwned) [a](b) <b>'


def test_words_of_a_plan_are_only_words(
    graph: OpGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph of this name wrote code into user.py, which train.py ran."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HeterogError, match="which names cannot have"):
        replace(graph, name=HOSTILE)
    with pytest.raises(HeterogError, match="is not the name of a class"):
        replace(graph, optimizer="SGD\nimport os")
    modules = [replace(op, module=f"{op.module}.{HOSTILE}") for op in graph.ops]
    wild = replace(graph, source=f"/nowhere/{HOSTILE}.py:f", ops=tuple(modules))
    cluster = cluster_of(tmp_path, ("a", "CPU", 4))
    served = Decision(devices=EVEN.devices, shares=EVEN.shares, sync=Sync.PARAMETER_SERVER)
    plan = plan_of(wild, cluster, served, homes=(0,) * len(graph.updates))
    for target in TARGETS:
        if target == "deepspeed":
            continue  # has no parameter servers' remarks
        made = make_export(plan, target)
        for name, content in made.files.items():
            text = content.decode() if not name.endswith(".gz") else ""
            if name.endswith(".py"):
                compile(text, name, "exec")
                tree = ast.parse(text)
                names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import)
                         for alias in node.names}  # fmt: skip
                assert "os" not in names or name == "train.py"
                docstring = ast.get_docstring(tree) or ""
                assert name != "user.py" or 'import os; os.mkdir("pwned")' in docstring
            if name.endswith((".sh", ".sbatch")):
                assert "pwned" not in text
            if name == "README.md":
                assert "[a](b)" not in text
                assert "<b>" not in text.replace("\\<b", "")
    assert not (tmp_path / "pwned").exists()


# --- what is not expressed, and what is refused -------------------------------------------------


def test_ddp_names_what_it_leaves_out(graph: OpGraph, tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, ("a", "CPU", 4))
    served = Decision(devices=EVEN.devices, shares=EVEN.shares, sync=Sync.PARAMETER_SERVER)
    plan = plan_of(graph, cluster, served, homes=(0,) * len(graph.updates), step_barrier=False)
    made = make_export(plan, "ddp")
    text = " ".join(made.not_expressed)
    first = group_ops(graph).names[0]
    for words in ("Parameter servers", f"first '{first}'", "No step barrier", "order of tasks",
                  "counted labels"):  # fmt: skip
        assert words in text
    assert all(remark in made.files["README.md"].decode() for remark in made.not_expressed)
    for sync in (Sync.HIERARCHICAL, Sync.REDUCE_SCATTER_ALL_GATHER):
        decision = Decision(devices=EVEN.devices, shares=EVEN.shares, sync=sync)
        text = " ".join(make_export(plan_of(graph, cluster, decision), "ddp").not_expressed)
        assert "ll-reduce" in text if sync == Sync.HIERARCHICAL else "slices" in text
    alone = Decision(devices=(1,), shares=(8,))
    plan = plan_of(graph, cluster, alone, homes=(2,) * len(graph.updates))
    assert "updated on other devices" in " ".join(make_export(plan, "ddp").not_expressed)


@pytest.mark.parametrize(("first_bytes", "is_said"), [(0, False), (1 << 20, False), (9, True)])
def test_ddp_says_so_if_its_first_bucket_is_another(
    graph: OpGraph, tmp_path: Path, first_bytes: int, is_said: bool
) -> None:
    cluster = cluster_of(tmp_path, ("a", "CPU", 4))
    plan = plan_of(graph, cluster, EVEN, bucket_bytes=25 << 20, first_bucket_bytes=first_bytes)
    made = make_export(plan, "ddp")
    said = "Buckets of 26214400 bytes after a first one of 9: with a smaller first one ddp has"
    assert (said in " ".join(made.not_expressed)) == is_said
    ranks = json.loads(made.files["ranks.json"])
    assert (ranks["bucket_bytes"], ranks["first_bucket_bytes"]) == (25 << 20, first_bytes)


def refusals(graph: OpGraph, folder: Path) -> Iterator[tuple[Plan, str, str]]:
    cluster = cluster_of(folder, ("a", "CPU", 2), ("b", "CPU", 2))
    names = group_ops(graph).names
    mixed = [EVEN] * len(names)
    mixed[1] = Decision(devices=(3,), shares=(8,))
    for target in ("ddp", "deepspeed"):
        text = f"group '{names[1]}' runs on b:1 (8) and '{names[0]}' on a:0 (2), a:1 (2)"
        yield plan_of(graph, cluster, mixed), target, text
        coded, text = plan_of(graph, cluster, EVEN), "int8 on gradients between devices 0, 1, 2, 3"
        rule = CodecRule(
            traffic=Traffic.GRADIENTS, devices=EVEN.devices, codec=parse_codec("int8")
        )
        yield replace(coded, strategy=with_rules(coded.strategy, (rule,))), target, text
    uneven = Decision(devices=(0, 1, 2, 3), shares=(3, 2, 2, 1))
    yield plan_of(graph, cluster, uneven), "deepspeed", "shares are a:0: 3, a:1: 2, b:0: 2, b:1: 1"
    one = Decision(devices=(0,), shares=(8,))
    micro = ((5, 3), (0, 0), (0, 0), (0, 0))
    yield (
        plan_of(graph, cluster, one, micro_batches=micro),
        "deepspeed",
        "equal micro-batches, but the plan's are a:0: (5, 3)",
    )
    spaced = cluster_of(folder, ("my host", "CPU", 4))
    yield plan_of(graph, spaced, EVEN), "deepspeed", "cannot name host 'my host'"


def test_targets_refuse_what_they_cannot_express(graph: OpGraph, tmp_path: Path) -> None:
    for plan, target, text in refusals(graph, tmp_path):
        with pytest.raises(ExportError, match=re.escape(text)):
            export_plan(plan, target, tmp_path / "job")
        assert not (tmp_path / "job").exists()


class MixedBatch(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input + input.flip(0))


class CumulativeBatch(torch.nn.Linear):
    """Every sample sees those before it: no rank can do that with its own samples."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).cumsum(0)


@pytest.mark.parametrize(("model", "kind"), [(CumulativeBatch, "cumsum"), (MixedBatch, "flip")])
def test_ddp_refuses_ops_that_need_the_whole_batch(
    tmp_path: Path, model: type[torch.nn.Linear], kind: str
) -> None:
    workload = Workload(
        lambda: model(4, 4),
        (torch.zeros(8, 4), torch.zeros(8, 4)),
        torch.nn.functional.mse_loss,
        torch.optim.SGD,
        {"lr": 0.1},
    )
    plan = plan_of(capture(workload), cluster_of(tmp_path, ("a", "CPU", 4)), EVEN)
    with pytest.raises(ExportError, match=rf"op {kind}.* needs the whole batch"):
        make_export(plan, "ddp")
    assert make_export(plan, "torchrun").files


def masked_mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    mask = (target > 0).float()
    return ((output - target) ** 2 * mask).sum() / mask.sum()


def test_ddp_names_sums_over_the_batch(tmp_path: Path) -> None:
    workload = Workload(
        lambda: torch.nn.Linear(4, 4),
        (torch.zeros(8, 4), torch.zeros(8, 4)),
        masked_mean,
        torch.optim.SGD,
        {"lr": 0.1},
    )
    plan = plan_of(capture(workload), cluster_of(tmp_path, ("a", "CPU", 4)), EVEN)
    assert "A sum over the whole batch that div" in " ".join(
        make_export(plan, "ddp").not_expressed
    )


def test_unknown_targets_and_plans_that_do_not_fit(even: Plan, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'torchrun'"):
        export_plan(even, "torchrn", tmp_path / "job")
    short = replace(even, step_time_s=None, shortage="a:0 lacks 3 GiB")
    for target in TARGETS:
        with pytest.raises(ExportError, match=r"cannot run \(a:0 lacks 3 GiB\)"):
            export_plan(short, target, tmp_path / "job")


def test_folders_are_not_mixed_or_destroyed(even: Plan, uneven: Plan, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    export_plan(even, "ddp", folder)  # empty: taken
    with pytest.raises(ExportError, match="not empty; name another folder, or pass `overwrite`"):
        export_plan(even, "ddp", folder)
    with pytest.raises(ExportError, match="holds an export to ddp"):
        export_plan(even, "torchrun", folder, overwrite=True)
    (folder / "weights.pt").write_text("precious")
    renewed = export_plan(uneven, "ddp", folder, overwrite=True)
    assert folder / "user.py" in renewed
    assert json.loads((folder / "ranks.json").read_text())["cluster"] == "skew_both"
    (folder / "user.py").write_text("mine")
    renewed = export_plan(even, "ddp", folder, overwrite=True)
    assert folder / "user.py" not in renewed
    assert (folder / "user.py").read_text() == "mine"
    assert (folder / "weights.pt").read_text() == "precious"

    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").write_text("dear")
    with pytest.raises(ExportError, match="no export"):
        export_plan(even, "ddp", tmp_path / "home", overwrite=True)
    with pytest.raises(ExportError, match="is not a folder"):
        export_plan(even, "ddp", tmp_path / "home" / "letter")
    with pytest.raises(ExportError, match="does not exist"):
        export_plan(even, "ddp", tmp_path / "no" / "job")


def test_a_refusal_of_the_system_leaves_nothing(
    even: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("heterog.files.os.replace", refuse)
    with pytest.raises(InputFileError, match=r"cannot write .*job: No space left on device"):
        export_plan(even, "ddp", tmp_path / "job")
    assert not list(tmp_path.iterdir())


# --- what the scripts say -----------------------------------------------------------------------


def script(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module train.py of an exported folder, with the folder's user.py."""
    modules = {}
    for name in ("user", "train"):
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        modules[name] = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, modules[name])
        spec.loader.exec_module(modules[name])
    return modules["train"]


def test_ddp_script_says_what_is_wrong(
    even: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    export_plan(even, "ddp", tmp_path / "job")
    train = script(tmp_path / "job", monkeypatch)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit, match="3 ranks are running; the plan has 4: Rack 1_A:0 on"):
        train.this_rank("cpu")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit, match="rank 1 is planned for GPU 1 of host Rack 1_A, where"):
        train.this_rank("auto")
    rank, backend = train.this_rank("cpu")
    assert (rank.first_sample, rank.batch_size, rank.micro_batches) == (2, 2, (1, 1))
    assert backend == "gloo"
    with pytest.raises(SystemExit, match=r"fill in build\(\)"):
        train.user.build(rank)
    with pytest.raises(SystemExit, match="gave rank 1 3 samples; the plan has 2"):
        list(train.cut((torch.zeros(3, 2), torch.zeros(3)), rank))
    parts = list(train.cut({"x": torch.zeros(2, 2), "name": "n"}, rank))
    assert [train.user.loss_weight(part) for part in parts] == [1.0, 1.0]
    monkeypatch.setattr(train.user, "loss_weight", lambda batch: 0.0)
    monkeypatch.setattr(train, "dist", SimpleNamespace(all_reduce=lambda totals: totals.mul_(4)))
    with pytest.raises(SystemExit, match="weights of the whole batch are 0"):
        train.train_step(None, None, None, torch.zeros(2, 2), rank, train.Weighting())
    alone = SimpleNamespace(all_reduce=lambda *_: None, barrier=lambda: None)
    monkeypatch.setattr(train, "dist", SimpleNamespace(**vars(alone), ReduceOp=dist.ReduceOp))
    monkeypatch.chdir(tmp_path)
    asked = SimpleNamespace(checkpoint="ckpt", every=2, every_minutes=0.0)
    model = tiny.make_model()
    trained = {"model": model, "optimizer": tiny.make_optimizer(model)}
    saved = train.Checkpoints(asked, rank, trained)
    assert saved.resume() == 0
    before = {name: value.clone() for name, value in model.state_dict().items()}
    saved.save(4)
    next_number = torch.rand(1)
    torch.nn.init.zeros_(next(model.parameters()))
    assert train.Checkpoints(asked, rank, trained).resume() == 4
    torch.testing.assert_close(dict(model.state_dict()), before)
    assert torch.rand(1) == next_number
    assert [saved.is_due(step) for step in (5, 6)] == [False, True]
    train.check_model(tiny.make_model(), replace(rank, rank=0))
    assert capsys.readouterr().out == ""
    train.check_model(torch.nn.Linear(2, 2), replace(rank, rank=0))
    assert "a model of 6 parameters; 'tiny' was planned with" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["broadcast_buffers", "forward_sync_buffers"])
def test_ddp_sends_buffers_as_the_user_says(
    even: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Torch ignores ``broadcast_buffers`` beside the newer option, so only one may be given."""
    export_plan(even, "ddp", tmp_path / "job")
    train = script(tmp_path / "job", monkeypatch)
    ours = train.ddp_options()
    assert ours.pop("gradient_as_bucket_view")
    assert list(ours.values()) == [False]
    assert ours.keys() <= signature(DistributedDataParallel).parameters.keys()
    monkeypatch.setattr(train.user, "DDP_OPTIONS", {name: True, "gradient_as_bucket_view": False})
    assert train.ddp_options() == {name: True, "gradient_as_bucket_view": False}


def test_torchrun_script_says_what_is_wrong(
    even: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_plan(even, "torchrun", tmp_path / "job")
    train = script(tmp_path / "job", monkeypatch)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit, match="rank 1 is planned for GPU 1 of host Rack 1_A, where"):
        train.join("auto", 1.0)
    monkeypatch.setenv("RANK", "4")
    with pytest.raises(SystemExit, match="there is a rank 4; the plan has 4 ranks"):
        train.join("cpu", 1.0)
    with pytest.raises(SystemExit, match=r"fill in workload\(\)"):
        train.user.workload(8)


# --- the command --------------------------------------------------------------------------------


def run_cli(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object
) -> tuple[object, str, str]:
    monkeypatch.setattr(sys, "argv", ["heterog", "export", *map(str, arguments)])
    code: object = 0
    try:
        cli.main()
    except SystemExit as stop:
        code = stop.code or 0
    streams = capsys.readouterr()
    return code, streams.out, streams.err


def test_command(
    uneven: Plan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = tmp_path / "plan.json"
    uneven.save(plan)

    def call(*arguments: object) -> tuple[object, str, str]:
        return run_cli(monkeypatch, capsys, *arguments)

    monkeypatch.chdir(tmp_path)
    folder = Path("ddp")  # what --to says is no file that is read
    code, out, err = call(plan, "--to", "ddp", "-o", folder, "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["target"] == "ddp"
    assert str(folder / "train.py") in document["files"]
    assert any("order of tasks" in remark for remark in document["not_expressed"])
    code, _, err = call(plan, "--to", "ddp", "-o", folder)
    assert code == 2
    assert err.count("\n") == 1
    assert "not empty" in err
    code, out, _ = call(plan, "--to", "ddp", "-o", folder, "--overwrite")
    assert code == 0
    assert "not expressed: The plan's order" in out
    code, _, err = call(plan, "--to", "dpd", "-o", tmp_path / "other")
    assert code == 2
    assert "unknown export target 'dpd'; did you mean 'ddp'?" in err
    code, _, err = call(plan, "--to", "deepspeed", "-o", tmp_path / "other")
    assert code == 2
    assert "the plan's shares are a: " in err
    assert not (tmp_path / "other").exists()


def test_exporting_needs_no_torch() -> None:
    code = "import sys, heterog.export; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_errors_are_errors_of_heterog() -> None:
    assert issubclass(ExportError, HeterogError)


@pytest.mark.parametrize(("sync", "stage"), [(Sync.RING, 0), (Sync.ZERO1, 1), (Sync.ZERO3, 3)])
def test_deepspeed_has_the_stage_of_the_plan(
    graph: OpGraph, tmp_path: Path, sync: Sync, stage: int
) -> None:
    cluster = cluster_of(tmp_path, ("a", "T4", 2), ("b", "T4", 2))
    decision = Decision(devices=(0, 1, 2, 3), shares=(2, 2, 2, 2), sync=sync)
    made = make_export(plan_of(graph, cluster, decision), "deepspeed")
    config = json.loads(made.files["ds_config.json"])
    assert config["zero_optimization"]["stage"] == stage
    assert "ZeRO" not in " ".join(made.not_expressed)
