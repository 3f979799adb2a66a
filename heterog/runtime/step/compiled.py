"""Compiles the kernels of segments with torch's inductor, those that do alike once.

Compiled code is kept by torch's own cache, across runs and ranks.
"""

import logging
import time
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

_LOG = logging.getLogger(__name__)

Kernels = Callable[[list[Tensor]], list[Tensor]]
"""Takes its inputs out of a list, so that it may drop them, and returns its outputs."""


class Compiler:
    """Compiles functions of tensors when they are first called.

    Attributes:
        seconds: Seconds that compiling has taken so far.
        num_compiled: Number of functions that were compiled.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_compiled = 0
        self._known: dict[Hashable, Kernels] = {}

    def compiled(self, key: Hashable, function: Kernels) -> Kernels:
        """A function that does the same as another one; compiled when it is called first.

        Args:
            key: Functions with equal keys do the same with equal inputs.
            function: The function.
        """
        found: Kernels | None = None

        def run(given: list[Tensor]) -> list[Tensor]:
            nonlocal found
            if found is None:
                shapes = [(x.shape, x.stride(), x.dtype, x.device) for x in given]
                whole = key, *shapes
                if whole not in self._known:
                    self._known[whole] = self._compile(function, given)
                found = self._known[whole]
            return found(given)

        return run

    def _compile(self, function: Kernels, given: list[Tensor]) -> Kernels:
        begin = time.perf_counter()
        try:
            made = _inductor(function, [value.detach() for value in given])
            self.num_compiled += 1
        except Exception as error:  # whatever the compiler or g++ does not like
            first = str(error).strip().partition("\n")[0]
            _LOG.warning("not compiled, run as generated Python instead: %s", first[:200])
            made = function
        self.seconds += time.perf_counter() - begin
        return made


def _inductor(function: Kernels, given: list[Tensor]) -> Kernels:
    """Compile a function for inputs of these shapes."""
    # Seconds to import, and only needed here.
    from torch._inductor.compile_fx import compile_fx
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad():
        traced = make_fx(lambda *inputs: function(list(inputs)), tracing_mode="fake")(*given)
        made = compile_fx(traced, given)

    def run(inputs: list[Tensor]) -> list[Tensor]:
        taken = tuple(inputs)
        inputs.clear()
        return list(made(*taken))

    return run
