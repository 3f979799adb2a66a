"""A method that hands over strategies known before a search, for the others to start from."""

from collections.abc import Sequence

from heterog.methods.planner import Candidate, Planner, PlanResult, Problem
from heterog.search.host_subset import HostSubset
from heterog.strategy.strategy import Strategy


class SeedPlanner(Planner):
    """Hands over strategies that are known already; the referee judges them like all others.

    Args:
        name: Name of its row.
        candidates: Strategies for the graph and cluster that it will be asked about.
        note: Where they come from, in words.
    """

    stage = "baseline"

    def __init__(self, name: str, candidates: Sequence[Candidate], note: str = "") -> None:
        self.name = name
        self.candidates = tuple(candidates)
        self.note = note

    def plan(self, problem: Problem) -> PlanResult:
        """The strategies, each in its own orders."""
        return PlanResult(
            candidates=self.candidates,
            num_evaluations=0,
            search_seconds=0.0,
            reason="" if self.candidates else "nothing was known before",
            note=self.note,
        )

    def on(self, subset: HostSubset) -> "SeedPlanner | None":
        """The strategies that need no other hosts, for these hosts alone; ``None`` if none."""
        kept: list[Candidate] = []
        for candidate in self.candidates:
            strategy: Strategy | None = subset.lowered(candidate.strategy)
            if strategy is not None:
                kept.append(Candidate(strategy=strategy, orders=candidate.orders))
        return SeedPlanner(self.name, kept, self.note) if kept else None
