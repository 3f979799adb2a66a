"""Write a method of your own and have it checked."""

import numpy as np

from heterog.agents.policy import draw, rule_of_thumb
from heterog.agents.proposals import rescore
from heterog.envs.pair import Pair
from heterog.methods.planner import PlanResult, Problem
from heterog.search.conformance import check_planner


class Lucky:
    """The best of eight draws from a rule of thumb."""

    name = "lucky"
    stage = "search"

    def plan(self, problem: Problem) -> PlanResult:
        """Draw, score and hand back the best rows."""
        pair = Pair(problem.evaluator.graph, problem.evaluator.cluster)
        rng = np.random.default_rng(problem.seed)
        rows = draw(rule_of_thumb(pair), pair, 8, rng).rows
        rows = rows[np.argsort([pair.score(row).step_time_s for row in rows])]
        candidates, spent = rescore(problem, pair, rows, spent=8)
        return PlanResult(candidates=candidates, num_evaluations=8 + spent)


def main() -> None:
    """Hold the method to what every method is held to."""
    check_planner(Lucky())
    print("lucky keeps the rules of a method")


if __name__ == "__main__":
    main()
