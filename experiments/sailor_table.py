"""Plans for OPT-350M on unequal GPUs beside Sailor's, under Sailor's own rules.

    python experiments/sailor_table.py --data DIR --json

``DIR`` has Sailor's three input files, see ``sailor/inputs.py``. Rows are clusters of its paper
and two of RTX cards. Each row has the best published plans by Sailor's simulator, if there are
any, the best even plan, and the result of a search over all plans that Sailor can express.

Even plans are the baseline that any user would try first.

All their replicas have teams of one size and micro-batches of one size, layers are cut as evenly
as whole layers allow, and there are as many replicas as GPUs allow, of all cards or of one card
only.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby, permutations
from pathlib import Path
from typing import Any

from rows import finish, option, run, script_parser, told
from sailor.columns import NODE_GPUS
from sailor.inputs import ZONE, Inputs, Plan, Replica, Stage, read_inputs, written
from sailor.score import Score, score_of
from sailor.search import Limit, search

from heterog.errors import StrategyError

MOST_STAGES = 8


def best_even(inputs: Inputs, num_gpus: Mapping[str, int]) -> tuple[Plan, Score] | None:
    """The fastest even plan that fits, over stages, teams, sizes and orders of cards."""
    best: tuple[Plan, Score] | None = None
    for plan in _plans(inputs, num_gpus):
        try:
            score = score_of(plan, inputs)
        except StrategyError:
            continue  # something in it was not measured
        is_better = best is None or score.timing.total_s < best[1].timing.total_s
        if score.is_valid and is_better:
            best = plan, score
    return best


def _plans(inputs: Inputs, num_gpus: Mapping[str, int]) -> Iterator[Plan]:
    cards = sorted(card for card, count in num_gpus.items() if count)
    chosen = chain(permutations(cards), ((card,) for card in cards))
    sizes = sorted({size for card in cards for size in inputs.times[card]})
    for order in set(chosen):
        for tensor in sorted(inputs.sizes):
            if tensor > min(NODE_GPUS[card] for card in order):
                continue
            for num_stages in range(1, MOST_STAGES + 1):
                stages = _stages(inputs, num_gpus, order, tensor, num_stages)
                for size in sizes if stages else ():
                    yield Plan(stages=stages, micro_batch=size)


def _stages(
    inputs: Inputs,
    num_gpus: Mapping[str, int],
    order: tuple[str, ...],
    tensor: int,
    num_stages: int,
) -> tuple[Stage, ...]:
    """Teams in the order of cards, so many to each stage; none where there are too few."""
    teams = [
        Replica(card=card, tensor=tensor)
        for card in order
        for _ in range(num_gpus[card] // tensor)
    ]
    count = len(teams) // num_stages
    if not count:
        return ()
    bounds = [inputs.num_layers * index // num_stages for index in range(num_stages + 1)]
    return tuple(
        Stage(
            first_layer=bounds[index],
            num_layers=bounds[index + 1] - bounds[index],
            replicas=tuple(teams[index * count : (index + 1) * count]),
        )
        for index in range(num_stages)
    )


def published_plan(micro_batch: int, *stages: tuple[int, Sequence[tuple[int, str, int]]]) -> Plan:
    """A plan as published: layers of each stage, and how many teams, of which card, how large."""
    made: list[Stage] = []
    for layers, groups in stages:
        replicas = tuple(
            Replica(card=card, tensor=tensor)
            for count, card, tensor in groups
            for _ in range(count)
        )
        first = made[-1].end_layer if made else 0
        made.append(Stage(first_layer=first, num_layers=layers, replicas=replicas))
    return Plan(stages=tuple(made), micro_batch=micro_batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A cluster, and plans to compare with.

    Attributes:
        num_gpus: by card.
        rivals: the best plans of Sailor's simulator, by planner.
    """

    num_gpus: Mapping[str, int]
    rivals: Mapping[str, Plan] = field(default_factory=dict)


A100, V100 = "A100-40", "V100-16"
SETTINGS = {
    "8+8": Setting(
        num_gpus={A100: 8, V100: 8},
        rivals={"Sailor": published_plan(2, (26, [(8, A100, 1), (2, V100, 4)]))},
    ),
    "16+16": Setting(
        num_gpus={A100: 16, V100: 16},
        rivals={
            "Metis": published_plan(2, (7, [(16, V100, 1)]), (19, [(16, A100, 1)])),
            "Sailor": published_plan(4, (13, [(6, A100, 1), (4, V100, 4)]), (13, [(10, A100, 1)])),
        },
    ),
    "32+96": Setting(
        num_gpus={A100: 32, V100: 96},
        rivals={
            "Sailor": published_plan(2, (13, [(3, A100, 1), (24, V100, 4)]), (13, [(27, A100, 1)]))
        },
    ),
    "16 Titan + 16 2080": Setting(num_gpus={"Titan-RTX": 16, "RTX-2080": 16}),
    "8 3090 + 8 Titan + 8 2080": Setting(num_gpus={"RTX-3090": 8, "Titan-RTX": 8, "RTX-2080": 8}),
}


def words_of(plan: Plan) -> str:
    """A plan in a line: layers, replicas and micro-batches."""
    stages = []
    for stage in plan.stages:
        groups = [
            f"{len(list(same))} x {replica.card} tp{replica.tensor}"
            for replica, same in groupby(stage.replicas)
        ]
        stages.append(f"{stage.num_layers} layers on {', '.join(groups)}")
    return f"{' | '.join(stages)}; micro-batch {plan.micro_batch}"


def row_of(name: str, method: str, plan: Plan, score: Score) -> dict[str, Any]:
    """A line of the table."""
    timing = score.timing
    return {
        "setting": name,
        "method": method,
        "step_time_s": timing.total_s,
        "pipeline_s": timing.pipeline_s,
        "sync_s": timing.sync_s,
        "straggler_s": timing.straggler_s,
        "samples": score.samples,
        "peak_check_bytes": score.peak_check_bytes,
        "peak_validation_bytes": score.peak_validation_bytes,
        "is_valid": score.is_valid,
        "fits_tightly": score.fits_tightly,
        "gpus": plan.num_gpus,
        "plan": words_of(plan),
        "plan_file": written(plan, ZONE),
    }


def rows_of(
    name: str, setting: Setting, inputs: Inputs, limit: Limit, seed: int
) -> list[dict[str, Any]]:
    """All lines of a setting."""
    rows = [
        row_of(name, planner, plan, score_of(plan, inputs))
        for planner, plan in setting.rivals.items()
    ]
    even = best_even(inputs, setting.num_gpus)
    if even is not None:
        rows.append(row_of(name, "best even plan", *even))
    found = search(inputs, setting.num_gpus, limit, seed)
    spent = {"search_s": found.seconds, "evaluations": found.evaluations}
    rows.append(row_of(name, "ours", found.plan, found.score) | spent)
    return rows


def main() -> None:
    """Search and print a table, or JSON."""
    parser = script_parser(
        __doc__,
        option("--data", type=Path, required=True, help="folder of Sailor's inputs"),
        option("--only", default="", help="names of settings, separated by semicolons"),
        option("--seconds", type=float, default=60.0, help="limit of each search"),
        option("--evaluations", type=int, default=300_000, help="limit of each search"),
        option("--seed", type=int, default=0),
    )
    options = parser.parse_args()
    names = options.only.split(";") if options.only else list(SETTINGS)
    unknown = [name for name in names if name not in SETTINGS]
    if unknown:
        parser.error(f"no setting is called {', '.join(unknown)}; there are {'; '.join(SETTINGS)}")
    inputs = read_inputs(options.data)
    limit = Limit(seconds=options.seconds, evaluations=options.evaluations)
    rows: list[dict[str, Any]] = []
    for name in names:
        rows += told(rows_of(name, SETTINGS[name], inputs, limit, options.seed))
    finish(options, {"seed": options.seed, "rows": rows})


if __name__ == "__main__":
    run(main)
