"""Models of papers: loops inside a loss, networks that make weights, flows, energies, scans."""

import copy
import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch.nn import functional
from torch.nn.utils import parametrizations

from families.family import BATCH, Batch, family, sgd, trained
from families.found import CLASSES, features_and_classes
from families.training import network, numbers
from heterog.graph.workload import Workload


@trained("maml", lambda: {"body": network(3, 8, 1)}, lambda: (numbers(8, 3), numbers(8, 1)))
def maml(net: Any, x: Tensor, y: Tensor) -> Tensor:
    """Two steps of SGD for each task inside the loss, by ``torch.func``."""

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(torch.func.functional_call(net.body, weights, (x,)), y)

    def task(x: Tensor, y: Tensor) -> Tensor:
        weights = {**dict(net.body.named_parameters())}
        for _ in range(2):
            slopes = torch.func.grad(loss)(weights, x[:4], y[:4])
            weights = {name: weights[name] - 0.1 * slopes[name] for name in weights}
        return loss(weights, x[4:], y[4:])

    return torch.func.vmap(task)(x, y).mean()


@trained(
    "capsules",
    lambda: {
        "first": nn.Linear(8, 5 * 4),
        "votes": nn.Parameter(0.5 * torch.randn(5, CLASSES, 4, 6)),
    },
    features_and_classes,
    loss=functional.multi_margin_loss,
)
def capsules(net: Any, x: Tensor) -> Tensor:
    """Routing by agreement between capsules, and the margin loss."""
    votes = torch.einsum("biu,icuv->bicv", net.first(x).view(-1, 5, 4), net.votes)
    logits = torch.zeros_like(votes[..., 0])
    for _ in range(3):
        made = (logits.softmax(2)[..., None] * votes).sum(1)
        size = made.pow(2).sum(-1, keepdim=True)
        made = made * size / (1 + size) / (size + 1e-9).sqrt()
        logits = logits + (votes * made[:, None]).sum(-1)
    return made.norm(dim=-1)


class _Mixer(nn.Module):
    """A decaying mean over what came before, and tokens mixed with the last ones."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.rand(3, 8))
        self.decay, self.bonus = nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(8))
        self.maps = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        last = functional.pad(x[:, :-1], (0, 0, 1, 0))
        mixed = [x * part + last * (1 - part) for part in self.mix]
        keys, values, gates = (
            layer(each) for layer, each in zip(self.maps[:3], mixed, strict=True)
        )
        total = weight = torch.zeros_like(x[:, 0])
        made = []
        for place in range(x.shape[1]):
            key, value = keys[:, place].exp(), values[:, place]
            now = key * self.bonus.exp()
            made.append((total + now * value) / (weight + now))
            total = total * torch.exp(-self.decay.exp()) + key * value
            weight = weight * torch.exp(-self.decay.exp()) + key
        return x + self.maps[3](gates.sigmoid() * torch.stack(made, 1))


@trained(
    "rwkv",
    lambda: {"body": nn.Sequential(nn.Embedding(20, 8), _Mixer(), _Mixer(), nn.Linear(8, 20))},
    lambda: (torch.randint(0, 20, (BATCH, 7)),),
)
def rwkv(net: Any, words: Tensor) -> Tensor:
    """RWKV: a decaying mean over what came before, and tokens mixed with the last ones."""
    return functional.cross_entropy(net.body(words[:, :-1]).mT, words[:, 1:])


@trained(
    "scan_recurrence",
    lambda: {"into": nn.Linear(5, 8), "keep": nn.Linear(8, 8), "head": nn.Linear(8, CLASSES)},
    lambda: (numbers(6, 5), torch.randint(0, CLASSES, (BATCH,))),
    loss=functional.cross_entropy,
)
def scan_recurrence(net: Any, x: Tensor) -> Tensor:
    """A recurrence by torch's ``scan``."""

    def pass_of(state: Tensor, now: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.tanh(net.keep(state) + net.into(now))
        return state, state.clone()

    last, _ = scan(pass_of, x.new_zeros(x.shape[0], 8), x, dim=1)
    return net.head(last)


@trained(
    "masked_token",
    lambda: {
        "first": nn.Linear(5, 8),
        "head": network(8, 8, 5),
        "token": nn.Parameter(torch.randn(8)),
    },
    lambda: (numbers(6, 5), torch.rand(BATCH, 6) < 0.4),
)
def masked_token(net: Any, x: Tensor, hidden: Tensor) -> Tensor:
    """One learned value written by a mask, as BEiT and HuBERT hide patches."""
    states = net.first(x)
    states[hidden] = net.token
    states = states + states.mean(1, keepdim=True)
    lost = functional.mse_loss(net.head(states), x, reduction="none").mean(-1)
    return (lost * hidden).sum() / hidden.sum()


@trained(
    "hypernetwork",
    lambda: {"make": network(4, 16, 6 * 5 + 5 * CLASSES)},
    lambda: (numbers(6), numbers(4), torch.randint(0, CLASSES, (BATCH,))),
    loss=functional.cross_entropy,
)
def hypernetwork(net: Any, x: Tensor, about: Tensor) -> Tensor:
    """Weights of a network for each sample, made by another network."""
    first, last = net.make(about).split([30, 5 * CLASSES], 1)
    inner = torch.bmm(x[:, None], first.view(-1, 6, 5)).tanh()
    return torch.bmm(inner, last.view(-1, 5, CLASSES))[:, 0]


@trained(
    "normalising_flow",
    lambda: {
        "nets": nn.ModuleList(network(3, 8, 6) for _ in range(3)),
        "mixes": nn.ParameterList(torch.eye(6) + 0.1 * torch.randn(6, 6) for _ in range(3)),
    },
    lambda: (numbers(6),),
    optimizer_options={"lr": 0.01},
)
def normalising_flow(net: Any, x: Tensor) -> Tensor:
    """Affine couplings and an invertible matrix, by their log-determinants."""
    total = torch.zeros_like(x[:, 0])
    for layer, mix in zip(net.nets, net.mixes, strict=True):
        kept, changed = (x @ mix).chunk(2, 1)
        size, shift = layer(kept).chunk(2, 1)
        x = torch.cat([kept, changed * size.tanh().exp() + shift], 1)
        total = total + size.tanh().sum(1) + torch.linalg.slogdet(mix)[1]
    return (0.5 * x.pow(2).sum(1) + 3 * math.log(2 * math.pi) - total).mean()


@trained(
    "energy_langevin",
    lambda: {"body": network(4, 16, 1)},
    lambda: (numbers(4), numbers(4), numbers(3, 4)),
)
def energy_langevin(net: Any, real: Tensor, start: Tensor, noise: Tensor) -> Tensor:
    """An energy whose negatives come from Langevin steps by its own gradient."""
    found = start
    for step in range(3):
        found = found.detach().requires_grad_()
        (slope,) = torch.autograd.grad(net.body(found).sum(), found)
        found = found - 0.1 * slope + 0.05 * noise[:, step]
    low, high = net.body(real), net.body(found.detach())
    return (low - high).mean() + 0.1 * (low.pow(2) + high.pow(2)).mean()


@trained(
    "mixture_density",
    lambda: {"body": network(5, 12, 9)},
    lambda: (numbers(5), numbers()),
    optimizer_options={"lr": 0.01},
)
def mixture_density(net: Any, x: Tensor, y: Tensor) -> Tensor:
    """A mixture of normal distributions by ``torch.distributions``."""
    logits, mean, size = net.body(x).chunk(3, 1)
    parts = torch.distributions.Normal(mean, functional.softplus(size) + 1e-3)
    which = torch.distributions.Categorical(logits=logits)
    return -torch.distributions.MixtureSameFamily(which, parts).log_prob(y).mean()


@trained(
    "long_convolution",
    lambda: {"maps": nn.Linear(6, 18), "filter": network(1, 8, 6), "head": nn.Linear(6, CLASSES)},
    lambda: (numbers(8, 6), torch.randint(0, CLASSES, (BATCH,))),
    loss=functional.cross_entropy,
)
def long_convolution(net: Any, x: Tensor) -> Tensor:
    """Hyena: a filter as long as the sequence, made by a network, by padded transforms."""
    query, key, value = net.maps(x).chunk(3, -1)
    places = torch.linspace(0, 1, 8, dtype=x.dtype)[:, None]
    waves = torch.fft.rfft(net.filter(places) * torch.exp(-places), n=16, dim=0)
    found = torch.fft.irfft(torch.fft.rfft(key * value, n=16, dim=1) * waves, n=16, dim=1)
    return net.head((query * found[:, :8]).mean(1))


@trained(
    "point_cloud",
    lambda: {"edges": network(6, 8, 8), "head": nn.Linear(8, CLASSES)},
    lambda: (numbers(10, 3), torch.randint(0, CLASSES, (BATCH,))),
    loss=functional.cross_entropy,
    is_quick=True,
)
def point_cloud(net: Any, points: Tensor) -> Tensor:
    """DGCNN: the nearest points, by rows of the points of all clouds one after another."""
    own = torch.cdist(points, points.detach())
    near = own.topk(3, largest=False).indices
    rows = near + points.shape[1] * torch.arange(len(points)).view(-1, 1, 1)
    first = net.edges(torch.cat([points, points], -1))  # a gradient goes through the rows, too
    taken = first.reshape(-1, 8)[rows]
    return net.head((taken.amax(2) * own.mean(-1, keepdim=True)).mean(1))


@trained(
    "critic",
    lambda: {"net": network(6, 8, 1), "head": nn.Linear(6, 1)},
    lambda: (numbers(6), numbers(6)),
)
def critic(net: Any, real: Tensor, made: Tensor) -> Tensor:
    """Wasserstein critic: the gradient of the last bias is known at once."""
    penalty = (net.head(real) - net.head(made)).square().mean()
    return net.net(made).mean() - net.net(real).mean() + penalty + net.head(real).mean()


def _graph_transformer_batch() -> Batch:
    distances = torch.randint(0, 5, (BATCH, 6, 6))
    return (numbers(6, 4), distances, torch.randint(2, 7, (BATCH,)),
            torch.randint(0, CLASSES, (BATCH,)))  # fmt: skip


@trained(
    "graph_transformer",
    lambda: {
        "into": nn.Linear(4, 8),
        "bias": nn.Embedding(5, 2),
        "maps": nn.Linear(8, 24),
        "head": nn.Linear(8, CLASSES),
    },
    _graph_transformer_batch,
    loss=functional.cross_entropy,
)
def graph_transformer(net: Any, nodes: Tensor, distances: Tensor, sizes: Tensor) -> Tensor:
    """Attention over the nodes of padded graphs, with a bias for each distance."""
    states, there = net.into(nodes), torch.arange(nodes.shape[1]) < sizes[:, None]
    bias = net.bias(distances).permute(0, 3, 1, 2)
    bias = bias.masked_fill(~there[:, None, None], -math.inf)
    query, key, value = (
        part.unflatten(2, (2, 4)).transpose(1, 2) for part in net.maps(states).chunk(3, 2)
    )
    found = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    states = states + found.transpose(1, 2).flatten(2)
    return net.head((states * there[..., None]).sum(1) / sizes[:, None])


@trained(
    "deep_equilibrium",
    lambda: {
        "keep": parametrizations.weight_norm(nn.Linear(8, 8)),
        "into": nn.Linear(8, 8),
        "head": nn.Linear(8, CLASSES),
    },
    features_and_classes,
    loss=functional.cross_entropy,
)
def deep_equilibrium(net: Any, x: Tensor) -> Tensor:
    """A fixed point in a number of passes, with weight norm, and a gradient through the last."""
    given, state = net.into(x), torch.zeros_like(x)
    with torch.no_grad():
        for _ in range(5):
            state = torch.tanh(net.keep(state) + given)
    return net.head(torch.tanh(net.keep(state) + given))


@trained(
    "mixer_of_ranks",
    lambda: {
        "body": nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise((6, 8, 1)))),
        "heat": nn.Parameter(torch.zeros(())),
    },
    lambda: (numbers(6), numbers()),
)
def mixer_of_ranks(net: Any, x: Tensor, worth: Tensor) -> Tensor:
    """A loss of ranks (ListNet) over the whole batch, and a temperature that is trained."""
    found = net.body(x)[:, 0] * net.heat.exp()
    return -(worth.softmax(0) * found.log_softmax(0)).sum()


class Critics(nn.Module):
    """SAC: an actor, two critics, and targets that follow them by ``.data``."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = network(5, 8, 4)
        self.critics = nn.ModuleList(network(7, 8, 1) for _ in range(2))
        self.targets = copy.deepcopy(self.critics)
        self.targets.requires_grad_(requires_grad=False)
        self.heat = nn.Parameter(torch.zeros(1))

    def _act(self, seen: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, size = self.actor(seen).chunk(2, 1)
        drawn = torch.distributions.Normal(mean, size.tanh().exp())
        raw = mean + drawn.scale * noise
        chance = drawn.log_prob(raw) - torch.log(1 - raw.tanh().square() + 1e-6)
        return raw.tanh(), chance.sum(1, keepdim=True)

    def forward(
        self, seen: Tensor, acted: Tensor, reward: Tensor, later: Tensor, noise: Tensor
    ) -> Tensor:
        with torch.no_grad():
            move, chance = self._act(later, noise[:, 0])
            worth = torch.minimum(*(each(torch.cat([later, move], 1)) for each in self.targets))
            wanted = reward[:, None] + 0.9 * (worth - self.heat.exp() * chance)
        pair = torch.cat([seen, acted], 1)
        lost = sum(functional.mse_loss(each(pair), wanted) for each in self.critics)
        move, chance = self._act(seen, noise[:, 1])
        fixed = [{k: v.detach() for k, v in each.named_parameters()} for each in self.critics]
        found = [
            torch.func.functional_call(each, state, (torch.cat([seen, move], 1),))
            for each, state in zip(self.critics, fixed, strict=True)
        ]
        lost = lost + (self.heat.exp().detach() * chance - torch.minimum(*found)).mean()
        first, second = (list(each.parameters()) for each in self.targets)
        for own, target in zip(self.critics[0].parameters(), first, strict=True):
            target.data.copy_(0.1 * own.data + 0.9 * target.data)
        for own, target in zip(self.critics[1].parameters(), second, strict=True):
            target.data.mul_(0.9).add_(own.data, alpha=0.1)
        return lost - (self.heat * (chance + 2).detach()).mean()


@family("soft_actor_critic")
def soft_actor_critic() -> Workload:
    """SAC in one step: two critics, the actor, a temperature, targets written by ``.data``."""
    shapes = (5,), (2,), (), (5,), (2, 2)
    return sgd(lambda: Critics().double(), lambda: tuple(numbers(*shape) for shape in shapes))


@trained(
    "grid_targets",
    lambda: {"body": nn.Conv2d(3, 5, 3, padding=1)},
    lambda: (
        numbers(3, 4, 4),
        torch.randint(0, 4, (BATCH, 3, 2)),
        torch.randint(0, CLASSES, (BATCH, 3)),
    ),
)
def grid_targets(net: Any, image: Tensor, places: Tensor, labels: Tensor) -> Tensor:
    """YOLO: objects are read from their cells, and written to a map, by a range of samples."""
    found, (down, right) = net.body(image), places.unbind(2)
    sample = torch.arange(len(image))[:, None].expand_as(labels)
    cells = found.permute(0, 2, 3, 1)[sample, down, right]
    there = torch.zeros_like(found[:, 0])
    there[sample, down, right] = cells[..., 0].detach().sigmoid()
    chosen = cells[range(len(image)), labels[:, 0] % 3]
    lost = functional.cross_entropy(cells[..., 1:].mT, labels) + chosen.square().mean()
    return lost + functional.binary_cross_entropy_with_logits(found[:, 0], there)
