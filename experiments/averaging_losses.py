"""What training costs in loss that is not exact: two small models beside the exact plan.

    python experiments/averaging_losses.py --json
    python experiments/averaging_losses.py --rows "exact; average=8; average=8 int8; stash=1"

Three ranks over gloo on this machine: islands or teams of one rank each with 4, 2 and 2 samples of
a batch of 8, or three stages; eight seeded batches in turn, the same for all; SGD with momentum
0.9. A row is what --asynchronous takes, and behind a blank what --lossy takes, which is put on all
that islands average. Told is the mean loss of the last eight steps, over the samples of all
islands. No clock is in it: two runs give the same numbers.
"""

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from local_ranks import result_of_ranks
from rows import finish, script_parser
from torch import Tensor, nn

from heterog import Workload
from heterog.graph.capture import capture
from heterog.methods.data_parallel import uniform_strategy
from heterog.methods.planner import Candidate, MethodRow
from heterog.modes.asynchronous.method import ServedTeams, served_strategy
from heterog.modes.averaging.method import AveragedReplicas
from heterog.modes.built_in import method_of
from heterog.modes.codecs.value import CodecRule, Traffic, parse_codec, with_rules
from heterog.modes.stash.method import StashedPipelines
from heterog.runtime.deploy import deploy
from heterog.runtime.ranks.testbed import load_testbed
from heterog.search.plan import load_plan, plan_from_rows
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.strategy import Decision, Strategy

EXACT = "exact"
ROWS = (
    *(EXACT, "average=8", "average=8,delay=2", "average=8,weights=equal,rate=0.7,momentum=0.9"),
    *("average=8 fp16", "average=8 int8", "average=8 top_k=10", "average=8 top_k=50"),
    *("server=0", "server=2", "server=8", "stash=0", "stash=1", "stash=2"),
)
SHARES = (4, 2, 2)
_BATCH, _NUM_BATCHES, _LAST = 8, 8, 8
_RATE = 0.01
"""With 0.02 the digits that sums round decide the GPT's loss after 300 steps: two outer rates that
differ by 1e-5 end 0.16 apart, and here by less than 1e-4."""


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
        out: Tensor = self.head(x)
        return out.flatten(0, 1)


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


def workload_of(model: str, rate: float = _RATE) -> Workload:
    """The model with its loss and optimizer."""

    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return SmallGpt() if model == "gpt" else conv_net()

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, labels.flatten())

    options = {"lr": rate, "momentum": 0.9}
    return Workload(seeded, batch_of(model, 0), loss, torch.optim.SGD, options, name=model)


def strategy_of(evaluator: Evaluator, row: str) -> Strategy:
    """What a row asks for, with islands or stages of one rank each."""
    words, _, codec = row.partition(" ")
    teams = ((0,), (1,), (2,)) if words != EXACT else ()
    decision = Decision(devices=(0, 1, 2), shares=SHARES, teams=teams)
    method = method_of(words) if teams else None
    if isinstance(method, ServedTeams):
        return served_strategy(evaluator, decision, method.staleness, (0,))
    strategy = uniform_strategy(evaluator, decision)
    if isinstance(method, AveragedReplicas):
        strategy = strategy.with_mode(method.averaging)
    if isinstance(method, StashedPipelines):
        strategy = replace(strategy, decisions=stages(evaluator)).with_mode(method.stash)
    if codec:
        rule = CodecRule(
            traffic=Traffic.PARAMETER_CHANGES,
            devices=decision.devices,
            codec=parse_codec(codec),
        )
        strategy = with_rules(strategy, (rule,))
    return strategy


def stages(evaluator: Evaluator) -> tuple[Decision, ...]:
    """Three stages of as many groups each."""
    count = evaluator.tables.num_groups
    return tuple(
        Decision(devices=(3 * group // count,), shares=(_BATCH,)) for group in range(count)
    )


def save_plans(model: str, folder: Path, rows: Sequence[str]) -> None:
    """A plan for each of the rows."""
    graph = capture(workload_of(model))
    evaluator = Evaluator(graph, load_testbed("skew_network"))
    for number, asked in enumerate(rows):
        strategy = strategy_of(evaluator, asked)
        judged = evaluator.referee(strategy, Order.FIFO)
        row = MethodRow(
            method="stated",
            stage="baseline",
            outcome=str(judged.outcome),
            step_time_s=judged.step_time_s,
            order="fifo",
            peak_memory_bytes=judged.peak_memory_bytes,
            num_evaluations=1,
            search_seconds=0.0,
            candidate=Candidate(strategy=strategy, orders=(Order.FIFO,)),
        )
        plan = plan_from_rows(evaluator, [row])
        plan.save(folder / f"{number}.json")


def train(
    rank: int, model: str, folder: Path, num_steps: int, num_plans: int, rate: float
) -> list[list[float]]:
    """One rank: all plans, one after another; returns the losses of each."""
    losses = []
    for number in range(num_plans):
        step = deploy(workload_of(model, rate), load_plan(folder / f"{number}.json"))
        own = [float(step(batch_of(model, each))) for each in range(num_steps)]
        step.close()
        if late := step.take_late_losses():  # begins with no numbers
            own = [*own, *late][-num_steps:]
        # But for a server all ranks have the same; of a server each its own.
        part = torch.tensor(own, dtype=torch.float64) * SHARES[rank] / _BATCH
        dist.all_reduce(part)
        losses.append(part.tolist())
    return losses


def main() -> None:
    """Train both models with every plan."""
    parser = script_parser(__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", type=float, default=_RATE)
    parser.add_argument("--models", default="gpt,conv")
    parser.add_argument("--rows", default="; ".join(ROWS), help="with semicolons between them")
    arguments = parser.parse_args()
    rows, asked = [], [each.strip() for each in arguments.rows.split(";")]
    for model in arguments.models.split(","):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            save_plans(model, folder, asked)
            losses = result_of_ranks(
                train, len(SHARES), model, folder, arguments.steps, len(asked), arguments.rate
            )
        for row, found in zip(asked, losses, strict=True):
            last = statistics.mean(found[-_LAST:])
            rows.append({"model": model, "row": row, "loss": last, "losses": found})
            if not arguments.json:
                print(f"{model:5} {row:45} {last:.4f}")
    finish(arguments, {"rows": rows})


if __name__ == "__main__":
    main()
