"""The table of built-in workloads, and workloads from a user's own file."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from heterog.errors import HeterogError, InputFileError, named
from heterog.graph.workload import Workload
from heterog.user_code import (
    as_script,
    callable_in,
    failures_told,
    is_from_file,
    split_source,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooEntry:
    """One built-in workload: its row in ``heterog models``, and how to make it.

    Attributes:
        name: Name that users type.
        family: ``"vision"``, ``"language"``, ``"moe"`` or ``"graph"``.
        default_batch_size: Global batch size, in samples, used when the user gives none.
        num_parameters: Number of trainable scalars, a tied tensor counted once.
        description: One line for tables.
        build: Function that makes the workload for a batch size; imports torch only when called.
    """

    name: str
    family: str
    default_batch_size: int
    num_parameters: int
    description: str
    build: Callable[[int], Workload]


def names() -> tuple[str, ...]:
    """The names of all zoo workloads, in the order of the table."""
    return tuple(_ENTRIES)


def entry(name: str) -> ZooEntry:
    """The zoo entry of that name.

    >>> entry("vgg19").default_batch_size
    192

    Raises:
        UnknownNameError: no such entry; the text names the closest one.
    """
    return named("model", name, _ENTRIES)


def build(name: str, batch_size: int | None = None) -> Workload:
    """The zoo workload of that name, at its default batch size unless one is given.

    No weight is allocated: the workload holds functions that make the model and the batch.

    Raises:
        UnknownNameError: no such entry.
        HeterogError: the batch size is below one.
    """
    found = entry(name)
    if batch_size is None:
        batch_size = found.default_batch_size
    _check_batch_size(batch_size)
    return replace(found.build(batch_size), name=name, source=name)


def load_workload(
    source: str, batch_size: int | None = None, *, must_take: bool = True
) -> Workload:
    """The workload that ``source`` names: a zoo name or ``path/to/file.py:function``.

    The function of a file takes ``batch_size`` or nothing and returns a ``Workload``. The file is
    imported, and the function runs, as if it were a script without arguments (``as_script``). The
    workload's ``source`` becomes the absolute path, and its ``name`` the function's unless the
    workload has one.

    Args:
        source: Source of the workload.
        batch_size: Batch size of its example batch; by default its own.
        must_take: Whether a batch size is an error for a function that takes none. To run a plan,
            its batch size is passed, and the batches are compared later.

    Raises:
        UnknownNameError: ``source`` is not a path and the zoo has no such entry.
        HeterogError: the batch size is below one.
        InputFileError: the file or the function is missing, fails, or returns something else.
    """
    if not is_from_file(source):
        return build(source, batch_size)
    if batch_size is not None:
        _check_batch_size(batch_size)
    path, function_name = split_source(source, "function")
    with as_script(path):
        function = callable_in(path, function_name)
        if not must_take and not _takes_batch_size(function):
            batch_size = None
        workload = _call(path, function, function_name, batch_size)
    name = function_name if workload.name == "workload" else workload.name
    return replace(workload, name=name, source=f"{path}:{function_name}")


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise HeterogError(f"the batch size must be at least 1 sample, got {batch_size}.")


def _call(path: Path, function: object, name: str, batch_size: int | None) -> Workload:
    """The result of the user's function, checked to be a workload."""
    from heterog.graph.workload import Workload

    assert callable(function)
    options = _call_options(path, function, name, batch_size)
    with failures_told(path):
        workload = function(**options)
    if not isinstance(workload, Workload):
        raise InputFileError(
            f"{path}: '{name}' returned {type(workload).__name__}, not a heterog Workload."
        )
    return workload


def _call_options(
    path: Path, function: Callable[..., object], name: str, batch_size: int | None
) -> dict[str, Any]:
    """The keyword arguments for the user's function: ``batch_size`` or nothing."""
    parameters = inspect.signature(function).parameters
    needed = {
        key
        for key, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }
    if other := sorted(needed - {"batch_size"}):
        raise InputFileError(
            f"{path}: '{name}' needs the argument {', '.join(other)}; a workload function takes "
            "batch_size or nothing."
        )
    if batch_size is not None:
        if not _takes_batch_size(function):
            raise InputFileError(
                f"{path}: a batch size of {batch_size} was asked for, but '{name}' does not take "
                f"one; write 'def {name}(batch_size)' or leave the batch size out."
            )
        return {"batch_size": batch_size}
    if needed:
        raise InputFileError(
            f"{path}: '{name}' needs a batch size; give one, or give batch_size a default there."
        )
    return {}


def _takes_batch_size(function: object) -> bool:
    assert callable(function)
    parameters = inspect.signature(function).parameters
    return "batch_size" in parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )


Builders = dict[str, Callable[[str, int], Workload]]
"""Functions of a module that make workloads from their name and a batch size, by name."""


def _build(module: str, name: str, batch_size: int) -> Workload:
    """Build a workload; imports its module, and so torch, only now."""
    builders: Builders = importlib.import_module(f"heterog.zoo.{module}").WORKLOADS
    return builders[name](name, batch_size)


_TABLE = (
    ("vgg19", "vision", "vision", 192, 143_667_240, "VGG-19, 224 x 224"),
    ("resnet50", "vision", "vision", 192, 25_557_032, "ResNet-50, 224 x 224"),
    ("resnet200", "vision", "vision", 192, 64_673_832, "ResNet-200, 224 x 224"),
    ("inception_v3", "vision", "vision", 192, 23_834_568, "Inception-v3, 299 x 299"),
    ("mobilenet_v2", "vision", "vision", 192, 3_504_872, "MobileNetV2, 224 x 224"),
    ("nasnet_large", "vision", "vision", 192, 88_753_150, "NASNet-A (6 @ 4032), 331 x 331"),
    ("vit_base", "vision", "vision", 64, 86_567_656, "ViT-Base/16, 224 x 224"),
    ("cosmoflow_128", "vision", "volumes", 8, 35_258_020, "CosmoFlow, 128 x 128 x 128"),
    ("cosmoflow_512", "vision", "volumes", 1, 38_797_476, "CosmoFlow, 512 x 512 x 512"),
    ("unet3d", "vision", "volumes", 1, 19_071_459, "3D U-Net, 128 x 128 x 128, three labels"),
    ("transformer_6l", "language", "language", 720, 69_740_544, "Transformer, 6 + 6 layers"),
    ("transformer_24l", "language", "language", 120, 202_156_032, "Transformer, 24 + 24 layers"),
    ("bert_base", "language", "language", 64, 109_514_298, "BERT-base, 128 tokens"),
    ("bert_large_24l", "language", "language", 48, 335_174_458, "BERT-large, 128 tokens"),
    ("bert_large_48l", "language", "language", 24, 637_483_834, "BERT-large, 48 layers"),
    ("xlnet_large_24l", "language", "language", 48, 360_300_800, "XLNet-large, 128 tokens"),
    ("xlnet_large_48l", "language", "language", 24, 687_800_576, "XLNet-large, 48 layers"),
    ("gpt2", "language", "language", 32, 124_439_808, "GPT-2, 512 tokens"),
    ("llama_1b", "language", "language", 16, 1_235_814_400, "Llama 3.2 1B, 512 tokens"),
    ("gcn_2l", "graph", "graphs", 1, 34_960, "GCN, two layers, a graph of 8,192 nodes"),
    ("sage_2l", "graph", "graphs", 1, 69_776, "GraphSAGE, two layers, 8,192 nodes"),
    ("bert_moe", "moe", "moe", 64, 534_605_370, "BERT-base, 16 experts in every second layer"),
)
"""Name, family, module, batch size, number of parameters and description of each workload."""
_ENTRIES = {
    name: ZooEntry(
        name=name,
        family=family,
        default_batch_size=batch_size,
        num_parameters=num_parameters,
        description=description,
        build=partial(_build, module, name),
    )
    for name, family, module, batch_size, num_parameters, description in _TABLE
}
