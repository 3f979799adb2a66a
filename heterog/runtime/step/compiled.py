"""Compiles the kernels of segments with torch's inductor, those that do alike once.

Compiled code is kept by torch's own cache, across runs and ranks.
"""

import inspect
import logging
import re
import time
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from heterog.runtime.step.recipes import Like

_LOG = logging.getLogger(__name__)

Kernels = Callable[[list[Tensor]], Sequence[Tensor]]
"""Takes its inputs out of a list, so that it may drop them, and returns its outputs."""


class Compiler:
    """Compiles functions of tensors.

    Attributes:
        tell: Told which part is compiled next.
        seconds: Seconds that compiling has taken so far.
        num_compiled: Number of functions that were compiled.
    """

    def __init__(self) -> None:
        self.tell: Callable[[str], None] = _LOG.debug
        self.seconds = 0.0
        self.num_compiled = 0
        # With the given function, which keeps alive what its key knows by identity.
        self._known: dict[tuple[Hashable, tuple[Like, ...]], tuple[Kernels, Kernels]] = {}

    def compiled(self, key: Hashable, function: Kernels, likes: tuple[Like, ...]) -> Kernels:
        """Compile a function, unless one that does the same has been compiled.

        Args:
            key: Functions with equal keys do the same with equal inputs.
            function: The function.
            likes: What its inputs are like.

        Returns:
            The compiled function, or the given one if it cannot be compiled.
        """
        if (key, likes) not in self._known:
            begin = time.perf_counter()
            self.tell(f"part {len(self._known) + 1}")
            try:
                try:
                    made = _inductor(function, likes)
                except Exception as error:
                    if not _remove_half_written(error):
                        raise
                    made = _inductor(function, likes)
                self.num_compiled += 1
            except Exception as error:  # whatever the compiler or g++ does not like
                first = str(error).strip().partition("\n")[0]
                _LOG.warning("not compiled, run as generated Python instead: %s", first[:200])
                made = function
            self._known[key, likes] = made, function
            self.seconds += time.perf_counter() - begin
        return self._known[key, likes][0]


def _remove_half_written(error: Exception) -> bool:
    """Remove the library of torch's cache that could not be loaded; whether there was one.

    A process that is killed while it compiles leaves part of a file, which torch would take for a
    compiled library from then on.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    named = re.search(r"(/\S+\.so): ", str(error))
    path = Path(named.group(1)) if named else None
    if path is None or not path.is_file() or Path(cache_dir()) not in path.parents:
        return False
    path.unlink()
    return True


def _inductor(function: Kernels, likes: Sequence[Like]) -> Kernels:
    # Seconds to import, and only needed here.
    from torch._inductor.compile_fx import compile_fx

    return as_compiled(function, likes, lambda graph, given: boxed(compile_fx(graph, given)))


def boxed(made: Any) -> Kernels:
    """What torch wraps in functions of single tensors: it takes a list, and drops inputs early."""
    while inspect.isfunction(made) and made.__code__.co_flags & inspect.CO_VARARGS:
        made = made.__wrapped__  # type: ignore[attr-defined]
    kernels: Kernels = made
    return kernels


def as_compiled(
    function: Kernels,
    likes: Sequence[Like],
    backend: Callable[[fx.GraphModule, list[Tensor]], Kernels],
) -> Kernels:
    """Trace a function with inputs of some shapes, and give the graph to a compiler.

    Args:
        function: The function.
        likes: What its inputs are like.
        backend: Compiles the graph, for inputs like those given, which have no memory.
    """
    # Without an environment of shapes, torch's caches are bypassed.
    shapes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    with torch.no_grad():
        with FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes, static_shapes=True):
            given = [
                torch.empty_strided(each.shape, each.stride, dtype=each.dtype, device=each.device)
                for each in likes
            ]
        return backend(make_fx(lambda *inputs: tuple(function(list(inputs))))(*given), given)
