"""Training that is not exact: its seconds and its losses.

    python experiments/inexact.py steps --json                           # Linux, as root
    python experiments/inexact.py steps --testbeds skew_network --models mlp --windows 2
    python experiments/inexact.py losses --rows "exact; average=8; average=8 int8; stash=1"

A row is a value of --asynchronous or ``exact``, then perhaps a blank and a value of --lossy.

``steps`` runs the best plan of each row on each testbed and model, in one job and in turn, in
windows of eight steps (with one averaging each). It prints median seconds a step beside
predictions with a calibration of the testbed on other workloads. A codec encodes messages of the
plan's slowest boundaries. ``losses`` trains two small models on three ranks over gloo, as islands
or teams of one rank each with 4, 2 and 2 samples of a batch of 8, or as three stages; eight seeded
batches in turn, the same for all rows; SGD with momentum 0.9. It prints the mean loss of the last
eight steps, over the samples of all islands. A codec encodes everything that islands average, or
all messages of an exact plan. No clock is involved: two runs give the same numbers.
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rows import asked_of, finish, option, progress, told
from testbeds import (
    Task,
    measured,
    plan_of,
    results_of_ranks,
    testbed_options,
    testbeds_and_models,
    workload_of,
)
from torch import Tensor, nn

from heterog import Workload
from heterog.cluster import Cluster
from heterog.graph.capture import capture
from heterog.methods.data_parallel import uniform_strategy
from heterog.methods.planner import Budget
from heterog.modes.asynchronous.method import ServedTeams, served_strategy
from heterog.modes.averaging.method import AveragedReplicas
from heterog.modes.averaging.value import Averaging
from heterog.modes.built_in import method_of
from heterog.modes.codecs.method import boundaries, with_codec
from heterog.modes.codecs.value import CodecRule, Traffic, parse_codec, with_rules
from heterog.modes.stash.method import StashedPipelines
from heterog.runtime.deploy import deploy
from heterog.runtime.ranks.testbed import load_testbed
from heterog.search.plan import Plan, load_plan, make_plan, plan_from_rows
from heterog.search.request import Request
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.strategy import Decision, Strategy

EXACT = "exact"
TESTBEDS = ("skew_network", str(Path(__file__).with_name("slow_network.yaml")))
MODELS = {"steps": "gpt,vgg", "losses": "gpt,conv"}
"""For steps those of ``testbed_workloads.py``, for losses those of this file."""
ROWS = {
    "steps": "exact; exact fp16; exact int8; exact top_k=10; average=8; average=8 fp16; "
    "average=8 int8; average=8 top_k=10",
    "losses": "exact; average=8; average=8,delay=2; "
    "average=8,weights=equal,rate=0.7,momentum=0.9; average=8 fp16; average=8 int8; "
    "average=8 top_k=10; average=8 top_k=50; server=0; server=2; server=8; stash=0; stash=1; "
    "stash=2",
}
SHARES = (4, 2, 2)
_WINDOW = 8  # steps, where nothing is averaged
_BATCH, _NUM_BATCHES, _LAST = 8, 8, 8
_RATE = 0.01
"""With 0.02 the digits that sums round decide the GPT's loss after 300 steps: two outer rates that
differ by 1e-5 end 0.16 apart, and here by less than 1e-4."""


def parts_of(row: str) -> tuple[str, str]:
    """The mode and the codec of a row."""
    words, _, codec = row.partition(" ")
    return words, codec


def _file(row: str) -> str:
    return row.replace(" ", "_")


# --- seconds of steps ----------------------------------------------------------------------------


def plans_of(cluster: Cluster, model: str, rows: Sequence[str], budget: str) -> dict[str, Plan]:
    """The best plan of every row."""
    graph = capture(workload_of(model))
    evaluator = Evaluator(graph, cluster)
    best: dict[str, Plan] = {}
    for words in dict.fromkeys(parts_of(row)[0] for row in rows):
        mode = None if words == EXACT else method_of(words)
        asked = Request(
            graph=graph, cluster=cluster, budget=Budget.parse(budget), asynchronous=mode
        )
        found = make_plan(asked, evaluator=evaluator).rows
        own = [row for row in found if mode is None or row.method == mode.name]
        best[words] = replace(plan_from_rows(evaluator, own), budget=budget)
    plans = {}
    for row in rows:
        words, codec = parts_of(row)
        plans[row] = best[words]
        if codec:
            plans[row], said = with_codec(best[words], evaluator, parse_codec(codec))
            progress(said)
    return plans


def steps(arguments: argparse.Namespace, rows: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Plan, then run all plans of a testbed and a model."""
    for cluster, model in testbeds_and_models(arguments):
        plans = plans_of(cluster, model, rows, arguments.budget)
        averagings = [plan.strategy.mode(Averaging) for plan in plans.values()]
        every = max((each.every for each in averagings if each), default=_WINDOW)
        task = Task(model=model, rounds=arguments.windows, steps=every)
        found = measured(cluster, {_file(row): plan for row, plan in plans.items()}, task)
        for row, plan in plans.items():
            seconds = found.seconds[_file(row)]
            yield {
                "testbed": cluster.name,
                "model": model,
                "row": row,
                "method": plan.method,
                "predicted_s": plan.step_time_s,
                "median_s": statistics.median(seconds),
                "seconds": seconds,
            }


# --- losses --------------------------------------------------------------------------------------


class SmallGpt(nn.Module):
    """Two causal layers of width 32."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(29, 32)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(32, 29)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of all tokens, one row each."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).flatten(0, 1)


def conv_net() -> nn.Module:
    """Two convolutions and a linear layer."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5)),
    )


def batch_of(model: str, number: int) -> tuple[Tensor, Tensor]:
    """A seeded batch."""
    generator = torch.Generator().manual_seed(number % _NUM_BATCHES)
    if model == "gpt":
        tokens = torch.randint(0, 29, (_BATCH, 12), generator=generator)
        return tokens, tokens.roll(-1, 1)
    images = torch.randn(_BATCH, 3, 8, 8, generator=generator)
    return images, torch.randint(0, 5, (_BATCH,), generator=generator)


def small(model: str) -> Workload:
    """The model with its loss and optimizer."""

    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return SmallGpt() if model == "gpt" else conv_net()

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, labels.flatten())

    options = {"lr": _RATE, "momentum": 0.9}
    return Workload(seeded, batch_of(model, 0), loss, torch.optim.SGD, options, name=model)


def strategy_of(evaluator: Evaluator, row: str) -> Strategy:
    """The strategy of a row, with islands or stages of one rank each."""
    words, codec = parts_of(row)
    teams = ((0,), (1,), (2,)) if words != EXACT else ()
    decision = Decision(devices=(0, 1, 2), shares=SHARES, teams=teams)
    method = method_of(words) if teams else None
    if isinstance(method, ServedTeams):
        return served_strategy(evaluator, decision, method.staleness, (0,))
    strategy = uniform_strategy(evaluator, decision)
    if isinstance(method, AveragedReplicas):
        strategy = strategy.with_mode(method.averaging)
    if isinstance(method, StashedPipelines):
        count = evaluator.tables.num_groups
        stages = [
            Decision(devices=(3 * group // count,), shares=(_BATCH,)) for group in range(count)
        ]
        strategy = replace(strategy, decisions=tuple(stages)).with_mode(method.stash)
    places = [(Traffic.PARAMETER_CHANGES, decision.devices)]
    if method is None:
        choice = evaluator.encode(strategy)
        crossed = boundaries(evaluator, evaluator.program(choice), evaluator.tables_of(choice))
        places = [(each.traffic, each.devices) for each in crossed]
    rules = [
        CodecRule(traffic=traffic, devices=devices, codec=parse_codec(codec))
        for traffic, devices in places
        if codec
    ]
    return with_rules(strategy, tuple(rules))


def train(
    rank: int, model: str, folder: Path, num_steps: int, num_plans: int
) -> list[list[float]]:
    """One rank: all plans, one after another; returns the losses of each."""
    losses = []
    for number in range(num_plans):
        step = deploy(small(model), load_plan(folder / f"{number}.json"))
        own = [float(step(batch_of(model, each))) for each in range(num_steps)]
        step.close()
        if late := step.take_late_losses():  # begins with no numbers
            own = [*own, *late][-num_steps:]
        # But for a server all ranks have the same; of a server each its own.
        part = torch.tensor(own, dtype=torch.float64) * SHARES[rank] / _BATCH
        dist.all_reduce(part)
        losses.append(part.tolist())
    return losses


def losses(arguments: argparse.Namespace, rows: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Train both models with every plan."""
    for model in arguments.models.split(","):
        evaluator = Evaluator(capture(small(model)), load_testbed("skew_network"))
        with tempfile.TemporaryDirectory() as name:
            for number, row in enumerate(rows):
                plan_of(evaluator, strategy_of(evaluator, row)).save(Path(name) / f"{number}.json")
            found, *_ = results_of_ranks(
                train, len(SHARES), model, Path(name), arguments.steps, len(rows)
            )
        for row, of_steps in zip(rows, found, strict=True):
            last = statistics.mean(of_steps[-_LAST:])
            yield {"model": model, "row": row, "loss": last, "losses": of_steps}


def main() -> None:
    """Run one of both experiments."""
    arguments = asked_of(
        __doc__,
        *testbed_options(TESTBEDS, ()),
        option("what", choices=tuple(ROWS)),
        option("--rows", default="", help="with semicolons between them"),
        option("--budget", default="300e"),
        option("--windows", type=int, default=5),
        option("--steps", type=int, default=300, help="trained for the losses"),
    )
    arguments.models = arguments.models or MODELS[arguments.what]
    asked = [each.strip() for each in (arguments.rows or ROWS[arguments.what]).split(";")]
    run = {"steps": steps, "losses": losses}[arguments.what]
    finish(arguments, {"rows": told(run(arguments, asked))})


if __name__ == "__main__":
    main()
