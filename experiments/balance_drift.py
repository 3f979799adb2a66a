"""A rank gets half of its speed inside a job: how soon are steps as quick as they can be?

    python experiments/balance_drift.py --json          # Linux, as root

Three ranks with equal parts of a core train a small network with ``heterog.Balancer``. At a step
the second rank's part is halved. What the best shares give is measured: jobs of fixed shares with
that rank slow from the third step on, one for each share that it could have. Told are the median
time of the steps from the twentieth on beside that of the best fixed shares, how shares changed,
and how often a rank's share went back by more than 5 % of it after the twentieth step: a swing.

Ranks keep memory that they have freed, as the allocator of an accelerator does. By default glibc
gives large buffers back, and getting them again costs half of a step in page faults, for more
samples more than in proportion: then no speed describes a rank. ``--default-allocator`` leaves it
so.
"""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from balance_testbed import EQUAL, KEEPS_MEMORY

from heterog.balance.following import INTERVAL
from heterog.balance.shares import count_turns
from heterog.cluster import Cluster
from heterog.runtime.launch import run_commands
from heterog.runtime.testbed import Testbed

ROOT = Path(__file__).resolve().parents[1]
BATCH = 192
SLOWED = 1
"""Rank whose part of a core is halved."""
SETTLED = 80
"""Steps before it: shares are found, and stay."""
FIXED = (29, 34, 38, 43, 48)
"""Shares of the slowed rank that are measured; others have the rest in halves."""


def train(log: Path, num_steps: int, fixed: tuple[int, ...] | None) -> None:
    """The job of one rank; the first one writes a line for each step: its shares, its time."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import TensorDataset

    import heterog

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(2400, 3, 64, 64), torch.randint(0, 10, (2400,)))
    model = DistributedDataParallel(
        nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10),
        )
    )  # fmt: skip
    balancer = heterog.Balancer(
        model, batch_size=BATCH, shares=fixed, interval=INTERVAL if fixed is None else 0
    )
    loader = balancer.loader(data)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = 0
    with log.open("a") as lines:
        while step < num_steps:
            begin = time.perf_counter()
            for inputs, targets in loader:
                loss = nn.functional.cross_entropy(model(inputs), targets)
                optimizer.zero_grad()
                balancer.weigh(loss).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                now = time.perf_counter()
                if dist.get_rank() == 0:
                    ran = {"step": step, "shares": balancer.deal.samples, "seconds": now - begin}
                    lines.write(json.dumps(ran) + "\n")
                    lines.flush()
                begin, step = now, step + 1
                if step == num_steps:
                    break
    dist.barrier()
    dist.destroy_process_group()


def run(
    cluster: Cluster,
    num_steps: int,
    fixed: tuple[int, ...] | None,
    allocator: dict[str, str],
) -> list[dict[str, Any]]:
    """One job: shares and seconds of its steps, and whether the rank was slow in them.

    Args:
        cluster: of three ranks.
        num_steps: of the job.
        fixed: shares that stay, with the rank slow from the third step on.
        allocator: environment that says how memory is allocated.
    """
    slow_from = SETTLED if fixed is None else 3  # its imports are not slow
    with tempfile.TemporaryDirectory() as folder, Testbed(cluster) as bed:
        log, slowed_at = Path(folder) / "steps", [num_steps]

        def lines() -> list[str]:
            return log.read_text().splitlines() if log.exists() else []

        def slow_down() -> None:
            while len(lines()) < slow_from:
                if ended.wait(0.05):
                    return
            bed.throttle(SLOWED, 0.5 * (cluster.hosts[SLOWED].cpu_quota or 1.0))
            slowed_at[0] = len(lines())

        ended = threading.Event()
        beside = threading.Thread(target=slow_down)
        beside.start()
        own = [str(Path(__file__)), "--rank-log", str(log), "--steps", str(num_steps)]
        try:
            run_commands(
                [*own, *(["--fixed", ",".join(map(str, fixed))] if fixed else [])],
                cluster.num_devices,
                wrap=bed.command,
                environment=lambda rank: {
                    **bed.environment(rank),
                    **allocator,
                    "PYTHONPATH": f"{ROOT}:{':'.join(sys.path)}",
                },
                timeout_s=1800,
                step_timeout_s=1800,
            )
        finally:
            ended.set()
            beside.join()
        steps = [json.loads(line) for line in lines()]
        return [step | {"is_slow": n >= slowed_at[0]} for n, step in enumerate(steps)]


def seconds_of(steps: list[dict[str, Any]]) -> float:
    """The median of whole batches; the last of a pass may be smaller."""
    return statistics.median(
        float(step["seconds"]) for step in steps if sum(step["shares"]) == BATCH
    )


def best_fixed(cluster: Cluster, num_steps: int, allocator: dict[str, str]) -> dict[str, float]:
    """Seconds of a step for every fixed share of the slowed rank."""
    found = {}
    for share in FIXED:
        rest = BATCH - share
        steps = run(cluster, num_steps, (rest - rest // 2, share, rest // 2), allocator)
        found[str(share)] = seconds_of([step for step in steps if step["is_slow"]][2:])
    return found


def shown(steps: list[dict[str, Any]], best_s: float) -> dict[str, Any]:
    """How quick steps were after the rank had become slow, and whether shares stayed."""
    after = [step for step in steps if step["is_slow"] and sum(step["shares"]) == BATCH]
    shares = [tuple(step["shares"]) for step in after]
    return {
        "before_s": seconds_of([step for step in steps[20:] if not step["is_slow"]]),
        "first_10_s": seconds_of(after[1:11]),
        "from_20_s": seconds_of(after[20:]),
        "ratio_to_best": seconds_of(after[20:]) / best_s,
        "ratio_20_to_50": seconds_of(after[20:50]) / best_s,
        "swings": max(map(count_turns, zip(*shares[20:], strict=True))),
        "changes": [
            [number + 1, *now]
            for number, (before, now) in enumerate(pairwise(shares))
            if before != now
        ],
        "steps": [[*step["shares"], round(step["seconds"], 3)] for step in steps],
    }


def main() -> None:
    """Run the job a few times, or as one of its ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--after", type=int, default=220, help="steps after the rank is slowed")
    parser.add_argument("--default-allocator", action="store_true")
    for own in ("--rank-log", "--steps", "--fixed"):
        parser.add_argument(own, default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_log:
        fixed = tuple(map(int, arguments.fixed.split(","))) if arguments.fixed else None
        train(Path(arguments.rank_log), int(arguments.steps), fixed)
        return
    cluster = EQUAL
    allocator = {} if arguments.default_allocator else KEEPS_MEMORY
    fixed_s = best_fixed(cluster, 40, allocator)
    best_s = min(fixed_s.values())
    print(f"fixed shares of the slow rank, seconds a step: {fixed_s}", file=sys.stderr, flush=True)
    rows = []
    for number in range(arguments.rounds):
        steps = run(cluster, SETTLED + arguments.after, None, allocator)
        rows.append(row := shown(steps, best_s))
        print(
            f"round {number}: {row['before_s']:.3f} s a step before, {row['first_10_s']:.3f} in "
            f"the first ten after, {row['from_20_s']:.3f} from the twentieth on, "
            f"{row['ratio_to_best']:.3f} of the best fixed shares; {row['swings']} swings; "
            f"changes {row['changes']}",
            file=sys.stderr,
            flush=True,
        )
    if arguments.json:
        print(json.dumps({"fixed_s": fixed_s, "rows": rows}))


if __name__ == "__main__":
    main()
