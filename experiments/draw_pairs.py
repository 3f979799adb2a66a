"""Draws lists of pairs for training, validation and tests, from disjoint families and clusters.

    python experiments/draw_pairs.py test --pairs 24 --large 8 --seed 58

Writes ``pairs/SPLIT.jsonl`` and a cluster file for each of its lines. Every family of the split
comes as often as every other, within one. ``--large`` of the pairs have 64 to 1,024 devices, the
others 2 to 48; sizes are spread evenly by their ratios. A member of a family is drawn again if
weights, gradients and optimizer state fill more than 40 % of all memory, or if a large cluster has
more devices than the batch has samples, because no strategy would work there.
"""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import yaml
from drawing.clusters import drawn_cluster
from drawing.families import TEST, TRAIN, VALIDATION
from drawn_models import families, workload
from rows import option, plain_parser, run

from heterog.cluster import Cluster

FOLDER = Path(__file__).with_name("pairs")
LARGE = (64, 1024)
SMALL = (2, 48)


def size_within(place: int, count: int, least: int, most: int) -> tuple[int, int]:
    """Bounds of the ``place``-th of ``count`` equal parts of a range, by ratios."""
    bounds = np.geomspace(least, most, count + 1)
    low = round(bounds[place])
    return low, max(low, int(bounds[place + 1]))


def parts_of_memory(name: str, cluster: Cluster) -> tuple[float, int]:
    """(part of all memory that weights and their state take, samples of the batch)."""
    made = workload(name)
    with torch.device("meta"):
        model = made.make_model()
    size = sum(each.numel() * each.element_size() for each in model.parameters())
    usable = sum(each.usable_memory_bytes for each in cluster.devices)
    return 4.0 * size / usable, next(iter(_tensors(made.make_batch()))).shape[0]


def _tensors(batch: object) -> Iterator[torch.Tensor]:
    assert isinstance(batch, tuple)
    yield from batch


def main() -> None:
    """Draw a list."""
    asked = plain_parser(
        __doc__,
        option("split", choices=(TRAIN, VALIDATION, TEST)),
        option("--pairs", type=int, default=24),
        option("--large", type=int, default=8, help="pairs of at least 64 devices"),
        option("--seed", type=int, default=58),
    ).parse_args()
    rng = np.random.default_rng([zlib.crc32(asked.split.encode()), asked.seed])
    names = families(asked.split)
    order = [names[k] for _ in range(asked.pairs) for k in rng.permutation(len(names))]
    lines = []
    for number in range(asked.pairs):
        name = f"{asked.split}_{number:02}"
        is_large = number < asked.large
        bounds = size_within(
            number if is_large else number - asked.large,
            asked.large if is_large else asked.pairs - asked.large,
            *(LARGE if is_large else SMALL),
        )
        document = drawn_cluster(name, int(rng.integers(2**31)), *bounds)
        path = FOLDER / "clusters" / f"{name}.yaml"
        text = yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=95)
        path.write_text(text)
        cluster = Cluster.load(str(path))
        model = _member(rng, order, cluster, is_large)
        line = {"model": f"../drawn_models.py:{model}", "cluster": f"clusters/{path.name}"}
        lines.append(json.dumps(line))
        print(lines[-1], cluster.num_devices, flush=True)
    (FOLDER / f"{asked.split}.jsonl").write_text("\n".join(lines) + "\n")


def _member(rng: np.random.Generator, order: list[str], cluster: Cluster, is_large: bool) -> str:
    """A model that fits a cluster; its family, the next that has one, is taken off ``order``."""
    for place, family in enumerate(order):
        for _ in range(20):
            name = f"{family}_{int(rng.integers(10_000))}"
            part, samples = parts_of_memory(name, cluster)
            if part <= 0.4 and (not is_large or samples >= cluster.num_devices):
                del order[place]
                return name
    raise ValueError(f"no model fits {cluster.name}")


if __name__ == "__main__":
    run(main)
