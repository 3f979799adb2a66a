"""Common parts of commands: options, loading what they name, progress, printing, and Ctrl-C.

The first Ctrl-C asks for the best so far, the second one ends at once.
"""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from heterog.cli import completion
from heterog.cli.outputs import answers
from heterog.errors import HeterogError, UnknownNameError, named
from heterog.garbage import without_collector
from heterog.units import format_seconds
from heterog.user_code import is_from_file

if TYPE_CHECKING:
    from heterog.cluster import Cluster
    from heterog.graph.op_graph import OpGraph
    from heterog.methods.planner import Planner, Stop
    from heterog.methods.registry import Methods
    from heterog.search.issue_order import Rehearse
    from heterog.search.request import GivenLayout

out = Console(width=None if sys.stdout is not None and sys.stdout.isatty() else 100)
err = Console(stderr=True)

ModelArgument = Annotated[
    str,
    typer.Argument(
        help="a name of 'heterog models', path/to/file.py:function, or a saved graph",
        autocompletion=completion.models,
    ),
]
PlanArgument = Annotated[
    Path,
    typer.Argument(help="a file that 'heterog plan -o' wrote", autocompletion=completion.plans),
]
ModelsOption = Annotated[
    str,
    typer.Option(
        "--models",
        help="as for 'heterog plan', with commas between them",
        autocompletion=completion.several(completion.models),
    ),
]
ClusterOption = Annotated[
    str,
    typer.Option(
        "--cluster",
        help="a name of 'heterog clusters', a YAML file, or ray (nodes of RAY_ADDRESS)",
        autocompletion=completion.clusters,
    ),
]
ClustersOption = Annotated[
    str,
    typer.Option(
        "--clusters",
        help="names or YAML files, with commas between them",
        autocompletion=completion.several(completion.clusters),
    ),
]
OrderOption = Annotated[
    str,
    typer.Option(
        "--order",
        help="order of tasks in methods that search: best, fifo, rank or program",
        autocompletion=completion.among(completion.ORDERS),
    ),
]
NoBarrierOption = Annotated[
    bool, typer.Option("--no-step-barrier", help="the next step may start before all updates end")
]
BatchOption = Annotated[int | None, typer.Option("--batch-size", help="global batch size")]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON document")]
LayoutOption = Annotated[
    str,
    typer.Option(
        "--layout",
        help="what you run today, as a row beside ours: tp=2,pp=4,micro_batch=1,zero=1,..., or a "
        "file of torchtitan (.toml), DeepSpeed (.json), Accelerate, NeMo, Megatron-Bridge (.yaml) "
        "or Megatron-LM's command line (.sh, .txt)",
    ),
]
AsynchronousOption = Annotated[
    str,
    typer.Option(
        "--asynchronous",
        help="also plan training whose weights differ from one device's: average=H[,delay=D]"
        "[,weights=equal][,rate=0.7,momentum=0.9], islands that average every H steps, "
        "server=TAU[,order=arrival], teams that push gradients to a server, TAU steps apart "
        "at most, or stash=K[,micro_batches=M], stages of a pipeline that do not wait and keep "
        "older weights",
    ),
]
BudgetOption = Annotated[str, typer.Option("--budget", help="30s, 2m, or 5000e (evaluations)")]
PolicyOption = Annotated[
    str,
    typer.Option(
        "--policy",
        help="network of the agents: default, heldout, or policy.pt",
        autocompletion=completion.policies,
    ),
]
EncoderOption = Annotated[
    str, typer.Option("--encoder", help="file.py:name of the policy's own encoder, if it has one")
]
WorkersOption = Annotated[
    str, typer.Option("--workers", help="processes, or ray or ray:N for a Ray cluster")
]
SeedOption = Annotated[
    int, typer.Option("--seed", min=0, max=2**63 - 1, help="seed of all random choices")
]
SourceOption = Annotated[
    list[str] | None,
    typer.Option(
        "--source",
        metavar="FILE.py",
        help="a Python file that the plan names and that you trust; again for a second one",
    ),
]


def print_json(value: Any) -> None:
    """Print one document on stdout."""
    answers().write(json.dumps(value, indent=2) + "\n")


def print_result(as_json: bool, document: object, *said: object) -> None:
    """Print one JSON document on stdout, or else ``said``: tables, and lines without a cut."""
    if as_json:
        print_json(document)
    for each in () if as_json else said:
        if isinstance(each, str):
            print_line(each)
        else:
            out.print(each)


def print_line(text: str, *, to: Console = out) -> None:
    """Print a text uncut and as it is: names, paths and errors in it may look like markup."""
    to.print(text, soft_wrap=True, markup=False, highlight=False)


def print_checkpoint(folder: Path | None) -> None:
    """Say where the checkpoint is, if one was saved."""
    if folder is not None:
        print_line(f"checkpoint: {folder}")


def load_model(model: str, batch_size: int | None) -> "tuple[OpGraph, Rehearse | None]":
    """The graph of a zoo name, a user's function, or a saved file, and the rehearsal of its plans.

    A saved graph has no kernels to rehearse with.
    """
    if model.endswith((".json", ".json.gz")):
        from heterog.graph.serialize import load_graph

        graph = load_graph(model)
        if batch_size not in (None, graph.batch_size):
            raise HeterogError(
                f"{model} was captured with batch size {graph.batch_size}, not {batch_size}; "
                "capture the model again with --batch-size."
            )
        return graph, None
    from heterog.zoo import load_workload

    with without_collector():
        workload = load_workload(model, batch_size)
        # Only now, so that a wrong name is reported without waiting for torch.
        from heterog.graph import capture as capturing
        from heterog.runtime.measure.rehearsal import rehearsal_of

        captured = capturing.capture_step(workload)
        return captured.graph, rehearsal_of(captured)


def loaded_models(models: str, quiet: bool) -> "Iterator[tuple[OpGraph, Rehearse | None]]":
    """Results of ``load_model`` for names with commas, at default batch sizes, one by one."""
    for model in split_names(models):
        with progress_line(quiet) as progress:
            progress(f"capture {model}", 0.0, float("inf"))
            loaded = load_model(model, None)
        yield loaded


def load_cluster(source: str) -> "Cluster":
    """A preset, a YAML file, a shipped testbed, or the nodes of Ray (``ray``)."""
    from heterog.cluster import Cluster, preset_names
    from heterog.runtime.ranks.testbed import load_testbed, shipped_testbeds

    if source in shipped_testbeds():
        return load_testbed(source)
    if source == "ray":
        from heterog.cluster.spec import parse_cluster
        from heterog.runtime.measure.detect import cluster_yaml
        from heterog.runtime.measure.detect_hosts import detect_on

        return parse_cluster(cluster_yaml(*detect_on(source)), Path(source))
    try:
        return Cluster.load(source)
    except UnknownNameError:  # raised for testbeds, too
        raise UnknownNameError("cluster", source, (*preset_names(), *shipped_testbeds())) from None


def load_asynchronous(text: str, no_step_barrier: bool) -> "Planner | None":
    """The method of ``--asynchronous``; ``None`` without the option."""
    if not text:
        return None
    from heterog.modes.built_in import method_of

    if no_step_barrier:
        raise HeterogError("--asynchronous acts between steps; leave --no-step-barrier out.")
    return method_of(text)


def load_layout(source: str, *, is_required: bool) -> "GivenLayout | None":
    """The layout in a text or in another program's file; ``None`` if there is none.

    Args:
        source: Text or file as given by the user.
        is_required: Whether a layout that does not fit a model or cluster is an error.
    """
    if not source:
        return None
    from heterog.search.request import GivenLayout
    from heterog.strategy.layouts.files import is_layout_file, read_layout
    from heterog.strategy.layouts.layout import parse_layout

    if not is_layout_file(source):
        return GivenLayout(parse_layout(source), is_required=is_required)
    found = read_layout(source)
    return GivenLayout(
        found.layout, batch_size=found.batch_size, remarks=found.remarks, is_required=is_required
    )


def split_names(text: str) -> list[str]:
    """The names in a text with commas."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise HeterogError("an empty list of names; separate names with commas.")
    return names


def load_methods(
    text: str, policy: str = "", encoder: str = "", among: "Methods | None" = None
) -> "tuple[list[str], Methods]":
    """Names of methods, and the ``Methods`` that have them; checked before slow work.

    Args:
        text: Names with commas. A method of your own is given as ``file.py:name``, and known by
            its own name from then on.
        policy: Policy that ``agent`` and ``agent+search`` use; the default one if empty.
        encoder: Encoder of that policy, if it has one of its own.
        among: Methods to look in; all built-in ones and policies' if ``None``.

    Raises:
        HeterogError: a policy is given, but no method that uses it.
    """
    from heterog.agents.planners import LEARNED, default_methods, policy_methods
    from heterog.methods.registry import AUTO
    from heterog.search.conformance import load_planner

    known, names = among or default_methods(), []
    for name in split_names(text):
        if is_from_file(name):
            own = load_planner(name, known)
            known = known.having(own)
            name = own.name
        elif name != AUTO:
            known[name]
        names.append(name)
    if (policy or encoder) and not {AUTO, *LEARNED} & set(names):
        raise HeterogError(
            f"{'--policy' if policy else '--encoder'} has no effect on {', '.join(names)}; only "
            f"{' and '.join(LEARNED)} ask a policy."
        )
    if encoder:
        use_encoder(encoder)
    return names, known.having(*policy_methods(policy)) if policy else known


def use_encoder(source: str) -> str:
    """The name of an encoder; one given as ``file.py:name`` is registered first."""
    from heterog.agents.encoder import ENCODERS

    if is_from_file(source):
        from heterog.agents.conformance import load_encoder

        return load_encoder(source)
    named("encoder", source, ENCODERS)
    return source


@contextmanager
def progress_line(quiet: bool) -> Iterator[Callable[[str, float, float], None]]:
    """A progress line on stderr; plain lines if that is no terminal."""
    if not err.is_terminal:
        seen: set[str] = set()

        def tell(method: str, fraction: float, best: float) -> None:
            if method not in seen and not quiet:
                seen.add(method)
                print(f"{method} ...", file=sys.stderr)

        yield tell
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        line = bar.add_task("", total=1.0)

        def show(method: str, fraction: float, best: float) -> None:
            found = "" if best == float("inf") else f", best {format_seconds(best)}"
            bar.update(line, completed=min(fraction, 1.0), description=f"{method}{found}")

        yield show


def stage_progress(stage: str) -> tuple[str, float, float]:
    """A rank's stage as progress: counted stages have a bar, others a word."""
    counted, _, what = stage.partition(": ")
    match counted.split():
        case ["step", number, "of", last]:
            return "training", int(number) / int(last), float("inf")
        case ["ops" | "links" as word, number, "of", last]:
            return what or f"measuring {word}", int(number) / int(last), float("inf")
    return stage, 0.0, float("inf")


INTERRUPTED = 130
"""Exit code of an interrupted command, as in shells: 128 and SIGINT's number."""


@contextmanager
def interrupts_told() -> Iterator[None]:
    """Raise ``KeyboardInterrupt`` after a Ctrl-C, whatever became of it in the body.

    Libraries that are being imported may make an error of their own of it, as pydantic does.
    heterog's own errors stay, but for those that only tell of another's.
    """
    before, is_interrupted = signal.getsignal(signal.SIGINT), False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal is_interrupted
        is_interrupted = True
        raise KeyboardInterrupt

    if before is not signal.default_int_handler:  # ignored in the background of a shell, say
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except Exception as error:
        is_own = isinstance(error, HeterogError) and error.__cause__ is None
        if is_interrupted and not is_own:
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def stop_when_interrupted(also: Callable[[], None] = lambda: None) -> "Iterator[Stop]":
    """A switch that SIGINT and SIGTERM set; a second signal raises ``KeyboardInterrupt``.

    Args:
        also: Function that stops other workers.
    """
    from heterog.methods.planner import Stop

    stop = Stop()

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.is_requested:
            raise KeyboardInterrupt
        stop.request()
        _say("stopping with the best so far; once more ends at once")
        also()

    with _handled_by(ask):
        yield stop


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Make SIGTERM raise ``KeyboardInterrupt``, as SIGINT does anyway."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handled_by(interrupt):
        yield


def end_interrupted(what: str) -> None:
    """Print what was kept, and end with ``INTERRUPTED``.

    Raises:
        typer.Exit: always.
    """
    _say(f"interrupted; {what}")
    raise typer.Exit(INTERRUPTED)


@contextmanager
def _handled_by(handler: "signal._HANDLER") -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _say(text: str) -> None:
    sys.stderr.write(f"heterog: {text}\n")
    sys.stderr.flush()
