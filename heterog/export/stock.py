"""``user.py`` of folders for stock frameworks: the part that a person fills in, if necessary."""

from collections.abc import Sequence
from dataclasses import dataclass

from heterog.export.folder import fill, in_docstring
from heterog.export.torchrun import MODEL_FILE, workload_code
from heterog.search.plan import Plan
from heterog.user_code import trusted_source

_FROM_ZOO = """\
    from heterog.zoo import load_workload  # the one thing that heterog is needed for

    return load_workload({source!r}, BATCH_SIZE)"""
_FROM_FILE = """\
    try:
        import heterog  # noqa: F401
    except ImportError:  # the file needs nothing of it but a place for its answer
        stand_in = types.ModuleType("heterog")
        stand_in.Workload = Workload
        sys.modules["heterog"] = stand_in
    from model import {function} as make

    return make(BATCH_SIZE) if inspect.signature(make).parameters else make()"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StockUser:
    """The part of a stock folder that depends on the model.

    Attributes:
        user: Content of ``user.py``.
        to_do: What a person has to fill in, for the README.
        model_file: Copy of the workload's own file; empty if there is none.
        remarks: Sentences about anything that could not be copied.
    """

    user: bytes
    to_do: str
    model_file: bytes = b""
    remarks: tuple[str, ...] = ()

    @property
    def files(self) -> dict[str, bytes]:
        """The copy, if there is one, by its name in the folder."""
        return {MODEL_FILE: self.model_file} if self.model_file else {}


def stock_user(plan: Plan, sources: Sequence[str]) -> StockUser:
    """``user.py`` with the workload's model, loss and optimizer if its source is available.

    Args:
        plan: Plan that is exported.
        sources: Files that the person named; see ``user_code.trusted_source``.

    Raises:
        InputFileError: the plan's model is made by a file that nobody named.
    """
    source = trusted_source(plan.graph.source, sources, "the plan")
    code = workload_code(source)
    words = {
        "model": in_docstring(plan.graph.name),
        "source": in_docstring(plan.graph.source) or "not named in the plan",
        "optimizer": plan.graph.optimizer,
        "batch_size": plan.graph.batch_size,
    }
    _, colon, function = source.rpartition(":")
    if code.model_file:
        body, origin = _FROM_FILE.format(function=function), f"{MODEL_FILE}, a copy of yours"
    elif source and not colon:
        body, origin = _FROM_ZOO.format(source=source), "heterog's zoo"
    else:
        user = fill("ddp_user.py.jinja", **words)
        return StockUser(user=user, to_do="`build()`: model, optimizer, loss and data")
    return StockUser(
        user=fill("stock_workload.py.jinja", workload=body, origin=origin, **words),
        to_do=code.to_do.replace("batches()", "build()"),
        model_file=code.model_file,
        remarks=code.remarks,
    )
