"""The suites: lists of pairs of model and cluster that have a name."""

from itertools import product
from pathlib import Path

from heterog.agents.benchmark.pair_lists import PairLine, read_pairs
from heterog.errors import UnknownNameError

_PAPER = (
    *("vgg19", "resnet200", "inception_v3", "mobilenet_v2", "nasnet_large"),
    *("transformer_6l", "bert_large_24l", "xlnet_large_24l"),
)
_FAMILIES = ("vit_base", "bert_base", "gpt2", "sage_2l", "bert_moe", "unet3d")
SUITES = {
    "paper": tuple(product(_PAPER, ("paper_8gpu", "paper_12gpu"))),
    "families": tuple(product(_FAMILIES, ("paper_8gpu", "rtx_mixed"))),
    "scale": tuple(product(("bert_base", "vit_base"), ("mixed_64", "mixed_128", "mixed_256"))),
}
"""Pairs of each: models of HeteroG's paper, a model of each family, clusters of many devices."""


def pairs_of(suite: str) -> list[PairLine]:
    """The pairs of a suite's name, or of a file with a pair a line.

    Raises:
        UnknownNameError: there is neither.
    """
    if Path(suite).suffix == ".jsonl":
        return read_pairs(Path(suite))
    if suite not in SUITES:
        raise UnknownNameError("suite", suite, list(SUITES))
    return [PairLine(model, cluster, f"{model} {cluster}") for model, cluster in SUITES[suite]]
