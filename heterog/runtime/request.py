"""A run as one value, the ``RunRequest``.

The command line and Python make it, launchers take it whole, and every rank gets it as a *run
file*: its fields as JSON; all but the plan may be left out.

    {"plan": "plan.json", "num_steps": 20, "limits": {"timeout_s": 600}}
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar

from heterog.errors import HeterogError
from heterog.files import read_json, write_atomically
from heterog.records import STRICT, parse_dataclass
from heterog.runtime.ranks.watching import Limits
from heterog.search.plan import Plan, load_plan
from heterog.user_code import trusted_source


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """A plan to train with, and how.

    Attributes:
        plan: Path of the plan.
        model: Source of the workload; the plan's own if empty.
        sources: Python files that may be run although only the plan names them; see
            ``user_code.trusted_source``.
        num_steps: Number of measured steps, after one that warms up (and trains, too).
        limits: Seconds after which a job is given up.
        port: Port on which the ranks of this machine meet; 0 picks a free one.
        save: Folder for a checkpoint after the last step.
        resume: Folder of a checkpoint to begin with.
        allow_nonfinite: Go on when the loss is infinite or not a number.
        record: Record when each task ran in the last step.
        output: File for the measurements of rank 0.
    """

    __pydantic_config__: ClassVar = STRICT

    plan: Path
    model: str = ""
    sources: tuple[str, ...] = ()
    num_steps: int = 10
    limits: Limits = field(default_factory=Limits)
    port: int = 0
    save: Path | None = None
    resume: Path | None = None
    allow_nonfinite: bool = False
    record: bool = False
    output: Path | None = None

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise HeterogError(f"`num_steps` is {self.num_steps}; measure at least one step.")

    def load(self) -> Plan:
        """The plan, if it can be run.

        Raises:
            HeterogError: it is no plan, cannot run (for want of memory, say), or has a background
                job without a source of its workload.
            InputFileError: a model is made by a file that nobody named.
        """
        plan = load_plan(self.plan)
        if plan.step_time_s is None:
            raise HeterogError(f"{self.plan} cannot run ({plan.shortage}); plan again.")
        if plan.background is not None and not plan.background.source:
            raise HeterogError(
                f"{self.plan} has the background job {plan.background.model}, which was read from "
                "a graph file; plan with a model's name or file.py:function as the background."
            )
        self.source_of(plan)
        if plan.background is not None:
            trusted_source(plan.background.source, self.sources, str(self.plan))
        return plan

    def source_of(self, plan: Plan) -> str:
        """Source of the workload that trains with the plan.

        Raises:
            InputFileError: a model is made by a file that nobody named.
        """
        return self.model or trusted_source(plan.graph.source, self.sources, str(self.plan))

    def to_json(self) -> str:
        """The text of a run file that means the same in every folder."""
        return json.dumps(asdict(self), default=lambda path: str(path.resolve()))

    def write(self, path: Path) -> None:
        """Write a run file."""
        write_atomically(path, self.to_json().encode())


def read_request(path: Path) -> RunRequest:
    """The request in a run file, or the one for a plan alone.

    Raises:
        InputFileError: the file cannot be read, or a field is missing, unknown or wrong.
    """
    value = read_json(path, "run file")
    if not isinstance(value, dict) or "plan" not in value:
        return RunRequest(plan=path)  # if it is no plan either, its reader says what is wrong
    return parse_dataclass(value, RunRequest, f"run file {path}")
