"""How good is a policy on models and clusters that it has not seen?

    python experiments/evaluate_cluster.py --cpu-seconds 300 --seeds 1

The default pairs are the held-out models and clusters (``pairs/held_out.jsonl``). Arms: ``search``
(``auto`` without the policy), to which the others are compared; the policy's best of 1, 16 and 64
draws; the baselines of HeteroG's paper; and, if asked for, ``agent+search`` and
``agent_finetuned`` for the same seconds.
"""

from functools import partial
from pathlib import Path

from portfolio_table import auto
from rows import board_parser, run, run_board

from heterog.agents.benchmark.board import Line, judged
from heterog.agents.checkpoint import load_checkpoint
from heterog.agents.finetune import FineTuned
from heterog.agents.planners import LEARNED, Agent, AgentSearch, default_methods
from heterog.methods.planner import Budget, Planner
from heterog.simulator.evaluator import Evaluator

ARMS = "search,agent_greedy,agent_16,agent,ev_ps,ev_ar,cp_ps,cp_ar"
HELD_OUT = Path(__file__).parent / "pairs" / "held_out.jsonl"


def tuned(policy: str, evaluator: Evaluator, seed: int, budget: Budget) -> Line:
    """The policy after fine-tuning for the budget."""
    return judged(FineTuned(load_checkpoint(policy).policy, budget), evaluator, seed, budget)


def main() -> None:
    """Make the table."""
    parser = board_parser(__doc__, ARMS, HELD_OUT)
    parser.add_argument("--policy", default="heldout", help="name or file")
    asked = parser.parse_args()
    known = default_methods(asked.policy)
    planners: list[Planner] = [
        Agent(asked.policy, name="agent_greedy", num_samples=1, only_rows=True),
        Agent(asked.policy, name="agent_16", num_samples=16, only_rows=True),
        Agent(asked.policy, only_rows=True),  # what the draws alone say
        AgentSearch(asked.policy),
        *(known[name] for name in ("ev_ps", "ev_ar", "cp_ps", "cp_ar")),
    ]
    run_board(
        asked,
        {planner.name: partial(judged, planner) for planner in planners}
        | {
            "search": partial(auto, known, LEARNED, 1.0),
            "agent_finetuned": partial(tuned, asked.policy),
        },
    )


if __name__ == "__main__":
    run(main)
