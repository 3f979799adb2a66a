"""Islands: teams that train alone, between averagings or beside an asynchronous server."""

from collections.abc import Iterator

from heterog.errors import StrategyError
from heterog.lowering.program import FIRST_LINK_KIND, Program
from heterog.strategy.division import batch_shares
from heterog.strategy.strategy import Decision, Strategy

MOST_STEPS = 1_000_000
"""Most steps between two averagings, or ahead of others; more is a typing error."""
_COUNT_BYTES = 8
"""Size of the number of unmasked labels, by which a masked mean divides."""


def check_islands(strategy: "Strategy", batch_size: int, what: str) -> None:
    """Refuse decisions whose teams are not islands that can train alone.

    Args:
        strategy: Strategy whose decisions are checked.
        batch_size: Batch size of the graph.
        what: Words for the mode that needs islands, for messages.

    Raises:
        StrategyError: a decision does not allow it; the message names it and the reason.
    """
    check_whole(strategy, what, "islands")
    first, wanted = strategy.decisions[0], island_samples(strategy, batch_size)
    island_of: dict[int, int] = {}
    for decision in dict.fromkeys(strategy.decisions):
        if len(decision.teams) < 2:
            raise StrategyError(
                f"{what} needs at least two teams that train alone; devices "
                f"{decision.devices} are in {max(len(decision.teams), 1)}."
            )
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


def check_whole(strategy: "Strategy", what: str, inside: str) -> None:
    """Refuse steps that overlap, and parameters or training state that are not whole on a device.

    Args:
        strategy: Strategy that is checked.
        what: Words for the mode that needs this, for messages.
        inside: Words for the devices that have the same parameters.
    """
    if not strategy.step_barrier:
        raise StrategyError(f"{what} needs steps that end with all updates; plan with them.")
    if strategy.op_rules:
        raise StrategyError(
            f"{what} goes with whole parameters only, but the strategy has rules that cut "
            "ops; plan without op rules."
        )
    for decision in strategy.decisions:
        if decision.sync.is_sharded or decision.sync.is_served:
            raise StrategyError(
                f"{what} goes with replicas that keep all of the training state, not with "
                f"{decision.sync.name.lower()}; choose ring, hierarchical or "
                f"reduce_scatter_all_gather inside {inside}."
            )


def island_samples(strategy: "Strategy", batch_size: int) -> tuple[int, ...]:
    """Samples of each island in a step, if a batch is divided in a strategy's proportions."""
    return _samples(strategy.decisions[0], batch_size)


def islands(strategy: "Strategy") -> tuple[tuple[int, ...], ...]:
    """All devices of each island, ascending."""
    members: list[set[int]] = [set() for _ in strategy.decisions[0].teams]
    for decision in dict.fromkeys(strategy.decisions):
        for own, team in zip(members, decision.teams, strict=True):
            own.update(team)
    return tuple(tuple(sorted(own)) for own in members)


def island_of(strategy: "Strategy", device: int) -> int | None:
    """Number of a device's island; ``None`` for a device without a part in training."""
    return next((number for number, own in enumerate(islands(strategy)) if device in own), None)


def _samples(decision: "Decision", batch_size: int) -> tuple[int, ...]:
    """Samples of each team of a decision."""
    of_device = dict(zip(decision.devices, batch_shares(decision.shares, batch_size), strict=True))
    return tuple(sum(of_device[device] for device in team) for team in decision.teams)


def crossing_tasks(
    program: Program, strategy: "Strategy"
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Tasks in which devices of several islands communicate, with the devices."""
    island_of = {device: n for n, own in enumerate(islands(strategy)) for device in own}
    for task in (program.kind >= FIRST_LINK_KIND).nonzero()[0].tolist():
        devices = program.channels[int(program.channel[task])].devices
        if len({island_of.get(device, -1) for device in devices}) > 1:
            yield task, devices


def crossing_fault(program: Program, strategy: "Strategy") -> str:
    """Why a program's islands cannot train alone between averagings; empty if they can.

    An island may receive the number of unmasked labels in the whole batch, per micro-batch, but
    no value that depends on another island's weights.
    """
    for task, devices in crossing_tasks(program, strategy):
        if program.num_bytes[task] > _COUNT_BYTES:
            return (
                f"devices {devices} of several islands exchange {program.num_bytes[task]:.0f} "
                "bytes in every step, so that islands do not train alone; cut the groups' "
                "samples alike, or average a model whose loss is a mean over samples"
            )
    return ""
