"""Models for training and tests, drawn by a number: ``drawn_models.py:u_shape_17``.

A name is a family and a number. The number seeds every draw: depth, widths, sizes of inputs,
batch, optimizer and precision, over decades. Families come from a grammar of own modules
(``drawing/modules.py``) and from architectures of ``transformers`` without weights
(``drawing/architectures.py``). Each belongs to training, validation or test, and a policy is never
trained on a family of the other two.
"""

import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import drawing.architectures
import drawing.modules  # noqa: F401  (enters its families)
import numpy as np
import torch
from drawing.families import FAMILIES, Draw

from heterog import Workload


def families(split: str) -> list[str]:
    """Names of the families of a split."""
    return [name for name, each in FAMILIES.items() if each.split == split]


def drawn_names(split: str, count: int) -> list[str]:
    """Names of members of a split's families, every family as often as every other."""
    names = families(split)
    rng = np.random.default_rng([zlib.crc32(split.encode()), 0, count])
    return [f"{names[n % len(names)]}_{rng.integers(10_000)}" for n in range(count)]


def workload(name: str, batch_size: int | None = None) -> Workload:
    """The model of a name such as ``u_shape_17``."""
    kind, _, number = name.rpartition("_")
    rng = np.random.default_rng([zlib.crc32(kind.encode()), int(number)])
    made = FAMILIES[kind].build(Draw(rng, batch_size))
    optimizer = str(rng.choice(["Adam", "AdamW", "SGD"], p=[0.4, 0.4, 0.2]))
    options = {"lr": 0.1, "momentum": float(rng.choice([0.0, 0.9]))}
    return replace(
        made,
        optimizer=getattr(torch.optim, optimizer),
        optimizer_options=options if optimizer == "SGD" else {},
        name=name,
    )


def __getattr__(name: str) -> Callable[..., Workload]:
    """The function that makes the model of a name."""
    kind, _, number = name.rpartition("_")
    if kind not in FAMILIES or not number.isdigit():
        raise AttributeError(name)

    return partial(workload, name)
