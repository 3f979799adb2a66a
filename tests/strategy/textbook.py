"""Costs of a transformer's layout on each device, from textbook formulas alone.

This module imports nothing of heterog: ``test_textbook.py`` compares lowered programs with it.
Sources, by the letters that the functions cite:

- [M] Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using
  Model Parallelism", section 3: which weights are cut, and where sums over the team are needed.
- [N] Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
  Megatron-LM", sections 2 and 3.2 and the appendix: parameters, FLOPs, bytes per micro-batch.
- [P] Patarasuk and Yuan 2009: a ring all-reduce of S bytes over n devices sends 2 (n-1)/n S from
  each of them; an all-gather or reduce-scatter half of that.
- [Z] Rajbhandari et al. 2020, "ZeRO", section 7: bytes of data parallelism with slices.
- [C] Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost": recomputation.

Letters as in the papers: h hidden size, a heads, s sequence length, V vocabulary, l layers, B the
samples that a team works on in a step, t devices of a team, d teams of a stage, e bytes of a
number.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """A decoder of l equal layers with learned positions.

    Attributes:
        hidden: h.
        layers: l.
        sequence: s, tokens of a sample.
        vocabulary: V, rows of the embedding and of the head.
        positions: rows of the table of positions.
        wide: width of the feed-forward block, 4 h in the papers.
        has_final_norm: whether a norm stands before the head.
        is_tied: whether the head is the embedding's table.
        item_bytes: e, of parameters, activations and gradients.
        loss_bytes: of a number of the loss.
    """

    hidden: int
    layers: int
    sequence: int
    vocabulary: int
    positions: int
    wide: int
    has_final_norm: bool = True
    is_tied: bool = False
    item_bytes: int = 2
    loss_bytes: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """Devices that share every matrix product of a stage.

    Attributes:
        size: t.
        samples: B, of one step.
    """

    size: int
    samples: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Some consecutive layers, held by d teams that share the batch.

    Attributes:
        teams: that hold a copy each.
        layers: of the stage.
        first_layer: number of the first one in the model.
        is_first: whether the embedding is here.
        is_last: whether the head and the loss are here.
    """

    teams: tuple[Team, ...]
    layers: int
    first_layer: int
    is_first: bool
    is_last: bool

    def holds(self, piece: int) -> bool:
        """Whether a piece of the model is here: a layer, ``EMBEDDING`` or ``HEAD``."""
        if piece < 0:
            return self.is_first if piece == EMBEDDING else self.is_last
        return self.first_layer <= piece < self.first_layer + self.layers

    @property
    def pieces(self) -> list[int]:
        """All pieces of the model that are here."""
        own = list(range(self.first_layer, self.first_layer + self.layers))
        return own + [EMBEDDING] * self.is_first + [HEAD] * self.is_last


EMBEDDING, HEAD = -1, -2
Pipelines = Sequence[Sequence[Stage]]
"""The stages of each pipeline; pipelines beside each other may cut the model differently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Of one device for one step.

    Attributes:
        parameters: numbers that it keeps.
        flops: of matrix products.
        tensor_bytes: that it sends to members of its team.
        data_bytes: that it sends to other teams of its stage.
        pipeline_bytes: that it sends to other stages.
    """

    parameters: float
    flops: float
    tensor_bytes: float
    data_bytes: float
    pipeline_bytes: float


def parameters(model: Transformer, piece: int, t: int) -> tuple[float, float]:
    """Parameters of a piece on a device: (those of which it holds a part of t, those whole).

    [N] eq. 2: P = 12 l h^2 (1 + 13/(12 h) + (V + s)/(12 l h)). By weight [M]: a layer cuts query,
    key and value (3 h^2 + 3 h), the output projection (h^2) and both weights of the feed-forward
    block (2 h w, and w biases); the two norms (4 h) and the biases behind sums (2 h) stay whole.
    The tables of the vocabulary (V h; the head again, unless it is tied) and of positions are cut.
    """
    h, w = model.hidden, model.wide
    if piece == EMBEDDING:
        return (model.vocabulary + model.positions) * h / t, 0.0
    if piece == HEAD:
        return (not model.is_tied) * model.vocabulary * h / t, 2.0 * h * model.has_final_norm
    return (4.0 * h * h + 3 * h + 2 * h * w + w) / t, 6.0 * h


def flops(model: Transformer, stage: Stage, team: Team, *, recompute: bool) -> float:
    """FLOPs of the matrix products of a device.

    [N] appendix: a layer's forward pass takes 24 B s h^2 + 4 B s^2 h, the head 2 B s h V, the
    backward pass twice as much. With w = 4 h: 8 h^2 for the four h x h products and 4 h w for the
    feed-forward block.

    [N]'s 96 B s l h^2 (...) repeats the whole forward pass of a layer. Here recomputation ends
    with the last value that the backward pass reads, as PyTorch's checkpoints do
    (``torch.utils.checkpoint``): the product behind the activation function (2 h w) is not
    repeated. Nor is, in a team, the output projection (2 h^2), because the sum over the team
    behind it is kept: see ``tensor_bytes``.
    """
    h, s, w, batch = model.hidden, model.sequence, model.wide, team.samples
    forward = batch * s * (8.0 * h * h + 4.0 * h * w) + 4.0 * batch * s * s * h
    again = forward - batch * s * 2.0 * h * w
    if team.size > 1:
        again -= batch * s * 2.0 * h * h
    total = stage.layers * (3.0 * forward + recompute * again)
    if stage.is_last:
        total += 3.0 * 2.0 * batch * s * h * model.vocabulary
    return total / team.size


def tensor_bytes(model: Transformer, stage: Stage, team: Team) -> float:
    """Bytes that a device sends to members of its team.

    [N] section 3.2: 8 b s h (t-1)/t for each layer and micro-batch: two sums over the team in the
    forward pass and two in the backward pass, of b s h numbers each. All micro-batches together
    have B samples. Recomputation sends nothing: the sums of the forward pass are kept (Megatron-LM
    repeats them, 12 b s h (t-1)/t).

    The embedding: each member looks up its columns, and the whole is gathered, (t-1)/t B s h.
    Megatron-LM cuts the rows of the table and sums, twice that. The head [M]: the gradient of its
    input is summed, and so are two numbers for each token, the sum of the exponentials and the
    wanted logit; Megatron-LM also finds the largest logit.
    """
    t, batch = team.size, team.samples
    ring = 2.0 * (t - 1) / t
    activation = batch * model.sequence * model.hidden * model.item_bytes
    total = stage.layers * 4.0 * ring * activation
    if stage.is_first:
        total += ring / 2.0 * activation
    if stage.is_last:
        total += ring * (activation + 2.0 * batch * model.sequence * model.loss_bytes)
    return total


def data_bytes(
    model: Transformer, pipelines: Pipelines, stage: Stage, team: Team, zero: int, num_micro: int
) -> float:
    """Bytes that a device sends to other teams with a copy of its parameters.

    [N] section 3.2, [P]: an all-reduce of the gradients, 2 (d-1)/d of the device's parameters.
    [Z]: the same with stages 1 and 2 (a reduce-scatter and an all-gather), half as much again with
    stage 3, for every micro-batch: parameters are gathered for the forward pass and once more for
    the backward pass, and gradients are scattered.

    Teams of different sizes reduce parameters that they cut in one ring for each interval, of d
    members; parameters that every member holds whole are reduced over all n devices. Pipelines
    that cut the model differently share each piece with other devices, so bytes are added up piece
    by piece.
    """
    times = 1.5 * num_micro if zero == 3 else 1.0
    total = 0.0
    for piece in stage.pieces:
        holders = [t for own in pipelines for s in own if s.holds(piece) for t in s.teams]
        num_devices = sum(each.size for each in holders)
        cut, whole = parameters(model, piece, team.size)
        ring = 2.0 * (len(holders) - 1) / len(holders)
        are_alike = len({each.size for each in holders}) == 1
        ring_of_whole = ring if are_alike else 2.0 * (num_devices - 1) / num_devices
        total += times * (ring * cut + ring_of_whole * whole) * model.item_bytes
    return total


def pipeline_bytes(model: Transformer, stages: Sequence[Stage], index: int) -> float:
    """Bytes that a device of a stage sends to other stages, the mean over the stage's devices.

    [N] section 3.2: b s h numbers from each device to its neighbour for each micro-batch, forward
    to the next stage and backward to the one before. Every member of a receiving team gets all
    samples of its team once.
    """
    own = sum(team.size for team in stages[index].teams)
    total = 0.0
    for other in (index - 1, index + 1):
        if 0 <= other < len(stages):
            total += sum(team.size * team.samples for team in stages[other].teams)
    return total * model.sequence * model.hidden * model.item_bytes / own


def costs(
    model: Transformer,
    pipelines: Pipelines,
    place: tuple[int, int],
    team: Team,
    *,
    recompute: bool,
    zero: int = 0,
    num_micro: int = 1,
) -> Costs:
    """Everything about a device of a team of a stage.

    Args:
        model: its sizes.
        pipelines: all of them.
        place: of the stage: (number of its pipeline, number in it).
        team: of the stage.
        recompute: whether layers recompute.
        zero: stage of ZeRO.
        num_micro: micro-batches.
    """
    own = pipelines[place[0]]
    stage = own[place[1]]
    return Costs(
        parameters=sum(sum(parameters(model, piece, team.size)) for piece in stage.pieces),
        flops=flops(model, stage, team, recompute=recompute),
        tensor_bytes=tensor_bytes(model, stage, team),
        data_bytes=data_bytes(model, pipelines, stage, team, zero, num_micro),
        pipeline_bytes=pipeline_bytes(model, own, place[1]),
    )
