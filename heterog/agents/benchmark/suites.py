"""The suites: named lists of pairs of model and cluster.

``paper`` has the models of HeteroG's paper, ``families`` a model of each family, ``scale``
clusters of 64 to 1,024 devices with four samples per device. ``layouts`` has models whose state
fills a device, so that they need stages or slices. ``placement`` places single operations on equal
devices (``tiles``).
"""

from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path

from heterog.agents.benchmark.pair_lists import PairLine, read_pairs
from heterog.agents.benchmark.tiles import placement_pairs
from heterog.errors import named

_PAPER = (
    *("vgg19", "resnet200", "inception_v3", "mobilenet_v2", "nasnet_large"),
    *("transformer_6l", "bert_large_24l", "xlnet_large_24l"),
)
_FAMILIES = ("vit_base", "bert_base", "gpt2", "sage_2l", "bert_moe", "unet3d")
_LARGE = ("llama_1b", "bert_large_48l", "xlnet_large_48l", "bert_moe")
_SAMPLES = 4
"""Samples of each device of a large cluster."""


def _every(models: Iterable[str], clusters: Iterable[str]) -> list[PairLine]:
    return [PairLine(*names, " ".join(names)) for names in product(models, clusters)]


def _scale() -> list[PairLine]:
    return [
        PairLine(model, f"mixed_{count}", f"{model} x{_SAMPLES * count} mixed_{count}", batch)
        for model, count in product(("bert_base", "vit_base"), (64, 256, 1024))
        for batch in (_SAMPLES * count,)
    ]


SUITES: dict[str, Callable[[], list[PairLine]]] = {
    "paper": lambda: _every(_PAPER, ("paper_8gpu", "paper_12gpu")),
    "families": lambda: _every(_FAMILIES, ("paper_8gpu", "rtx_mixed")),
    "scale": _scale,
    "layouts": lambda: _every(_LARGE, ("a100_v100_16", "mixed_32")),
    "placement": placement_pairs,
}
"""Functions that make the pairs of each suite."""


def pairs_of(suite: str) -> list[PairLine]:
    """The pairs of a suite, given by name or as a file with one pair a line.

    Raises:
        UnknownNameError: it is neither a file nor the name of a suite.
    """
    if Path(suite).suffix == ".jsonl":
        return read_pairs(Path(suite))
    return named("suite", suite, SUITES)()
