"""``heterog run --heal``: train with a plan, and with others when that becomes necessary."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heterog.cli.common import err, out, print_json, progress_line, stage_progress
from heterog.errors import HeterogError
from heterog.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from heterog.healing.options import HealOptions
    from heterog.healing.several import SeveralHosts


def heal_options(
    heal: bool,
    *,
    redundancy: int | None,
    checkpoint: Path | None,
    checkpoint_every: str,
    back_after: str,
    slow_factor: float | None = None,
    rendezvous: str = "",
    host: str = "",
) -> "HealOptions | None":
    """The options of healing on the command line; ``None`` if the job does not heal.

    Raises:
        HeterogError: an option would have no effect.
    """
    from heterog.healing.options import HealOptions
    from heterog.units import parse_seconds

    given = {
        "--redundancy": redundancy is not None,
        "--checkpoint": checkpoint is not None,
        "--checkpoint-every": bool(checkpoint_every),
        "--back-after": bool(back_after),
        "--slow-factor": slow_factor is not None,
        "--rendezvous": bool(rendezvous),
        "--host": bool(host),
    }
    for name, is_given in given.items():
        if is_given and not heal:
            raise HeterogError(f"{name} without --heal has no effect; add --heal or leave it out.")
    if checkpoint_every and checkpoint is None:
        raise HeterogError("--checkpoint-every without --checkpoint; name a folder for them.")
    if host and not rendezvous:
        raise HeterogError("--host without --rendezvous has no effect; say where hosts meet.")
    if not heal:
        return None
    chosen = HealOptions()
    return replace(
        chosen,
        redundancy=chosen.redundancy if redundancy is None else redundancy,
        checkpoint="" if checkpoint is None else str(checkpoint),
        checkpoint_s=parse_seconds(checkpoint_every) if checkpoint_every else chosen.checkpoint_s,
        back_after_s=parse_seconds(back_after) if back_after else chosen.back_after_s,
        slow_factor=chosen.slow_factor if slow_factor is None else slow_factor,
    )


def run_healing(
    plan: Path,
    options: "HealOptions",
    *,
    rendezvous: str,
    host: str,
    as_json: bool,
    **given: Any,
) -> None:
    """Run the job and print the outcome; ``given`` are arguments of ``HealingJob``."""
    from heterog.healing.job import HealingJob

    def say(text: str) -> None:
        err.print(text, soft_wrap=True, highlight=False)

    with progress_line(as_json) as show:
        crew = None
        if rendezvous:
            crew = _crew_of_several(plan, rendezvous, host, say, given)
            if crew is None:  # another host leads, and the job is done
                out.print("done; the host that leads says how it went", soft_wrap=True)
                return
        job = HealingJob(
            plan,
            options=options,
            crew=crew,
            progress=lambda stage: show(*stage_progress(stage)),
            say=say,
            **given,
        )
        measured = job.run()
    if as_json:
        print_json(measured)
        return
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
    if given["save"] is not None:
        out.print(f"checkpoint: {given['save']}", soft_wrap=True)


def _crew_of_several(
    plan: Path, rendezvous: str, host: str, say: Callable[[str], None], given: dict[str, Any]
) -> "SeveralHosts | None":
    """The crew that this host leads; ``None`` if another leads and the job is done.

    Raises:
        HeterogError: the plan has no such host, or the job failed.
    """
    from heterog.healing.crew import RankArguments
    from heterog.healing.host import HostProcess
    from heterog.healing.rendezvous import Rendezvous, own_host
    from heterog.healing.several import SeveralHosts
    from heterog.planners.plan import load_plan

    loaded = load_plan(plan)
    names = [each.name for each in loaded.cluster.hosts]
    name = names[own_host(host, names)]
    save = given["save"]
    told = RankArguments(
        model=given["model"],
        sources=tuple(given["sources"]),
        timeout_s=given["timeout_s"],
        step_timeout_s=given["step_timeout_s"],
        save="" if save is None else str(save.resolve()),
        allow_nonfinite=given["allow_nonfinite"],
    )
    place = Rendezvous.parse(rendezvous)
    listening = place.listen()
    if listening is None:
        HostProcess(place, name, loaded.program_hash, told).run()
        return None
    own = ["-m", "heterog.healing.host", "--rendezvous", rendezvous, "--host", name]
    own += ["--program", loaded.program_hash, "--told", json.dumps(asdict(told))]
    return SeveralHosts(
        loaded.cluster, loaded.program_hash, listening, place, told, own=own, say=say
    )
