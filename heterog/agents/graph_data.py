"""Observations as PyTorch Geometric graphs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch_geometric.data import HeteroData

from heterog.envs.observation import WHOLE_SLOWER, WHOLE_SUM, Observation

FEEDS = ("block", "feeds", "block")
FED_BY = ("block", "fed_by", "block")
RUNS = ("device", "runs", "block")
ON = ("block", "on", "device")
LINK = ("device", "link", "device")
IN = ("device", "in", "candidate")
MOST_LINKED, NUM_TOLD = 512, 64
EdgeType = tuple[str, str, str]
IndexArray = npt.NDArray[np.int64]
Features = npt.NDArray[np.float32]


def graphs_of(observations: Sequence[Observation]) -> HeteroData:
    """Pairs as one heterogeneous graph, with ``batch`` and ``ptr`` of nodes as in PyG's ``Batch``.

    Nodes: ``block``, ``device``, ``candidate``. Edges: blocks that feed one another (both ways),
    every block with every device (its seconds there), every device with every other (their link),
    and devices in a candidate (their share of the batch). With more than ``MOST_LINKED`` devices,
    only ``NUM_TOLD`` devices, spread over hosts, have edges to all others: most links are alike.
    """
    data, first = HeteroData(), {}
    for kind in ("block", "device", "candidate"):
        nodes = [getattr(each, f"{kind}s") for each in observations]
        counts = np.array([len(own) for own in nodes])
        ends = np.cumsum(counts)
        first[kind] = ends - counts
        data[kind].x = _joined(nodes)
        data[kind].batch = torch.from_numpy(np.repeat(np.arange(len(nodes)), counts))
        data[kind].ptr = torch.from_numpy(np.append(0, ends))

    def add(edge: EdgeType, pairs: Sequence[IndexArray], features: Sequence[Features]) -> None:
        """Add edges, whose (source, target) are numbered in their own observation."""
        source, _, target = edge
        begins = np.stack([first[source], first[target]], axis=1)[:, :, None]
        data[edge].edge_index = _joined(list(map(np.add, pairs, begins)), axis=1)
        data[edge].edge_attr = _joined(features)

    edges, times = ([getattr(o, name) for o in observations] for name in ("edges", "edge_time"))
    add(FEEDS, edges, times)
    add(FED_BY, [each[::-1] for each in edges], times)
    every = [_grid(np.arange(len(o.blocks)), len(o.devices)) for o in observations]
    seconds = [o.block_devices.reshape(-1, o.block_devices.shape[2]) for o in observations]
    add(ON, every, seconds)
    add(RUNS, [each[::-1] for each in every], seconds)
    told = [
        np.linspace(0, count - 1, num_told(count)).astype(np.int64)
        for count in (len(o.devices) for o in observations)
    ]
    links = [o.links[own] for o, own in zip(observations, told, strict=True)]
    add(
        LINK,
        [_grid(own, each.shape[1]) for own, each in zip(told, links, strict=True)],
        [each.reshape(-1, each.shape[2]) for each in links],
    )
    held = [np.nonzero(o.shares) for o in observations]
    parts = [o.shares[own][:, None] for o, own in zip(observations, held, strict=True)]
    add(IN, [np.stack(own[::-1]) for own in held], parts)
    return data


class PairBatch:
    """Some pairs for one pass of a policy, tables padded to the largest.

    Attributes:
        graphs: All pairs as one heterogeneous graph.
        pairs: Features of block and candidate.  # [B, G, C, 6]
        overlap: Overlap of two candidates.  # [B, C, C]
        allowed: Whether a block may take a candidate.  # [B, G, C] bool
        block_mask: Whether a block is real.  # [B, G] bool
        promise: Logarithms of the whole model's analytic seconds under each candidate, the slower
            of compute and synchronisation, and their sum.  # [B, C, 2]
        candidate_mask: Whether a candidate is real.  # [B, C] bool
    """

    def __init__(self, observations: Sequence[Observation]) -> None:
        num, blocks = len(observations), max(len(o.blocks) for o in observations)
        candidates = max(len(o.candidates) for o in observations)
        self.graphs = graphs_of(observations)
        self.pairs = torch.zeros(num, blocks, candidates, observations[0].pairs.shape[2])
        self.promise = torch.zeros(num, candidates, 2)
        self.overlap = torch.zeros(num, candidates, candidates)
        self.allowed = torch.zeros(num, blocks, candidates, dtype=torch.bool)
        self.block_mask = torch.zeros(num, blocks, dtype=torch.bool)
        self.candidate_mask = torch.zeros(num, candidates, dtype=torch.bool)
        for index, o in enumerate(observations):
            g, c = len(o.blocks), len(o.candidates)
            self.pairs[index, :g, :c] = _tensor(o.pairs)
            self.promise[index, :c] = _tensor(o.candidates[:, WHOLE_SLOWER : WHOLE_SUM + 1])
            self.overlap[index, :c, :c] = _tensor(o.overlap)
            self.allowed[index, :g, :c] = _tensor(o.fits)
            self.allowed[index, g:, :1] = True  # padding has one choice, which has no effect
            self.block_mask[index, :g] = True
            self.candidate_mask[index, :c] = True


def num_told(num_devices: int) -> int:
    """Number of devices with link edges to all others."""
    return num_devices if num_devices <= MOST_LINKED else NUM_TOLD


def _tensor(array: npt.NDArray[np.generic]) -> torch.Tensor:
    return torch.from_numpy(array.copy())


def _joined(arrays: Sequence[npt.NDArray[Any]], axis: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays, axis=axis))


def _grid(rows: IndexArray, columns: int) -> IndexArray:
    """Pairs of every row's number with every column.  # [2, len(rows) * columns]"""
    return np.stack([np.repeat(rows, columns), np.tile(np.arange(columns), len(rows))])
