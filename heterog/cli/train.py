"""``heterog train``: train a policy on models and clusters."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heterog.cli.common import (
    JsonOption,
    ModelsOption,
    SeedOption,
    WorkersOption,
    err,
    out,
    print_json,
    split_names,
)
from heterog.errors import HeterogError, UnknownNameError
from heterog.workers import open_workers

if TYPE_CHECKING:
    from heterog.agents.training import Report


def train(
    models: ModelsOption,
    output: Annotated[Path, typer.Option("-o", "--output", help="policy.pt")],
    clusters: Annotated[
        str, typer.Option("--clusters", help="names or files with commas; generated: new ones")
    ] = "generated",
    algorithm: Annotated[
        str, typer.Option("--algorithm", help="imitation, reinforce, mixed or ppo")
    ] = "imitation",
    encoder: Annotated[str, typer.Option("--encoder", help="hetero or paper")] = "hetero",
    pairs: Annotated[int, typer.Option("--pairs", help="pairs of model and cluster")] = 800,
    steps: Annotated[int, typer.Option("--steps", help="gradient steps (PPO: rollouts)")] = 2000,
    search: Annotated[
        int, typer.Option("--search", help="evaluations that look for elites, per pair")
    ] = 1000,
    max_devices: Annotated[int, typer.Option(help="of generated clusters")] = 32,
    logdir: Annotated[Path | None, typer.Option("--logdir", help="for TensorBoard")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="file renewed while training")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="checkpoint to go on from")
    ] = None,
    initial: Annotated[str, typer.Option("--initial", help="policy to begin with")] = "",
    graphs: Annotated[
        Path | None, typer.Option("--graphs", help="folder that keeps captured graphs")
    ] = None,
    workers: WorkersOption = "1",
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Train a policy; Ctrl-C keeps the best one so far."""
    from heterog.files import check_writable

    for path in (output, checkpoint):
        if path is not None:
            check_writable(path)
    for name, value in (
        ("--pairs", pairs),
        ("--steps", steps),
        ("--search", search),
    ):
        if value < 1:
            raise HeterogError(f"{name} {value} is too small; give 1 or more.")
    if max_devices < 2:
        raise HeterogError(f"--max-devices {max_devices}: a cluster needs 2 devices or more.")
    names = split_names(models)
    crew = open_workers(workers)

    from heterog.agents.checkpoint import load_checkpoint, save_checkpoint
    from heterog.agents.config import PolicyConfig
    from heterog.agents.encoder import ENCODERS
    from heterog.agents.ppo_training import make_trainer
    from heterog.agents.sources import PIPELINED_PART, PairSource, captured, parse_clusters
    from heterog.agents.training import Algorithm, TrainingConfig
    from heterog.envs.clusters import ClusterRange

    if algorithm not in list(Algorithm):
        raise UnknownNameError("algorithm", algorithm, list(Algorithm))
    if encoder not in ENCODERS:
        raise UnknownNameError("encoder", encoder, ENCODERS)
    config = TrainingConfig(
        algorithm=Algorithm(algorithm),
        num_pairs=pairs,
        num_steps=steps,
        search_evaluations=search,
        check_every=max(min(200, steps // 8), 1),
        seed=seed,
    )
    network = PolicyConfig(encoder=encoder, rank=0 if encoder == "paper" else 16)
    start = load_checkpoint(initial).policy if initial else None
    given, generated = parse_clusters(split_names(clusters))
    report = _reporter(as_json)
    found = []
    for number, name in enumerate(names):
        report("capture", number / len(names), name)
        found.append(captured(name, graphs))
    with crew:
        trainer = make_trainer(
            PairSource(
                graphs=found,
                clusters=given,
                generated=generated,
                pipelined=PIPELINED_PART if config.imitates else 0.0,
                wanted=ClusterRange(max_devices=max_devices),
                seed=seed,
            ),
            config,
            start.config if start is not None else network,
            provenance={"name": output.stem, "encoder": encoder, "asked_clusters": clusters},
            logdir=logdir,
            checkpoint=checkpoint,
            resume=resume,
            initial=start,
            workers=crew,
            report=report,
        )
        result = trainer.run()
    save_checkpoint(output, result.checkpoint)
    first, last = result.history[0], min(result.history, key=lambda row: row["best_of_16"])
    document = {
        "policy": str(output),
        "algorithm": algorithm,
        "finished": result.finished,
        "num_evaluations": result.num_evaluations,
        "seconds": result.seconds,
        "history": [dict(row) for row in result.history],
    }
    if as_json:
        print_json(document)
        return
    out.print(
        f"{output}: best of 16 draws over search, untrained {first['best_of_16']:.3f}, trained "
        f"{last['best_of_16']:.3f} (1 is as good as {search} evaluations); "
        f"{result.num_evaluations:,} evaluations in {result.seconds:.0f} s"
        f"{'' if result.finished else '; interrupted'}",
        soft_wrap=True,
        markup=False,
    )


def _reporter(quiet: bool) -> "Report":
    """Lines on stderr, not more than one a second for each stage."""
    import time

    last: dict[str, float] = {}

    def report(stage: str, fraction: float, text: str) -> None:
        now = time.monotonic()
        if quiet or (now - last.get(stage, -1e9) < 1.0 and fraction < 1.0):
            return
        last[stage] = now
        err.print(f"{stage} {fraction:4.0%} {text}", soft_wrap=True, markup=False, highlight=False)

    return report
