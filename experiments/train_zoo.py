"""Trains the policies that the package ships, by ``heterog train`` on their models and clusters.

    python experiments/train_zoo.py heldout -o heterog/agents/policies/heldout.pt
    python experiments/train_zoo.py default -o heterog/agents/policies/default.pt

``heldout`` never sees the models and clusters of ``heterog.agents.shipped.HELD_OUT_*``. With
``--drawn``, ``default`` also sees members of the training families of ``drawn_models.py`` (the
notebook says why the shipped policy does not). All other options are those of ``heterog train``;
``--encoder experiments/agent_ablation.py:NoMessages`` trains the network of
``measured/no_messages.pt``. A log with seed, settings, models, clusters and validation goes beside
the policy. About half an hour on one core, the capture of the models included; ``--graphs DIR``
keeps the captures.
"""

import shlex
import subprocess
import sys
from pathlib import Path

from drawing.families import TRAIN
from drawn_models import drawn_names
from rows import option, plain_parser, run

from heterog.agents.checkpoint import load_checkpoint
from heterog.agents.shipped import (
    HELD_OUT_MODELS,
    TRAINING_CLUSTERS,
    TRAINING_FUNCTIONS,
    TRAINING_ZOO,
)
from heterog.agents.sources import GENERATED
from heterog.files import write_json

DRAWN_FILE = Path(__file__).with_name("drawn_models.py")
MODELS_FILE = Path(__file__).with_name("training_models.py")


def main() -> None:
    """Train one of the two policies."""
    asked, others = plain_parser(
        __doc__,
        option("policy", choices=("default", "heldout")),
        option("-o", "--output", type=Path, required=True),
        option("--drawn", type=int, default=0, help="drawn models that ``default`` sees, too"),
    ).parse_known_args()
    models = [*TRAINING_ZOO, *(f"{MODELS_FILE}:{name}" for name in TRAINING_FUNCTIONS)]
    clusters = [GENERATED]
    if asked.policy == "default":
        models += HELD_OUT_MODELS
        models += [f"{DRAWN_FILE}:{name}" for name in drawn_names(TRAIN, asked.drawn)]
        clusters += TRAINING_CLUSTERS
    names = ["--models", ",".join(models), "--clusters", ",".join(clusters)]
    command = [sys.executable, "-m", "heterog.cli", "train", *names, "-o", str(asked.output)]
    if code := subprocess.run([*command, *others], check=False).returncode:
        sys.exit(code)
    asked_by = f"python experiments/train_zoo.py {shlex.join(sys.argv[1:])}"
    log = {"command": asked_by, **load_checkpoint(str(asked.output)).provenance}
    write_json(asked.output.with_suffix(".json"), log, indent=1)


if __name__ == "__main__":
    run(main)
