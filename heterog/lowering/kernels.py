"""Compilation of kernels: two decorators, their cache on disk, and progress reports.

A kernel is compiled when it is first called, which takes seconds, and comes from a cache on disk
from then on: beside its file, or in the user's cache folder (``NUMBA_CACHE_DIR`` names another)
where that is not writable. What is compiled is stale when any of ``SOURCES`` has changed, because
kernels call each other and unpack each other's tuples; numba alone looks at a kernel's own file.

Five things keep compilation short, and the first also made kernels faster:

- Kernels allocate nothing, so they are compiled without reference counts (``_nrt=False``). A
  kernel gets tuples of fifty arrays; each use of one would count references to it, atomically.
- So helpers are functions that LLVM inlines where that pays. They used to be copied into every
  caller before types were inferred, which took most of a minute.
- Helpers have no wrapper that Python could call, no cache of their own (whatever calls them has
  it), and one version for all integers: numba would compile another one for each constant and each
  width that they are called with.
- Helpers are optimised in the kernels that call them, and only there (``kernel_compiler``).
- Tuples of many arrays are passed by reference (``kernel_arguments``).
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba as nb
import numpy as np
import numpy.typing as npt
from numba.core import event
from numba.core.caching import FunctionCache, IndexDataCacheFile

from heterog.lowering.kernel_compiler import HelperCompiler, KernelCompiler

Function = TypeVar("Function", bound=Callable[..., Any])
Report = Callable[[str, float], None]
"""Called with the name of the kernel being compiled, and the fraction of kernels compiled."""

SOURCES = (
    "envs/filling.py",
    "strategy/division.py",
    "strategy/strategy.py",
    "strategy/sync.py",
    "lowering/*.py",
    "methods/model_parallel.py",
    "pricing/cost_model.py",
    "simulator/engine.py",
    "simulator/heaps.py",
    "simulator/memory.py",
    "simulator/multiplex.py",
    "simulator/place_facts.py",
    "simulator/referee.py",
    "simulator/timings.py",
)
"""Files that define kernels, the tuples they unpack, or numbers that are compiled into them."""

# Division by zero gives infinity, as in numpy: no branch, no exception, shorter code.
_COMMON: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "no_cfunc_wrapper": True,
    "_nrt": False,
}
_HELPER: dict[str, Any] = {"no_cpython_wrapper": True, "pipeline_class": HelperCompiler}


def kernel(function: Function) -> Function:
    """Compile a function that Python calls and that allocates no arrays."""
    dispatcher: Any = _compiled(function, {"pipeline_class": KernelCompiler})
    if dispatcher is not function:  # it is the same with NUMBA_DISABLE_JIT
        try:
            dispatcher._cache = _Cache(function)
        except RuntimeError:  # no folder is writable: compiled anew in every process
            pass
    return dispatcher  # type: ignore[no-any-return]


def helper(function: Function) -> Function:
    """Compile a function that only kernels call and that allocates no arrays."""
    compiled = _compiled(function, _HELPER)
    if compiled is not function:
        _take_any_integer(compiled)
    return compiled


def records(count: int, fields: np.dtype[np.void]) -> npt.NDArray[np.void]:
    """Empty records whose fields kernels access by name, even where they run as Python.

    They run as Python where NUMBA_DISABLE_JIT is set. Elsewhere this type would only cost time,
    because numba recognises numpy's own at once.
    """
    is_compiled = not nb.config.DISABLE_JIT  # type: ignore[attr-defined]
    return np.empty(count, fields if is_compiled else np.dtype((_Record, fields)))


class _Record(np.record):  # type: ignore[misc]
    """A record whose fields are attributes, even those named like one of numpy's (``device``)."""

    def __getattribute__(self, name: str) -> Any:
        dtype = super().__getattribute__("dtype")
        return self[name] if name in dtype.names else super().__getattribute__(name)


def _take_any_integer(dispatcher: Any) -> None:
    """Make a function look up versions for wide types only; calls convert their arguments."""
    find = dispatcher.get_call_template

    def find_wide(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return find(tuple(map(_wide, arguments)), keywords)

    dispatcher.get_call_template = find_wide


def _wide(argument: Any) -> Any:
    plain = nb.types.unliteral(argument)  # type: ignore[no-untyped-call]
    return nb.types.int64 if isinstance(plain, nb.types.Integer) else plain


def _compiled(function: Function, options: dict[str, Any]) -> Function:
    _names.add(function.__name__)
    return nb.njit(**_COMMON, **options)(function)  # type: ignore[no-any-return]


_names: set[str] = set()  # of all kernels that were defined


class _Cache(FunctionCache):
    """numba's cache of a function; stale when any of ``SOURCES`` has changed."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        self._cache_file = _CacheFile(  # type: ignore[no-untyped-call]
            cache_path=self._cache_path,
            filename_base=self._impl.filename_base,
            source_stamp=_sources_stamp(),
        )


class _CacheFile(IndexDataCacheFile):
    """The files of a cache; an unreadable one is compiled again, an unwritable one is skipped.

    numba reads a whole index before it checks whether it is stale. So a file of an older version
    that names a class that is gone would end every command; so would a file that was cut short
    when a disk was full.
    """

    def load(self, key: Any) -> Any:
        try:
            return super().load(key)  # type: ignore[no-untyped-call]
        except Exception:  # any error from unpickling a damaged or foreign file
            return None

    def save(self, key: Any, data: Any) -> None:
        try:
            super().save(key, data)  # type: ignore[no-untyped-call]
        except OSError:  # no space, or no longer allowed: compiled anew in every process
            pass

    def _load_index(self) -> Any:
        try:
            return super()._load_index()  # type: ignore[no-untyped-call]
        except Exception:  # as above: the index is begun anew
            return {}


@cache
def _sources_stamp() -> str:
    """Hash of the contents of ``SOURCES``."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for source in SOURCES:
        for file in sorted(package.glob(source)):
            digest.update(file.read_bytes())
    return digest.hexdigest()


@contextmanager
def compilation_told(report: Report) -> Iterator[None]:
    """Report each kernel that is compiled during the body; nothing if all are cached."""
    listener = _Listener(report)
    event.register("numba:compile", listener)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        event.unregister("numba:compile", listener)  # type: ignore[no-untyped-call]


class _Listener(event.Listener):
    def __init__(self, report: Report) -> None:
        self._report = report
        self._done: set[str] = set()

    def on_start(self, about: Any) -> None:
        name = about.data["dispatcher"].py_func.__name__
        if name in _names:
            self._report(name.strip("_"), len(self._done) / len(_names))

    def on_end(self, about: Any) -> None:
        self._done |= _names & {about.data["dispatcher"].py_func.__name__}
