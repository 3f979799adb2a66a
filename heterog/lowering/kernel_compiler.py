"""How kernels and their helpers are compiled: as much as makes them fast, and no more.

Left to itself, numba optimises a helper, links it into each function that calls it, and optimises
all of it again there, at every level of a chain of calls; and it makes machine code of each, which
nobody runs. For our kernels, whose helpers call helpers six deep, that was a third of the time.
Here a helper is only simplified, function by function, and copied into its callers; the kernel at
the top is optimised as a whole, once, at LLVM's first level. Those above take longer, and our
kernels, which are branches and lists of integers, get no faster by them.

``Compiler`` is how numba is meant to be extended. Its libraries of code are not; what is changed
here of ``JITCodeLibrary`` are the three places where code is optimised, given to the machine and
asked for its address.
"""

from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler

_LEVEL = 1
"""Of LLVM's optimisations."""


class _KernelCode(JITCodeLibrary):
    """Code of a kernel, with that of its helpers."""

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout
        for function in ll_module.functions:
            passes, builder = self._codegen._function_pass_manager(opt=_LEVEL)  # type: ignore[no-untyped-call]
            passes.run(function, builder)

    def _optimize_final_module(self) -> None:
        passes, builder = self._codegen._module_pass_manager(opt=_LEVEL)  # type: ignore[no-untyped-call]
        passes.run(self._final_module, builder)


class _HelperCode(_KernelCode):
    """Code to be copied into kernels. It is in no execution engine, so it has no address."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()  # type: ignore[no-untyped-call]
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """The null pointer, after all that is linked has been copied here."""
        self._ensure_finalized()  # type: ignore[no-untyped-call]
        return 0

    @property
    def codegen(self) -> Any:
        """The object that numba hands a function's environment to once it is in the engine."""
        return _NoEngine()


class _NoEngine:
    def set_env(self, env_name: str, env: object) -> None:
        """Nothing to set; kernels that come from the cache have no environments of helpers."""


class KernelCompiler(Compiler):
    """Compiles functions that Python calls."""

    _library: type[JITCodeLibrary] = _KernelCode

    def define_pipelines(self) -> list[Any]:
        """Do as numba does, with ``_library`` for the code."""
        state = self.state
        codegen = state.targetctx.codegen()
        library = self._library(codegen, state.func_id.func_qualname)
        library.enable_object_caching()  # type: ignore[no-untyped-call]
        state.library = library
        return super().define_pipelines()  # type: ignore[no-untyped-call, no-any-return]


class HelperCompiler(KernelCompiler):
    """Compiles functions that only kernels call."""

    _library = _HelperCode
