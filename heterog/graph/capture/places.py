"""Where a node comes from: its module, its phase, and the line of code that makes a constant."""

import linecache
import sys
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch.fx.traceback as fx_traceback
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils.hooks import RemovableHandle

from heterog.graph.op_graph import Phase
from heterog.graph.traced_constants import MADE_AT


def is_users(filename: str) -> bool:
    """Whether a file is neither torch's nor ours."""
    path = filename.replace("\\", "/")
    return "/torch/" not in path and "/heterog/graph/" not in path and not path.startswith("<")


class LinesOfConstants(TorchFunctionMode):
    """Annotates tensors that are made from sizes alone with the lines of code that make them.

    Two ranges from different lines, of samples and of positions, say, are equal where a batch has
    as many samples as positions. They must stay two even so: see ``merge_equal_constants``.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function not in _device_constructors():
            return function(*args, **(kwargs or {}))
        with fx_traceback.annotate({MADE_AT: _users_lines()}):
            return function(*args, **(kwargs or {}))


def _users_lines() -> str:
    """The innermost line of the user's code that runs now, and the one that called it.

    Two lines tell a helper's callers apart. More would tell layers apart.
    """
    lines: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(lines) < 2:
        if is_users(frame.f_code.co_filename):
            lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back
    return " ".join(lines)


def users_line() -> str:
    """The innermost line of the user's code that runs now, with what it says."""
    place = _users_lines().split(" ")[0]
    path, _, line = place.rpartition(":")
    return f"{path}:{line} (`{linecache.getline(path, int(line)).strip()}`)" if path else ""


class OpenModules:
    """Tracks the running module, and annotates every node traced inside it with its path."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._open: list[tuple[str, AbstractContextManager[Any]]] = []
        self._handles: list[RemovableHandle] = []

    @property
    def innermost(self) -> str:
        """Path of the module that runs now."""
        name = self._open[-1][0] if self._open else ""
        return f"module '{name}'" if name else "the root module"

    def __enter__(self) -> "OpenModules":
        for module in self._names:
            self._handles.append(module.register_forward_pre_hook(self._begin))
            self._handles.append(module.register_forward_hook(self._end))
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:  # modules that an exception left
            self._end()
        for handle in self._handles:
            handle.remove()

    def _begin(self, module: nn.Module, *_: Any) -> None:
        annotation = fx_traceback.annotate({"module": self._names[module]})
        annotation.__enter__()
        self._open.append((self._names[module], annotation))

    def _end(self, *_: Any) -> None:
        self._open.pop()[1].__exit__(None, None, None)


def annotate_backward(graph: fx.Graph) -> None:
    """Write module and phase of every node into its annotation, which the retrace keeps.

    A forward node carries its module already. A backward node has its forward twin's: autograd
    gives both one sequence number (the retrace renumbers forward nodes, so this comes before it).
    Forward nodes that autograd does not see inherit the previous node's ``seq_nr``, so the first
    node of a number is the twin. Adds that accumulate gradients have no twin, ops outside any
    module no annotation: both follow the input that was made last. For a residual stream's
    gradients that is the new one; the other is the sum of all layers behind.
    """
    twins: dict[int, str] = {}
    module_of: dict[fx.Node, str] = {}
    in_backward = False
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        is_backward = bool(node.meta.get("autograd_backward"))
        in_backward |= is_backward
        number = node.meta.get("seq_nr", -1)
        module = (node.meta.get("custom") or {}).get("module")
        if module is None and is_backward:
            module = twins.get(number)
        if module is None:
            inputs = [value for value in node.all_input_nodes if value in module_of]
            module = module_of[max(inputs)] if inputs else ""  # nodes compare by their place
        elif not is_backward and number >= 0:
            twins.setdefault(number, module)
        module_of[node] = module
        phase = Phase.BACKWARD if in_backward else Phase.FORWARD
        made_at = (node.meta.get("custom") or {}).get(MADE_AT)
        node.meta["custom"] = {"module": module, "phase": int(phase), MADE_AT: made_at}
