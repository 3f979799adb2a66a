"""What is averaging every H steps, or a server, worth on slow networks, and what does it cost?

    python experiments/averaging.py --json                            # Linux, as root
    python experiments/averaging.py --testbeds skew_network --models mlp --windows 2 --steps 0
    python experiments/averaging.py --words server=2 --steps 0 --json
    python experiments/averaging.py --lossy "fp16 int8 top_k=10" --steps 0 --json
    python experiments/averaging.py --lossy "fp16 int8 top_k=10" --predict-averages

On each testbed and model, in one job and in turn: the best exact plan and the best plan that
averages, in windows of H steps; their median seconds a step beside what was predicted. Then each
is trained for some steps from the same seed, on a batch that differs from step to step, and the
mean of the last ten losses is compared; with a server each island has losses of its own, and those
of the first rank are told. A window of a server ends when it has all gradients. With --lossy what
is averaged also goes through each of these codecs; --predict-averages says, without running
anything, how long one average of three islands takes with each. Plans are made
with a calibration of the testbed on other workloads than these. What Adaptive SGD's dispatch would
do on the same speeds is added by its own simulation.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rows import finish, progress, script_parser
from testbed_calibration import add_testbeds, testbeds_and_models
from testbed_rounds import report, results_of_ranks, seconds_in_turn
from torch import Tensor

from heterog.cluster import Cluster
from heterog.graph.capture import capture, capture_step
from heterog.methods.data_parallel import device_speeds, uniform_strategy
from heterog.methods.planner import Budget
from heterog.modes.averaging.pricing import averaging_seconds
from heterog.modes.averaging.value import Averaging
from heterog.modes.built_in import method_of
from heterog.modes.codecs.method import with_codec
from heterog.modes.codecs.value import CodecRule, Traffic, parse_codec, with_rules
from heterog.modes.search import island_decisions
from heterog.runtime.deploy import DeployedStep
from heterog.runtime.rank import end_together, join
from heterog.runtime.ranks.testbed import load_testbed
from heterog.search.plan import Plan, Searched, load_plan, make_plan, plan_from_rows
from heterog.search.request import Request
from heterog.simulator.evaluator import Evaluator
from heterog.simulator.unequal_updates import elastic_schedule
from heterog.zoo import load_workload

TESTBEDS = ("skew_network", str(Path(__file__).with_name("slow_network.yaml")))
MODELS = ("gpt", "vgg")
WORKLOADS = Path(__file__).with_name("testbed_workloads.py")
_WINDOW = 8  # steps, where nothing is averaged
_LAST = 10  # losses whose mean is told
_ELASTIC = (512, 20_000, 10)  # batch, samples of a mega-batch, rounds


def plans_of(
    cluster: Cluster, model: str, words: str, codecs: Sequence[str], budget: str
) -> dict[str, Plan]:
    """The best exact plan, the best that averages as the words say, and that with each codec."""
    graph = capture(load_workload(f"{WORKLOADS}:{model}", None))
    asked = method_of(words)
    both = make_plan(
        Request(graph=graph, cluster=cluster, budget=Budget.parse(budget), asynchronous=asked)
    )
    averaged = next(row for row in both.rows if row.method == asked.name)
    exact = [row for row in both.rows if row.method != asked.name]
    evaluator = Evaluator(graph, cluster)
    found = {
        name: plan_from_rows(evaluator, rows, Searched(budget=budget))
        for name, rows in (("exact", exact), ("averaged", [averaged]))
    }
    for codec in codecs:
        found[f"averaged {codec}"], said = with_codec(
            found["averaged"], evaluator, parse_codec(codec)
        )
        print(said, file=sys.stderr, flush=True)
    return found


def batches_of(batch: Any, number: int) -> tuple[Tensor, ...]:
    """Other samples in every step, with a rule that can be learned: the labels are the inputs'."""
    generator = torch.Generator().manual_seed(number)
    order = torch.randperm(batch[0].shape[0], generator=generator)
    return tuple(each[order] for each in batch)


def serve(folder: Path, model: str, num_windows: int, num_steps: int) -> None:
    """One rank: windows of all plans in turn, then the losses of each from its own start."""
    torch.set_num_threads(1)
    join(timeout_s=1800)
    workload = load_workload(f"{WORKLOADS}:{model}", None)
    batch = workload.make_batch()
    captured = capture_step(workload)
    plans = {path.stem: load_plan(path) for path in sorted(folder.glob("*.json"))}
    averagings = [plan.strategy.mode(Averaging) for plan in plans.values()]
    every = max((each.every for each in averagings if each), default=_WINDOW)
    steps = {name: DeployedStep(workload, plan, captured=captured) for name, plan in plans.items()}

    def window(step: DeployedStep) -> Callable[[], None]:
        def run() -> None:
            for _ in range(every):
                step(batch)
            if step.is_free_running:
                step.settle()

        return run

    seconds = seconds_in_turn({name: window(step) for name, step in steps.items()}, num_windows)
    losses: dict[str, list[float]] = {}
    for name, plan in plans.items():
        steps[name].close()
        fresh = DeployedStep(workload, plan, captured=captured)
        losses[name] = [float(fresh(batches_of(batch, n))) for n in range(num_steps)]
        fresh.close()
    own = {name: [each / every for each in found] for name, found in seconds.items()}
    report(folder, {"seconds": own, "losses": losses})
    end_together()


def measure(cluster: Cluster, model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Plan, then run both plans on the testbed."""
    codecs = arguments.lossy.split()
    plans = plans_of(cluster, model, arguments.words, codecs, arguments.budget)
    options = ["--models", model, "--windows", str(arguments.windows)]
    options += ["--steps", str(arguments.steps)]
    found = results_of_ranks(__file__, cluster, plans, options)[0]
    speeds = device_speeds(Evaluator(plans["exact"].graph, cluster))
    elastic = elastic_schedule(speeds, *_ELASTIC)[-1]
    return {
        "testbed": cluster.name,
        "model": model,
        "words": arguments.words,
        "elastic": {"batches": elastic.batches, "updates": elastic.updates},
        "plans": {
            name: {
                "method": plan.method,
                "predicted_s": plan.step_time_s,
                "median_s": statistics.median(found["seconds"][name]),
                "seconds": found["seconds"][name],
                "losses": found["losses"][name],
            }
            for name, plan in plans.items()
        },
    }


def predicted_averages(testbed: str, model: str, codecs: Sequence[str]) -> dict[str, float]:
    """Seconds of one average of islands of a device each, plain and with each codec.

    They follow from the testbed's links and, for encoding, from its data sheet.
    """
    graph = capture(load_workload(f"{WORKLOADS}:{model}", None))
    evaluator = Evaluator(graph, load_testbed(testbed))
    decision = next(island_decisions(evaluator))
    strategy = uniform_strategy(evaluator, decision).with_mode(Averaging(every=_WINDOW))
    found = {}
    for codec in ("", *codecs):
        rules: tuple[CodecRule, ...] = ()
        if codec:
            rules = (
                CodecRule(
                    traffic=Traffic.PARAMETER_CHANGES,
                    devices=decision.devices,
                    codec=parse_codec(codec),
                ),
            )
        coded = with_rules(strategy, rules)
        found[codec or "plain"] = averaging_seconds(evaluator, coded, evaluator.encode(coded))
    return found


def told(row: dict[str, Any]) -> Iterator[str]:
    """A row for people."""
    for name, found in row["plans"].items():
        off = found["predicted_s"] / found["median_s"] - 1.0
        text = (
            f"{row['testbed']:13} {row['model']:5} {name:17} by {found['method']:12} "
            f"{found['median_s']:.3f} s a step (predicted {found['predicted_s']:.3f}, {off:+.1%})"
        )
        if found["losses"]:
            last = statistics.mean(found["losses"][-_LAST:])
            text += f", loss {last:.4f} after {len(found['losses'])} steps"
        yield text


def main() -> None:
    """Measure every testbed and model."""
    parser = script_parser(__doc__)
    add_testbeds(parser, TESTBEDS, MODELS)
    parser.add_argument("--words", default="average=8", help="as for --asynchronous")
    parser.add_argument("--lossy", default="", help="codecs for what is averaged, with blanks")
    parser.add_argument("--predict-averages", action="store_true")
    parser.add_argument("--budget", default="300e")
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300, help="trained for the losses")
    arguments = parser.parse_args()
    if arguments.rank_folder:
        serve(Path(arguments.rank_folder), arguments.models, arguments.windows, arguments.steps)
        return
    if arguments.predict_averages:
        for testbed in arguments.testbeds.split(","):
            for model in arguments.models.split(","):
                found = predicted_averages(testbed, model, arguments.lossy.split())
                seconds = ", ".join(f"{codec} {each:.3f} s" for codec, each in found.items())
                print(f"{Path(testbed).stem:13} {model:5} {seconds}")
        return
    rows = []
    for cluster, model in testbeds_and_models(arguments):
        rows.append(measure(cluster, model, arguments))
        progress("\n".join(told(rows[-1])))
    finish(arguments, {"rows": rows})


if __name__ == "__main__":
    main()
