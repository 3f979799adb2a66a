"""Observations of fixed size as padded arrays in a ``Dict`` space, and rows from actions."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from heterog.envs.observation import (
    NUM_BLOCK_DEVICE_FEATURES,
    NUM_BLOCK_FEATURES,
    NUM_CANDIDATE_FEATURES,
    NUM_DEVICE_FEATURES,
    NUM_LINK_FEATURES,
)
from heterog.envs.pair import Pair
from heterog.errors import HeterogError
from heterog.lowering.program import IntArray

LIMIT = 12.0
"""Features are clipped to ``[-LIMIT, LIMIT]``."""

Padded = dict[str, npt.NDArray[np.generic]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """Sizes to which observations are padded; by default, the largest of all pairs.

    Attributes:
        blocks: G, number of blocks.
        edges: E, number of edges.
        devices: D, number of devices.
        candidates: C, number of candidates.
        pairs: Number of pairs that an environment chooses from.
    """

    blocks: int
    edges: int
    devices: int
    candidates: int
    pairs: int

    @staticmethod
    def of(pairs: Sequence[Pair]) -> "Padding":
        """The smallest padding that all given pairs fit into."""
        return Padding(
            blocks=max(pair.num_blocks for pair in pairs),
            edges=max(pair.observation.edges.shape[1] for pair in pairs),
            devices=max(pair.cluster.num_devices for pair in pairs),
            candidates=max(pair.num_candidates for pair in pairs),
            pairs=len(pairs),
        )

    def check(self, pairs: Sequence[Pair]) -> None:
        """Refuse pairs that do not fit into the padding.

        Raises:
            HeterogError: a size is too small; the message names it and the needed size.
        """
        needed = Padding.of(pairs)
        for field in fields(self):
            given, wanted = getattr(self, field.name), getattr(needed, field.name)
            if given < wanted:
                raise HeterogError(
                    f"the padding has {given} {field.name}, and the pairs need {wanted}; give "
                    "Padding.of all pairs, or none."
                )


def pair_space(padding: Padding) -> dict[str, gym.Space[npt.NDArray[np.generic]]]:
    """Spaces of the arrays that ``pad_pair`` makes."""

    def features(*shape: int) -> gym.spaces.Box:
        return gym.spaces.Box(-LIMIT, LIMIT, shape, np.float32)

    def numbers(most: int, *shape: int) -> gym.spaces.Box:
        return gym.spaces.Box(0, max(most, 1), shape, np.int64)

    def mask(*shape: int) -> gym.spaces.Box:
        return gym.spaces.Box(0, 1, shape, np.int8)

    g, e, d, c = padding.blocks, padding.edges, padding.devices, padding.candidates
    return {
        "pair": numbers(padding.pairs - 1, 1),
        "blocks": features(g, NUM_BLOCK_FEATURES),
        "block_mask": mask(g),
        "edges": numbers(g - 1, 2, e),
        "edge_time": features(e, 1),
        "edge_mask": mask(e),
        "devices": features(d, NUM_DEVICE_FEATURES),
        "device_mask": mask(d),
        # Two axes, because stable-baselines3 takes an array of three for an image.
        "links": features(d, d * NUM_LINK_FEATURES),
        "block_devices": features(g, d * NUM_BLOCK_DEVICE_FEATURES),
        "candidates": features(c, NUM_CANDIDATE_FEATURES),
        "shares": gym.spaces.Box(0.0, 1.0, (c, d), np.float32),
        "candidate_mask": mask(c),
        "action_mask": mask(g, c),
    }


def pad_pair(pair: Pair, number: int, padding: Padding) -> Padded:
    """The static observation of a pair, padded with zeros."""
    seen = pair.observation
    arrays: dict[str, tuple[npt.NDArray[np.generic], tuple[int, ...]]] = {
        "blocks": (seen.blocks, (padding.blocks,)),
        "block_mask": (np.ones(pair.num_blocks, np.int8), (padding.blocks,)),
        "edges": (seen.edges, (2, padding.edges)),
        "edge_time": (seen.edge_time, (padding.edges,)),
        "edge_mask": (np.ones(seen.edges.shape[1], np.int8), (padding.edges,)),
        "devices": (seen.devices, (padding.devices,)),
        "device_mask": (np.ones(len(seen.devices), np.int8), (padding.devices,)),
        "links": (seen.links, (padding.devices, padding.devices)),
        "block_devices": (seen.block_devices, (padding.blocks, padding.devices)),
        "candidates": (seen.candidates, (padding.candidates,)),
        "shares": (seen.shares, (padding.candidates, padding.devices)),
        "candidate_mask": (np.ones(pair.num_candidates, np.int8), (padding.candidates,)),
        "action_mask": (seen.fits.astype(np.int8), (padding.blocks, padding.candidates)),
    }
    padded: Padded = {"pair": np.array([number], np.int64)}
    for name, (array, sizes) in arrays.items():
        full = np.zeros((*sizes, *array.shape[len(sizes) :]), array.dtype)
        part = array if array.dtype != np.float32 else np.clip(array, -LIMIT, LIMIT)
        full[tuple(slice(size) for size in array.shape)] = part
        padded[name] = full.reshape(len(full), -1) if full.ndim == 3 else full
    return padded


def read_action(pair: Pair, action: npt.ArrayLike) -> tuple[IntArray, int]:
    """(row of a one-shot action, number of masked entries).

    A masked entry (a candidate that the pair lacks, or that cannot hold the block) is a no-op: the
    block takes the candidate of the block before it, the first block its first legal candidate.
    Entries beyond the pair's blocks do not count.
    """
    entries = np.asarray(action, np.int64).reshape(-1)
    fits = pair.observation.fits
    row = np.empty(pair.num_blocks, np.int32)
    masked = 0
    for block in range(pair.num_blocks):
        wanted = int(entries[block]) if block < len(entries) else -1
        if 0 <= wanted < pair.num_candidates and fits[block, wanted]:
            row[block] = wanted
            continue
        masked += 1
        row[block] = row[block - 1] if block else int(np.argmax(fits[0]))
    return row, masked
