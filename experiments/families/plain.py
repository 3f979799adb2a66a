"""Architectures in plain torch: recurrent, recommenders, sets, state spaces, experts."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from families.family import BATCH, FLOAT32, Batch, Family, enter, family, sgd, trained
from families.language import VOCABULARY, labels_of, tokens
from families.training import numbers
from heterog.graph.workload import Workload

TOKENS = 6


def flat_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of scores ``[batch * tokens, vocabulary]``."""
    return functional.cross_entropy(scores, labels.flatten())


class Recurrent(nn.Module):
    """An embedding, recurrent layers, and a head over the vocabulary; its own shifted loss."""

    def __init__(self, kind: str, *, both_ways: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        layer: Any = getattr(nn, kind)
        self.layers = layer(8, 12, num_layers=2, batch_first=True, bidirectional=both_ways)
        self.head = nn.Linear(12 * (1 + both_ways), VOCABULARY)

    def forward(self, words: Tensor) -> Tensor:
        hidden, _ = self.layers(self.embedding(words))
        scores = self.head(hidden[:, :-1]).reshape(-1, VOCABULARY)
        return functional.cross_entropy(scores, words[:, 1:].reshape(-1))


class Dlrm(nn.Module):
    """DLRM: embeddings of categories, a network for numbers, products of pairs."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        sizes = (11, 7, 5)
        self.tables = nn.ModuleList(nn.Embedding(size, 4, sparse=sparse) for size in sizes)
        self.history = nn.EmbeddingBag(9, 4, mode="sum")
        self.bottom = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        self.top = nn.Sequential(nn.Linear(4 + 10, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, numbers: Tensor, categories: Tensor, history: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        found = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        every = torch.stack([dense, *found, self.history(history)], 1)
        products = torch.bmm(every, every.transpose(1, 2))
        row, column = torch.triu_indices(5, 5, 1)
        return self.top(torch.cat([dense, products[:, row, column]], 1)).squeeze(1)


def _clicks() -> Batch:
    categories = torch.stack([torch.randint(0, size, (BATCH,)) for size in (11, 7, 5)], 1)
    return (
        numbers(6),
        categories,
        torch.randint(0, 9, (BATCH, 3)),
        torch.randint(0, 2, (BATCH,)).double(),
    )


@trained(
    "wide_and_deep",
    lambda: {
        "wide": nn.EmbeddingBag(20, 1, mode="mean"),
        "deep": nn.EmbeddingBag(20, 6, mode="mean", padding_idx=0),
        "body": nn.Sequential(nn.Linear(6 + 4, 8), nn.PReLU(), nn.Linear(8, 1)),
    },
    lambda: (
        torch.randint(0, 20, (BATCH, 4)),
        numbers(4),
        torch.rand(BATCH, 1, dtype=torch.float64),
    ),
    loss=functional.binary_cross_entropy,
    optimizer=torch.optim.Adagrad,
    optimizer_options={"lr": 0.05},
)
def wide_and_deep(net: Any, words: Tensor, numbers: Tensor) -> Tensor:
    """Wide & deep: bags with offsets-free rows, crossed features, Adagrad."""
    return torch.sigmoid(net.wide(words) + net.body(torch.cat([net.deep(words), numbers], 1)))


@trained(
    "two_tower",
    lambda: {
        "user": nn.Embedding(30, 8),
        "item": nn.Embedding(30, 8),
        "tower": nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)),
    },
    lambda: tuple(torch.randint(0, 30, (2, BATCH))),
)
def two_tower(net: Any, users: Tensor, items: Tensor) -> Tensor:
    """Two towers: the other items of the batch are the wrong answers."""
    left = functional.normalize(net.tower(net.user(users)), dim=-1)
    right = functional.normalize(net.tower(net.item(items)), dim=-1)
    target = torch.arange(users.shape[0], device=users.device)
    return functional.cross_entropy(left @ right.T / 0.2, target)


@trained(
    "state_space",
    lambda: {
        "embedding": nn.Embedding(VOCABULARY, 8),
        "rate": nn.Parameter(torch.rand(8, 4)),
        "enter": nn.Parameter(torch.randn(8, 4)),
        "leave": nn.Parameter(torch.randn(8, 4)),
        "gate": nn.Linear(8, 8),
        "head": nn.Linear(8, VOCABULARY),
    },
    lambda: (tokens(), labels_of()),
    loss=functional.cross_entropy,
)
def state_space(net: Any, words: Tensor) -> Tensor:
    """A hand-written state space model; class scores in the middle dimension."""
    x = net.embedding(words)
    decay = torch.exp(-functional.softplus(net.rate))
    state = torch.zeros(words.shape[0], 8, 4, dtype=x.dtype, device=x.device)
    out = []
    for place in range(words.shape[1]):
        state = decay * state + net.enter * x[:, place, :, None]
        out.append((state * net.leave).sum(-1))
    mixed = torch.stack(out, 1) * torch.sigmoid(net.gate(x))
    return net.head(x + mixed).transpose(1, 2)


def _sets() -> Batch:
    missing = torch.zeros(BATCH, 7, dtype=torch.bool)
    missing[1, 4:] = True
    missing[6:, 2:] = True
    return numbers(7, 5), missing, numbers(4)


@trained(
    "perceiver",
    lambda: {
        "latents": nn.Parameter(torch.randn(3, 8)),
        "enter": nn.Linear(5, 8),
        "read": nn.MultiheadAttention(8, 2, batch_first=True),
        "talk": nn.MultiheadAttention(8, 2, batch_first=True),
        "norm": nn.RMSNorm(8),
        "head": nn.Linear(8, 4),
    },
    _sets,
    loss=functional.mse_loss,
)
def perceiver(net: Any, elements: Tensor, is_missing: Tensor) -> Tensor:
    """Perceiver on sets of different size: a mask of missing elements."""
    known = net.enter(elements)
    latents = net.latents.expand(elements.shape[0], -1, -1)
    latents = latents + net.read(latents, known, known, key_padding_mask=is_missing)[0]
    latents = net.norm(latents + net.talk(latents, latents, latents)[0])
    return net.head(latents.mean(1))


@trained(
    "set_transformer",
    lambda: {
        "points": nn.Parameter(torch.randn(2, 6)),
        "first": nn.Linear(3, 6),
        "attention": nn.ModuleList(
            nn.MultiheadAttention(6, 2, batch_first=True) for _ in range(2)
        ),
        "last": nn.Linear(6, 3),
    },
    lambda: (numbers(5, 3), numbers(5, 3)),
)
def set_transformer(net: Any, cloud: Tensor, wanted: Tensor) -> Tensor:
    """Induced attention over a set, and a set distance (chamfer) as loss."""
    x = net.first(cloud)
    inner = net.attention[0](net.points.expand(len(x), -1, -1), x, x, need_weights=False)[0]
    x = x + net.attention[1](x, inner, inner, need_weights=False)[0]
    distance = torch.cdist(net.last(x), wanted).square()
    return distance.amin(1).mean() + distance.amin(2).mean()


@trained(
    "soft_experts",
    lambda: {
        "embedding": nn.Embedding(VOCABULARY, 8),
        "router": nn.Parameter(torch.randn(8, 4)),
        "first": nn.Parameter(torch.randn(4, 8, 16) * 0.3),
        "second": nn.Parameter(torch.randn(4, 16, 8) * 0.3),
        "head": nn.Linear(8, VOCABULARY),
    },
    lambda: (tokens(), labels_of()),
    loss=flat_loss,
)
def soft_experts(net: Any, words: Tensor) -> Tensor:
    """A soft mixture of experts: every expert sees weighted means of the tokens of a sample."""
    x = net.embedding(words)
    scores = x @ net.router
    slots = torch.einsum("bte,btd->bed", scores.softmax(1), x)
    hidden = torch.relu(torch.einsum("bed,edh->beh", slots, net.first))
    out = torch.einsum("beh,ehd->bed", hidden, net.second)
    mixed = torch.einsum("bte,bed->btd", scores.softmax(2), out)
    return net.head(x + mixed).flatten(0, 1)


@trained(
    "top1_experts_float32",
    lambda: {
        "router": nn.Linear(6, 4),
        "experts": nn.ModuleList(nn.Linear(6, 6) for _ in range(4)),
        "head": nn.Linear(6, 3),
    },
    lambda: (torch.randn(BATCH, 6), torch.randint(0, 3, (BATCH,))),
    tolerance=FLOAT32,
    dtype=None,
)
def top1_experts(net: Any, x: Tensor, classes: Tensor) -> Tensor:
    """Switch routing with a balance loss over the whole batch; experts run on everything."""
    likely = net.router(x).softmax(-1)
    best = functional.one_hot(likely.argmax(-1), 4).to(x.dtype)
    every = torch.stack([expert(x) for expert in net.experts], 1)
    mixed = ((likely * best).unsqueeze(-1) * every).sum(1)
    balance = 4 * (best.mean(0) * likely.mean(0)).sum()
    return functional.cross_entropy(net.head(mixed), classes) + 0.1 * balance


@family("spectral_norm_mlp", is_quick=True)
def spectral_norm_mlp() -> Workload:
    """Weights divided by their largest singular value, which buffers follow."""

    def model() -> nn.Module:
        normed = nn.utils.parametrizations.spectral_norm
        return nn.Sequential(
            normed(nn.Linear(6, 8)), nn.LeakyReLU(0.1), normed(nn.Linear(8, 8)), nn.ELU(),
            nn.Linear(8, 3),
        ).double()  # fmt: skip

    return sgd(
        model, lambda: (numbers(6), torch.randint(0, 3, (BATCH,))), loss=functional.cross_entropy
    )


def _tied_parts() -> dict[str, nn.Module]:
    embedding, head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY, bias=False)
    head.weight = embedding.weight
    frozen = nn.Linear(8, 8).requires_grad_(False)
    own = {"shared": nn.Linear(8, 8), "frozen": frozen, "unused": nn.Linear(8, 8)}
    return {"embedding": embedding, **own, "head": head}


@trained(
    "tied_frozen_shared",
    _tied_parts,
    lambda: (tokens(), labels_of()),
    loss=flat_loss,
    is_quick=True,
)
def tied_frozen_shared(net: Any, words: Tensor) -> Tensor:
    """One layer used three times, a tied head, a frozen layer, and a parameter nobody uses."""
    x = net.embedding(words)
    for _ in range(3):
        x = x + torch.tanh(net.shared(net.frozen(x)))
    return net.head(x).flatten(0, 1)


enter(
    Family(
        "lstm_language_model",
        "LSTM: the target is the input, one word later.",
        lambda: sgd(lambda: Recurrent("LSTM").double(), lambda: (tokens(),)),
    ),
    Family(
        "gru_both_ways",
        "GRU in both directions.",
        lambda: sgd(lambda: Recurrent("GRU", both_ways=True).double(), lambda: (tokens(),)),
    ),
    Family(
        "dlrm",
        "DLRM with dense gradients of its tables.",
        lambda: sgd(
            lambda: Dlrm(sparse=False).double(),
            _clicks,
            loss=functional.binary_cross_entropy_with_logits,
        ),
    ),
    Family(
        "dlrm_sparse",
        "DLRM whose tables ask for sparse gradients.",
        lambda: sgd(
            lambda: Dlrm(sparse=True).double(),
            _clicks,
            loss=functional.binary_cross_entropy_with_logits,
            optimizer_options={"lr": 0.1},
        ),
        is_quick=True,
    ),
)
