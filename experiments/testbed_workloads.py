"""The four workloads that are run for real on testbeds of CPUs.

Each is a function for ``heterog plan experiments/testbed_workloads.py:NAME``; weights and batches
are the same on every call. There is no dropout.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

import heterog

VOCABULARY = 4096
TOKENS = 32


def mlp(batch_size: int = 4096) -> heterog.Workload:
    """A multi-layer perceptron of 3.8 M parameters: much communication, little compute."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(1024, 1408),
            nn.ReLU(),
            nn.Linear(1408, 1408),
            nn.ReLU(),
            nn.Linear(1408, 256),
        )

    generator = torch.Generator().manual_seed(1)
    batch = (
        torch.randn(batch_size, 1024, generator=generator),
        torch.randn(batch_size, 256, generator=generator),
    )
    return heterog.Workload(model, batch, functional.mse_loss, torch.optim.SGD, {"lr": 0.01})


def vgg(batch_size: int = 384) -> heterog.Workload:
    """A VGG-like network with BatchNorm on 32 x 32 images: much compute, little communication."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        channels = 3
        for width in (32, 64, 128):
            for _ in range(2):
                layers += [
                    nn.Conv2d(channels, width, 3, padding=1, bias=False),
                    nn.BatchNorm2d(width),
                    nn.ReLU(),
                ]
                channels = width
            layers.append(nn.MaxPool2d(2))
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * 16, 10))

    generator = torch.Generator().manual_seed(1)
    batch = (
        torch.randn(batch_size, 3, 32, 32, generator=generator),
        torch.randint(0, 10, (batch_size,), generator=generator),
    )
    return heterog.Workload(model, batch, functional.cross_entropy, torch.optim.SGD, {"lr": 0.01})


class LanguageModel(nn.Module):
    """Transformer layers between a tied embedding and its decoder."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 256)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True, norm_first=True)
            for _ in range(num_layers)
        )
        self.head = nn.Linear(256, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of every position, ``[batch x tokens, vocabulary]``."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out.flatten(0, 1)


def gpt(batch_size: int = 96) -> heterog.Workload:
    """A tied language model of 4.2 M parameters."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return LanguageModel(4)

    return _tokens(model, batch_size)


def encoder(batch_size: int = 72) -> heterog.Workload:
    """A deeper Transformer encoder of 7.4 M parameters."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return LanguageModel(8)

    return _tokens(model, batch_size)


def _tokens(model: object, batch_size: int) -> heterog.Workload:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (batch_size, TOKENS), generator=generator)

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(output, labels.flatten())

    return heterog.Workload(
        model,  # type: ignore[arg-type]
        (tokens, tokens.roll(-1, 1)),
        loss,
        torch.optim.SGD,
        {"lr": 0.01},
    )
