"""Trains the shipped policy that improves plans, by expert iteration.

    python experiments/train_improver.py -o heterog/agents/improvers/default.pt

The script records searches on models of the zoo and of the grammar's training families, on
clusters drawn for each, and on the pairs of ``--pairs``. Blind searches come first. Then,
``--iterations`` times, the policy learned from all records leads further searches, so that the
records include points that only a led search reaches. (``--records DIR`` keeps them, one file a
search; existing files are not made again.) ``VALIDATION`` and the grammar's validation families
are recorded, but not learned from. A card goes beside the policy.
"""

import argparse
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from drawing.families import TRAIN
from drawing.families import VALIDATION as UNSEEN
from drawn_models import drawn_names
from rows import option, plain_parser, progress, run

from heterog.agents.benchmark.pair_lists import read_pairs
from heterog.agents.improver import Improver, ImproverConfig, save_improver
from heterog.agents.move_imitation import Recorded, Recorder, gaining_shares, imitate
from heterog.agents.sources import captured
from heterog.cluster import Cluster
from heterog.envs.clusters import ClusterRange, random_cluster
from heterog.files import check_writable, write_json
from heterog.graph.op_graph import OpGraph
from heterog.methods.local_search.planner import LocalSearch, Search
from heterog.methods.planner import Budget, Problem
from heterog.simulator.evaluator import Evaluator

DRAWN_FILE = Path(__file__).with_name("drawn_models.py")
MODELS_FILE = Path(__file__).with_name("training_models.py")
ZOO = (
    "vgg19", "transformer_6l", "gpt2", "mobilenet_v2", "bert_base", "vit_base", "resnet50",
)  # fmt: skip
FUNCTIONS = (
    "lm_4l", "mlp", "lm_6l_wide", "vgg_wide_head", "lm_10l", "resnet_shallow", "cells",
    "lm_14l_long", "lm_18l_untied", "lm_32l", "lm_8l_giant",
)  # fmt: skip
VALIDATION = ("gpt2", "cells", "resnet50")
"""Models from which nothing is learned: they show how often a chosen move gains."""
SETTINGS = ("drawn", "evaluations", "led", "iterations", "models", "steps", "seed")
LED_LONGER = 2
"""Times the evaluations that a led search is recorded for: it gains for longer."""
MOST_DEVICES = 128


def recorded_search(
    graph: OpGraph, cluster: Cluster, num_evaluations: int, seed: int, policy: Improver | None
) -> Recorded | None:
    """A search, recorded; blind without a policy."""
    evaluator = Evaluator(graph, cluster)
    evaluator.warm_up()
    leads: list[Recorder] = []

    def lead(search: Search) -> Recorder:
        leads.append(Recorder(search, policy))
        return leads[-1]

    budget = Budget(evaluations=num_evaluations)
    LocalSearch(lead).plan(Problem(evaluator=evaluator, budget=budget, seed=seed))
    return leads[0].recorded()


def record(
    asked: argparse.Namespace, folder: Path, iteration: int, policy: Improver | None
) -> None:
    """Record every search of an iteration that the folder lacks."""
    models = [
        *ZOO,
        *(f"{MODELS_FILE}:{name}" for name in FUNCTIONS),
        *(f"{DRAWN_FILE}:{name}" for name in drawn_names(TRAIN, asked.models)),
        *(f"{DRAWN_FILE}:{name}" for name in drawn_names(UNSEEN, asked.models // 8)),
    ]
    evaluations = asked.evaluations * (1 if policy is None else LED_LONGER)
    for number in range(asked.drawn if policy is None else asked.led):
        model = models[number % len(models)]
        seed = number + iteration * asked.drawn
        path = folder / f"{iteration}_{number}_{model.rpartition(':')[2]}.npz"
        if not path.is_file():
            graph = captured(model, asked.graphs)
            wanted = ClusterRange(max_devices=MOST_DEVICES)
            cluster = random_cluster(np.random.default_rng([asked.seed, seed]), graph, wanted)
            keep(recorded_search(graph, cluster, evaluations, seed, policy), path)
    for number, line in enumerate(read_pairs(asked.pairs) if asked.pairs else []):
        path = folder / f"{iteration}_{asked.drawn + number}_{line.model.rpartition(':')[2]}.npz"
        if not path.is_file():
            graph, cluster = line.load(asked.graphs)
            keep(recorded_search(graph, cluster, evaluations, number, policy), path)


def keep(recorded: Recorded | None, path: Path) -> None:
    """Write what was recorded, if anything."""
    progress(f"{path.stem}: {0 if recorded is None else len(recorded.gains)} points")
    if recorded is not None:
        recorded.save(path)


def main() -> None:
    """Record, learn, and write the policy and its card."""
    asked = plain_parser(
        __doc__,
        option("-o", "--output", type=Path, required=True),
        option("--graphs", type=Path, help="folder that keeps captured graphs"),
        option("--records", type=Path, help="folder that keeps recorded searches"),
        option("--pairs", type=Path, help="list of further pairs"),
        option("--drawn", type=int, default=140, help="pairs with drawn clusters"),
        option("--models", type=int, default=48, help="drawn models, beside the zoo's"),
        option("--led", type=int, default=60, help="of them in each iteration"),
        option("--iterations", type=int, default=1, help="with led searches"),
        option("--evaluations", type=int, default=1000, help="of each recorded search"),
        option("--steps", type=int, default=2000),
        option("--seed", type=int, default=0),
    ).parse_args()
    check_writable(asked.output)
    config = ImproverConfig()
    unseen = {*VALIDATION, *drawn_names(UNSEEN, asked.models // 8)}
    policy: Improver | None = None
    history: list[dict[str, float]] = []
    with TemporaryDirectory() as temporary:
        folder = asked.records or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for iteration in range(asked.iterations + 1):
            record(asked, folder, iteration, policy)
            found = {
                path.stem: Recorded.load(path)
                for path in sorted(folder.glob("*.npz"))
                if int(path.stem.partition("_")[0]) <= iteration
            }
            held = [stem for stem in found if stem.split("_", 2)[2] in unseen]
            known = [each for stem, each in found.items() if stem not in held]
            policy = imitate(
                known, config=config, num_steps=asked.steps, seed=asked.seed, report=report
            )
            history.append(asdict(gaining_shares(policy, [found[stem] for stem in held])))
            progress(f"iteration {iteration}: {history[-1]}")
    assert policy is not None
    card = {
        "name": "improver",
        "command": "python experiments/train_improver.py "
        + " ".join(f"--{name} {getattr(asked, name)}" for name in SETTINGS)
        + (f" --pairs {asked.pairs}" if asked.pairs else ""),
        "learned_from": sorted(set(found) - set(held)),
        "validated_on": sorted(held),
        "points": sum(len(each.gains) for each in known),
        "config": asdict(config),
        "gaining_share_of_moves": history[-1],
        "after_each_iteration": history,
    }
    save_improver(asked.output, policy, card)
    write_json(asked.output.with_suffix(".json"), card, indent=1)


def report(step: int, loss: float) -> None:
    """Report the progress of training."""
    if step % 500 == 499:
        progress(f"step {step + 1}: loss {loss:.4f}")


if __name__ == "__main__":
    run(main)
