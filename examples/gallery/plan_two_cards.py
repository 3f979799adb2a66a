"""Plan a model for two unlike cards, and see who gets how many samples."""

from pathlib import Path

import torch
from torch import nn

import heterog
from heterog.cluster.spec import parse_cluster

LAB = """
schema_version: 1
name: lab
hosts:
  - {name: box, devices: [{type: RTX-4090}, {type: RTX-3070}], intra: pcie3}
"""


def main() -> None:
    """Plan by speed and print the shares."""
    workload = heterog.Workload(
        model=lambda: nn.Sequential(
            nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(65536, 10)
        ),
        example_batch=(torch.randn(4096, 3, 32, 32), torch.randint(0, 10, (4096,))),
        loss=nn.functional.cross_entropy,
        optimizer=torch.optim.SGD,
    )
    cluster = parse_cluster(LAB, Path("lab.yaml"))
    plan = heterog.plan(workload, cluster, method="cp_ar", budget="20e")
    first = plan.strategy.decisions[0]
    for device, share in zip(first.devices, first.shares, strict=True):
        print(f"{cluster.devices[device].type.name}: {share} of 4096 samples")


if __name__ == "__main__":
    main()
