"""``heterog run --heal``: train with a plan, and with others when that becomes necessary."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from heterog.cli.common import (
    err,
    out,
    print_checkpoint,
    print_json,
    progress_line,
    stage_progress,
)
from heterog.errors import HeterogError
from heterog.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from heterog.healing.options import HealOptions
    from heterog.healing.several import SeveralHosts
    from heterog.runtime.request import RunRequest


def heal_options(heal: bool, given: Mapping[str, Any]) -> "HealOptions | None":
    """The options of healing on the command line; ``None`` if the job does not heal.

    Args:
        heal: Whether it heals.
        given: Values of the other options by their parameters, ``None`` or empty if not given.

    Raises:
        HeterogError: an option would have no effect.
    """
    from heterog.healing.options import HealOptions
    from heterog.units import parse_seconds

    given = {name: value for name, value in given.items() if value not in (None, "")}
    for name in given:
        if not heal:
            option = f"--{name.replace('_', '-')}"
            raise HeterogError(
                f"{option} without --heal has no effect; add --heal or leave it out."
            )
    if "checkpoint_every" in given and "checkpoint" not in given:
        raise HeterogError("--checkpoint-every without --checkpoint; name a folder for them.")
    if "host" in given and "rendezvous" not in given:
        raise HeterogError("--host without --rendezvous has no effect; say where hosts meet.")
    if not heal:
        return None
    read: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "redundancy": ("redundancy", int),
        "checkpoint": ("checkpoint", str),
        "checkpoint_every": ("checkpoint_s", parse_seconds),
        "back_after": ("back_after_s", parse_seconds),
        "slow_factor": ("slow_factor", float),
    }
    fields = {read[name][0]: read[name][1](value) for name, value in given.items() if name in read}
    return HealOptions(**fields)


def run_healing(
    request: "RunRequest", options: "HealOptions", *, rendezvous: str, host: str, as_json: bool
) -> None:
    """Run the job and print the outcome."""
    from heterog.healing.job import HealingJob

    def say(text: str) -> None:
        err.print(text, soft_wrap=True, highlight=False)

    with progress_line(as_json) as show:
        crew = None
        if rendezvous:
            crew = _crew_of_several(request, rendezvous, host, say)
            if crew is None:  # another host leads, and the job is done
                out.print("done; the host that leads says how it went", soft_wrap=True)
                return
        job = HealingJob(
            request,
            options=options,
            crew=crew,
            progress=lambda stage: show(*stage_progress(stage)),
            say=say,
        )
        measured = job.run()
    if as_json:
        print_json(measured)
    else:
        _print_measured(measured)
        print_checkpoint(request.save)


def _print_measured(measured: Mapping[str, Any]) -> None:
    """Print what happened, and how long a step took."""
    for move in measured["moves"]:
        took_s = sum(move[part] for part in ("detect_s", "plan_s", "move_s", "first_step_s"))
        out.print(
            f"{move['why']}: on with {move['num_ranks']} ranks ({move['method']}) after step "
            f"{move['step']}, {format_seconds(took_s)} later (noticed in "
            f"{format_seconds(move['detect_s'])}, planned in {format_seconds(move['plan_s'])}, "
            f"moved in {format_seconds(move['move_s'])}; {move['steps_done_again']} steps again)",
            soft_wrap=True,
        )
    snapshots, losses = measured["snapshots"], measured["losses"]
    first, last = (float("nan") if each is None else each for each in (losses[0], losses[-1]))
    out.print(
        f"{measured['model']} on {measured['num_ranks']} ranks: "
        f"{format_seconds(measured['step_time_s'])} a step (median of {len(losses)}); loss "
        f"{first:.4f} -> {last:.4f}; {snapshots['number']} snapshots, "
        f"{format_bytes(snapshots['bytes_of_rank_0'])} each from rank 0",
        soft_wrap=True,
    )


def _crew_of_several(
    request: "RunRequest", rendezvous: str, host: str, say: Callable[[str], None]
) -> "SeveralHosts | None":
    """The crew that this host leads; ``None`` if another leads and the job is done.

    Raises:
        HeterogError: the plan has no such host, or the job failed.
    """
    from heterog.healing.host import HostProcess
    from heterog.healing.rendezvous import Rendezvous, own_host
    from heterog.healing.several import SeveralHosts

    loaded = request.load()
    names = [each.name for each in loaded.cluster.hosts]
    name = names[own_host(host, names)]
    place = Rendezvous.parse(rendezvous)
    listening = place.listen()
    if listening is None:
        HostProcess(place, name, loaded.program_hash, request).run()
        return None
    own = ["-m", "heterog.healing.host", rendezvous, name, loaded.program_hash]
    return SeveralHosts(
        loaded.cluster,
        loaded.program_hash,
        listening,
        place,
        request,
        own=[*own, request.to_json()],
        say=say,
    )
