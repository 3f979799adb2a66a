"""``heterog train``: train a policy on models and clusters."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heterog.agents.config import PolicyConfig, TrainingConfig
from heterog.cli.common import (
    JsonOption,
    ModelsOption,
    SeedOption,
    WorkersOption,
    end_interrupted,
    err,
    print_result,
    split_names,
    termination_as_interrupt,
    use_encoder,
)
from heterog.cli.outputs import CACHE, POLICY, TRAINING
from heterog.errors import HeterogError
from heterog.workers import open_workers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from heterog.agents.learner import Report
    from heterog.agents.policy import Policy
    from heterog.agents.sources import PairSource
    from heterog.agents.training import TrainingResult

_DEFAULTS = TrainingConfig()


def train(
    models: ModelsOption,
    output: Annotated[Path, typer.Option("-o", "--output", help="policy.pt"), POLICY],
    clusters: Annotated[
        str, typer.Option("--clusters", help="names or files with commas; generated: new ones")
    ] = "generated",
    algorithm: Annotated[
        str,
        typer.Option(
            "--algorithm",
            help="imitation, reinforce, mixed, sb3:PPO, sb3_contrib:MaskablePPO, file.py:Learner",
        ),
    ] = str(_DEFAULTS.algorithm),
    reward: Annotated[
        str, typer.Option("--reward", help="file.py:name of a reward of your own")
    ] = "",
    encoder: Annotated[
        str,
        typer.Option(
            "--encoder", help="hetero (or that of --initial), another by name, or file.py:name"
        ),
    ] = "",
    pairs: Annotated[
        int, typer.Option("--pairs", help="pairs of model and cluster")
    ] = _DEFAULTS.num_pairs,
    steps: Annotated[
        int, typer.Option("--steps", help="gradient steps (sb3: rollouts)")
    ] = _DEFAULTS.num_steps,
    search: Annotated[
        int,
        typer.Option("--search", help="evaluations per pair: for elites, and to validate against"),
    ] = _DEFAULTS.search_evaluations,
    budget: Annotated[
        str, typer.Option("--budget", help="ends it before its steps: 10m, or 5000e (evaluations)")
    ] = "",
    max_devices: Annotated[
        int | None, typer.Option("--max-devices", help="of generated clusters; 32")
    ] = None,
    logdir: Annotated[Path | None, typer.Option("--logdir", help="for TensorBoard"), CACHE] = None,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="file renewed while training"), TRAINING
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="checkpoint to go on from, with more --steps")
    ] = None,
    initial: Annotated[str, typer.Option("--initial", help="policy to begin with")] = "",
    graphs: Annotated[
        Path | None, typer.Option("--graphs", help="folder that keeps captured graphs"), CACHE
    ] = None,
    workers: WorkersOption = "1",
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Train a policy; Ctrl-C keeps the best one so far."""
    _check_sizes(pairs, steps, search, max_devices)
    if initial and resume is not None:
        raise HeterogError(
            f"--resume {resume} goes on with the weights in there, so --initial {initial} would "
            "have no effect; give one of the two."
        )
    names = split_names(models)
    from heterog.methods.planner import Budget

    limit = Budget.parse(budget) if budget else None
    crew = open_workers(workers)

    from heterog.agents.checkpoint import save_checkpoint
    from heterog.agents.learner import learner_of
    from heterog.agents.training import RunFiles, Trainer, check_settings
    from heterog.envs.conformance import load_reward
    from heterog.envs.reward import reward_of

    learner_of(algorithm)  # a name that is wrong shows before anything is captured
    network = _network(encoder, initial)
    judge = load_reward(reward) if reward else reward_of
    config = TrainingConfig(
        algorithm=algorithm,
        num_pairs=pairs,
        num_steps=steps,
        search_evaluations=search,
        check_every=max(min(_DEFAULTS.check_every, steps // 8), 1),
        seed=seed,
    )
    check_settings(config, judge)
    report = _reporter(as_json)
    with crew, termination_as_interrupt():
        result = Trainer(
            _source(names, graphs, clusters, max_devices, config, report),
            config,
            network,
            files=RunFiles(
                provenance={"name": output.stem, "asked_clusters": clusters},
                logdir=logdir,
                checkpoint=checkpoint,
                resume=resume,
            ),
            reward=judge,
            workers=crew,
            report=report,
            budget=limit,
        ).run()
        save_checkpoint(output, result.checkpoint)
    print_result(as_json, _document(result, output, algorithm), _words(result, output, search))
    if not result.finished:
        end_interrupted(f"the best policy so far is written to {output}")


def _check_sizes(pairs: int, steps: int, search: int, max_devices: int | None) -> None:
    for name, value in (("--pairs", pairs), ("--steps", steps), ("--search", search)):
        if value < 1:
            raise HeterogError(f"{name} {value} is too small; give 1 or more.")
    if max_devices is not None and max_devices < 2:
        raise HeterogError(f"--max-devices {max_devices}: a cluster needs 2 devices or more.")


def _network(encoder: str, initial: str) -> "PolicyConfig | Policy":
    """Sizes of the network to train, or the policy to begin with if there is one."""
    from heterog.agents.checkpoint import load_checkpoint
    from heterog.agents.encoder import default_config

    name = use_encoder(encoder) if encoder else ""
    if not initial:
        return default_config(name) if name else PolicyConfig()
    start = load_checkpoint(initial).policy
    if name not in ("", start.config.encoder):
        raise HeterogError(
            f"--initial {initial} has the encoder '{start.config.encoder}', and its weights do "
            f"not fit '{name}'; leave one of the two out."
        )
    return start


def _source(
    names: "Sequence[str]",
    folder: Path | None,
    clusters: str,
    max_devices: int | None,
    config: TrainingConfig,
    report: "Report",
) -> "PairSource":
    """The pairs to train on; every model is captured now."""
    from heterog.agents.sources import (
        GENERATED,
        PIPELINED_PART,
        PairSource,
        captured,
        parse_clusters,
    )
    from heterog.envs.clusters import ClusterRange

    given, generated = parse_clusters(split_names(clusters))
    if generated == 0.0 and max_devices is not None:
        raise HeterogError(
            f"--max-devices {max_devices} is about generated clusters, and --clusters {clusters} "
            f"has none; add '{GENERATED}' to it, or leave --max-devices out."
        )
    found = []
    for number, name in enumerate(names):
        report("capture", number / len(names), name)
        found.append(captured(name, folder))
    return PairSource(
        graphs=found,
        clusters=given,
        generated=generated,
        pipelined=PIPELINED_PART if config.imitates else 0.0,
        wanted=ClusterRange() if max_devices is None else ClusterRange(max_devices=max_devices),
        seed=config.seed,
    )


def _document(result: "TrainingResult", output: Path, algorithm: str) -> dict[str, Any]:
    return {
        "policy": str(output),
        "algorithm": algorithm,
        "reward": result.checkpoint.provenance["reward"],
        "finished": result.finished,
        "num_evaluations": result.num_evaluations,
        "seconds": result.seconds,
        "history": [dict(row) for row in result.history],
        "before": dict(result.before),
        "after": dict(result.after),
    }


def _words(result: "TrainingResult", output: Path, search: int) -> str:
    """One sentence about the quality of the policy."""
    if not result.history:
        return (
            f"{output}: interrupted before anything was learned; this is the policy it began with"
        )
    reached = ""
    if result.after:
        reached = (
            f"best of 16 draws over search on pairs that nothing was chosen by, before "
            f"{result.before['best_of_16']:.3f}, after {result.after['best_of_16']:.3f} "
            f"(1 is as good as {search} evaluations); "
        )
    return (
        f"{output}: {reached}{_rewards(result.history)}{result.num_evaluations:,} evaluations in "
        f"{result.seconds:.0f} s{'' if result.finished else '; interrupted'}"
    )


def _rewards(history: "Sequence[Mapping[str, float]]") -> str:
    """The rise of a reward of one's own, in words; empty without one."""
    if "reward" not in history[0]:
        return ""
    best = max(row["reward"] for row in history)
    return f"mean reward {history[0]['reward']:.3f}, then {best:.3f}; "


def _reporter(quiet: bool) -> "Report":
    """Function that prints lines on stderr, at most one a second for each stage."""
    import time

    last: dict[str, float] = {}

    def report(stage: str, fraction: float, text: str) -> None:
        now = time.monotonic()
        if quiet or (now - last.get(stage, -1e9) < 1.0 and fraction < 1.0):
            return
        last[stage] = now
        err.print(f"{stage} {fraction:4.0%} {text}", soft_wrap=True, markup=False, highlight=False)

    return report
