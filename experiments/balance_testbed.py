"""What does a balancer gain for ordinary scripts, on unequal and on equal ranks?

    python experiments/balance_testbed.py --json        # Linux, as root

Each script of ``examples/balance`` and its version without a balancer run in turn on a testbed.
The seconds are those of whole epochs, which the scripts print. A balanced script begins with equal
shares; epochs in which it still finds its shares are left out. Perfect shares allow a gain of mean
speed over least speed of the ranks, measured with the same script alone in each rank's part of the
machine, without communication. Equal ranks have equal quotas, or on ``cores`` a core each (two
ranks).

Linux grants a CPU quota every 100 ms, so ranks that wait for each other several times in a short
step lose a part of it. ``--pixels 128`` makes images larger, and steps about a second long. The
loss differs from run to run with the moments at which the quotas begin: by 15 % on ``equal``,
between runs of one script with the same shares. ``cores`` has no quotas.

Ranks keep memory that they have freed, as the allocator of an accelerator does. By default glibc
returns large buffers to the system and requests them again in each step, and the same script then
takes up to a quarter longer in some runs than in others.
"""

import re
import statistics
import string
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from rows import finish, option, script_parser, told

from heterog.cluster import Cluster
from heterog.cluster.spec import parse_cluster
from heterog.runtime.launch import run_commands
from heterog.runtime.ranks.place import Place
from heterog.runtime.ranks.testbed import Testbed, load_testbed
from heterog.runtime.ranks.watching import Limits

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("plain_ddp", "fsdp2", "hf_accelerate", "hf_trainer", "lightning_ddp")
PIXELS = 64
"""Height and width of the images in the scripts."""
KEEPS_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**34)}
"""Environment in which glibc keeps what is freed."""
SETTLING = 3
"""Epochs of eleven steps in which shares may still change."""


def alike_ranks(name: str, num_ranks: int, cpu_quota: float) -> Cluster:
    """Ranks on hosts of their own that each have as much of a core."""
    hosts = "\n".join(
        f"  - {{name: {host}, devices: [{{type: CPU, names: [{host}]}}], "
        f"nic: {{line_rate: 1 Gbit/s}}, testbed: {{cpu_quota: {cpu_quota}}}}}"
        for host in string.ascii_lowercase[:num_ranks]
    )
    text = f"schema_version: 1\nname: {name}\nefficiency: 1.0\nhosts:\n{hosts}"
    return parse_cluster(text, ROOT)


EQUAL = alike_ranks("equal", 3, 0.5)
ALIKE = {"equal": EQUAL, "cores": alike_ranks("cores", 2, 1.0)}


def epoch_seconds(
    cluster: Cluster, script: Path, epochs: int, pixels: int, *, alone: bool = False
) -> list[list[float]]:
    """Seconds of each epoch that each rank printed.

    Args:
        cluster: of the testbed.
        script: a file of ``examples/balance``.
        epochs: to run.
        pixels: height and width of the images.
        alone: every rank is a job of its own.
    """
    with tempfile.TemporaryDirectory() as name, Testbed(cluster) as bed:
        resized = Path(name, script.name)
        resized.write_text(
            script.read_text().replace(f"3, {PIXELS}, {PIXELS})", f"3, {pixels}, {pixels})")
        )

        class Printing(Place):
            """The testbed, with the output of each rank in a file."""

            def command(self, rank: int, argv: Sequence[str]) -> list[str]:
                single = ["env", "RANK=0", "WORLD_SIZE=1", "LOCAL_RANK=0", "MASTER_ADDR=127.0.0.1"]
                shell = ["/bin/sh", "-c", 'exec "$@" > "$0"', f"{name}/{rank}"]
                return bed.command(rank, [*shell, *(single if alone else []), *argv])

            def environment(self, rank: int) -> Mapping[str, str]:
                return {
                    **bed.environment(rank),
                    **KEEPS_MEMORY,
                    "EPOCHS": str(epochs),
                    "LOCAL_RANK": str(rank),
                    "PYTHONPATH": f"{ROOT}:{':'.join(sys.path)}",
                    **({"GLOO_SOCKET_IFNAME": "lo"} if alone else {}),
                }

        run_commands(
            [str(resized)],
            cluster.num_devices,
            limits=Limits(timeout_s=1800, step_timeout_s=1800),
            place=Printing(),
        )
        texts = [Path(name, str(rank)).read_text() for rank in range(cluster.num_devices)]
        return [[float(s) for s in re.findall(r"^epoch \d+ ([\d.]+) s", t, re.M)] for t in texts]


def measure(
    cluster: Cluster, script: str, epochs: int, rounds: int, pixels: int
) -> dict[str, Any]:
    """Run both scripts in turn, and measure what perfect shares allow."""
    with_balancer = ROOT / "examples" / "balance" / f"{script}.py"
    without = with_balancer.parent / "before" / with_balancer.name
    alone = epoch_seconds(cluster, without, 3, pixels, alone=True)
    speeds = [1 / statistics.median(seconds[1:]) for seconds in alone]
    perfect = statistics.mean(speeds) / min(speeds)
    before: list[list[float]] = []
    after: list[list[float]] = []
    for number in range(rounds):
        for path in (without, with_balancer)[:: 1 if number % 2 == 0 else -1]:
            seconds = epoch_seconds(cluster, path, epochs, pixels)[0]
            (before if path is without else after).append(seconds)
    plain = statistics.median(s for each in before for s in each[1:])
    ours = statistics.median(s for each in after for s in each[SETTLING:])
    return {
        "testbed": cluster.name,
        "script": script,
        "pixels": pixels,
        "plain_epoch_s": plain,
        "balanced_epoch_s": ours,
        "speedup": plain / ours,
        "perfect": perfect,
        "part_of_perfect": (plain / ours - 1) / (perfect - 1) if perfect > 1.05 else None,
        "ratio_to_perfect": plain / ours / perfect,
        "rank_speeds": speeds,
        "before_s": before,
        "after_s": after,
    }


def main() -> None:
    """Measure every script."""
    parser = script_parser(
        __doc__,
        option("--scripts", default=",".join(SCRIPTS)),
        option("--epochs", type=int, default=8),
        option("--rounds", type=int, default=2),
        option("--pixels", type=int, default=PIXELS),
        option("--testbeds", default="skew_compute,equal"),
    )
    arguments = parser.parse_args()
    if arguments.epochs <= SETTLING:
        parser.error(f"--epochs {arguments.epochs}: the first {SETTLING} are left out")
    how = (arguments.epochs, arguments.rounds, arguments.pixels)
    rows = told(
        measure(ALIKE.get(testbed) or load_testbed(testbed), script, *how)
        for testbed, script in product(arguments.testbeds.split(","), arguments.scripts.split(","))
    )
    finish(arguments, {"rows": rows})


if __name__ == "__main__":
    main()
