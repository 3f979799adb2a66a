"""Seconds of a step of a uniform pipeline: Pipette's six models, and the exact time of 1F1B.

Pipette (Yim et al., DATE 2024, arXiv 2405.18093) prices a layout of tp x pp x dp before anything
runs. Its published code has six variants, each with one more of the paper's ideas. With p stages,
m micro-batches, d_p replicas (n of them on a host, on d hosts), F and B seconds of one micro-batch
on one stage, P bytes of an activation, D of a stage's gradients, E = p (F + B), k = floor(m / p)
and C = 2 (p - 1) P / bandwidth:

    variant      pipeline                               gradients
    amp          (m - 1) 3F + p 3F + C                  2 (d_p - 1)/d_p D / slowest bandwidth
    +path        k (E + C) + (p - 1)(F + B)             as amp
    +split       (m - 1)(F + B) + E + C                 2 x 2 (n - 1)/n D / inside
                                                          + 2 (d - 1)/d D / between
    +measured    as +split, C of an order of hosts      of that order
    path+split   as +path                               as +split
    all          as +path, C of an order of hosts       of that order

Where m < p, +path has E + C + (m - 1)(F + B). Four peculiarities are kept as published:

- k drops the remainder of m / p, so that a model with m = 2p - 1 costs as much as with m = p.
- The term inside hosts has a factor 2 under +split that it lacks where an order is measured.
- Only the gradients of the first stage are priced.
- amp takes a backward pass as twice a forward pass, whatever B is.
"""

from dataclasses import dataclass
from enum import StrEnum

from heterog.methods.pipette.communication import Communication, ring_payloads


class Variant(StrEnum):
    """One of the six models, by its name in the paper's ablation."""

    AMP = "amp"
    PATH = "+path"
    SPLIT = "+split"
    MEASURED = "+measured"
    PATH_SPLIT = "path+split"
    ALL = "all"

    @property
    def needs_measured(self) -> bool:
        """Whether it prices an order of hosts on measured rates."""
        return self in (Variant.MEASURED, Variant.ALL)

    @property
    def follows_path(self) -> bool:
        """Whether every p micro-batches pay for a round trip through the pipeline."""
        return self in (Variant.PATH, Variant.PATH_SPLIT, Variant.ALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformCosts:
    """A layout in the terms of the models.

    Attributes:
        num_stages: p, number of stages of the pipeline.
        num_replicas: Number of replicas of the model.
        replicas_per_host: n, number of replicas that share a host.
        num_micro: m, number of micro-batches of a replica.
        forward_s: F, forward pass of one micro-batch on one stage, the team's sums included.
        backward_s: B, backward pass, likewise.
        message_bytes: P, bytes of one activation from stage to stage.
        gradient_bytes: D, bytes of a stage's gradients on one member of a team.
        inside_bytes_per_s: Bandwidth inside a host.
        between_bytes_per_s: Bandwidth between hosts.
    """

    num_stages: int
    num_replicas: int
    replicas_per_host: int
    num_micro: int
    forward_s: float
    backward_s: float
    message_bytes: float
    gradient_bytes: float
    inside_bytes_per_s: float
    between_bytes_per_s: float

    @property
    def hosts_per_stage(self) -> int:
        """d, number of hosts that have the same stage."""
        return self.num_replicas // self.replicas_per_host


def latency_s(
    variant: Variant, costs: UniformCosts, measured: Communication | None = None
) -> float:
    """Seconds of a step by one of the models.

    Args:
        variant: The model.
        costs: Costs of the layout.
        measured: Communication on an order of hosts; only for ``+measured`` and ``all``.
    """
    if variant.needs_measured:
        assert measured is not None, f"variant {variant} prices an order of hosts"
        return _pipeline_s(variant, costs, measured.pipeline_s) + measured.gradients_s
    links = costs.num_stages - 1
    messages_s = 2.0 * links * costs.message_bytes / costs.between_bytes_per_s
    return _pipeline_s(variant, costs, messages_s) + _gradients_s(variant, costs)


def _pipeline_s(variant: Variant, costs: UniformCosts, messages_s: float) -> float:
    """Seconds of the pipeline.

    Args:
        variant: The model.
        costs: Costs of the layout.
        messages_s: C, round trip of messages through the pipeline.
    """
    stages, micro = costs.num_stages, costs.num_micro
    if variant == Variant.AMP:
        return (micro - 1 + stages) * 3.0 * costs.forward_s + messages_s
    both_s = costs.forward_s + costs.backward_s
    rounds = micro // stages
    if variant.follows_path and rounds >= 1:
        return rounds * (stages * both_s + messages_s) + (stages - 1) * both_s
    return (micro - 1 + stages) * both_s + messages_s


def _gradients_s(variant: Variant, costs: UniformCosts) -> float:
    """Seconds of the gradients, at fixed bandwidths."""
    inside, between = costs.inside_bytes_per_s, costs.between_bytes_per_s
    if variant in (Variant.AMP, Variant.PATH):
        return ring_payloads(costs.num_replicas) * costs.gradient_bytes / min(inside, between)
    inside_s = 2.0 * ring_payloads(costs.replicas_per_host) * costs.gradient_bytes / inside
    return inside_s + ring_payloads(costs.hosts_per_stage) * costs.gradient_bytes / between
