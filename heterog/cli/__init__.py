"""The command line: it parses, calls, and prints; every decision is made elsewhere.

With ``--json`` one document goes to stdout and nothing else; progress and notes go to stderr. Bad
input ends with exit code 2 and one clear line.

- ``plan`` has the commands that make and show plans, ``compare`` compares methods; options about
  money are in ``objective``, the words about a new plan in ``found``, settings in a file in
  ``run_file``.
- ``run`` trains; ``check`` looks whether a script with a balancer divides its samples right;
  ``calibrate`` has profiles, fits and the errors of predictions.
- ``train`` has the commands about agents, ``schedule`` the one about arriving jobs, ``listing``
  lists names and makes files of graphs and machines.
- Shared: ``common`` has options, printing and Ctrl-C, ``outputs`` the files and streams that
  commands write and the spelling of settings in errors, ``completion`` completes in shells,
  ``once`` refuses lists given twice.
"""

import atexit
import gc
import logging
import sys
import warnings
from typing import Annotated, TextIO

import typer

import heterog
from heterog.cli import calibrate, check, compare, listing, plan, run, schedule, train
from heterog.cli.common import INTERRUPTED, interrupts_told
from heterog.cli.once import EachOnce
from heterog.cli.outputs import errors_spelled, outputs_checked, standard_streams
from heterog.cli.run_file import FromRunFile
from heterog.errors import HeterogError, HeterogWarning
from heterog.user_code import working_folder
from heterog.workers import signals_as_exit

app = typer.Typer(
    help="Finds how to train a PyTorch model on a cluster of unequal GPUs.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _command in (
    *(listing.models, listing.clusters, listing.devices, listing.links, listing.methods),
    *(listing.capture, plan.plan, compare.compare, train.dataset, train.train),
    *(train.evaluate, run.run),
    *(schedule.schedule, calibrate.profile, calibrate.calibrate, calibrate.fidelity),
    *(plan.report, plan.export),
):
    _kind = FromRunFile if _command is plan.plan else EachOnce
    app.command(cls=_kind)(errors_spelled(outputs_checked(_command)))
# What follows the script is the script's, options too.
app.command(cls=EachOnce, context_settings={"allow_interspersed_args": False})(
    errors_spelled(check.check)
)

cluster_app = typer.Typer(help="Make cluster files.", no_args_is_help=True)
cluster_app.command("detect", cls=EachOnce)(errors_spelled(outputs_checked(listing.detect)))
app.add_typer(cluster_app, name="cluster")

bench_app = typer.Typer(help="Compare methods on suites.", no_args_is_help=True)
bench_app.command("agents", cls=EachOnce)(errors_spelled(outputs_checked(train.agents)))
app.add_typer(bench_app, name="bench")

policy_app = typer.Typer(help="Share policies.", no_args_is_help=True)
policy_app.command("pack", cls=EachOnce)(errors_spelled(outputs_checked(train.pack)))
policy_app.command("pull", cls=EachOnce)(errors_spelled(outputs_checked(train.pull)))
app.add_typer(policy_app, name="policy")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"heterog {heterog.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Finds how to train a PyTorch model on a cluster of unequal GPUs."""


_show_in_full = warnings.showwarning


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print heterog's own warnings in one line, without a place in the code."""
    if issubclass(category, HeterogWarning):
        print(f"heterog: warning: {message}", file=sys.stderr)
    else:
        _show_in_full(message, category, filename, lineno, file, line)


def main() -> None:
    """Run the command line; exit code 2 and one line on bad input."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    warnings.showwarning = _show_warning
    # When Python exits, it looks for garbage among all imported modules: a second for torch.
    atexit.register(gc.freeze)
    try:
        with standard_streams(), signals_as_exit(), interrupts_told():
            working_folder()
            app()
    except HeterogError as error:
        print(f"heterog: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("heterog: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
