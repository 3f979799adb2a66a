"""Architectures in plain torch: recurrent, recommenders, sets, state spaces, experts."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from families.family import BATCH, FLOAT32, Batch, family, sgd
from families.language import VOCABULARY, labels_of, tokens
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


@family("lstm_language_model")
def lstm_language_model() -> Workload:
    """LSTM: the target is the input, one word later."""
    return sgd(lambda: Recurrent("LSTM").double(), lambda: (tokens(),))


@family("gru_both_ways")
def gru_both_ways() -> Workload:
    """GRU in both directions."""
    return sgd(lambda: Recurrent("GRU", both_ways=True).double(), lambda: (tokens(),))


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
        out: Tensor = self.top(torch.cat([dense, products[:, row, column]], 1)).squeeze(1)
        return out


def _clicks() -> Batch:
    categories = torch.stack([torch.randint(0, size, (BATCH,)) for size in (11, 7, 5)], 1)
    return (
        torch.randn(BATCH, 6, dtype=torch.float64),
        categories,
        torch.randint(0, 9, (BATCH, 3)),
        torch.randint(0, 2, (BATCH,)).double(),
    )


@family("dlrm")
def dlrm() -> Workload:
    """DLRM with dense gradients of its tables."""
    return sgd(lambda: Dlrm(sparse=False).double(), _clicks,
               loss=functional.binary_cross_entropy_with_logits)  # fmt: skip


@family("dlrm_sparse", is_quick=True)
def dlrm_sparse() -> Workload:
    """DLRM whose tables ask for sparse gradients."""
    return sgd(lambda: Dlrm(sparse=True).double(), _clicks,
               loss=functional.binary_cross_entropy_with_logits,
               optimizer_options={"lr": 0.1})  # fmt: skip


@family("wide_and_deep")
def wide_and_deep() -> Workload:
    """Wide & deep: bags with offsets-free rows, crossed features, Adagrad."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.EmbeddingBag(20, 1, mode="mean")
            self.deep = nn.EmbeddingBag(20, 6, mode="mean", padding_idx=0)
            self.body = nn.Sequential(nn.Linear(6 + 4, 8), nn.PReLU(), nn.Linear(8, 1))

        def forward(self, words: Tensor, numbers: Tensor) -> Tensor:
            deep = self.body(torch.cat([self.deep(words), numbers], 1))
            return torch.sigmoid(self.wide(words) + deep)

    def batch() -> Batch:
        return (
            torch.randint(0, 20, (BATCH, 4)),
            torch.randn(BATCH, 4, dtype=torch.float64),
            torch.rand(BATCH, 1, dtype=torch.float64),
        )

    return sgd(lambda: Network().double(), batch, loss=functional.binary_cross_entropy,
               optimizer=torch.optim.Adagrad, optimizer_options={"lr": 0.05})  # fmt: skip


@family("two_tower")
def two_tower() -> Workload:
    """Two towers: the other items of the batch are the wrong answers."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.user, self.item = nn.Embedding(30, 8), nn.Embedding(30, 8)
            self.tower = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

        def forward(self, users: Tensor, items: Tensor) -> Tensor:
            left = functional.normalize(self.tower(self.user(users)), dim=-1)
            right = functional.normalize(self.tower(self.item(items)), dim=-1)
            target = torch.arange(users.shape[0], device=users.device)
            return functional.cross_entropy(left @ right.T / 0.2, target)

    return sgd(lambda: Network().double(),
               lambda: tuple(torch.randint(0, 30, (2, BATCH))))  # fmt: skip


class StateSpace(nn.Module):
    """A diagonal state space, run as a recurrence over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.rate = nn.Parameter(torch.rand(8, 4))
        self.enter, self.leave = nn.Parameter(torch.randn(8, 4)), nn.Parameter(torch.randn(8, 4))
        self.gate = nn.Linear(8, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        decay = torch.exp(-functional.softplus(self.rate))
        state = torch.zeros(words.shape[0], 8, 4, dtype=x.dtype, device=x.device)
        out = []
        for place in range(words.shape[1]):
            state = decay * state + self.enter * x[:, place, :, None]
            out.append((state * self.leave).sum(-1))
        mixed = torch.stack(out, 1) * torch.sigmoid(self.gate(x))
        return self.head(x + mixed).transpose(1, 2)


@family("state_space")
def state_space() -> Workload:
    """A hand-written state space model; class scores in the middle dimension."""
    return sgd(lambda: StateSpace().double(), lambda: (tokens(), labels_of()),
               loss=functional.cross_entropy)  # fmt: skip


class Perceiver(nn.Module):
    """A few learned latents read a set, talk to each other, and answer."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(3, 8))
        self.enter = nn.Linear(5, 8)
        self.read = nn.MultiheadAttention(8, 2, batch_first=True)
        self.talk = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.RMSNorm(8)
        self.head = nn.Linear(8, 4)

    def forward(self, elements: Tensor, is_missing: Tensor) -> Tensor:
        known = self.enter(elements)
        latents = self.latents.expand(elements.shape[0], -1, -1)
        latents = latents + self.read(latents, known, known, key_padding_mask=is_missing)[0]
        latents = self.norm(latents + self.talk(latents, latents, latents)[0])
        out: Tensor = self.head(latents.mean(1))
        return out


@family("perceiver")
def perceiver() -> Workload:
    """Perceiver on sets of different size: a mask of missing elements."""

    def batch() -> Batch:
        missing = torch.zeros(BATCH, 7, dtype=torch.bool)
        missing[1, 4:] = True
        missing[6:, 2:] = True
        return (
            torch.randn(BATCH, 7, 5, dtype=torch.float64),
            missing,
            torch.randn(BATCH, 4, dtype=torch.float64),
        )

    return sgd(lambda: Perceiver().double(), batch, loss=functional.mse_loss)


@family("set_transformer")
def set_transformer() -> Workload:
    """Induced attention over a set, and a set distance (chamfer) as loss."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.points = nn.Parameter(torch.randn(2, 6))
            self.first = nn.Linear(3, 6)
            self.attention = nn.ModuleList(
                nn.MultiheadAttention(6, 2, batch_first=True) for _ in range(2)
            )
            self.last = nn.Linear(6, 3)

        def forward(self, cloud: Tensor, wanted: Tensor) -> Tensor:
            x = self.first(cloud)
            points = self.points.expand(len(x), -1, -1)
            inner = self.attention[0](points, x, x, need_weights=False)[0]
            x = x + self.attention[1](x, inner, inner, need_weights=False)[0]
            distance = torch.cdist(self.last(x), wanted).square()
            return distance.amin(1).mean() + distance.amin(2).mean()

    def batch() -> Batch:
        shape = (BATCH, 5, 3)
        return torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)

    return sgd(lambda: Network().double(), batch)


@family("soft_experts")
def soft_experts() -> Workload:
    """A soft mixture of experts: every expert sees weighted means of the tokens of a sample."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, 8)
            self.router = nn.Parameter(torch.randn(8, 4))
            self.first = nn.Parameter(torch.randn(4, 8, 16) * 0.3)
            self.second = nn.Parameter(torch.randn(4, 16, 8) * 0.3)
            self.head = nn.Linear(8, VOCABULARY)

        def forward(self, words: Tensor) -> Tensor:
            x = self.embedding(words)
            scores = x @ self.router
            slots = torch.einsum("bte,btd->bed", scores.softmax(1), x)
            hidden = torch.relu(torch.einsum("bed,edh->beh", slots, self.first))
            out = torch.einsum("beh,ehd->bed", hidden, self.second)
            mixed = torch.einsum("bte,bed->btd", scores.softmax(2), out)
            return self.head(x + mixed).flatten(0, 1)

    return sgd(lambda: Network().double(), lambda: (tokens(), labels_of()), loss=flat_loss)


@family("top1_experts_float32", tolerance=FLOAT32)
def top1_experts() -> Workload:
    """Switch routing with a balance loss over the whole batch; experts run on everything."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(6, 4)
            self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor, classes: Tensor) -> Tensor:
            likely = self.router(x).softmax(-1)
            best = functional.one_hot(likely.argmax(-1), 4).to(x.dtype)
            every = torch.stack([expert(x) for expert in self.experts], 1)
            mixed = ((likely * best).unsqueeze(-1) * every).sum(1)
            balance = 4 * (best.mean(0) * likely.mean(0)).sum()
            return functional.cross_entropy(self.head(mixed), classes) + 0.1 * balance

    return sgd(Network, lambda: (torch.randn(BATCH, 6), torch.randint(0, 3, (BATCH,))))


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
        model,
        lambda: (torch.randn(BATCH, 6, dtype=torch.float64), torch.randint(0, 3, (BATCH,))),
        loss=functional.cross_entropy,
    )


@family("tied_frozen_shared", is_quick=True)
def tied_frozen_shared() -> Workload:
    """One layer used three times, a tied head, a frozen layer, and a parameter nobody uses."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, 8)
            self.shared = nn.Linear(8, 8)
            self.frozen = nn.Linear(8, 8).requires_grad_(False)
            self.unused = nn.Linear(8, 8)
            self.head = nn.Linear(8, VOCABULARY, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, words: Tensor) -> Tensor:
            x = self.embedding(words)
            for _ in range(3):
                x = x + torch.tanh(self.shared(self.frozen(x)))
            return self.head(x).flatten(0, 1)

    return sgd(lambda: Network().double(), lambda: (tokens(), labels_of()), loss=flat_loss)
