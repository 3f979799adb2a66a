"""Families that were written after everything else worked, and run once to see what breaks."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric import nn as pyg

from families.family import BATCH, FLOAT32, Batch, Family, enter, family, trained
from families.graphs import EDGES, NODES, edges_of_batch
from families.language import (
    VOCABULARY,
    classes_batch,
    config_of,
    decoder,
    hugging_face,
    padded_batch,
    small,
    tokens,
)
from families.training import network, numbers
from families.vision import LABELS, classifier, images
from heterog.graph.workload import Workload


@family("mbart")
def mbart() -> Workload:
    """mBART: norms first, labels with padding."""
    sizes = {
        "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
        "init_std": 0.2,
    }  # fmt: skip
    return hugging_face(lambda: small("MBart", **sizes), "MBartForConditionalGeneration",
                        padded_batch)  # fmt: skip


@family("fnet", tolerance=FLOAT32)
def fnet() -> Workload:
    """FNet: Fourier transforms over tokens and features instead of attention."""
    return hugging_face(
        lambda: small("FNet", use_tpu_fourier_optimizations=False),
        "FNetForSequenceClassification",
        lambda: classes_batch(2),
    )


def _gine_batch() -> Batch:
    return (
        torch.randn(BATCH * NODES, 6, dtype=torch.float64),
        edges_of_batch(),
        torch.randn(BATCH * EDGES, 3, dtype=torch.float64),
        numbers(),
    )


@trained(
    "pyg_gine_edges",
    lambda: {
        "first": pyg.GINEConv(network(6, 8, 8), edge_dim=3),
        "second": pyg.GATv2Conv(8, 8, edge_dim=3),
        "norm": pyg.LayerNorm(8, mode="node"),
        "gate": nn.Linear(8, 1),
        "head": nn.Linear(8, 1),
    },
    _gine_batch,
)
def gine(net: Any, x: Tensor, edges: Tensor, features: Tensor, wanted: Tensor) -> Tensor:
    """Edges with features, attention with edge features, and a readout by attention."""
    x = torch.relu(net.first(x, edges, features))
    x = net.norm(net.second(x, edges, features)).view(BATCH, NODES, 8)
    return functional.mse_loss(net.head((net.gate(x).softmax(1) * x).sum(1)).squeeze(-1), wanted)


@trained(
    "vq_vae",
    lambda: {
        "encoder": network(6, 8, 4),
        "decoder": network(4, 8, 6),
        "codes": nn.Embedding(7, 4),
    },
    lambda: (numbers(6),),
)
def vq_vae(net: Any, x: Tensor) -> Tensor:
    """VQ-VAE: the nearest code by ``argmin``, the gradient straight through."""
    z = net.encoder(x)
    code = net.codes(torch.cdist(z, net.codes.weight).argmin(-1))
    found = net.decoder(z + (code - z).detach())
    commit = functional.mse_loss(z, code.detach()) + functional.mse_loss(code, z.detach())
    return functional.mse_loss(found, x) + commit


@trained(
    "segmentation_dice",
    lambda: {
        "down": nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
        "deep": nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        "up": nn.ConvTranspose2d(8, 4, 2, stride=2),
        "last": nn.Conv2d(8, 1, 1),
    },
    lambda: (numbers(1, 8, 8), numbers(1, 8, 8).gt(0).double()),
)
def segmentation_dice(net: Any, image: Tensor, mask: Tensor) -> Tensor:
    """A U-Net with BatchNorm and transposed convolutions, a Dice loss of every sample."""
    wide = net.down(image)
    deep = net.deep(functional.max_pool2d(wide, 2))
    likely = torch.sigmoid(net.last(torch.cat([wide, net.up(deep)], 1)))
    both = (likely * mask).flatten(1).sum(1)
    every = likely.flatten(1).sum(1) + mask.flatten(1).sum(1)
    return (1 - 2 * both / (every + 1)).mean()


@trained(
    "neural_ode",
    lambda: {"slope": network(5, 8, 4)},
    lambda: (numbers(4), numbers(4)),
    loss=functional.mse_loss,
)
def neural_ode(net: Any, start: Tensor) -> Tensor:
    """A differential equation, integrated by Runge and Kutta's method in the model."""
    x, step = start, 0.25
    for number in range(4):
        time = torch.full_like(x[:, :1], number * step)
        one = net.slope(torch.cat([x, time], 1))
        two = net.slope(torch.cat([x + step / 2 * one, time + step / 2], 1))
        x = x + step * two
    return x


@trained(
    "crf_tagger",
    lambda: {
        "embedding": nn.Embedding(VOCABULARY, 8),
        "lstm": nn.LSTM(8, 6, batch_first=True, bidirectional=True),
        "head": nn.Linear(12, LABELS),
        "change": nn.Parameter(torch.randn(LABELS, LABELS) * 0.1),
    },
    lambda: (tokens(), torch.randint(0, LABELS, (BATCH, 6))),
)
def crf_tagger(net: Any, words: Tensor, tags: Tensor) -> Tensor:
    """An LSTM with a conditional random field: the forward algorithm as loss."""
    scores = net.head(net.lstm(net.embedding(words))[0])
    every = scores[:, 0]
    for place in range(1, words.shape[1]):
        steps = every.unsqueeze(2) + net.change + scores[:, place].unsqueeze(1)
        every = steps.logsumexp(1)
    own = scores.gather(2, tags.unsqueeze(2)).sum((1, 2))
    own = own + net.change[tags[:, :-1], tags[:, 1:]].sum(1)
    return (every.logsumexp(1) - own).mean()


enter(
    Family(
        "gemma3",
        "Gemma 3: local and global layers with unlike rotary bases.",
        lambda: hugging_face(
            lambda: small("Gemma3Text", num_key_value_heads=1, head_dim=8, sliding_window=4),
            "Gemma3ForCausalLM",
            padded_batch,
        ),
        tolerance=FLOAT32,
    ),
    decoder(
        "phi3", "Phi-3: queries, keys and values from one weight, gate and up from another.",
        "Phi3", num_key_value_heads=1, batch=padded_batch,
    ),
    decoder(
        "olmoe", "OLMoE with the router's balance loss.", "Olmoe",
        num_experts=4, num_experts_per_tok=2, output_router_logits=True,
        router_aux_loss_coef=0.1, dtype=torch.float32,
    ),
    decoder(
        "mamba2", "Mamba 2: a state space in chunks.", "Mamba2",
        num_heads=4, head_dim=8, state_size=4, n_groups=1, chunk_size=4, expand=2,
    ),
    decoder(
        "granite", "Granite: scaled embedding, residuals and logits.", "Granite",
        num_key_value_heads=1, residual_multiplier=0.5,
    ),
    Family(
        "beit",
        "BEiT: relative position biases, scaled layers.",
        lambda: classifier("Beit", use_relative_position_bias=True, drop_path_rate=0.0),
    ),
    Family(
        "regnet",
        "RegNet: grouped convolutions, squeeze and excitation, BatchNorm.",
        lambda: hugging_face(
            lambda: config_of(
                "RegNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=4,
                layer_type="y", num_labels=LABELS,
            ),
            "RegNetForImageClassification",
            lambda: images(32),
        ),
    ),
)  # fmt: skip
