"""Families that were written after everything else worked, and run once to see what breaks."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric import nn as pyg

from families.family import BATCH, FLOAT32, Batch, family, sgd
from families.graphs import EDGES, NODES, edges_of_batch
from families.language import (
    VOCABULARY,
    causal,
    config_of,
    hugging_face,
    padded_batch,
    small,
    tokens,
)
from families.training import network, numbers
from families.vision import LABELS, classifier, images
from heterog.graph.workload import Workload


@family("gemma3", tolerance=FLOAT32)
def gemma3() -> Workload:
    """Gemma 3: local and global layers with unlike rotary bases."""
    return hugging_face(
        lambda: small("Gemma3Text", num_key_value_heads=1, head_dim=8, sliding_window=4),
        "Gemma3ForCausalLM",
        padded_batch,
    )


@family("phi3", tolerance=FLOAT32)
def phi3() -> Workload:
    """Phi-3: queries, keys and values from one weight, gate and up from another."""
    return causal("Phi3", num_key_value_heads=1, batch=padded_batch)


@family("olmoe", tolerance=FLOAT32)
def olmoe() -> Workload:
    """OLMoE with the router's balance loss."""
    return causal("Olmoe", num_experts=4, num_experts_per_tok=2, output_router_logits=True,
                  router_aux_loss_coef=0.1, dtype=torch.float32)  # fmt: skip


@family("mamba2", tolerance=FLOAT32)
def mamba2() -> Workload:
    """Mamba 2: a state space in chunks."""
    return causal("Mamba2", num_heads=4, head_dim=8, state_size=4, n_groups=1, chunk_size=4,
                  expand=2)  # fmt: skip


@family("granite", tolerance=FLOAT32)
def granite() -> Workload:
    """Granite: scaled embedding, residuals and logits."""
    return causal("Granite", num_key_value_heads=1, residual_multiplier=0.5)


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

    def batch() -> Batch:
        return {"input_ids": tokens(), "labels": torch.randint(0, 2, (BATCH,))}

    return hugging_face(
        lambda: small("FNet", use_tpu_fourier_optimizations=False),
        "FNetForSequenceClassification",
        batch,
    )


@family("beit")
def beit() -> Workload:
    """BEiT: relative position biases, scaled layers."""
    return classifier("Beit", use_relative_position_bias=True, drop_path_rate=0.0)


@family("regnet")
def regnet() -> Workload:
    """RegNet: grouped convolutions, squeeze and excitation, BatchNorm."""
    return hugging_face(
        lambda: config_of("RegNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1],
                          groups_width=4, layer_type="y", num_labels=LABELS),
        "RegNetForImageClassification",
        lambda: images(32),
    )  # fmt: skip


@family("pyg_gine_edges")
def gine() -> Workload:
    """Edges with features, attention with edge features, and a readout by attention."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = pyg.GINEConv(network(6, 8, 8), edge_dim=3)
            self.second = pyg.GATv2Conv(8, 8, edge_dim=3)
            self.norm = pyg.LayerNorm(8, mode="node")
            self.gate, self.head = nn.Linear(8, 1), nn.Linear(8, 1)

        def forward(self, x: Tensor, edges: Tensor, features: Tensor, wanted: Tensor) -> Tensor:
            x = torch.relu(self.first(x, edges, features))
            x = self.norm(self.second(x, edges, features)).view(BATCH, NODES, 8)
            pooled = (self.gate(x).softmax(1) * x).sum(1)
            return functional.mse_loss(self.head(pooled).squeeze(-1), wanted)

    def batch() -> Batch:
        return (
            torch.randn(BATCH * NODES, 6, dtype=torch.float64),
            edges_of_batch(),
            torch.randn(BATCH * EDGES, 3, dtype=torch.float64),
            numbers(),
        )

    return sgd(lambda: Network().double(), batch)


@family("vq_vae")
def vq_vae() -> Workload:
    """VQ-VAE: the nearest code by ``argmin``, the gradient straight through."""

    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = network(6, 8, 4), network(4, 8, 6)
            self.codes = nn.Embedding(7, 4)

        def forward(self, x: Tensor) -> Tensor:
            z = self.encoder(x)
            nearest = torch.cdist(z, self.codes.weight).argmin(-1)
            code = self.codes(nearest)
            found = self.decoder(z + (code - z).detach())
            commit = functional.mse_loss(z, code.detach()) + functional.mse_loss(code, z.detach())
            return functional.mse_loss(found, x) + commit

    return sgd(lambda: Quantised().double(), lambda: (numbers(6),))


@family("segmentation_dice")
def segmentation_dice() -> Workload:
    """A U-Net with BatchNorm and transposed convolutions, a Dice loss of every sample."""

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
            self.deep = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
            self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
            self.last = nn.Conv2d(8, 1, 1)

        def forward(self, image: Tensor, mask: Tensor) -> Tensor:
            wide = self.down(image)
            deep = self.deep(functional.max_pool2d(wide, 2))
            likely = torch.sigmoid(self.last(torch.cat([wide, self.up(deep)], 1)))
            both = (likely * mask).flatten(1).sum(1)
            every = likely.flatten(1).sum(1) + mask.flatten(1).sum(1)
            return (1 - 2 * both / (every + 1)).mean()

    return sgd(
        lambda: UNet().double(), lambda: (numbers(1, 8, 8), numbers(1, 8, 8).gt(0).double())
    )


@family("neural_ode")
def neural_ode() -> Workload:
    """A differential equation, integrated by Runge and Kutta's method in the model."""

    class Ode(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slope = network(5, 8, 4)

        def forward(self, start: Tensor) -> Tensor:
            x, step = start, 0.25
            for number in range(4):
                time = torch.full_like(x[:, :1], number * step)
                one = self.slope(torch.cat([x, time], 1))
                two = self.slope(torch.cat([x + step / 2 * one, time + step / 2], 1))
                x = x + step * two
            return x

    return sgd(lambda: Ode().double(), lambda: (numbers(4), numbers(4)), loss=functional.mse_loss)


@family("crf_tagger")
def crf_tagger() -> Workload:
    """An LSTM with a conditional random field: the forward algorithm as loss."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, 8)
            self.lstm = nn.LSTM(8, 6, batch_first=True, bidirectional=True)
            self.head = nn.Linear(12, LABELS)
            self.change = nn.Parameter(torch.randn(LABELS, LABELS) * 0.1)

        def forward(self, words: Tensor, tags: Tensor) -> Tensor:
            scores = self.head(self.lstm(self.embedding(words))[0])
            every = scores[:, 0]
            for place in range(1, words.shape[1]):
                steps = every.unsqueeze(2) + self.change + scores[:, place].unsqueeze(1)
                every = steps.logsumexp(1)
            own = scores.gather(2, tags.unsqueeze(2)).sum((1, 2))
            own = own + self.change[tags[:, :-1], tags[:, 1:]].sum(1)
            return (every.logsumexp(1) - own).mean()

    return sgd(lambda: Tagger().double(),
               lambda: (tokens(), torch.randint(0, LABELS, (BATCH, 6))))  # fmt: skip
