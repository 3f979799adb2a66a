"""Plans on the ranks of a testbed, measured in turn, for the experiments that run there."""

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from heterog.cluster import Cluster
from heterog.runtime.launch import run_commands
from heterog.runtime.ranks.testbed import Testbed
from heterog.runtime.ranks.watching import Limits
from heterog.search.plan import Plan

WARM_UP = 1


def results_of_ranks(
    script: str, cluster: Cluster, plans: Mapping[str, Plan], arguments: Sequence[str]
) -> list[Any]:
    """Run a script on every rank of a testbed; what each handed to ``report``, by rank.

    Args:
        script: its ``__file__``. It gets the arguments and ``--rank-folder FOLDER``.
        cluster: that the testbed is like.
        plans: lie in the folder as ``NAME.json``.
        arguments: of the script.
    """
    with tempfile.TemporaryDirectory() as name, Testbed(cluster) as bed:
        folder = Path(name)
        for key, plan in plans.items():
            plan.save(folder / f"{key}.json")
        run_commands(
            [str(Path(script).resolve()), "--rank-folder", name, *arguments],
            cluster.num_devices,
            limits=Limits(timeout_s=1800),
            place=bed,
        )
        return [
            json.loads(_result(folder, rank).read_text()) for rank in range(cluster.num_devices)
        ]


def report(folder: Path, result: Any) -> None:
    """Hand this rank's result to ``results_of_ranks``."""
    _result(folder, dist.get_rank()).write_text(json.dumps(result))


def _result(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.result"


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
