"""The README of an exported folder."""

import textwrap
from collections.abc import Sequence

from heterog.export.folder import fill, in_markdown
from heterog.export.ranks import RankEntry, by_host
from heterog.search.plan import Plan
from heterog.units import format_seconds

_WIDTH = 100


def readme(
    plan: Plan,
    target: str,
    *,
    what: str,
    start: str,
    user: str,
    num_ranks: int,
    not_expressed: Sequence[str],
) -> bytes:
    """A page with a description of the folder, how to start it and what to expect.

    Args:
        plan: Plan that was exported.
        target: Name of the target.
        what: A sentence or two about the folder.
        start: Command that starts the job.
        user: What has to be filled in in ``user.py``.
        num_ranks: Number of ranks that are started.
        not_expressed: Parts of the plan that are left out, see ``Export``.
    """
    assert plan.step_time_s is not None
    idle = plan.cluster.num_devices - num_ranks
    expect = (
        f"Fill in `user.py` ({user}); `ranks.json` says which rank runs where. Method "
        f"{in_markdown(plan.method)}, {plan.graph.batch_size} samples a step over {num_ranks} "
        "ranks, predicted "
        f"{format_seconds(plan.step_time_s)} a step in heterog's own schedule."
    )
    if idle:
        expect += f" Not started: {idle} devices without samples."
    return fill(
        "readme.md.jinja",
        model=in_markdown(plan.graph.name),
        cluster=in_markdown(plan.cluster.name),
        target=target,
        what=_wrap(what),
        start=start,
        expect=_wrap(expect),
        not_expressed=[in_markdown(remark) for remark in not_expressed],
    )


def launch_command(ranks: Sequence[RankEntry]) -> str:
    """The command that calls ``launch.sh``, in a line for the README."""
    hosts = list(by_host(ranks))
    return f"bash launch.sh HOST --steps 100    # on {', '.join(hosts)}; MASTER_ADDR is {hosts[0]}"


def _wrap(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)
