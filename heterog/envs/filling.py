"""Kernels for rows filled block by block: candidates that fit the next block, memory after it.

``draw_rows`` fills and draws whole rows at once; other draws ask block by block.

A candidate loads few of many devices, and it only adds memory. So the peaks of all devices of a
row are computed once without the block, and again only on the devices of each load.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from heterog.lowering.kernels import by_reference, helper, kernel
from heterog.lowering.program import FloatArray, IntArray

Parts = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
_ONE, _NONE = np.float32(1.0), np.float32(0.0)
_NEARLY = np.float32(1e-6)
NEVER = np.float32(-2e9)
"""Logit of a candidate that does not fit: below those that a network masks, so that even if it
masks all that fit, one of these wins."""
STATE, SAVED, GRADIENT, PASSING = range(4)
"""Columns of a block's bytes."""


@by_reference
class Filled(NamedTuple):
    """Bytes of each row on each device so far, over the device's memory.  # [T, num_rows]"""

    start: Parts  # before the first block  # [T]
    state: Parts
    saved: Parts
    gradient: Parts
    inner: Parts  # temporary values of the largest op


@by_reference
class PartLoads(NamedTuple):
    """Loads, divided by the memory of each device.  # [L, T]"""

    counts: Parts
    state: Parts
    holds: Parts
    member_start: IntArray  # first entry of each load in ``member``  # [L + 1]
    member: IntArray


@by_reference
class BlockLimits(NamedTuple):
    """What blocks need and devices have."""

    blocks: Parts  # bytes of each block: ``STATE`` and ``GRADIENT``, others per sample  # [G, 4]
    is_alone: BoolArray  # whether a block would fit alone under a candidate  # [G, C]
    rest: FloatArray  # bytes of the blocks after each  # [G]
    room: Parts  # bytes of all devices of a class  # [T]
    load_of: IntArray  # load of each candidate  # [C]
    adds_up: bool  # whether gradients and saved values are in memory at once


@by_reference
class Logits(NamedTuple):
    """The parts of a policy's logits; see ``policy``."""

    unary: Parts  # [G, C]
    pair: Parts  # [C, C]
    overlap: Parts  # [C, C]
    cut: Parts  # [G]
    stay: Parts  # [G]


@helper
def _most(filled: Filled, device: int, row: int, adds_up: bool) -> np.float32:
    """Peak of a device without a further block."""
    held = filled.start[device] + filled.state[device, row]
    saved, gradient = filled.saved[device, row], filled.gradient[device, row]
    peak = held + saved + gradient if adds_up else max(held + saved, held + gradient)
    return peak + filled.inner[device, row]  # type: ignore[no-any-return]


@helper
def _most_with(
    filled: Filled,
    loads: PartLoads,
    block: Parts,
    device: int,
    row: int,
    load: int,
    adds_up: bool,
) -> np.float32:
    """Peak of a device with a further block under a load."""
    gradient = block[GRADIENT] * loads.holds[load, device]
    state = block[STATE] * loads.state[load, device]
    saved = block[SAVED] * loads.counts[load, device]
    passing = block[PASSING] * loads.counts[load, device] + gradient
    held = filled.start[device] + filled.state[device, row]
    kept, summed = filled.saved[device, row], filled.gradient[device, row]
    if adds_up:
        peak = (held + kept + summed) + (state + saved + gradient)
    else:
        peak = max((held + kept) + (state + saved), (held + summed) + (state + gradient))
    return peak + max(filled.inner[device, row], passing)  # type: ignore[no-any-return]


@helper
def _find_fits(
    filled: Filled, loads: PartLoads, limits: BlockLimits, number: int, work: FloatArray,
    fits: BoolArray,
) -> None:  # fmt: skip
    worst, free, slack = work[0], work[1], work[2]
    block, is_alone, rest = limits.blocks[number], limits.is_alone[number], limits.rest[number]
    adds_up, room, load_of = limits.adds_up, limits.room, limits.load_of
    num_loads = len(loads.counts)
    for row in range(filled.state.shape[1]):
        fullest, left = _NONE, 0.0
        for device in range(filled.state.shape[0]):
            most = _most(filled, device, row, adds_up)
            fullest = max(fullest, most)
            slack[device] = room[device] * max(_ONE - most, _NONE)
            left += slack[device]
        least = np.float32(np.inf)
        for load in range(num_loads):
            most_of_all, left_then = fullest, left
            for entry in range(loads.member_start[load], loads.member_start[load + 1]):
                device = loads.member[entry]
                most = _most_with(filled, loads, block, device, row, load, adds_up)
                most_of_all = max(most_of_all, most)
                left_then += room[device] * max(_ONE - most, _NONE) - slack[device]
            worst[load], free[load] = most_of_all, left_then
            least = min(least, most_of_all)
        some_fit, some_roomy = False, False
        for candidate in range(len(load_of)):
            load = load_of[candidate]
            is_fit = worst[load] <= 1.0 and is_alone[candidate]
            some_fit |= is_fit
            some_roomy |= is_fit and free[load] >= rest
        for candidate in range(len(load_of)):
            load = load_of[candidate]
            is_fit = worst[load] <= 1.0 and is_alone[candidate]
            if (
                some_roomy
            ):  # too little room for the rest is better than a device that is too small
                is_fit = is_fit and free[load] >= rest
            if not some_fit:
                is_fit = worst[load] <= least + _NEARLY
            fits[row, candidate] = is_fit


@kernel
def find_fits(
    filled: Filled, loads: PartLoads, limits: BlockLimits, number: int, work: FloatArray,
    fits: BoolArray,
) -> None:  # fmt: skip
    """Find the candidates that fit a block, if possible those that leave room for later blocks.

    Args:
        filled: Memory of the rows so far.
        loads: Loads of the candidates.
        limits: What blocks need and devices have.
        number: Number of the block.
        work: Working memory.  # [3, max(L, T)]
        fits: Output; the candidates with the least overflow if none fits.  # [num_rows, C]
    """
    _find_fits(filled, loads, limits, number, work, fits)


@helper
def _fill(
    filled: Filled, loads: PartLoads, limits: BlockLimits, number: int, chosen: IntArray
) -> None:
    block = limits.blocks[number]
    for row in range(len(chosen)):
        load = limits.load_of[chosen[row]]
        for entry in range(loads.member_start[load], loads.member_start[load + 1]):
            device = loads.member[entry]
            gradient = block[GRADIENT] * loads.holds[load, device]
            filled.state[device, row] += block[STATE] * loads.state[load, device]
            filled.saved[device, row] += block[SAVED] * loads.counts[load, device]
            filled.gradient[device, row] += gradient
            passing = block[PASSING] * loads.counts[load, device] + gradient
            filled.inner[device, row] = max(filled.inner[device, row], passing)


@kernel
def fill(
    filled: Filled, loads: PartLoads, limits: BlockLimits, number: int, chosen: IntArray
) -> None:
    """Add a block to every row.

    Args:
        filled: Memory of the rows so far; changed.
        loads: Loads of the candidates.
        limits: What blocks need and devices have.
        number: Number of the block.
        chosen: Candidate of each row.  # [num_rows]
    """
    _fill(filled, loads, limits, number, chosen)


@kernel
def draw_rows(
    logits: Logits, noise: Parts, filled: Filled, loads: PartLoads, limits: BlockLimits,
    work: FloatArray, rows: IntArray, masks: BoolArray,
) -> None:  # fmt: skip
    """Fill rows from the first block on, each with the fitting candidate of the largest logit.

    Args:
        logits: The policy's logits.
        noise: Added to them.  # [G, num_rows, C]
        filled: Memory of empty rows; changed.
        loads: Loads of the candidates.
        limits: What blocks need and devices have.
        work: Working memory.  # [3, max(L, T)]
        rows: Output: candidates of each block, in the order of blocks.  # [G, num_rows]
        masks: Output: candidates that fitted.  # [G, num_rows, C], or the last [1, num_rows, C]
    """
    for number in range(len(rows)):
        fits = masks[number % len(masks)]
        _find_fits(filled, loads, limits, number, work, fits)
        for row in range(rows.shape[1]):
            before = rows[number - 1, row] if number > 0 else -1
            best, most = 0, np.float32(-np.inf)
            for candidate in range(len(limits.load_of)):
                logit = logits.unary[number, candidate]
                if before >= 0:
                    logit += logits.pair[before, candidate]
                    logit += logits.cut[number] * logits.overlap[before, candidate]
                if candidate == before:
                    logit += logits.stay[number]
                if not fits[row, candidate]:
                    logit = NEVER
                logit += noise[number, row, candidate]
                if logit > most:
                    best, most = candidate, logit
            rows[number, row] = best
        _fill(filled, loads, limits, number, rows[number])


_STAYS, _GOES, _GOES_WITHOUT_MEMORY, _STAYS_TOO_LONG, _ANY = range(5)


@helper
def _is_allowed(way: int, stays: bool, is_free: bool, in_time: bool, in_memory: bool) -> bool:
    """Whether a way to continue the pipeline allows a candidate."""
    if way == _STAYS:
        return stays and in_time and in_memory
    if way == _GOES:
        return is_free and in_time and in_memory
    if way == _GOES_WITHOUT_MEMORY:
        return is_free and in_time
    return stays or way == _ANY


@kernel
def find_stage_fits(
    set_of: IntArray, current: IntArray, is_taken: BoolArray, load_s: FloatArray,
    until_end: FloatArray, weight_of: IntArray, limit_s: FloatArray, found: BoolArray,
    fits: BoolArray,
) -> None:  # fmt: skip
    """Find the candidates for a pipeline's next block.

    The first of these ways that allows a candidate: the block stays on the stage's devices, within
    time and memory; it goes to free devices; it goes there without enough memory; it stays beyond
    the limits; any candidate.

    Args:
        set_of: Device set of each candidate.  # [C]
        current: Set of each row's current stage.  # [num_rows]
        is_taken: Whether a set shares a device with a stage.  # [num_rows, S]
        load_s: Seconds of each row's current stage so far.  # [num_rows]
        until_end: Seconds until a stage with the block may end.  # [W, C]
        weight_of: Row of ``until_end`` for each row.  # [num_rows]
        limit_s: Most seconds of a stage.  # [num_rows]
        found: Working memory.  # [C]
        fits: Whether memory suffices; replaced by the result.  # [num_rows, C]
    """
    for row in range(len(current)):
        for way in range(_ANY + 1):
            is_found = False
            for candidate in range(len(set_of)):
                stays = set_of[candidate] == current[row]
                seconds = until_end[weight_of[row], candidate]
                in_time = seconds + (load_s[row] if stays else 0.0) <= limit_s[row]
                is_free = not is_taken[row, set_of[candidate]]
                found[candidate] = _is_allowed(way, stays, is_free, in_time, fits[row, candidate])
                is_found |= found[candidate]
            if is_found:
                break
        for candidate in range(len(set_of)):
            fits[row, candidate] = found[candidate]
