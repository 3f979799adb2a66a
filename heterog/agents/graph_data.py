"""Observations as PyTorch Geometric graphs."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch_geometric.data import Batch, HeteroData

from heterog.envs.observation import WHOLE_SLOWER, WHOLE_SUM, Observation

FEEDS = ("block", "feeds", "block")
FED_BY = ("block", "fed_by", "block")
RUNS = ("device", "runs", "block")
ON = ("block", "on", "device")
LINK = ("device", "link", "device")
IN = ("device", "in", "candidate")
MOST_LINKED, NUM_TOLD = 512, 64


def hetero_data(observation: Observation) -> HeteroData:
    """One pair as a heterogeneous graph.

    Nodes: ``block``, ``device``, ``candidate``. Edges: blocks that feed one another (both ways),
    every block with every device (its seconds there), every device with every other (their link),
    and devices in a candidate (their share of the batch). With more than ``MOST_LINKED`` devices,
    only ``NUM_TOLD`` devices, spread over hosts, have edges to all others: most links are alike.
    """
    data = HeteroData()
    num_blocks, num_devices = len(observation.blocks), len(observation.devices)
    data["block"].x = _tensor(observation.blocks)
    data["device"].x = _tensor(observation.devices)
    data["candidate"].x = _tensor(observation.candidates)
    edges, times = _tensor(observation.edges), _tensor(observation.edge_time)
    data[FEEDS].edge_index, data[FEEDS].edge_attr = edges, times
    data[FED_BY].edge_index, data[FED_BY].edge_attr = edges.flip(0), times
    every = _grid(num_blocks, num_devices)
    seconds = _tensor(observation.block_devices).flatten(0, 1)
    data[ON].edge_index, data[ON].edge_attr = every, seconds
    data[RUNS].edge_index, data[RUNS].edge_attr = every.flip(0), seconds
    told = np.arange(num_devices)
    if num_devices > MOST_LINKED:
        told = np.linspace(0, num_devices - 1, NUM_TOLD).astype(np.int64)
    first, second = _grid(len(told), num_devices)
    data[LINK].edge_index = torch.stack([_tensor(told)[first], second])
    data[LINK].edge_attr = _tensor(observation.links[told]).flatten(0, 1)
    candidate, device = np.nonzero(observation.shares)
    data[IN].edge_index = _tensor(np.stack([device, candidate]).astype(np.int64))
    data[IN].edge_attr = _tensor(observation.shares[candidate, device])[:, None]
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
        self.graphs = Batch.from_data_list([hetero_data(o) for o in observations])
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


def _grid(rows: int, columns: int) -> torch.Tensor:
    first = torch.arange(rows).repeat_interleave(columns)
    return torch.stack([first, torch.arange(columns).repeat(rows)])
