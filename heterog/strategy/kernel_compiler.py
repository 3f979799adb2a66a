"""How helpers of kernels are compiled: they are optimised in the kernels, and only there.

Left to itself, numba optimises a helper, links it into each function that calls it, and optimises
all of it again there, at every level of a chain of calls; and it makes machine code of each, which
nobody runs. For our kernels, whose helpers call helpers six deep, that was a third of the time.
Here a helper is only simplified, function by function, and copied into its callers; the kernel at
the top is optimised as a whole, once. Its code is as fast as it was.

``Compiler`` is how numba is meant to be extended. Its libraries of code are not; what is changed
here of ``JITCodeLibrary`` are the three places where code is optimised, given to the machine and
asked for its address.
"""

from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler


class HelperCompiler(Compiler):
    """Compiles functions that only kernels call."""

    def define_pipelines(self) -> list[Any]:
        """As numba's, with a library of ours for the code."""
        state = self.state
        codegen = state.targetctx.codegen()
        state.library = _HelperCode(codegen, state.func_id.func_qualname)  # type: ignore[no-untyped-call]
        return super().define_pipelines()  # type: ignore[no-untyped-call, no-any-return]


class _HelperCode(JITCodeLibrary):
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
        """What is told the environment of a function once that is in the engine."""
        return _NoEngine()


class _NoEngine:
    def set_env(self, env_name: str, env: object) -> None:
        """Nothing to set; kernels that come from the cache have no environments of helpers."""
