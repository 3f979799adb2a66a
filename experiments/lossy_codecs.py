"""Codecs: what they cost, what they bring on slow links, and what they do to training.

    python experiments/lossy_codecs.py cost --json
    python experiments/lossy_codecs.py steps --json                     # Linux, as root
    python experiments/lossy_codecs.py steps --testbeds skew_network --models vgg --rounds 10
    python experiments/lossy_codecs.py losses --json --steps 300

``cost``: CPU seconds of encoding and decoding over those of a copy; the constants of
``heterog.modes.codecs.value`` come from it. ``steps``: on each testbed and workload the best exact
plan and codecs on its slowest boundaries, in one job and in turn, beside what was predicted with
a calibration on other workloads. ``losses``: the same number of steps with and without codecs, on
ranks of plain processes; data parallelism and a pipeline.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rows import finish, progress, script_parser
from testbed_calibration import calibrated
from testbed_rounds import report, results_of_ranks, seconds_in_turn
from torch import Tensor, nn
from torch.nn import functional

import heterog
from heterog.cluster import Cluster
from heterog.graph.capture import capture, capture_step
from heterog.graph.grouping import group_ops
from heterog.methods.planner import Budget, Candidate, MethodRow
from heterog.modes.codecs.method import boundaries, with_codec
from heterog.modes.codecs.tensors import add_decoded, decode, encode
from heterog.modes.codecs.value import (
    DECODE_BYTES,
    ENCODE_BYTES,
    CodecRule,
    Traffic,
    codec_rules,
    parse_codec,
    with_rules,
)
from heterog.runtime.deploy import DeployedStep
from heterog.runtime.launch import run_commands
from heterog.runtime.rank import end_together, join
from heterog.runtime.ranks.testbed import load_testbed
from heterog.runtime.ranks.watching import Limits
from heterog.search.plan import Plan, load_plan, make_plan, plan_from_rows
from heterog.search.request import Request
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.strategy import REPLICATED, Decision, Strategy, Sync
from heterog.zoo import load_workload

WORKLOADS = Path(__file__).with_name("testbed_workloads.py")
SLOW = Path(__file__).with_name("slow_network.yaml")
CODECS = ("fp16", "int8", "top_k=10")
MODELS = {"steps": ("gpt", "vgg"), "losses": ("gpt", "conv")}
"""For steps those of ``testbed_workloads.py``, for losses those of this file."""
SIZES = (25_000, 400_000, 4_000_000)
_TOKENS, _VOCABULARY, _WIDTH = 32, 64, 96


class SmallGpt(nn.Module):
    """Two causal layers of 0.25 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
        self.position = nn.Parameter(torch.randn(_TOKENS, _WIDTH) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                _WIDTH, 4, 4 * _WIDTH, 0.0, batch_first=True, norm_first=True
            )
            for _ in range(2)
        )
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of every position, ``[batch x tokens, vocabulary]``."""
        mask = torch.full((_TOKENS, _TOKENS), -1e9).triu(1)
        x = self.embedding(tokens) + self.position
        for layer in self.layers:
            x = layer(x, mask)
        out: Tensor = self.head(x)
        return out.flatten(0, 1)


def _loss(output: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(output, labels.flatten())


def gpt(batch_size: int = 24) -> heterog.Workload:
    """Learns which token follows which."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return SmallGpt()

    batch = gpt_batch(0, batch_size)
    return heterog.Workload(model, batch, _loss, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})


def gpt_batch(step: int, batch_size: int = 24) -> tuple[Tensor, Tensor]:
    """Sequences that a rule makes of their first token, with a tenth of noise."""
    generator = torch.Generator().manual_seed(1000 + step)
    rows = [torch.randint(0, _VOCABULARY, (batch_size,), generator=generator)]
    for _ in range(_TOKENS):
        noise = torch.randint(0, _VOCABULARY, (batch_size,), generator=generator)
        is_noise = torch.rand(batch_size, generator=generator) < 0.1
        rows.append(torch.where(is_noise, noise, (5 * rows[-1] + 3) % _VOCABULARY))
    tokens = torch.stack(rows, dim=1)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def conv(batch_size: int = 24) -> heterog.Workload:
    """A convolutional network of 0.3 M parameters on 16 x 16 images."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(
            *layers, nn.Flatten(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 10)
        )

    options = {"lr": 0.004, "momentum": 0.9}
    return heterog.Workload(
        model, conv_batch(0, batch_size), functional.cross_entropy, torch.optim.SGD, options
    )


def conv_batch(step: int, batch_size: int = 24) -> tuple[Tensor, Tensor]:
    """Ten patterns under noise of three times their size."""
    patterns = torch.randn(10, 3, 16, 16, generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(2000 + step)
    labels = torch.randint(0, 10, (batch_size,), generator=generator)
    noise = torch.randn(batch_size, 3, 16, 16, generator=generator)
    return patterns[labels] + 3.0 * noise, labels


BATCHES: dict[str, Callable[[int], tuple[Tensor, Tensor]]] = {"gpt": gpt_batch, "conv": conv_batch}


def workload(model: str) -> heterog.Workload:
    """A workload of this file, with its source."""
    return load_workload(f"{Path(__file__).resolve()}:{model}", None)


def testbed_workload(model: str) -> heterog.Workload:
    """A workload whose exact plan needs the network of a testbed."""
    return load_workload(f"{WORKLOADS}:{model}", None)


# --- what they cost ------------------------------------------------------------------------------


def cpu_seconds(call: Callable[[], Any], repeats: int = 7) -> float:
    """The least CPU time of a call: other people's processes take none of it."""
    found = []
    for _ in range(repeats):
        begin = time.process_time()
        call()
        found.append(time.process_time() - begin)
    return min(found)


def costs() -> Iterator[dict[str, Any]]:
    """Bytes that could be copied while a payload byte is encoded or decoded."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    for size in SIZES:
        values = torch.randn(size, generator=generator)
        total = torch.zeros(size)
        copied = cpu_seconds(values.clone) / 2.0  # reads and writes
        for name in CODECS:
            codec = parse_codec(name)
            message = encode(values, codec)
            times = {
                "encode": cpu_seconds(partial(encode, values, codec)),
                "decode": cpu_seconds(partial(decode, message, size, torch.float32, codec)),
                "add": cpu_seconds(partial(add_decoded, total, message, codec)),
            }
            yield {
                "codec": name,
                "elements": size,
                "bytes": message.numel(),
                **{key: seconds / copied for key, seconds in times.items()},
                "priced": [ENCODE_BYTES[codec.kind], DECODE_BYTES[codec.kind]],
            }


# --- what they bring -----------------------------------------------------------------------------


def measure(cluster: Cluster, model: str, budget: str, num_rounds: int) -> dict[str, Any]:
    """The best exact plan, and codecs on its slowest boundaries."""
    graph = capture(testbed_workload(model))
    evaluator = Evaluator(graph, cluster)
    exact = make_plan(
        Request(graph=graph, cluster=cluster, budget=Budget.parse(budget)), evaluator=evaluator
    )
    found = {"exact": (exact, "")}
    for name in CODECS:
        lossy, said = with_codec(exact, evaluator, parse_codec(name))
        if codec_rules(lossy.strategy):
            found[name] = lossy, said
    arguments = ["steps", "--models", model, "--rounds", str(num_rounds)]
    plans = {name: plan for name, (plan, _) in found.items()}
    parts = results_of_ranks(__file__, cluster, plans, arguments)
    return {
        "testbed": cluster.name,
        "model": model,
        "rows": [
            {
                "name": name,
                "method": plan.method,
                "said": said,
                "predicted_s": plan.step_time_s,
                "median_s": statistics.median(parts[0][name]),
                "seconds": parts[0][name],
                "codecs": [str(rule) for rule in codec_rules(plan.strategy)],
            }
            for name, (plan, said) in found.items()
        ],
    }


def serve_steps(folder: Path, model: str, num_rounds: int) -> None:
    """One rank: all plans in turn."""
    torch.set_num_threads(1)
    join(timeout_s=1800)
    here = testbed_workload(model)
    captured = capture_step(here)
    batch = here.make_batch()
    steps = {
        path.stem: partial(DeployedStep(here, load_plan(path), captured=captured), batch)
        for path in sorted(folder.glob("*.json"))
    }
    report(folder, seconds_in_turn(steps, num_rounds))
    end_together()


# --- what they do to training --------------------------------------------------------------------


def given_plan(evaluator: Evaluator, strategy: Strategy) -> Plan:
    """A strategy as a plan."""
    found = evaluator.referee(strategy, Order.FIFO)
    row = MethodRow(
        method="given", stage="baseline", outcome=str(found.outcome),
        step_time_s=found.step_time_s, order="fifo",
        peak_memory_bytes=found.peak_memory_bytes, num_evaluations=1, search_seconds=0.0,
        candidate=Candidate(strategy=strategy, orders=(Order.FIFO,)),
    )  # fmt: skip
    return plan_from_rows(evaluator, [row])


def training_plans(model: str) -> dict[str, Plan]:
    """Data parallelism and a pipeline of two stages, exact and with each codec everywhere."""
    graph, cluster = capture(workload(model)), load_testbed(str(SLOW))
    evaluator = Evaluator(graph, cluster)
    groups = group_ops(graph).num_groups
    batch = graph.batch_size
    shared = Decision(devices=(0, 1), shares=(batch // 2, batch - batch // 2), sync=Sync.RING)
    stages = [Decision(devices=(int(2 * g >= groups),), shares=(batch,)) for g in range(groups)]
    found = {}
    for layout, decisions in (("dp", [shared] * groups), ("pp", stages)):
        exact = Strategy(
            graph=graph.fingerprint, cluster=cluster.fingerprint(), decisions=tuple(decisions),
            homes=(REPLICATED,) * len(graph.updates), bucket_bytes=1 << 20,
        )  # fmt: skip
        found[f"{layout} exact"] = given_plan(evaluator, exact)
        choice = evaluator.encode(exact)
        kinds = boundaries(evaluator, evaluator.program(choice), evaluator.tables_of(choice))
        kinds = [each for each in kinds if each.traffic != Traffic.PARAMETERS]
        for name in CODECS:
            rules = tuple(
                CodecRule(traffic=each.traffic, devices=each.devices, codec=parse_codec(name))
                for each in kinds
            )
            found[f"{layout} {name}"] = given_plan(evaluator, with_rules(exact, rules))
    return found


def losses(model: str, num_steps: int) -> list[dict[str, Any]]:
    """The mean loss of the last twentieth of the steps of every plan."""
    plans = training_plans(model)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, plan in enumerate(plans.values()):
            plan.save(folder / f"{number:02d}.json")
        arguments = [str(Path(__file__).resolve()), "losses", "--models", model]
        arguments += ["--steps", str(num_steps), "--rank-folder", name]
        run_commands(arguments, 3, limits=Limits(timeout_s=3600))
        found = json.loads((folder / "rank0.result").read_text())
    last = max(num_steps // 20, 1)
    return [
        {"model": model, "plan": name, "first": of[0], "last": statistics.mean(of[-last:])}
        for name, of in zip(plans, found, strict=True)
    ]


def serve_losses(folder: Path, model: str, num_steps: int) -> None:
    """One rank: one plan after another."""
    torch.set_num_threads(1)
    join(timeout_s=3600)
    here = workload(model)
    captured = capture_step(here)
    found = []
    for path in sorted(folder.glob("*.json")):
        step = DeployedStep(here, load_plan(path), captured=captured)
        found.append([float(step(BATCHES[model](number))) for number in range(num_steps)])
        step.close()
        dist.barrier()
    report(folder, found)
    end_together()


def main() -> None:
    """Do what is asked for."""
    parser = script_parser(__doc__)
    parser.add_argument("what", choices=("cost", "steps", "losses"))
    parser.add_argument("--testbeds", default=f"skew_network,{SLOW}")
    parser.add_argument("--models", default="", help="by default two that suit what is asked")
    parser.add_argument("--budget", default="300e")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--folder", default="", help="keeps calibrations here, and uses old ones")
    parser.add_argument("--rank-folder", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_folder:
        folder = Path(arguments.rank_folder)
        if arguments.what == "steps":
            serve_steps(folder, arguments.models, arguments.rounds)
        else:
            serve_losses(folder, arguments.models, arguments.steps)
        return
    rows: list[dict[str, Any]] = []
    if arguments.what == "cost":
        rows += costs()
    models = arguments.models.split(",") if arguments.models else MODELS.get(arguments.what, ())
    if arguments.what == "losses":
        rows += [row for model in models for row in losses(model, arguments.steps)]
    if arguments.what == "steps":
        scratch = tempfile.TemporaryDirectory()
        kept = Path(arguments.folder or scratch.name)
        kept.mkdir(parents=True, exist_ok=True)
        for testbed in arguments.testbeds.split(","):
            cluster = calibrated(testbed, kept)
            for model in models:
                rows.append(measure(cluster, model, arguments.budget, arguments.rounds))
                progress(json.dumps(rows[-1]))
    finish(arguments, {"rows": rows}, rows)


if __name__ == "__main__":
    main()
