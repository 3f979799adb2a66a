"""Binary heaps in flat arrays: waiting tasks by priority, events by time."""

from heterog.lowering.kernels import helper
from heterog.lowering.program import FloatArray, IntArray


@helper
def before(priority: FloatArray, first: int, second: int) -> bool:
    """Whether task ``first`` goes before ``second``: by priority, then by number."""
    a = priority[first]
    b = priority[second]
    return a < b or (a == b and first < second)


@helper
def sift_up(priority: FloatArray, items: IntArray, base: int, position: int, task: int) -> None:
    """Put a task at the end of a heap in ``items[base:]`` and let it rise."""
    while position > 0:
        above = (position - 1) >> 1
        if not before(priority, task, items[base + above]):
            break
        items[base + position] = items[base + above]
        position = above
    items[base + position] = task


@helper
def remove_first(priority: FloatArray, items: IntArray, base: int, size: int) -> None:
    """Remove the first item of a heap that has ``size`` items left afterwards."""
    task = items[base + size]
    position = 0
    while True:
        below = 2 * position + 1
        if below >= size:
            break
        if below + 1 < size and before(priority, items[base + below + 1], items[base + below]):
            below += 1
        if not before(priority, items[base + below], task):
            break
        items[base + position] = items[base + below]
        position = below
    if size > 0:
        items[base + position] = task


@helper
def push_event(times: FloatArray, items: IntArray, size: int, time: float, item: int) -> int:
    """Add an event; returns the new number of events."""
    position = size
    while position > 0:
        above = (position - 1) >> 1
        if times[above] < time or (times[above] == time and items[above] <= item):
            break
        times[position] = times[above]
        items[position] = items[above]
        position = above
    times[position] = time
    items[position] = item
    return size + 1


@helper
def pop_event(times: FloatArray, items: IntArray, size: int) -> int:
    """Remove the first event; returns the new number of events."""
    size -= 1
    replace_event(times, items, size, times[size], items[size])
    return size


@helper
def replace_event(times: FloatArray, items: IntArray, size: int, time: float, item: int) -> None:
    """Put another event in the place of the first one, whose time is not above its own."""
    position = 0
    while True:
        below = 2 * position + 1
        if below >= size:
            break
        right = below + 1
        if right < size and (
            times[right] < times[below]
            or (times[right] == times[below] and items[right] < items[below])
        ):
            below = right
        if time < times[below] or (time == times[below] and item <= items[below]):
            break
        times[position] = times[below]
        items[position] = items[below]
        position = below
    times[position] = time
    items[position] = item
