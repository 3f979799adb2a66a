"""Options about money and deadlines, and remarks on them."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from heterog.errors import HeterogError, named

if TYPE_CHECKING:
    from heterog.graph.op_graph import OpGraph
    from heterog.search.objective import Cost, Objective
    from heterog.search.plan import Plan

ObjectiveOption = Annotated[
    str,
    typer.Option(
        "--objective",
        help="time, cost (of --steps, --samples or --tokens) or cost_per_token; prices are in the "
        "cluster file",
    ),
]
StepsOption = Annotated[int | None, typer.Option("--steps", help="steps of the training run")]
SamplesOption = Annotated[
    int | None, typer.Option("--samples", help="samples of the run, instead of --steps")
]
TokensOption = Annotated[
    int | None, typer.Option("--tokens", help="tokens of the run, instead of --steps")
]
DeadlineOption = Annotated[
    str, typer.Option("--deadline", help="when all steps must have ended: 36h, 2d, 90min or 600s")
]


def asked_objective(
    objective: str, steps: int | None, samples: int | None, tokens: int | None, deadline: str
) -> "Objective":
    """The objective in the options, after all checks that need no graph.

    With samples or tokens it has one step; ``objective_for`` puts the real number there.

    Raises:
        HeterogError: an unknown aim, two amounts, one below 1, or a deadline or cost without any.
    """
    from heterog.search.objective import Aim, Objective
    from heterog.units import parse_seconds

    amounts = {"--steps": steps, "--samples": samples, "--tokens": tokens}
    given = {name: value for name, value in amounts.items() if value is not None}
    if len(given) > 1:
        raise HeterogError(f"{' and '.join(given)}: give one of them.")
    for name, value in given.items():
        if value < 1:
            raise HeterogError(f"{name} is {value}; it must be at least 1.")
    return Objective(
        aim=named("objective", objective, {str(aim): aim for aim in Aim}),
        num_steps=steps or (1 if given else None),
        deadline_s=parse_seconds(deadline) if deadline else None,
    )


def objective_for(
    graph: "OpGraph", asked: "Objective", samples: int | None, tokens: int | None
) -> "Objective":
    """What was asked for, with the steps of one model.

    Raises:
        HeterogError: tokens of a model whose samples have none.
    """
    from heterog.search.objective import steps_for, tokens_per_sample

    if samples is not None:
        return replace(asked, num_steps=steps_for(samples, graph.batch_size))
    if tokens is None:
        return asked
    per_sample = tokens_per_sample(graph)
    if per_sample is None:
        raise HeterogError(
            f"--tokens, but the batch of '{graph.name}' does not begin with a table of token "
            "numbers; give --samples or --steps."
        )
    return replace(asked, num_steps=steps_for(tokens, graph.batch_size * per_sample))


def money_remarks(found: "Plan") -> list[str]:
    """Remarks on the plan's cost and whether it is in time; none if not asked for.

    With prices in the cluster file, the cost is given under every objective.
    """
    cost, objective = found.cost, found.objective
    remarks = []
    if cost is not None:
        remarks.append(_cost(cost))
    if objective.num_steps is not None and found.step_time_s is not None:
        remarks.append(_run(found, objective.num_steps, found.step_time_s))
    if cost is not None and not objective.is_time:
        remarks.append(_beside_fastest(found, cost))
    return remarks


def _cost(cost: "Cost") -> str:
    hosts = ", ".join(cost.hosts) if len(cost.hosts) <= 6 else f"{len(cost.hosts)} hosts"
    each = cost.per_million_tokens
    tokens = "" if each is None else f", {each:.3g} per million tokens"
    return (
        f"costs {cost.per_step:.3g} {cost.currency} a step, {cost.per_million_samples:.3g} per "
        f"million samples{tokens}; rents {hosts} ({cost.per_hour:.4g} an hour)"
    )


def _run(found: "Plan", num_steps: int, step_time_s: float) -> str:
    """Time and cost of the run, and whether the deadline is met."""
    cost, deadline_s = found.cost, found.objective.deadline_s
    total_s = num_steps * step_time_s
    text = f"{num_steps:,} steps take {format_duration(total_s)}"
    if cost is not None and cost.total is not None:
        text += f" and cost {cost.total:,.2f} {cost.currency}"
    if deadline_s is None:
        return text
    missed_s = found.objective.missed_s(step_time_s)
    if not missed_s:
        return f"{text}; the deadline leaves {format_duration(deadline_s - total_s)}"
    text += f"; the deadline of {format_duration(deadline_s)} is missed by "
    text += f"{format_duration(missed_s)}, and {found.method} is the fastest plan found"
    bound_s = num_steps * found.lower_bound_s
    if bound_s > deadline_s and found.strategy.step_barrier:
        text += f" (no plan here takes less than {format_duration(bound_s)})"
    return text


def _beside_fastest(found: "Plan", cost: "Cost") -> str:
    """Cost of the fastest plan that the same search found."""
    if not found.offers or found.step_time_s is None:
        return "no other plan was found"
    fastest = found.offers[0]
    if fastest.step_time_s >= found.step_time_s:
        return "no faster plan was found"
    ratio = found.step_time_s / fastest.step_time_s
    text = f"the fastest plan found ({fastest.method}) is {ratio:.2f}x faster"
    if cost.per_step > 0.0:
        text += f" and costs {fastest.cost_per_step / cost.per_step:.2f}x as much"
    return text


def offers_lines(found: "Plan") -> list[str]:
    """A line for every trade of time for money."""
    steps, currency = found.objective.num_steps, found.cost.currency if found.cost else ""
    times = 1 if steps is None else steps
    lines = []
    for offer in found.offers:
        hosts = ", ".join(offer.hosts) if len(offer.hosts) <= 6 else f"{len(offer.hosts)} hosts"
        lines.append(
            f"{format_duration(times * offer.step_time_s):>10}  "
            f"{times * offer.cost_per_step:10.4g} {currency}  {offer.method} on {hosts}"
        )
    what = "a step" if steps is None else f"{steps:,} steps"
    return [f"Time and cost of {what}, the best trades found:", *lines] if lines else []


def format_duration(seconds: float) -> str:
    """A time for people, in days or hours if it is long.

    >>> format_duration(172800.0), format_duration(5400.0), format_duration(0.5)
    ('2.00 d', '1.50 h', '500.0 ms')
    """
    from heterog.units import format_seconds

    for name, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.2f} {name}"
    return format_seconds(seconds)
