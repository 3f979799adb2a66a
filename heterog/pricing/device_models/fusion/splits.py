"""Number of parts of a reduction with few results, cut by inductor so that all of a GPU works.

Each part is summed by itself, and a second kernel adds up the parts. The rules are those of
``Reduction.num_splits`` (``torch/_inductor/ir.py``) and ``reduction_split_factor``
(``choices.py``) of torch 2.13, for a GPU with as many multiprocessors as an A100: another number
moves the borders between one part and several a little. Unlike there, parts need not be equal.
"""

from math import ceil

_MULTIPROCESSORS = 108
_THREADS = 2048
_THREADS_OF_BLOCK = 256
_LEAST_PER_THREAD = 32
_MOST_PER_THREAD = 512
_LONGEST_ROW = 8192
_RESULTS_OF_BLOCK = 128
_ROWS_OF_THREAD = 4


def num_parts(results: int, reduced: int, *, along_rows: bool) -> int:
    """Number of parts of a reduction; 1 if it stays whole.

    Args:
        results: Number of elements that it makes.
        reduced: Number of elements that each is made of.
        along_rows: Whether these lie beside each other in memory.

    >>> num_parts(8192, 768, along_rows=True), num_parts(768, 8192, along_rows=False)
    (1, 64)
    """
    if results == 1 or along_rows:
        return _parts_of_rows(results, reduced)
    if reduced <= _LEAST_PER_THREAD or results >= _MULTIPROCESSORS * 64:
        return 1
    blocks = ceil(
        _MULTIPROCESSORS * _THREADS // _THREADS_OF_BLOCK / ceil(results / _RESULTS_OF_BLOCK)
    )
    each = ceil(reduced / (_ROWS_OF_THREAD * blocks))
    return ceil(reduced / (_ROWS_OF_THREAD * _per_thread(results * reduced, each)))


def _parts_of_rows(results: int, reduced: int) -> int:
    if results >= 2 * _MULTIPROCESSORS or reduced <= _LONGEST_ROW:
        return 1
    blocks = ceil(_MULTIPROCESSORS * _THREADS // (2 * _THREADS_OF_BLOCK) / results)
    each = ceil(reduced / (_THREADS_OF_BLOCK * blocks))
    return ceil(reduced / (_THREADS_OF_BLOCK * _per_thread(results * reduced, each)))


def _per_thread(elements: int, even: int) -> int:
    """Number of elements that a thread reduces; ``even`` is the number that fills the GPU once."""
    if elements <= _LEAST_PER_THREAD * _MULTIPROCESSORS * _THREADS:
        return _LEAST_PER_THREAD
    if elements < _MOST_PER_THREAD * _MULTIPROCESSORS * _THREADS:
        return max(even, _LEAST_PER_THREAD)
    return _MOST_PER_THREAD
