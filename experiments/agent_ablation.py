"""What does learning add? The same planner with scores from different sources.

    python experiments/agent_ablation.py --pairs experiments/pairs/test.jsonl --seeds 3 --json

Arms: ``trained`` (``--policy``), ``untrained`` (the same network with the analytic prior alone;
the seed draws its weights, too), ``no_messages`` (trained as ``default`` is, but with the encoder
``NoMessages``; ``train_zoo.py`` says how), ``thumb`` (a rule of thumb) and ``uniform`` (all
fitting candidates are equally likely). Each arm answers once as ``agent`` does: by the policy's
rows on 5 to 16 devices, by islands on others, then by moves until the seconds are over. In
trained arms the shipped policy leads the moves, in ``untrained`` a policy with random weights; in
the other arms moves are blind. ``NAME:rows`` uses the policy's rows alone: 64 draws, stages,
segments, refining. ``NAME+search`` continues with a local search for the CPU seconds, with the
same moves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rows import board_parser, run, run_board
from torch_geometric.utils import to_dense_batch

from heterog.agents.benchmark.board import Line, judged
from heterog.agents.benchmark.rivals import Fixed, thumb, untrained
from heterog.agents.checkpoint import load_checkpoint
from heterog.agents.config import PolicyConfig
from heterog.agents.encoder import ENCODERS, mlp
from heterog.agents.improver import Improver, led_by, load_improver
from heterog.agents.planners import DEFAULT_POLICY, Agent, AgentSearch
from heterog.agents.policy import Policy
from heterog.envs.observation import NUM_BLOCK_FEATURES, NUM_CANDIDATE_FEATURES
from heterog.methods.local_search.planner import Lead
from heterog.methods.planner import Budget, Planner
from heterog.simulator.evaluator import Evaluator

WITHOUT = str(Path(__file__).with_name("measured") / "no_messages.pt")
ARMS = "trained,untrained,no_messages,thumb,uniform"


class NoMessages(torch.nn.Module):
    """An encoder without messages between nodes: it shows what features alone can do."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        width = config.width
        self.blocks = mlp(NUM_BLOCK_FEATURES, width, width)
        self.candidates = mlp(NUM_CANDIDATE_FEATURES, width, width)

    def forward(self, graphs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings of blocks and candidates, padded."""
        block, candidate = graphs["block"], graphs["candidate"]
        return (
            to_dense_batch(self.blocks(block.x), block.batch)[0],
            to_dense_batch(self.candidates(candidate.x), candidate.batch)[0],
        )


@dataclass(frozen=True)
class Arm:
    """Source of scores, and lead of moves, for a seed."""

    policy: Callable[[int], Policy]
    lead: Callable[[int], Lead | None] = lambda seed: None

    def ask(
        self, method: Callable[..., Planner], evaluator: Evaluator, seed: int, budget: Budget
    ) -> Line:
        """The answer of a method with this policy and lead."""
        planner = method(self.policy(seed), lead=partial(self.lead, seed))
        return judged(planner, evaluator, seed, budget)


def main() -> None:
    """Make the table."""
    parser = board_parser(__doc__, ARMS)
    parser.add_argument("--policy", default=DEFAULT_POLICY, help="the trained one")
    parser.add_argument("--no-messages", default=WITHOUT, help="one trained without messages")
    asked = parser.parse_args()
    ENCODERS[NoMessages.__name__] = NoMessages
    trained, without = (load_checkpoint(file).policy for file in (asked.policy, asked.no_messages))
    moves = led_by(load_improver())
    own = {
        "trained": Arm(lambda seed: trained, lambda seed: moves),
        "untrained": Arm(
            lambda seed: untrained(seed, trained.config),
            lambda seed: led_by(Improver.untrained(seed)),
        ),
        "no_messages": Arm(lambda seed: without, lambda seed: moves),
        "thumb": Arm(thumb),
        "uniform": Arm(lambda seed: Fixed(0.0, 0.0, 0.0).eval()),
    }
    ways: dict[str, Callable[..., Planner]] = {
        "": Agent,
        ":rows": partial(Agent, only_rows=True),
        "+search": AgentSearch,
    }
    arms = {
        f"{name}{way}": partial(arm.ask, method)
        for (name, arm), (way, method) in product(own.items(), ways.items())
    }
    run_board(asked, arms)


if __name__ == "__main__":
    run(main)
