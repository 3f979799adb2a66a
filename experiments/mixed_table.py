"""``auto``, or any method, beside the best uniform layout on mixed clusters, at equal CPU seconds.

    python experiments/mixed_table.py --seeds 1 --json
    python experiments/mixed_table.py --arms megatron_grid,islands --cpu-seconds 60

The default pairs are twelve models on six clusters (``pairs/mixed.jsonl``). Ratios are step times
over those of the first arm; a gain is one over that ratio. ``auto`` runs without
``megatron_grid``, so that no method starts from its plans, ``auto_with_grid`` with it; every other
arm is a method of that name.
"""

from functools import partial
from pathlib import Path

from portfolio_table import auto
from rows import board_parser, run_board

from heterog.agents.benchmark.board import judged
from heterog.methods.registry import built_in_methods

GRID = "megatron_grid"
PAIRS = Path(__file__).parent / "pairs" / "mixed.jsonl"


def main() -> None:
    """Make the table."""
    known = built_in_methods()
    arms = {planner.name: partial(judged, planner) for planner in known}
    asked = board_parser(__doc__, f"{GRID},auto", PAIRS).parse_args()
    run_board(
        asked,
        arms
        | {
            "auto": partial(auto, known, (GRID,), 1.0),
            "auto_with_grid": partial(auto, known, (), 1.0),
        },
    )


if __name__ == "__main__":
    main()
