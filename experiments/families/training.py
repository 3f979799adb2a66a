"""Ways to train: adapters, adversaries, teachers, triplets, masks, physics, own gradients."""

from itertools import pairwise
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from families.family import BATCH, FLOAT32, Batch, Family, enter, family, sgd, trained
from families.language import causal_batch, labels_of, small, tokens
from heterog.graph.workload import Workload

WIDTH = 6


def numbers(*shape: int) -> Tensor:
    """Normal numbers ``[batch, *shape]`` in double precision."""
    return torch.randn(BATCH, *shape, dtype=torch.float64)


def network(*widths: int) -> nn.Sequential:
    """A multilayer perceptron."""
    layers: list[nn.Module] = []
    for width_in, width in pairwise(widths):
        layers += [nn.Linear(width_in, width), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class Lora(nn.Module):
    """A frozen linear layer and a change of low rank."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.3)
        self.up = nn.Parameter(torch.randn(base.out_features, rank) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * (x @ self.down.T) @ self.up.T


@family("lora_llama", tolerance=FLOAT32)
def lora_llama() -> Workload:
    """Adapters in the attention of a frozen Llama."""

    def model() -> nn.Module:
        made = transformers.LlamaForCausalLM(small("Llama", num_key_value_heads=1))
        made.requires_grad_(False)
        for layer in made.model.layers:
            layer.self_attn.q_proj = Lora(layer.self_attn.q_proj, 2)
            layer.self_attn.v_proj = Lora(layer.self_attn.v_proj, 2)
        return made.double()

    return sgd(model, causal_batch)


@family("frozen_backbone")
def frozen_backbone() -> Workload:
    """A new head on a frozen encoder with BatchNorm in evaluation."""

    def model() -> nn.Module:
        body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2)
        )
        body.requires_grad_(False)
        made = nn.Sequential(body, nn.Flatten(), nn.Linear(32, 5)).double()
        body.eval()
        return made

    return sgd(model, lambda: (numbers(3, 8, 8), torch.randint(0, 5, (BATCH,))),
               loss=functional.cross_entropy)  # fmt: skip


@trained(
    "gan_generator",
    lambda: {
        "generator": network(4, 8, WIDTH),
        "discriminator": network(WIDTH, 8, 1).requires_grad_(False),
    },
    lambda: (numbers(4),),
)
def gan_generator(net: Any, noise: Tensor) -> Tensor:
    """The generator's step through a frozen discriminator."""
    return functional.softplus(-net.discriminator(net.generator(noise))).mean()


@trained(
    "gan_both",
    lambda: {"generator": network(4, 8, WIDTH), "discriminator": network(WIDTH, 8, 1)},
    lambda: (numbers(4), numbers(WIDTH)),
)
def gan_both(net: Any, noise: Tensor, real: Tensor) -> Tensor:
    """Both players in one step: the discriminator sees a detached forgery."""
    forged = net.generator(noise)
    frozen = {k: v.detach() for k, v in net.discriminator.named_parameters()}
    score = torch.func.functional_call(net.discriminator, frozen, (forged,))
    honest, caught = net.discriminator(real), net.discriminator(forged.detach())
    told = functional.binary_cross_entropy_with_logits
    return (
        functional.softplus(-score).mean()
        + told(honest, torch.ones_like(honest))
        + told(caught, torch.zeros_like(caught))
    )


@trained(
    "distillation",
    lambda: {
        "teacher": network(WIDTH, 16, 16, 5).requires_grad_(False),
        "student": network(WIDTH, 8, 5),
    },
    lambda: (numbers(WIDTH), torch.randint(0, 5, (BATCH,))),
)
def distillation(net: Any, x: Tensor, classes: Tensor) -> Tensor:
    """A student learns a frozen teacher's soft answers and the labels."""
    with torch.no_grad():
        soft = functional.softmax(net.teacher(x) / 2, -1)
    found = net.student(x)
    near = functional.kl_div(functional.log_softmax(found / 2, -1), soft, reduction="batchmean")
    return 4 * near + functional.cross_entropy(found, classes, label_smoothing=0.1)


@trained(
    "triplet", lambda: {"body": network(WIDTH, 8, 4)}, lambda: (numbers(6), numbers(6), numbers(6))
)
def triplet(net: Any, anchor: Tensor, same: Tensor, other: Tensor) -> Tensor:
    """Siamese networks: an anchor is nearer to the same than to another."""
    return functional.triplet_margin_loss(
        net.body(anchor), net.body(same), net.body(other), margin=2.0
    )


@trained(
    "siamese_cosine",
    lambda: {"body": network(WIDTH, 8, 4)},
    lambda: (numbers(6), numbers(6), numbers().sign()),
)
def siamese_cosine(net: Any, left: Tensor, right: Tensor, alike: Tensor) -> Tensor:
    """Pairs that are alike or not, by the angle between their embeddings."""
    return functional.cosine_embedding_loss(net.body(left), net.body(right), alike, 0.2)


@trained(
    "simclr", lambda: {"body": network(WIDTH, 8, 4)}, lambda: (numbers(WIDTH), numbers(WIDTH))
)
def simclr(net: Any, one: Tensor, two: Tensor) -> Tensor:
    """Contrastive learning: two views, all others of both are wrong, targets from ``arange``."""
    z = functional.normalize(torch.cat([net.body(one), net.body(two)]), dim=1)
    count = one.shape[0]
    itself = torch.eye(2 * count, dtype=torch.bool, device=z.device)
    scores = (z @ z.T / 0.5).masked_fill(itself, float("-inf"))
    return functional.cross_entropy(scores, torch.arange(2 * count, device=z.device).roll(count))


class _Round(torch.autograd.Function):
    """Rounds, and passes the gradient on as if it had not, where the input was near zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1)


@trained(
    "custom_autograd",
    lambda: {"first": nn.Linear(WIDTH, 8), "second": nn.Linear(8, 4)},
    lambda: (numbers(WIDTH), numbers(4)),
    loss=functional.mse_loss,
)
def custom_autograd(net: Any, x: Tensor) -> Tensor:
    """A quantised network with an autograd function of its own."""
    hidden: Tensor = _Round.apply(torch.tanh(net.first(x)))
    return net.second(hidden)


def _token_parts() -> dict[str, nn.Module]:
    """An embedding, a layer that mixes positions, a head."""
    return {"embedding": nn.Embedding(50, 8), "mix": nn.Linear(6, 6), "head": nn.Linear(8, 50)}


def _scores(net: Any, words: Tensor) -> Tensor:
    x = net.embedding(words)
    return net.head(x + torch.tanh(net.mix(x.transpose(1, 2)).transpose(1, 2)))


def _masked_tokens() -> Batch:
    keep = torch.rand(BATCH, 6) > 0.4
    keep[:, 0] = True
    return tokens(), tokens(), keep


@trained("where_masked_target", _token_parts, _masked_tokens)
def where_masked_target(net: Any, words: Tensor, labels: Tensor, keep: Tensor) -> Tensor:
    """The target is masked by ``torch.where`` inside the model."""
    target = torch.where(keep, labels, torch.full_like(labels, -100))
    return functional.cross_entropy(_scores(net, words).flatten(0, 1), target.flatten())


@trained("shifted_labels", _token_parts, lambda: (tokens(), labels_of()))
def shifted_labels(net: Any, words: Tensor, labels: Tensor) -> Tensor:
    """Labels one word later, flattened: ``labels[:, 1:].reshape(-1)``."""
    scores = _scores(net, words)[:, :-1].reshape(-1, 50)
    return functional.cross_entropy(scores, labels[:, 1:].reshape(-1))


@trained(
    "weighted_classes",
    lambda: {**_token_parts(), "weights": torch.linspace(0.5, 2.0, 50)},
    lambda: (tokens(), labels_of()),
)
def weighted_classes(net: Any, words: Tensor, labels: Tensor) -> Tensor:
    """Class weights, ignored labels, and an auxiliary loss over fewer positions."""
    scores = _scores(net, words).transpose(1, 2)
    main = functional.cross_entropy(scores, labels, weight=net.weights)
    return main + 0.3 * functional.cross_entropy(scores[:, :, -1], words[:, 0])


@trained("hand_masked_mean", _token_parts, lambda: (tokens(), labels_of()))
def hand_masked_mean(net: Any, words: Tensor, labels: Tensor) -> Tensor:
    """Unreduced losses, divided by how many positions of the whole batch count."""
    counts = labels != -100
    found = functional.cross_entropy(
        _scores(net, words).flatten(0, 1), labels.flatten().clamp(min=0), reduction="none"
    )
    return (found * counts.flatten()).sum() / counts.sum()


@trained(
    "vae",
    lambda: {"encoder": network(WIDTH, 8, 6), "decoder": network(3, 8, WIDTH)},
    lambda: (numbers(WIDTH),),
    is_random=True,
    is_quick=True,
)
def vae(net: Any, x: Tensor) -> Tensor:
    """A variational autoencoder: noise in the middle of the step."""
    mean, spread = net.encoder(x).chunk(2, -1)
    hidden = mean + torch.randn_like(mean) * torch.exp(0.5 * spread)
    divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(-1).mean()
    return functional.mse_loss(net.decoder(hidden), x) + 0.1 * divergence


@trained("physics_informed", lambda: {"body": network(2, 12, 12, 1)}, lambda: (numbers(2),))
def physics_informed(net: Any, place: Tensor) -> Tensor:
    """The loss is a differential equation: gradients by the input inside the step."""
    place = place.detach().requires_grad_(True)
    found = net.body(place)
    slope = torch.autograd.grad(found.sum(), place, create_graph=True)[0]
    bend = torch.autograd.grad(slope[:, 0].sum(), place, create_graph=True)[0][:, 0]
    return (slope[:, 1] - 0.1 * bend).square().mean() + found.square().mean()


@trained(
    "gradient_penalty",
    lambda: {"body": network(WIDTH, 8, 1)},
    lambda: (numbers(WIDTH), numbers(WIDTH)),
)
def gradient_penalty(net: Any, real: Tensor, forged: Tensor) -> Tensor:
    """A critic whose gradient by its input should have length one."""
    between = (0.3 * real + 0.7 * forged).detach().requires_grad_(True)
    score = net.body(between).sum()
    (slope,) = torch.autograd.grad(score, between, create_graph=True)
    penalty = (slope.norm(2, dim=1) - 1).square().mean()
    return net.body(forged).mean() - net.body(real).mean() + 10 * penalty


@trained(
    "recomputed_layers",
    lambda: {"blocks": nn.ModuleList(network(WIDTH, 12, WIDTH) for _ in range(3))},
    lambda: (numbers(WIDTH), numbers(WIDTH)),
    loss=functional.huber_loss,
)
def recomputed_layers(net: Any, x: Tensor) -> Tensor:
    """Layers under ``torch.utils.checkpoint``."""
    for block in net.blocks:
        x = x + torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
    return x


def _multi_task_batch() -> Batch:
    marks = torch.randint(0, 2, (BATCH, 2)).double()
    return numbers(WIDTH), torch.randint(0, 3, (BATCH,)), marks, numbers()


@trained(
    "multi_task",
    lambda: {
        "body": network(WIDTH, 8, 8),
        "heads": nn.ModuleList(nn.Linear(8, width) for width in (3, 2, 1)),
        "spread": nn.Parameter(torch.zeros(3)),
    },
    _multi_task_batch,
)
def multi_task(net: Any, x: Tensor, classes: Tensor, marks: Tensor, value: Tensor) -> Tensor:
    """Three heads with weights that are learned from their uncertainty."""
    hidden = net.body(x)
    found = [head(hidden) for head in net.heads]
    losses = torch.stack([
        functional.cross_entropy(found[0], classes),
        functional.multilabel_soft_margin_loss(found[1], marks),
        functional.mse_loss(found[2].squeeze(-1), value),
    ])  # fmt: skip
    return (losses * torch.exp(-net.spread) + net.spread).sum()


@trained(
    "ctc_speech",
    lambda: {"body": nn.Conv1d(4, 8, 3, padding=1), "head": nn.Linear(8, 6)},
    lambda: (numbers(4, 12), torch.randint(1, 6, (BATCH, 3))),
    refused="as wide as the longest target",
)
def ctc_speech(net: Any, sound: Tensor, text: Tensor) -> Tensor:
    """Speech to text by connectionist temporal classification."""
    scores = net.head(torch.relu(net.body(sound)).transpose(1, 2))
    likely = scores.log_softmax(-1).transpose(0, 1)
    lengths: Any = [(length,) * len(sound) for length in (12, 3)]
    return functional.ctc_loss(likely, text, *lengths)


@trained(
    "actor_critic",
    lambda: {"body": network(4, 8), "policy": nn.Linear(8, 3), "value": nn.Linear(8, 1)},
    lambda: (numbers(4), torch.randint(0, 3, (BATCH,)), numbers()),
)
def actor_critic(net: Any, seen: Tensor, action: Tensor, reward: Tensor) -> Tensor:
    """Policy gradients: log-probabilities of the actions taken, entropy, a value."""
    hidden = torch.tanh(net.body(seen))
    likely = torch.distributions.Categorical(logits=net.policy(hidden), validate_args=False)
    value = net.value(hidden).squeeze(-1)
    gain = (reward - value).detach()
    gain = (gain - gain.mean()) / (gain.std() + 1e-5)
    actor = -(likely.log_prob(action) * gain).mean()
    return actor + 0.5 * (reward - value).square().mean() - 0.01 * likely.entropy().mean()


@trained(
    "penalised_weights",
    lambda: {"body": network(WIDTH, 8, 4)},
    lambda: (numbers(WIDTH), torch.randint(0, 4, (BATCH,))),
    is_quick=True,
)
def penalised_weights(net: Any, x: Tensor, classes: Tensor) -> Tensor:
    """A penalty on the weights beside the loss of the samples, and an entropy bonus."""
    scores = net.body(x)
    penalty = sum(weight.square().sum() for weight in net.body.parameters())
    likely = scores.softmax(-1)
    entropy = -(likely * likely.clamp(min=1e-6).log()).sum(-1).mean()
    return functional.cross_entropy(scores, classes) + 0.1 * penalty - 0.05 * entropy


enter(
    Family(
        "dropout_adam",
        "Dropout in a network trained by Adam with weight decay.",
        lambda: sgd(
            lambda: nn.Sequential(
                nn.Linear(WIDTH, 16),
                nn.Dropout(0.3),
                nn.GELU(),
                nn.Linear(16, 8),
                nn.Dropout(0.2),
                nn.Linear(8, 4),
            ).double(),
            lambda: (numbers(WIDTH), numbers(4)),
            loss=functional.l1_loss,
            optimizer=torch.optim.AdamW,
            optimizer_options={"lr": 1e-2, "weight_decay": 0.1},
        ),
        is_random=True,
    )
)
