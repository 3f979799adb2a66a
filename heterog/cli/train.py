"""Commands about agents.

- ``heterog train`` trains a policy on models and clusters.
- ``heterog evaluate`` compares a policy, zero-shot and fine-tuned, with other methods.
- ``heterog bench agents`` compares methods on suites of models and clusters, with intervals.
- ``heterog policy pack`` and ``pull`` exchange policies with a hub, as folders.
- ``heterog dataset`` solves models on clusters, and keeps the plans for others to learn from.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heterog.agents.config import PolicyConfig, TrainingConfig
from heterog.cli import completion
from heterog.cli.common import (
    BudgetOption,
    ClustersOption,
    EncoderOption,
    JsonOption,
    LayoutOption,
    ModelsOption,
    SeedOption,
    WorkersOption,
    end_interrupted,
    err,
    load_cluster,
    load_layout,
    load_methods,
    loaded_models,
    out,
    print_json,
    print_line,
    print_result,
    progress_line,
    split_names,
    termination_as_interrupt,
    use_encoder,
)
from heterog.cli.outputs import CACHE, HTML, LINES, POLICY, TRAINING
from heterog.errors import HeterogError
from heterog.workers import open_workers

if TYPE_CHECKING:
    from heterog.agents.benchmark.board import Entry, Scored
    from heterog.agents.learner import Report
    from heterog.agents.policy import Policy
    from heterog.agents.sources import PairSource
    from heterog.agents.training import TrainingResult

_DEFAULTS = TrainingConfig()


def train(
    models: ModelsOption,
    output: Annotated[Path, typer.Option("-o", "--output", help="policy.pt"), POLICY],
    clusters: Annotated[
        str,
        typer.Option("--clusters", help="names or files, with commas; 'generated' draws new ones"),
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
        int, typer.Option("--pairs", min=1, help="pairs of model and cluster")
    ] = _DEFAULTS.num_pairs,
    steps: Annotated[
        int, typer.Option("--steps", min=1, help="gradient steps (sb3: rollouts)")
    ] = _DEFAULTS.num_steps,
    search: Annotated[
        int,
        typer.Option(
            "--search", min=1, help="evaluations per pair: for elites, and to validate against"
        ),
    ] = _DEFAULTS.search_evaluations,
    budget: Annotated[
        str, typer.Option("--budget", help="an earlier end: after 10m, or 5000e (evaluations)")
    ] = "",
    max_devices: Annotated[
        int | None,
        typer.Option(
            "--max-devices", min=2, help="most devices of generated clusters; 32 if not given"
        ),
    ] = None,
    logdir: Annotated[Path | None, typer.Option("--logdir", help="for TensorBoard"), CACHE] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option("--checkpoint", help="file that is rewritten while training, for --resume"),
        TRAINING,
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="checkpoint to continue, with more --steps")
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

    learner_of(algorithm)  # reports a wrong name before anything is captured
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
            f"on pairs kept for this test, the best of 16 draws takes "
            f"{result.after['best_of_16']:.3f} times as long a step as the plan of a search with "
            f"{search} evaluations ({result.before['best_of_16']:.3f} before training); "
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
        print_line(f"{stage} {fraction:4.0%} {text}", to=err)

    return report


ROWS = "random,thumb,untrained,local_search,agent,agent+search"


def agents(
    suite: Annotated[
        str,
        typer.Option(
            "--suite",
            help="paper, families, scale, layouts, placement, or pairs.jsonl; several with commas",
        ),
    ] = "families",
    methods: Annotated[
        str,
        typer.Option(
            "--methods",
            help="random, annealing, tpe, cma_es, tree, heterog_agent, gdp, placeto, ppo, "
            "maskable_ppo, thumb, untrained, or as for 'heterog compare'",
        ),
    ] = ROWS,
    budget: Annotated[
        str, typer.Option("--budget", help="of each run: 2000e (evaluations), or 20s of CPU time")
    ] = "2000e",
    seeds: Annotated[
        str, typer.Option("--seeds", help="runs of each method on each pair, or from:to of others")
    ] = "10",
    results: Annotated[
        Path,
        typer.Option(
            "--results", help="file of runs, which is added to; graphs are kept beside it"
        ),
        LINES,
    ] = Path("board.jsonl"),
    report: Annotated[
        Path | None, typer.Option("--report", help="page.html of quality, profiles and time"), HTML
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare methods on a suite; the same command continues a stopped run."""
    asked = _seeds(seeds)
    suites = suite.split(",")
    if report is not None and len(suites) > 1:
        raise HeterogError(f"--report is of one suite, not of {suite}; ask for one at a time.")
    from heterog.methods.planner import Budget

    common = {
        "entries": _entries(methods),
        "budget": Budget.parse(budget),
        "seeds": asked,
        "results": results,
    }
    with termination_as_interrupt():
        made = [_made(name, common) for name in suites]
    if report is not None:
        from heterog.agents.benchmark.page import write_board_page

        write_board_page(report, f"{suite}, {budget} a run", made[0])
    about = {"budget": budget, "results": str(results)}
    found = {name: scored.summary() for name, scored in zip(suites, made, strict=True)}
    documents = [{"suite": name} | about | {"rows": rows} for name, rows in found.items()]
    words = [line for name, rows in found.items() for line in (name, *_table(rows))]
    print_result(as_json, documents[0] if len(suites) == 1 else {"suites": documents}, *words)


def _seeds(text: str) -> range:
    """The seeds of a text: ``"n"`` for the first n, or ``"from:to"`` without the last.

    >>> _seeds("10"), _seeds("10:20")
    (range(0, 10), range(10, 20))
    """
    first, _, end = text.rpartition(":")
    try:
        found = range(int(first or "0"), int(end))
    except ValueError:
        found = range(0)
    if not found or found.start < 0:
        raise HeterogError(f"--seeds {text} names no seeds; give a number as 10, or 10:20.")
    return found


def _made(suite: str, common: dict[str, Any]) -> "Scored":
    """The board of a suite, after its missing runs have been made."""
    from heterog.agents.benchmark.board import Board
    from heterog.agents.benchmark.suites import pairs_of

    board = Board(pairs=pairs_of(suite), graphs=common["results"].with_suffix(".graphs"), **common)
    board.run(_tell)
    return board.scored()


def _tell(line: dict[str, Any]) -> None:
    took = line["step_time_s"]
    said = "does not fit" if took is None else f"{1e3 * took:.1f} ms"
    print_line(f"{line['pair']}, seed {line['seed']}: {line['arm']} {said}", to=err)


def _entries(methods: str) -> "list[Entry]":
    """The named methods as entries of the board, each with its origin."""
    import heterog
    from heterog.agents.benchmark.board import Entry, code_of, judged
    from heterog.agents.benchmark.rivals import known_rows
    from heterog.methods.registry import AUTO
    from heterog.user_code import is_from_file, split_source

    entries: list[Entry] = []
    for name in methods.split(","):
        names, known = load_methods(name, among=known_rows())
        own = is_from_file(name)
        code = code_of(split_source(name, "method")[0]) if own else heterog.__version__
        if AUTO in names:
            raise HeterogError("--methods: a row is one method, auto is all of them; name some.")
        planner = known[names[0]]
        if planner.name in (entry.name for entry in entries):
            raise HeterogError(
                f"--methods: two of them are called {planner.name}, and a row is found by its "
                "name; leave one out, or rename it."
            )
        entries.append(Entry(planner.name, partial(judged, planner), code))
    return entries


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The board in words, best first."""
    if not rows:
        return ["no pair has a run of every method, one of which fits"]
    counts = f"pairs: {rows[0]['pairs']}, seeds: {rows[0]['seeds']}"
    title = f"{counts}; a quality of 1 is the best known step"
    lines = [title, f"{'method':20} {'quality':22} {'beats the first':22} {'CPU':>9} evaluations"]
    for row in rows:
        quality, beats = (
            "{value:.3f} [{low:.3f}, {high:.3f}]".format(**row[name])
            for name in ("quality", "beats_first")
        )
        misfits = f", {row['do_not_fit']} do not fit" if row["do_not_fit"] else ""
        lines.append(
            f"{row['arm']:20} {quality:22} {beats:22} {row['cpu_s']:7.1f} s "
            f"{row['evaluations']:.0f}{misfits}"
        )
    return lines


def pack(
    policy: Annotated[str, typer.Argument(help="policy.pt, or the name of a shipped one")],
    folder: Annotated[Path, typer.Argument(help="folder for weights, configuration, card"), CACHE],
) -> None:
    """Write a policy as a folder that a hub can hold."""
    from heterog.agents.checkpoint import load_checkpoint
    from heterog.agents.hub import pack as packed

    packed(load_checkpoint(policy), folder)
    print_line(f"{folder}: read its README.md before you share it")


def pull(
    address: Annotated[str, typer.Argument(help="folder, https://..., s3://..., hf://...")],
    output: Annotated[Path, typer.Option("-o", "--output", help="policy.pt"), POLICY],
) -> None:
    """Read a policy that was packed; nothing of it is run."""
    from heterog.agents.checkpoint import save_checkpoint
    from heterog.agents.hub import pull as pulled

    save_checkpoint(output, pulled(address))
    print_line(f"{output}: use it by --policy {output}")


def evaluate(
    policy: Annotated[
        str,
        typer.Argument(
            help="shipped name (default, heldout) or policy.pt", autocompletion=completion.policies
        ),
    ],
    models: ModelsOption,
    clusters: ClustersOption,
    budget: BudgetOption = "30s",
    finetune: Annotated[
        str, typer.Option("--finetune", help="time or evaluations to fine-tune on each pair")
    ] = "",
    encoder: EncoderOption = "",
    layout: LayoutOption = "",
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Compare a policy with baselines and searches."""
    from heterog.methods.planner import Budget

    parsed = Budget.parse(budget)
    tuning = Budget.parse(finetune) if finetune else None
    targets = [load_cluster(name) for name in split_names(clusters)]
    given = load_layout(layout, is_required=False)

    from heterog.agents.checkpoint import load_checkpoint
    from heterog.agents.evaluation import evaluate_policy, summary
    from heterog.agents.finetune import FineTuned
    from heterog.report.tables import methods_table
    from heterog.search.request import Request

    if encoder:
        use_encoder(encoder)
    checkpoint = load_checkpoint(policy)
    documents: list[dict[str, Any]] = []
    for graph, _ in loaded_models(models, as_json):
        for target in targets:
            with progress_line(as_json) as progress:
                found = evaluate_policy(
                    policy,
                    Request(graph=graph, cluster=target, budget=parsed, seed=seed, given=given),
                    tuned=None if tuning is None else FineTuned(checkpoint.policy, tuning),
                    progress=progress,
                )
            documents += found.to_dicts()
            if not as_json:
                title = f"{graph.name}, batch {graph.batch_size}, on {target.name}, by {policy}"
                out.print(methods_table(found.rows, target, title=title))
                shown = ", ".join(
                    f"{name} {'does not fit' if value is None else f'{value:.3f}'}"
                    for name, value in summary(found.rows).items()
                )
                print_line(f"step time over that of 'search': {shown}")
    if as_json:
        print_json({"policy": policy, "rows": documents})


def dataset(
    folder: Annotated[Path, typer.Argument(help="folder of solved pairs, added to"), CACHE],
    models: ModelsOption,
    clusters: ClustersOption,
    methods: Annotated[str, typer.Option("--methods", help="as for 'heterog compare'")] = "auto",
    budget: BudgetOption = "30s",
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Solve models on clusters and keep every method's plan, a file for each pair."""
    from heterog.methods.planner import Budget
    from heterog.search.dataset import SolvedPair, solved_before
    from heterog.search.portfolio import run_methods
    from heterog.search.request import Request, Session
    from heterog.simulator.evaluator import Evaluator

    names, known = load_methods(methods)
    parsed = Budget.parse(budget)
    targets = [load_cluster(name) for name in split_names(clusters)]
    documents = []
    for graph, _ in loaded_models(models, as_json):
        for target in targets:
            pair = solved_before(SolvedPair(graph=graph, cluster=target), folder)
            request = Request(
                graph=graph,
                cluster=target,
                methods=tuple(names),
                known=known,
                budget=parsed,
                seed=seed,
            )
            with progress_line(as_json) as progress:
                rows = run_methods(Evaluator(graph, target), request, Session(progress=progress))
            # Read again: another process may have added plans meanwhile.
            pair = solved_before(pair, folder).adding(rows, seed, str(parsed))
            folder.mkdir(parents=True, exist_ok=True)
            path = pair.save(folder)
            best = pair.plans[0].step_time_s if pair.plans else None
            documents.append({"file": str(path), "plans": len(pair.plans), "step_time_s": best})
            if not as_json:
                said = "none fits" if best is None else f"{1e3 * best:.1f} ms the fastest"
                print_line(f"{path}: {len(pair.plans)} plans, {said}")
    if as_json:
        print_json(documents)
