"""Averaging: islands of devices that train alone for some steps, then average their parameters.

The teams of every decision are *islands*: gradients are summed inside an island at each step, as
the decision's synchronisation says, and never between islands. After every H steps the parameters
of all islands are averaged (local SGD, Stich 2019). With an outer optimizer the difference to the
last average is a gradient for SGD with Nesterov momentum (DiLoCo, Douillard et al. 2023,
algorithm 1).

The weights that come out are *not* those of one device, but for H = 1 with plain SGD, so a
strategy averages only where a person asked for it.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from heterog.errors import StrategyError
from heterog.graph.grouping import group_ops
from heterog.strategy.division import batch_shares

if TYPE_CHECKING:
    from heterog.graph.op_graph import OpGraph
    from heterog.strategy.strategy import Decision, Strategy

MOST_STEPS = 1_000_000
"""Most steps between two averagings; more is a typing error."""


class AverageWeights(StrEnum):
    """Weight of an island's parameters in the average."""

    SAMPLES = "samples"
    """In proportion to the samples that it trains on: with H = 1 and SGD, one device's step."""
    EQUAL = "equal"
    """All islands alike, as in DiLoCo."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaging:
    """How and when islands average their parameters.

    With w the average of the islands' parameters and a the parameters after the averaging before,
    the outer optimizer takes d = a - w as a gradient: m = momentum * m + d, and the new parameters
    are a - rate * (d + momentum * m). With rate 1 and momentum 0 they are w.

    With a delay of D steps the average of the parameters s after step t arrives after step t + D,
    while islands train on: what they have then, x, becomes new + (x - s). Nobody waits for it
    unless it takes longer than D steps (CoCoD-SGD, Shen et al. 2019, for D = H), and what an
    island knows of the others is at most H + D steps old.

    With a codec (``CodecRule`` of parameter changes) island i sends c_i = encode(p_i (a - x_i) +
    e_i) of its parameters x_i and weight p_i, and keeps e_i, what the message left out, for the
    next one. All take d = sum_i decode(c_i), in one order, so that they stay equal bit for bit
    (Qsparse-local-SGD, Basu et al. 2019, algorithm 1).

    Attributes:
        every: Number H of training steps from one averaging to the next.
        weights: Weight of each island in the average.
        outer_rate: Learning rate of the outer optimizer.
        outer_momentum: Nesterov momentum of the outer optimizer.
        delay: Number D of steps for which an average may be under way; below H.
    """

    every: int
    weights: AverageWeights = AverageWeights.SAMPLES
    outer_rate: float = 1.0
    outer_momentum: float = 0.0
    delay: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.every <= MOST_STEPS:
            raise StrategyError(
                f"averaging every {self.every} steps; give a number from 1 to {MOST_STEPS:,}."
            )
        if not 0.0 < self.outer_rate <= 10.0:
            raise StrategyError(
                f"the outer learning rate is {self.outer_rate:g}; it must be above 0 and at most "
                "10 (1 takes the average over, 0.7 is DiLoCo's)."
            )
        if not 0.0 <= self.outer_momentum < 1.0:
            raise StrategyError(
                f"the outer momentum is {self.outer_momentum:g}; it must be at least 0 and below "
                "1 (0.9 is DiLoCo's)."
            )
        if not 0 <= self.delay < self.every:
            raise StrategyError(
                f"the delay is {self.delay} steps of a window of {self.every}; it must be at "
                "least 0 and below the steps between two averagings."
            )

    @property
    def has_outer(self) -> bool:
        """Whether there is an outer optimizer, with two copies of all parameters as its state."""
        return self.outer_rate != 1.0 or self.outer_momentum != 0.0

    def num_copies(self, is_coded: bool) -> int:
        """Copies of all parameters that stay on a device: outer state, and averages under way.

        With codecs also the parameters after the last averaging, and what messages left out.

        Args:
            is_coded: Whether what averaging sends has codecs.
        """
        num_anchors = 1 + (not self.has_outer) if is_coded else 0
        return 2 * self.has_outer + 2 * (self.delay > 0) + num_anchors

    def step_s(self, local_s: float, averaging_s: float) -> float:
        """Mean seconds of a step over a window.

        T = T_local + max(T_average - D T_local, 0) / H.

        >>> Averaging(every=8).step_s(1.0, 4.0), Averaging(every=8, delay=3).step_s(1.0, 4.0)
        (1.5, 1.125)

        Args:
            local_s: Seconds of a step without averaging.
            averaging_s: Seconds of one averaging.
        """
        return local_s + max(averaging_s - self.delay * local_s, 0.0) / self.every

    @property
    def words(self) -> str:
        """The averaging in a sentence.

        >>> Averaging(every=8).words
        'parameters averaged every 8 steps by samples'
        """
        steps = "step" if self.every == 1 else f"{self.every} steps"
        text = f"parameters averaged every {steps} by samples"
        if self.weights == AverageWeights.EQUAL:
            text = f"parameters averaged every {steps} with equal weights"
        if self.has_outer:
            text += f", outer SGD of rate {self.outer_rate:g}, momentum {self.outer_momentum:g}"
        if self.delay:
            text += f", arriving {self.delay} steps later"
        return text

    def check(self, strategy: "Strategy", graph: "OpGraph") -> None:
        """Refuse decisions whose teams are not islands that can train alone.

        Args:
            strategy: Strategy whose decisions are checked.
            graph: One training step.

        Raises:
            StrategyError: a decision does not allow it; the message says which and why.
        """
        check_islands(strategy, graph.batch_size, "averaging")
        group = group_ops(graph).group
        owners = {strategy.decisions[int(group[op])].devices for op, _, _ in graph.updates}
        for rule in strategy.codecs:
            if tuple(sorted(rule.devices)) not in owners:
                raise StrategyError(
                    f"the strategy has a codec, {rule}, but averaging brings together parameters "
                    f"of devices {', '.join(map(str, sorted(owners)))}; name one of these sets."
                )


def check_islands(strategy: "Strategy", batch_size: int, what: str) -> None:
    """Refuse decisions whose teams are not islands that can train alone.

    Args:
        strategy: Strategy whose decisions are checked.
        batch_size: Batch size of the graph.
        what: Words for what needs islands.

    Raises:
        StrategyError: a decision does not allow it; the message says which and why.
    """
    if not strategy.step_barrier:
        raise StrategyError(f"{what} needs steps that end with all updates; plan with them.")
    if strategy.op_rules:
        raise StrategyError(
            f"{what} goes with whole parameters only, but the strategy has rules that cut "
            "ops; plan without op rules."
        )
    first, wanted = strategy.decisions[0], island_samples(strategy, batch_size)
    island_of: dict[int, int] = {}
    for decision in dict.fromkeys(strategy.decisions):
        _check_decision(decision, what)
        if _samples(decision, batch_size) != wanted:
            raise StrategyError(
                f"groups on devices {first.devices} and {decision.devices} give islands other "
                f"samples; with {what} all groups share the batch out alike."
            )
        for number, team in enumerate(decision.teams):
            for device in team:
                if island_of.setdefault(device, number) != number:
                    raise StrategyError(
                        f"device {device} is in island {island_of[device]} for one group and "
                        f"in island {number} for another; with {what} it belongs to one."
                    )
    if not all(wanted):
        raise StrategyError(
            f"of a batch of {batch_size} the islands get {list(wanted)} samples; with "
            f"{what} each of them trains and needs at least one."
        )


def _check_decision(decision: "Decision", what: str) -> None:
    if len(decision.teams) < 2:
        raise StrategyError(
            f"{what} needs at least two teams that train alone; devices "
            f"{decision.devices} are in {max(len(decision.teams), 1)}."
        )
    if decision.sync.is_sharded or decision.sync.is_served:
        raise StrategyError(
            f"{what} goes with replicas that keep all of the training state, not with "
            f"{decision.sync.name.lower()}; choose ring, hierarchical or "
            "reduce_scatter_all_gather inside islands."
        )


def island_samples(strategy: "Strategy", batch_size: int) -> tuple[int, ...]:
    """Samples of a step on each island, when a batch is shared out in a strategy's proportions."""
    return _samples(strategy.decisions[0], batch_size)


def island_parts(strategy: "Strategy") -> tuple[float, ...]:
    """Weight of each island in the average; they add up to 1."""
    assert strategy.averaging is not None
    first = strategy.decisions[0]
    if strategy.averaging.weights == AverageWeights.EQUAL:
        return (1.0 / len(first.teams),) * len(first.teams)
    batch_size = sum(first.shares)
    return tuple(count / batch_size for count in island_samples(strategy, batch_size))


def islands(strategy: "Strategy") -> tuple[tuple[int, ...], ...]:
    """All devices of each island, ascending."""
    members: list[set[int]] = [set() for _ in strategy.decisions[0].teams]
    for decision in dict.fromkeys(strategy.decisions):
        for own, team in zip(members, decision.teams, strict=True):
            own.update(team)
    return tuple(tuple(sorted(own)) for own in members)


def island_of(strategy: "Strategy", device: int) -> int | None:
    """Number of a device's island; ``None`` for one that takes no part in training."""
    found = (number for number, own in enumerate(islands(strategy)) if device in own)
    return next(found, None)


def _samples(decision: "Decision", batch_size: int) -> tuple[int, ...]:
    """Samples of each team of a decision."""
    shares = batch_shares(decision.shares, batch_size)
    of_device = dict(zip(decision.devices, shares, strict=True))
    return tuple(sum(of_device[device] for device in team) for team in decision.teams)
