"""How is the shipped policy that improves plans made?

    python experiments/train_improver.py -o heterog/agents/improvers/default.pt

Blind searches are recorded, of models of the zoo on clusters that are drawn for each and of the
pairs of ``--pairs``. (``--records DIR`` keeps them, a file a pair; what is there is not made
again.) Then the network learns from all but those of ``VALIDATION``; a card goes beside it.
"""

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from rows import progress

from heterog.agents.benchmark.pair_lists import read_pairs
from heterog.agents.improver import ImproverConfig, save_improver
from heterog.agents.move_imitation import Recorded, Recorder, gaining_shares, imitate
from heterog.agents.sources import captured
from heterog.cluster import Cluster
from heterog.envs.clusters import ClusterRange, random_cluster
from heterog.files import check_writable, write_json
from heterog.graph.op_graph import OpGraph
from heterog.methods.local_search.planner import LocalSearch
from heterog.methods.planner import Budget, Problem
from heterog.simulator.evaluator import Evaluator

MODELS_FILE = Path(__file__).with_name("training_models.py")
ZOO = (
    "vgg19", "transformer_6l", "gpt2", "mobilenet_v2", "bert_base", "vit_base", "resnet50",
)  # fmt: skip
FUNCTIONS = (
    "lm_4l", "mlp", "lm_6l_wide", "vgg_wide_head", "lm_10l", "resnet_shallow", "cells",
    "lm_14l_long", "lm_18l_untied", "lm_32l", "lm_8l_giant",
)  # fmt: skip
VALIDATION = ("gpt2", "cells", "resnet50")
"""Models that nothing is learned from: they say how often a chosen move gains."""
MOST_DEVICES = 128


def recorded_search(
    graph: OpGraph, cluster: Cluster, num_evaluations: int, seed: int
) -> Recorded | None:
    """A blind search, recorded."""
    evaluator = Evaluator(graph, cluster)
    evaluator.warm_up()
    leads: list[Recorder] = []

    def lead(search: object) -> Recorder:
        leads.append(Recorder(search))  # type: ignore[arg-type]
        return leads[-1]

    budget = Budget(evaluations=num_evaluations)
    LocalSearch(lead).plan(Problem(evaluator=evaluator, budget=budget, seed=seed))
    return leads[0].recorded()


def record(asked: argparse.Namespace, folder: Path) -> None:
    """Record every pair that the folder lacks."""
    models = [*ZOO, *(f"{MODELS_FILE}:{name}" for name in FUNCTIONS)]
    for number in range(asked.drawn):
        model = models[number % len(models)]
        rng = np.random.default_rng([asked.seed, number])
        name = model.rpartition(":")[2]
        path = folder / f"drawn{asked.seed}_{number}_{name}.npz"
        if not path.is_file():
            graph = captured(model, asked.graphs)
            cluster = random_cluster(rng, graph, ClusterRange(max_devices=MOST_DEVICES))
            keep(recorded_search(graph, cluster, asked.evaluations, number), path)
    for number, line in enumerate(read_pairs(asked.pairs) if asked.pairs else []):
        name = line.model.rpartition(":")[2]
        path = folder / f"{asked.pairs.stem}_{number}_{name}.npz"
        if not path.is_file():
            graph, cluster = line.load(asked.graphs)
            keep(recorded_search(graph, cluster, asked.evaluations, number), path)


def keep(recorded: Recorded | None, path: Path) -> None:
    """Write what was recorded, if anything."""
    progress(f"{path.stem}: {0 if recorded is None else len(recorded.gains)} points")
    if recorded is not None:
        recorded.save(path)


def main() -> None:
    """Record, learn, and write the policy and its card."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--graphs", type=Path, help="folder that keeps captured graphs")
    parser.add_argument("--records", type=Path, help="folder that keeps recorded searches")
    parser.add_argument("--pairs", type=Path, help="list of further pairs")
    parser.add_argument("--drawn", type=int, default=40, help="pairs with drawn clusters")
    parser.add_argument("--evaluations", type=int, default=1000, help="of each recorded search")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=ImproverConfig().num_rounds)
    parser.add_argument("--no-timeline", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    check_writable(asked.output)
    with TemporaryDirectory() as temporary:
        folder = asked.records or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        record(asked, folder)
        everything = {path.stem: Recorded.load(path) for path in sorted(folder.glob("*.npz"))}
    held = {stem for stem in everything if stem.split("_", 2)[2] in VALIDATION}
    known = [each for stem, each in everything.items() if stem not in held]
    config = replace(
        ImproverConfig(), num_rounds=asked.rounds, sees_timeline=not asked.no_timeline
    )
    mean: list[float] = []

    def report(step: int, loss: float) -> None:
        mean.append(loss)
        if step % 100 == 99:
            progress(f"step {step + 1}: loss {np.mean(mean[-100:]):.4f}")

    policy = imitate(known, config=config, num_steps=asked.steps, seed=asked.seed, report=report)
    shares = gaining_shares(policy, [everything[stem] for stem in sorted(held)])
    progress(shares)
    card = {
        "name": "improver",
        "command": f"python experiments/train_improver.py --drawn {asked.drawn} --evaluations "
        f"{asked.evaluations} --steps {asked.steps} --seed {asked.seed}"
        + (f" --pairs {asked.pairs}" if asked.pairs else ""),
        "learned_from": sorted(set(everything) - held),
        "validated_on": sorted(held),
        "points": sum(len(each.gains) for each in known),
        "config": asdict(config),
        "gaining_share_of_moves": asdict(shares),
    }
    save_improver(asked.output, policy, card)
    write_json(asked.output.with_suffix(".json"), card, indent=1)


if __name__ == "__main__":
    main()
