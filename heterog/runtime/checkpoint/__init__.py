"""Checkpoints of a deployed step, which another plan can resume.

    folder/
      checkpoint.json     what is saved and where, the optimizer's options, whatever else was given
      data-3/             in the form of torch.distributed.checkpoint
        __0_0.distcp      tensors that rank 0 owns
        __1_0.distcp

Every tensor is stored under the name of its parameter and written once, by the rank whose copy
counts; so a plan for other devices, shares, homes or another number of ranks finds what it needs.
If ranks hold a parameter in slices (ZeRO, op rules, both), each writes its own slice, in boxes of
the whole tensor: ``model.weight[10:20,0:8]``. All ranks must see the folder.

Every tensor and the index itself carry a checksum, which is compared when they are read.

A new checkpoint gets a data folder of its own, and ``checkpoint.json`` is replaced when the folder
is complete: a crash at any time leaves the old checkpoint.

Nothing is unpickled, neither from files nor from the network: ranks exchange JSON, and tensors are
read by ``torch.load(weights_only=True)``. torch's own description of such a folder is a pickle
(``data-3/.metadata``). It is written for torch's tools; heterog reads ``checkpoint.json`` only.

``steps`` saves and loads; the names here are imported at first use. ``state`` decides what a step
saves and on which rank, and loads it; ``held`` finds the ``boxes`` that a rank holds, ``left_out``
handles what codecs have left out; ``contents`` is the index, ``files`` the other files.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heterog.runtime.checkpoint.contents import read_contents
    from heterog.runtime.checkpoint.steps import load_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "read_contents", "save_checkpoint"]

_HOME = {"load_checkpoint": "steps", "read_contents": "contents", "save_checkpoint": "steps"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'heterog.runtime.checkpoint' has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
