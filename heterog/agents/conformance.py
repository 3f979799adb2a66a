"""Checks that every encoder has to pass; run them on your own with ``check_encoder(Mine)``."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from heterog.agents.config import PolicyConfig
from heterog.agents.encoder import BUILT_IN, ENCODERS
from heterog.agents.graph_data import PairBatch
from heterog.envs.pair import Pair
from heterog.envs.toy import chain_graph, toy_cluster
from heterog.errors import ConformanceError
from heterog.names import own_name
from heterog.user_code import load_object

Encoder = Callable[[PolicyConfig], nn.Module]


def check_encoder(encoder: Encoder, config: PolicyConfig | None = None) -> None:
    """Run an encoder on two pairs of unequal size, together and each alone.

    Args:
        encoder: Function that makes the network for a configuration.
        config: Sizes to try; those of ``heterog train`` by default.

    Raises:
        ConformanceError: it fails, its shapes differ from those in ``ENCODERS``, an embedding is
            not finite or depends on the other pairs of a batch, or no gradient reaches a weight.
    """
    name = own_name(encoder)
    config = config or PolicyConfig()
    pairs = [Pair(chain_graph(layers), toy_cluster()) for layers in (2, 5)]
    torch.manual_seed(0)
    try:
        network = encoder(config).eval()
        together = _embeddings(network, pairs)
        alone = [_embeddings(network, [pair]) for pair in pairs]
    except Exception as error:
        raise ConformanceError(f"encoder {name} fails: {type(error).__name__}: {error}") from error
    sizes = [(pair.num_blocks, pair.num_candidates) for pair in pairs]
    for place, what in enumerate(("blocks", "candidates")):
        found = together[place]
        wanted = (len(pairs), max(size[place] for size in sizes), config.width)
        if tuple(found.shape) != wanted:
            raise ConformanceError(
                f"encoder {name} embeds {what} as {tuple(found.shape)}; wanted is {wanted}: "
                f"pairs, {what} of the largest, width."
            )
        for index, size in enumerate(sizes):
            own = found[index, : size[place]]
            if not bool(torch.isfinite(own).all()):
                raise ConformanceError(f"encoder {name} makes embeddings that are not finite.")
            if not torch.allclose(own, alone[index][place][0], atol=1e-4, rtol=1e-4):
                raise ConformanceError(
                    f"encoder {name} embeds the {what} of a pair differently beside another pair; "
                    "mask what is padding, and do not normalise over a batch."
                )
    _check_gradients(name, network, together)


def load_encoder(source: str) -> str:
    """Enter the encoder of ``path/to/file.py:name`` in ``ENCODERS``, and return its name there.

    Raises:
        InputFileError: the file or the name is missing, or running the file fails.
        ConformanceError: see ``check_encoder``; or the name is one of the package's.
    """
    found = load_object(source, "encoder")
    name = source.rpartition(":")[2]
    if name in BUILT_IN:
        raise ConformanceError(
            f"{source}: '{name}' is an encoder of the package; give yours another name."
        )
    assert callable(found)
    check_encoder(found)
    ENCODERS[name] = found
    return name


def _embeddings(network: nn.Module, pairs: list[Pair]) -> tuple[Tensor, Tensor]:
    blocks, candidates = network(PairBatch([pair.observation for pair in pairs]).graphs)
    return blocks, candidates


def _check_gradients(name: str, network: nn.Module, embeddings: tuple[Tensor, Tensor]) -> None:
    weights = [weight for weight in network.parameters() if weight.requires_grad]
    # Squared, because the sum of a final norm's outputs does not depend on its inputs.
    loss = torch.stack([(each**2 * torch.rand(each.shape[-1])).sum() for each in embeddings]).sum()
    reached = loss.requires_grad and any(
        gradient is not None for gradient in torch.autograd.grad(loss, weights, allow_unused=True)
    )
    if weights and not reached:
        raise ConformanceError(
            f"encoder {name} has {len(weights)} weights, and no gradient reaches any of them."
        )
