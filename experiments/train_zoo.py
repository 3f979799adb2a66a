"""Trains the policies that the package ships.

    python experiments/train_zoo.py heldout -o heterog/agents/policies/heldout.pt
    python experiments/train_zoo.py default -o heterog/agents/policies/default.pt

``heldout`` never sees the models and clusters of ``heterog.agents.shipped.HELD_OUT_*``. With
``--drawn``, ``default`` also sees members of the training families of ``drawn_models.py`` (the
notebook says why the shipped policy does not). ``--encoder
experiments/agent_ablation.py:NoMessages`` trains another network in the same way, that of
``measured/no_messages.pt``. A log with seed, settings, models, clusters and validation goes beside
the policy. About half an hour on one core, the capture of the models included; ``--graphs DIR``
keeps the captures.
"""

import time
from pathlib import Path

from drawing.families import TRAIN
from drawn_models import drawn_names
from rows import option, plain_parser, progress, run

from heterog.agents.checkpoint import save_checkpoint
from heterog.agents.config import Algorithm, TrainingConfig
from heterog.agents.conformance import load_encoder
from heterog.agents.encoder import default_config
from heterog.agents.shipped import (
    HELD_OUT_MODELS,
    TRAINING_CLUSTERS,
    TRAINING_FUNCTIONS,
    TRAINING_ZOO,
)
from heterog.agents.sources import GENERATED, PIPELINED_PART, PairSource, captured, parse_clusters
from heterog.agents.training import RunFiles, Trainer
from heterog.files import check_writable, write_json
from heterog.workers import open_workers

DRAWN_FILE = Path(__file__).with_name("drawn_models.py")
MODELS_FILE = Path(__file__).with_name("training_models.py")


def main() -> None:
    """Train one of the two policies."""
    arguments = plain_parser(
        __doc__,
        option("policy", choices=("default", "heldout")),
        option("-o", "--output", type=Path, required=True),
        option("--graphs", type=Path, help="folder that keeps captured graphs"),
        option("--logdir", type=Path, help="folder for TensorBoard"),
        option("--checkpoint", type=Path, help="file renewed while training"),
        option("--seed", type=int, default=0),
        option("--workers", default="1", help="processes, ray, or ray:N"),
        option("--pairs", type=int, default=TrainingConfig().num_pairs),
        option("--steps", type=int, default=TrainingConfig().num_steps),
        option("--drawn", type=int, default=0, help="drawn models that ``default`` sees, too"),
        option("--algorithm", default=Algorithm.IMITATION),
        option("--encoder", default="", help="another network, as file.py:name"),
    ).parse_args()
    check_writable(arguments.output)
    network = default_config(load_encoder(arguments.encoder)) if arguments.encoder else None
    models = [*TRAINING_ZOO, *(f"{MODELS_FILE}:{name}" for name in TRAINING_FUNCTIONS)]
    clusters = [GENERATED]
    if arguments.policy == "default":
        models += HELD_OUT_MODELS
        models += [f"{DRAWN_FILE}:{name}" for name in drawn_names(TRAIN, arguments.drawn)]
        clusters += TRAINING_CLUSTERS
    graphs = []
    for model in models:
        progress(f"capture {model.rpartition('/')[2]}")
        graphs.append(captured(model, arguments.graphs))
    given, generated = parse_clusters(clusters)
    config = TrainingConfig(
        algorithm=arguments.algorithm,
        num_pairs=arguments.pairs,
        num_steps=arguments.steps,
        seed=arguments.seed,
    )
    begin = time.perf_counter()

    def report(stage: str, fraction: float, text: str) -> None:
        progress(f"{time.perf_counter() - begin:7.1f} s {stage} {fraction:4.0%} {text}")

    with open_workers(arguments.workers) as workers:
        result = Trainer(
            PairSource(
                graphs=graphs,
                clusters=given,
                generated=generated,
                pipelined=PIPELINED_PART,
                seed=arguments.seed,
            ),
            config,
            network,
            files=RunFiles(
                provenance={
                    "name": arguments.policy,
                    "command": f"python experiments/train_zoo.py {arguments.policy} --seed "
                    f"{arguments.seed} --pairs {arguments.pairs} --steps {arguments.steps}",
                    "generated_clusters": generated,
                },
                logdir=arguments.logdir,
                checkpoint=arguments.checkpoint,
            ),
            workers=workers,
            report=report,
        ).run()
    save_checkpoint(arguments.output, result.checkpoint)
    write_json(arguments.output.with_suffix(".json"), dict(result.checkpoint.provenance), indent=1)


if __name__ == "__main__":
    run(main)
