"""Contenders measured in turn, for the experiments that run on testbeds."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

WARM_UP = 1


def seconds_in_turn(
    contenders: Mapping[str, Callable[[], Any]],
    num_rounds: int,
    *,
    every: Mapping[str, int] | None = None,
) -> dict[str, list[float]]:
    """Seconds of every contender in every round, between barriers; on every rank.

    Each round begins with another contender: what ran just before leaves its traces.

    Args:
        contenders: what to call, by name; the same names in the same order on all ranks.
        num_rounds: after one to warm up.
        every: contenders that are slow, and in how many rounds they take part once.
    """
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(num_rounds + WARM_UP):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            if number % (every or {}).get(name, 1):
                continue
            dist.barrier()
            begin = time.perf_counter()
            contenders[name]()
            dist.barrier()
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - begin)
    return seconds
