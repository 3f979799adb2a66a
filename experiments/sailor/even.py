"""Even plans: the baseline that any user would try first.

All replicas have teams of one size and micro-batches of one size, layers are cut as evenly as
whole layers allow, and as many replicas are used as there are GPUs for; or those of one card only.
"""

from collections.abc import Iterator, Mapping
from itertools import chain, permutations

from heterog.errors import StrategyError
from sailor.inputs import Inputs, Plan, Replica, Stage
from sailor.score import Score, score_of
from sailor.tables import NODE_GPUS

MOST_STAGES = 8


def best_even(inputs: Inputs, num_gpus: Mapping[str, int]) -> tuple[Plan, Score] | None:
    """The fastest even plan that fits, over stages, teams, sizes and the order of cards."""
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
