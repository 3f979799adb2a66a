"""Compilation of kernels: two decorators, their cache on disk, and progress reports.

A kernel is compiled at its first call, which takes seconds, and loaded from a cache on disk from
then on. The cache lies beside the kernel's file or, if that folder is not writable, in the user's
cache folder (``NUMBA_CACHE_DIR`` names another). It is stale when any of ``SOURCES`` has changed,
because kernels call each other and unpack each other's tuples; numba alone checks only a kernel's
own file.

Five things keep compilation short, and the first also makes kernels faster:

- Kernels allocate nothing, so they are compiled without reference counts (``_nrt=False``). A
  kernel gets tuples of fifty arrays; each use of one would count references to it, atomically.
- So helpers can be functions that LLVM inlines where that pays. Copying them into every caller
  before types are inferred took most of a minute.
- Helpers have no wrapper for calls from Python, no cache of their own (their callers have one),
  and one version for all integers: numba would compile another version for each constant and each
  width that they are called with.
- Helpers are optimised in the kernels that call them, and only there (``KernelCompiler``).
- Tuples of many arrays are passed by reference (``by_reference``).

By default numba optimises a helper, links it into each function that calls it, and optimises it
again there, at every level of a chain of calls; it also makes machine code of each helper, which
never runs. For our kernels, whose helpers call helpers six deep, that was a third of the time.
Here a helper is only simplified, function by function, and copied into its callers; the kernel at
the top is optimised as a whole, once, at LLVM's first level. Higher levels take longer and make
our kernels, which are branches and lists of integers, no faster.

numba is meant to be extended by a ``Compiler``, but not in its libraries of code. This module
changes three methods of ``JITCodeLibrary``: those that optimise code, make it machine code and
return its address.

By default numba also passes each field of a tuple separately, and seven numbers for each array.
Our kernels get a hundred arrays, so each of thousands of calls between helpers moved hundreds of
numbers, most of them unused. Compiling these moves took longer than everything else.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numba as nb
import numpy as np
import numpy.typing as npt
from numba.core import cgutils, event, types
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.typing.templates import AttributeTemplate
from numba.extending import (
    NativeValue,
    infer_getattr,
    lower_getattr_generic,
    models,
    register_model,
    typeof_impl,
    unbox,
)

Fields = TypeVar("Fields", bound=type[NamedTuple])


def by_reference(fields: Fields) -> Fields:
    """Make kernels get such named tuples by reference; they may only read fields by name.

    The tuple lies in the frame of the call from Python, and helpers get its address. They cannot
    make such a tuple, nor unpack it by position. All tuples of a class have fields of the same
    types: arrays of one data type and dimension, contiguous and writable.
    """

    @typeof_impl.register(fields)
    def type_of(value: Any, context: Any) -> _Reference:
        each = [typeof_impl(field, context) for field in value]
        return _Reference(types.NamedTuple(each, fields))  # type: ignore[no-untyped-call]

    return fields


class _Reference(types.Type):
    """Type of the address of a named tuple."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole
        super().__init__(f"reference to {whole}")  # the name decides which types are equal


@register_model(_Reference)
class _ReferenceModel(models.PrimitiveModel):
    """A reference is represented as a pointer to the values of the fields."""

    def __init__(self, manager: Any, reference: _Reference) -> None:
        values = manager.lookup(reference.whole).get_value_type()
        super().__init__(manager, reference, values.as_pointer())  # type: ignore[no-untyped-call]


@infer_getattr
class _ReferenceFields(AttributeTemplate):
    key = _Reference

    def generic_resolve(self, reference: _Reference, name: str) -> Any:  # type: ignore[override]
        whole = reference.whole
        return whole.types[whole.fields.index(name)] if name in whole.fields else None


@lower_getattr_generic(_Reference)  # type: ignore[no-untyped-call, untyped-decorator]
def _read_field(context: Any, builder: Any, reference: _Reference, value: Any, name: str) -> Any:
    place = reference.whole.fields.index(name)
    address = cgutils.gep_inbounds(builder, value, 0, place)  # type: ignore[no-untyped-call]
    return builder.load(address)


@unbox(_Reference)  # type: ignore[no-untyped-call, untyped-decorator]
def _from_python(reference: _Reference, argument: Any, context: Any) -> NativeValue:
    values = context.unbox(reference.whole, argument)
    address = cgutils.alloca_once_value(context.builder, values.value)  # type: ignore[no-untyped-call]
    return NativeValue(address, values.is_error, values.cleanup)  # type: ignore[no-untyped-call]


_LEVEL = 1
"""Level of LLVM's optimisations."""


class _KernelCode(JITCodeLibrary):
    """Code of a kernel and its helpers."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout
        for function in ll_module.functions:
            passes, builder = self._codegen._function_pass_manager(opt=_LEVEL)  # type: ignore[no-untyped-call]
            passes.run(function, builder)

    def _optimize_final_module(self) -> None:
        passes, builder = self._codegen._module_pass_manager(opt=_LEVEL)  # type: ignore[no-untyped-call]
        passes.run(self._final_module, builder)


class _HelperCode(_KernelCode):
    """Code to be copied into kernels; it is in no execution engine, so it has no address."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()  # type: ignore[no-untyped-call]
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """Copy all linked code here; returns the null pointer."""
        self._ensure_finalized()  # type: ignore[no-untyped-call]
        return 0

    @property
    def codegen(self) -> Any:
        """The object to which numba gives a function's environment once it is in the engine."""
        return _NoEngine()


class _NoEngine:
    def set_env(self, env_name: str, env: object) -> None:
        """Do nothing, because helpers need no environment: kernels from the cache have none."""


class KernelCompiler(Compiler):
    """Compiles functions that Python calls."""

    _library: type[JITCodeLibrary] = _KernelCode

    def define_pipelines(self) -> list[Any]:
        """Numba's pipelines, with ``_library`` for the code."""
        state = self.state
        codegen = state.targetctx.codegen()
        library = self._library(codegen, state.func_id.func_qualname)
        library.enable_object_caching()  # type: ignore[no-untyped-call]
        state.library = library
        return super().define_pipelines()  # type: ignore[no-untyped-call, no-any-return]


class HelperCompiler(KernelCompiler):
    """Compiles functions that only kernels call."""

    _library = _HelperCode


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
    "simulator/lower_bound.py",
    "simulator/memory.py",
    "simulator/multiplex.py",
    "simulator/place_facts.py",
    "simulator/referee.py",
    "simulator/successors.py",
    "simulator/task_seconds.py",
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
    if dispatcher is function:  # with NUMBA_DISABLE_JIT
        return function
    try:
        dispatcher._cache = _Cache(function)
    except RuntimeError:  # no folder is writable: compiled anew in every process
        pass
    return _straight(dispatcher)  # type: ignore[no-any-return]


def _straight(dispatcher: Any) -> Any:
    """A function that calls machine code without a look at each field of its arguments.

    numba looks at all of them in every call, which takes 12 microseconds for a graph's tables and
    a choice; unpacking them takes 1. So here a version is known by the classes of named tuples,
    whose fields must have the same types in all of them.
    """
    versions: dict[tuple[Any, ...], Callable[..., Any]] = {}

    @wraps(dispatcher.py_func)
    def call(*arguments: Any) -> Any:
        kinds = tuple([_kind(each) for each in arguments])
        version = versions.get(kinds)
        if version is not None:
            return version(*arguments)
        result = dispatcher(*arguments)
        types = tuple(map(dispatcher.typeof_pyval, arguments))
        versions[kinds] = dispatcher.overloads[types].entry_point
        return result

    call.dispatcher, call.versions = dispatcher, versions  # type: ignore[attr-defined]
    return call


def _kind(argument: Any) -> Any:
    """The class of an argument; of an array and a plain tuple all that numba's type of it says."""
    kind = type(argument)
    if kind is np.ndarray:
        return argument.dtype, argument.ndim, argument.flags.num
    return tuple(map(_kind, argument)) if kind is tuple else kind


def helper(function: Function) -> Function:
    """Compile a function that only kernels call and that allocates no arrays."""
    return _helper(function, _HELPER)


def inlined(function: Function) -> Function:
    """Compile a helper that LLVM copies into every caller, whether it thinks that pays or not."""
    return _helper(function, _HELPER | {"forceinline": True})


def _helper(function: Function, options: dict[str, Any]) -> Function:
    compiled = _compiled(function, options)
    if compiled is not function:
        _take_any_integer(compiled)
    return compiled


def records(count: int, fields: np.dtype[np.void]) -> npt.NDArray[np.void]:
    """Empty records whose fields kernels access by name, even if kernels run as Python.

    Kernels run as Python under NUMBA_DISABLE_JIT. Otherwise ``_Record`` would only cost time,
    because numba recognises numpy's own type at once.
    """
    is_compiled = not nb.config.DISABLE_JIT  # type: ignore[attr-defined]
    return np.empty(count, fields if is_compiled else np.dtype((_Record, fields)))


class _Record(np.record):  # type: ignore[misc]
    """A record whose fields are attributes, even if numpy has one of that name (``device``)."""

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
    whole = isinstance(plain, nb.types.Integer | nb.types.IntEnumMember)
    return nb.types.int64 if whole else plain


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

    numba reads a whole index before it checks whether it is stale. So every command would fail on
    a file of an older version that names a removed class, or on a file that was cut short when a
    disk was full.
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
