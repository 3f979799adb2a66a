"""Exports a plan as a folder that other launchers and frameworks can run.

    export_plan(load_plan("plan.json"), "ddp", Path("job"))

Each target names the parts of the plan that it cannot express, or refuses the plan.

- ``torchrun``, ``slurm``, ``kubernetes`` and ``ray`` take any plan, ``skypilot`` any plan on alike
  hosts: heterog runs it there.
- ``accelerate``, ``ddp``, ``deepspeed`` and ``torchtitan`` take ``uniform`` plans; the last three
  run without heterog. ``torchtitan`` also takes plans that are layouts.
- ``folder`` writes the files, among them the table of ranks and their launch script, and leaves
  idle devices out; ``stock`` makes the folders with a file that a person fills in.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from heterog.errors import named
from heterog.export.accelerate import export_accelerate
from heterog.export.ddp import export_ddp
from heterog.export.deepspeed import export_deepspeed
from heterog.export.folder import Export, ExportError, check_folder, write_folder
from heterog.export.kubernetes import export_kubernetes
from heterog.export.ray import export_ray
from heterog.export.skypilot import export_skypilot
from heterog.export.slurm import export_slurm
from heterog.export.torchrun import export_torchrun
from heterog.export.torchtitan import export_torchtitan
from heterog.search.plan import Plan

TARGETS: Mapping[str, Callable[[Plan, Sequence[str]], Export]] = {
    "ddp": export_ddp,
    "torchrun": export_torchrun,
    "slurm": export_slurm,
    "kubernetes": export_kubernetes,
    "deepspeed": export_deepspeed,
    "accelerate": export_accelerate,
    "torchtitan": export_torchtitan,
    "skypilot": export_skypilot,
    "ray": export_ray,
}
"""Functions that make each target's folder from a plan and the files that the person named."""

__all__ = [
    "TARGETS",
    "Export",
    "ExportError",
    "check_folder",
    "check_target",
    "export_plan",
    "make_export",
    "write_folder",
]


def check_target(target: str) -> None:
    """Refuse a target that does not exist.

    Raises:
        UnknownNameError: names the closest one.
    """
    named("export target", target, TARGETS)


def make_export(plan: Plan, target: str, *, sources: Sequence[str] = ()) -> Export:
    """The files of an export, not written yet, and what they cannot express.

    Args:
        plan: Plan to export.
        target: One of ``TARGETS``.
        sources: Python files that may be copied although they are elsewhere; see
            ``user_code.trusted_source``.

    Raises:
        UnknownNameError: there is no such target.
        InputFileError: the plan's model is made by a file that nobody named.
        ExportError: the plan cannot run (for want of memory, say), or the target has no words for
            it.
        StrategyError: the plan's step has too many tasks; see ``Plan.is_written``.
    """
    check_target(target)
    if plan.step_time_s is None:
        raise ExportError(f"the plan cannot run ({plan.shortage}); plan again.")
    plan.require_written()
    return TARGETS[target](plan, sources)


def export_plan(
    plan: Plan, target: str, folder: Path, *, overwrite: bool = False, sources: Sequence[str] = ()
) -> list[Path]:
    """Write a plan as a folder for another launcher or framework.

    Args:
        plan: Plan to export.
        target: One of ``TARGETS``.
        folder: New or empty folder.
        overwrite: Whether to renew an export to the same target; an edited ``user.py`` is kept.
        sources: Files that may be copied, as for ``make_export``.

    Returns:
        The files written.

    Raises:
        UnknownNameError: there is no such target.
        ExportError: the target cannot express the plan, or the folder holds something else.
    """
    return write_folder(make_export(plan, target, sources=sources), folder, overwrite=overwrite)
