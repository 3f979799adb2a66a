"""Rules that decide how many devices a job gets: PAC-ML's baselines and some of our own."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from heterog.errors import UnknownNameError
from heterog.search.arrivals.queueing import JobCluster, JobQueueing, JobRequest, Verdict

Rule = Callable[[JobQueueing], int]
"""Function that decides the degree of the job at hand; 0 rejects it."""


def one_device(state: JobQueueing) -> int:
    """No partitioning: one device, if one is free."""
    return 1 if 1 in state.legal() else 0


def most_devices(state: JobQueueing) -> int:
    """Maximum partitioning: as many as are legal now (the paper's Para_max)."""
    return max(state.legal(), default=0)


def fewest_in_time(state: JobQueueing) -> int:
    """Minimum partitioning that should meet the deadline, by arithmetic (the paper's Para_min).

    The first legal degree from ceil(time alone / acceptable time) on, else the largest.
    """
    legal, request = state.legal(), state.request
    if not legal or request is None:
        return 0
    ratio = state.cluster.alone_s(request.kind) / request.acceptable_s
    wanted = math.ceil(min(ratio, 1e9))
    return next((degree for degree in legal if degree >= wanted), legal[-1])


def fewest_that_fit(state: JobQueueing) -> int:
    """The fewest devices with which the job starts now and ends in time; not one of PAC-ML's.

    It asks where the job would run and how long that takes, not what perfect splits would give.
    """
    for degree in state.legal():
        place = state.place(degree)
        if place is not None and state.in_time(place):
            return degree
    return 0 if not state.waits else max(state.legal(), default=0)


def fastest(state: JobQueueing) -> int:
    """The degree with which the job ends first; 0 if nothing fits. Not one of PAC-ML's."""
    found = [
        (place.seconds, degree)
        for degree in state.legal()
        if (place := state.place(degree)) is not None
    ]
    return min(found)[1] if found else 0


def at_most(limit: int) -> Rule:
    """A rule that gives the largest legal degree up to a limit."""

    def rule(state: JobQueueing) -> int:
        return max((degree for degree in state.legal() if degree <= limit), default=0)

    return rule


def random_degree(seed: int) -> Rule:
    """A rule that draws any legal degree."""
    rng = np.random.default_rng(seed)

    def rule(state: JobQueueing) -> int:
        legal = state.legal()
        return int(rng.choice(legal)) if legal else 0

    return rule


RULES: dict[str, Rule] = {
    "one": one_device,
    "most": most_devices,
    "fewest": fewest_in_time,
    "fit": fewest_that_fit,
    "fastest": fastest,
}
"""Rules by their command-line names; ``random`` and ``at_most_4`` (any number) are known too."""


_AT_MOST = "at_most_"


def rule_named(name: str, seed: int = 0) -> Rule:
    """The rule of a name.

    Raises:
        UnknownNameError: there is none.
    """
    if name == "random":
        return random_degree(seed)
    limit = name.removeprefix(_AT_MOST)
    if limit != name and limit.isascii() and limit.isdigit() and 0 < len(limit) < 10:
        return at_most(int(limit))
    if name not in RULES:
        raise UnknownNameError("rule", name, [*RULES, "random", f"{_AT_MOST}4"])
    return RULES[name]


def run_rule(
    cluster: JobCluster,
    requests: Sequence[JobRequest],
    rule: Rule,
    *,
    waits: bool = False,
    end_s: float = float("inf"),
) -> list[Verdict]:
    """Decide about all jobs by a rule; see ``JobQueueing``."""
    state = JobQueueing(cluster, requests, waits=waits, end_s=end_s)
    while state.request is not None:
        state.decide(rule(state))
    return state.final()
