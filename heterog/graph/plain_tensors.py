"""What code asks of a tensor beside its values, answered during a capture as in training.

Fake tensors have a class of their own and no memory: ``type(x) is Tensor`` would be false, and all
of them at one address.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from heterog.graph.python_state import PythonState
from heterog.graph.value_numbers import storage_of

_APART = 20  # memory of a storage in these addresses, as a power of two


@contextmanager
def plain_tensors(state: PythonState) -> Iterator[None]:
    """Make fake tensors have the class of tensors in training, and addresses as unlike.

    Args:
        state: Says which functions of the user ask for classes.
    """
    owner: Any = FakeTensor
    storage: Any = torch.UntypedStorage
    address = storage.data_ptr

    def of_storage(self: torch.UntypedStorage) -> int:
        return int(self._cdata << _APART if self.device.type == "meta" else address(self))

    owner.data_ptr = _address
    if state.reads_class:  # only then, because all attributes are read through it
        owner.__getattribute__ = _attribute
    storage.data_ptr = of_storage
    changed = [each for each in state.naming_type if "type" not in each]
    for each in changed:
        each["type"] = _Type
    try:
        yield
    finally:
        for each in changed:
            del each["type"]
        storage.data_ptr = address
        del owner.data_ptr
        if state.reads_class:
            del owner.__getattribute__


def _class_of(tensor: Any) -> type:
    return nn.Parameter if getattr(tensor, "_is_param", False) else Tensor


def _attribute(tensor: Any, name: str) -> Any:
    return _class_of(tensor) if name == "__class__" else Tensor.__getattribute__(tensor, name)


def _address(tensor: Tensor) -> int:
    return (storage_of(tensor) << _APART) + int(tensor.storage_offset()) * tensor.element_size()


class _Kind(type):
    """Makes ``_Type`` do what ``type`` does, with another answer for a fake tensor."""

    def __call__(cls, *args: Any, **keywords: Any) -> Any:
        if len(args) == 1 and type(args[0]) is FakeTensor:
            return _class_of(args[0])
        return type(*args, **keywords)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, type)


class _Type(type, metaclass=_Kind):
    """What functions find by the name ``type``."""
