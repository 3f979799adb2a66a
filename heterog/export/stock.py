"""Folders for stock frameworks: ``user.py`` is the part that a person fills in, if necessary."""

from collections.abc import Mapping, Sequence

from heterog.export.folder import USER_FILE, Export, RankEntry, Target, fill, job_folder
from heterog.export.torchrun import MODEL_FILE, user_file, workload_code
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


def stock_folder(
    plan: Plan,
    target: Target,
    sources: Sequence[str],
    ranks: tuple[RankEntry, ...],
    *,
    remarks: Sequence[str],
    files: Mapping[str, bytes],
) -> Export:
    """The folder of a framework that trains without heterog.

    ``user.py`` has the workload's model, loss and optimizer if its source is available.

    Args:
        plan: Plan that is exported.
        target: The framework.
        sources: Files that the person named; see ``user_code.trusted_source``.
        ranks: The ranks that it starts.
        remarks: Sentences about what it does not express.
        files: The framework's own files beside ``train.py``.

    Raises:
        InputFileError: the plan's model is made by a file that nobody named.
    """
    source = trusted_source(plan.graph.source, sources, "the plan")
    code = workload_code(source)
    _, colon, function = source.rpartition(":")
    template, to_do = "stock_workload.py.jinja", code.to_do.replace("batches()", "build()")
    not_expressed = (*remarks, *code.remarks)
    if code.model_file:
        body, origin = _FROM_FILE.format(function=function), f"{MODEL_FILE}, a copy of yours"
    elif source and not colon:
        body, origin = _FROM_ZOO.format(source=source), "heterog's zoo"
    else:
        body = origin = ""
        template, to_do = "ddp_user.py.jinja", "`build()`: model, optimizer, loss and data"
        not_expressed = tuple(remarks)  # what is to be filled in says enough of the source
    every = {
        "train.py": fill(f"{target.name}_train.py.jinja"),
        USER_FILE: user_file(template, plan, workload=body, origin=origin),
        **({MODEL_FILE: code.model_file} if code.model_file else {}),
        **files,
    }
    return job_folder(plan, target, ranks, every, user=to_do, not_expressed=not_expressed)
