"""Runs of programs: a choice is lowered, priced and simulated, by the engine or the referee.

Devices that do the same are lowered only once (``lowering.folding``). Twins that share no link do
the same at the same time, so step time and memory equal those of all devices together. If messages
of twins meet on a link (for example the NIC of a host), each gets a share of it, which the
messages of one of them do not show. So such twins are not folded.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from heterog.cluster.schema import is_cpu
from heterog.cluster.topology import Cluster, Sends
from heterog.graph.op_graph import OpGraph
from heterog.lowering import (
    Choice,
    Held,
    held_bytes,
    kept_bytes,
    lower_to_tape,
    make_scratch,
    program_from_tape,
    stepping_bytes,
)
from heterog.lowering.channels import Channel, ChannelTable
from heterog.lowering.folding import Fold, channels_named, fold_choice, folds, hardware_of
from heterog.lowering.program import FloatArray, IntArray, Program
from heterog.lowering.tables import GraphTables, graph_tables
from heterog.lowering.tape import APART, NUM_TASKS, Scratch, Tape, make_tape, mark_channels
from heterog.pricing.calibration import cost_model_of
from heterog.pricing.cost_model import ChannelPrices, ChannelSeconds, CostModel, Prices
from heterog.pricing.intervals import Noise, noisy_prices, noisy_seconds
from heterog.pricing.price_table import ChannelPricer, PriceTable, RuleSet, RuleSets
from heterog.simulator.engine import GIVEN_UP, Order, run_program
from heterog.simulator.memory import Inside, Kept, copies_of_ops, kept_values, peak_memory
from heterog.simulator.place_facts import PlaceFacts, place_facts
from heterog.simulator.referee import replay, sequence_of
from heterog.simulator.timings import Timings, make_timings, with_room

_MOST_PRICES = 256  # folds whose channels stay priced
_MOST_SCRATCHES = 8
_MOST_FAILS = 256
_NOTHING_COPIED = np.zeros(0, np.int32)


class Folded(NamedTuple):
    """A choice that was lowered on the columns of a fold."""

    choice: Choice
    fold: Fold
    tape: Tape
    channels: ChannelPrices  # in the numbering of the folded choice


class Folding:
    """Lowers choices with twins folded away if the result is the same.

    Args:
        cluster: The devices.
        pricer: Prices of the cluster's links.
        table: Table of the channels that choices use.
    """

    def __init__(self, cluster: Cluster, pricer: ChannelPricer, table: ChannelTable) -> None:
        self._cluster, self._hardware = cluster, hardware_of(cluster)
        self._pricer = pricer
        self._table = table
        self._tape: Tape | None = None
        self._scratch: dict[tuple[int, int], Scratch] = {}
        self._prices: dict[bytes, ChannelPrices | None] = {}
        # Folds that failed for a choice with the same channels. They are not tried again: another
        # failure costs more time than a success would gain.
        self._fails: set[bytes] = set()

    def lower(
        self, choice: Choice, tables: GraphTables, *, minds_position: bool = False
    ) -> Folded | None:
        """Lower a choice on as few columns as possible; ``None`` if no fold is possible.

        Args:
            choice: The strategy.
            tables: Tables of its graph and rules.
            minds_position: Whether members of a team with equally many units do different work.
        """
        if self._cluster.sends == Sends.BLOCKING:  # waiting is tracked by device, not by column
            return None
        found = folds(choice, self._cluster, self._hardware, minds_position=minds_position)
        for fold in found:
            same = _bytes_of(fold.columns, fold.column_of, *channels_named(choice))
            if same in self._fails:
                continue
            folded, numbers = fold_choice(choice, fold)
            tape = self._tape or make_tape(
                4096, len(tables.parameter_bytes), self._cluster.num_devices
            )
            tape = tape._replace(turn=np.zeros(len(fold.columns), np.int32))
            key = choice.rule_set, len(fold.columns)
            if key not in self._scratch:
                if len(self._scratch) >= _MOST_SCRATCHES:
                    self._scratch.clear()
                self._scratch[key] = make_scratch(tables, len(fold.columns))
            self._tape = tape = lower_to_tape(tables, folded, self._scratch[key], tape)
            channels = None if tape.counts[APART] else self._price(tape, fold, numbers)
            if channels is not None:
                return Folded(folded, fold, tape, channels)
            if len(self._fails) >= _MOST_FAILS:
                self._fails.clear()
            self._fails.add(same)
        return None

    def _price(self, tape: Tape, fold: Fold, numbers: IntArray) -> ChannelPrices | None:
        """Prices of a fold's channels; ``None`` if twins differ or disturb each other."""
        is_used = np.zeros(len(numbers) + 1, np.bool_)
        mark_channels(tape, is_used)
        used = np.flatnonzero(is_used[:-1])
        key = _bytes_of(fold.columns, fold.column_of, numbers, used)
        if key not in self._prices:
            if len(self._prices) >= _MOST_PRICES:
                self._prices.clear()
            channels = [self._table[number] for number in numbers]
            is_apart = self._are_apart(fold, [channels[number] for number in used])
            self._prices[key] = self._new_prices(channels) if is_apart else None
        return self._prices[key]

    def _new_prices(self, channels: list[Channel]) -> ChannelPrices | None:
        prices = self._pricer.prices(channels)
        # Prices list the devices that a channel slows down by device, not by column.
        is_free = not (prices.drag.any() or prices.overhead_s.any() or prices.loaded_s.any())
        return prices if is_free else None

    def _are_apart(self, fold: Fold, channels: Sequence[Channel]) -> bool:
        """Whether twins cost the same, and no folded lane or position uses a link of a kept one.

        A collective over several lanes is its own twin in each lane, and so is a collective over
        several positions: the traffic of all of these meets it equally.
        """
        by_lane: dict[int, set[int]] = {}
        by_position: dict[int, set[int]] = {}
        for channel in channels:
            cost = self._pricer.seconds(channel)
            if not self._loads_alike(fold, channel, cost):
                return False
            for devices in fold.twins(channel.devices):
                there = self._pricer.seconds(self._table.alike(channel, devices))
                if not _is_alike(cost, there):
                    return False
                lane, position = fold.lane_of(devices), fold.position_of(devices)
                if lane is not None:
                    by_lane.setdefault(lane, set()).update(there.held)
                if position is not None:
                    by_position.setdefault(position, set()).update(there.held)
        return _is_apart(by_lane, fold.lane_twin) and _is_apart(by_position, fold.position_twin)

    def _loads_alike(self, fold: Fold, channel: Channel, cost: ChannelSeconds) -> bool:
        """Whether a channel holds the links of all its members in a column equally long."""
        of_column: dict[int, tuple[float, ...]] = {}
        for device in channel.devices:
            held = tuple(cost.held.get(link, 0.0) for link in self._cluster.links_of(device))
            if of_column.setdefault(int(fold.column_of[device]), held) != held:
                return False
        return True


def _bytes_of(*arrays: npt.NDArray[np.integer[Any]]) -> bytes:
    return b"".join(each.tobytes() for each in arrays)


def _is_apart(links: Mapping[int, set[int]], twin: IntArray) -> bool:
    """Whether no folded place (lane or position) uses a link of a kept place."""
    used = {link for place, own in links.items() if twin[place] == place for link in own}
    return all(twin[place] == place or used.isdisjoint(own) for place, own in links.items())


def _is_alike(first: ChannelSeconds, second: ChannelSeconds) -> bool:
    mine, theirs = sorted(first.held.values()), sorted(second.held.values())
    one, other = (
        (each.latency_s, each.fill_s, each.fill_s_per_byte, each.seconds_per_byte)
        for each in (first, second)
    )
    return (one, mine) == (other, theirs)


LEAST_FOLDED = 30_000
"""Fewest ops, on all devices in all micro-batches and steps, for which the search for folds pays:
it takes about a millisecond, in which a third of so many ops are lowered and simulated."""


class Lowered(NamedTuple):
    """A choice ready to be simulated, on all devices or on those that stand for others."""

    choice: Choice
    rules: RuleSet
    tape: Tape
    prices: Prices
    fold: Fold | None = None


def _more_s(choice: Choice) -> float:
    """Seconds that modes add to a step; negative if steps overlap."""
    return sum(mode.more_s for mode in choice.modes)


class Runner:
    """Lowers and simulates strategies of one graph on one cluster.

    It reuses its arrays between calls, so use one per thread.

    Args:
        graph: One training step.
        cluster: Devices and links.
        cost_model: Model of the seconds of tasks; by default the calibration that the cluster
            names, else the roofline prior.
        beside: Another runner on this cluster with this cost model; collectives and their prices
            are shared, and if it is of the same graph, prices of ops.

    Attributes:
        tables: The graph's tables without op rules.
        channels: Table in which the channels of strategies are registered.
        rules: Rule sets of the graph.
        prices: Cache of the prices that strategies need.
        num_evaluations: Number of simulations so far.
        num_tasks: Number of tasks of the program that was simulated last.
        last: Times of that program; the next simulation overwrites them.
        poll: Callback before every simulation; an exception from it ends a search
            (``Spending.limits``).
    """

    def __init__(
        self,
        graph: OpGraph,
        cluster: Cluster,
        cost_model: CostModel | None = None,
        beside: "Runner | None" = None,
    ) -> None:
        self.graph, self.cluster = graph, cluster
        known_model = beside.cost_model if beside is not None else None
        self.cost_model: CostModel = cost_model or known_model or cost_model_of(cluster)
        if beside is not None:  # it has prices of these
            assert beside.cluster is cluster
            assert beside.cost_model is self.cost_model
        self.tables = graph_tables(graph)
        self.channels: ChannelTable = ChannelTable(cluster, beside.channels if beside else None)
        self.rules: RuleSets = RuleSets(graph, self.channels, beside.rules if beside else None)
        model, known = self.cost_model, beside.prices if beside else None
        self.prices: PriceTable = PriceTable(
            graph, cluster, model, self.channels, self.tables, known
        )
        self.num_evaluations = 0
        self.num_tasks = 0
        self._copies: dict[int, IntArray] = {}
        self._are_cpus = np.array([is_cpu(kind.name) for kind, _ in self.prices.models])
        self.poll: Callable[[], None] = lambda: None
        self._folding = Folding(cluster, self.prices.pricer, self.channels)
        self.last = make_timings(1, 1, 1, 1)
        self._ran: Lowered | None = None
        self._tape = make_tape(4096, len(self.tables.parameter_bytes), cluster.num_devices)

    def tables_of(self, choice: Choice) -> GraphTables:
        """The graph's tables under the op rules of an encoded strategy."""
        return self.rules.tables_of(choice)

    def lower(self, choice: Choice) -> Lowered:
        """Lower a choice on all devices."""
        self.poll()
        rules = self.rules.of(choice.rule_set)
        self._tape = lower_to_tape(rules.tables, choice, rules.scratch, self._tape)
        channels = self.prices.of_channels(self._tape)
        types, members = self.prices.types_of(choice), self._members_that_wait(choice, rules)
        prices = self.prices.prices(choice, rules, types, channels, members)
        return Lowered(choice, rules, self._tape, prices)

    def fold(self, choice: Choice) -> Lowered | None:
        """Lower a choice on devices that stand for others; ``None`` if that is not exact."""
        if not all(mode.folds for mode in choice.modes):
            return None
        rules, num_devices = self.rules.of(choice.rule_set), self.cluster.num_devices
        num_ops = len(rules.tables.op_id) * num_devices * choice.num_micro * choice.num_steps
        if num_ops < LEAST_FOLDED:
            return None
        self.poll()
        if rules.tells_rows_apart:
            return None
        folded = self._folding.lower(choice, rules.tables, minds_position=rules.minds_position)
        if folded is None:
            return None
        members = self._members_that_wait(choice, rules)
        types = self.prices.types_of(choice)[folded.fold.columns]
        prices = self.prices.prices(folded.choice, rules, types, folded.channels, members)
        return Lowered(folded.choice, rules, folded.tape, prices, folded.fold)

    def _members_that_wait(self, choice: Choice, rules: RuleSet) -> int:
        """Devices of the largest team if stages lie on different hosts; else 0.

        It matters only for the prices of ops with rules.
        """
        members = int(choice.teams.size.max(initial=0)) if rules.has_rules else 0
        if members < 2 or len(choice.member) < 2:
            return 0
        on_hosts = {
            frozenset(self.cluster.host_of[device] for device in np.flatnonzero(row).tolist())
            for row in choice.member.astype(np.bool_)
        }
        return members if len(on_hosts) > 1 else 0

    def run(self, lowered: Lowered, order: Order, limit_s: float) -> tuple[float, bool]:
        """Simulate a lowered choice.

        Returns:
            (seconds per step, True), or (a lower bound of them above the limit, False).
        """
        choice, _, tape, prices, _ = self._ran = lowered
        num_devices = len(prices.type_of_device)
        limit_s -= _more_s(choice)
        self.last = with_room(self.last, tape, len(prices.channels.queue) + num_devices)
        end, is_done = run_program(
            tape, prices, self.last, num_devices, order, limit_s * choice.num_steps
        )
        self.num_evaluations += 1
        self.num_tasks = int(tape.counts[NUM_TASKS])
        return end / choice.num_steps + _more_s(choice), is_done

    def facts(self) -> PlaceFacts | None:
        """Seconds by place of the last evaluation; ``None`` if it was not simulated."""
        if self._ran is None:
            return None
        _, rules, tape, prices, fold = self._ran
        num_links = len(self.cluster.resources)
        columns = np.arange(self.cluster.num_devices, dtype=np.int32)
        stream_of = columns if fold is None else fold.column_of
        columns = columns if fold is None else fold.columns
        found = place_facts(tape, prices, self.last, rules.tables, stream_of, num_links)
        links = np.array([self.cluster.links_of(device) for device in columns.tolist()])
        found.devices[:, -1] = found.resources[links].max(axis=1)
        if fold is None:
            return found
        columns_of = [fold.unfolded(column) for column in found.devices.T]
        return found._replace(devices=np.column_stack(columns_of))

    def replayed(
        self, lowered: Lowered, limit_s: float = math.inf
    ) -> tuple[float, Timings | None]:
        """(seconds per step, timings) of the last simulation by the referee.

        Above the limit it returns (a lower bound of the seconds, ``None``).
        """
        choice, rules, tape, prices, _ = lowered
        limit_s -= _more_s(choice)
        sequence = sequence_of(rules.tables, choice, tape, self.last)
        num_devices = len(prices.type_of_device)
        end, done, replayed = replay(
            tape, prices, self.last, num_devices, sequence, limit_s * choice.num_steps
        )
        num_tasks = int(tape.counts[NUM_TASKS])
        assert done in (num_tasks, GIVEN_UP), f"only {done} of {num_tasks} tasks can be replayed"
        seconds = end / choice.num_steps + _more_s(choice)
        return seconds, None if done == GIVEN_UP else replayed

    def peak(self, lowered: Lowered, *timings: Timings) -> FloatArray:
        """Peak bytes of each device, the largest over timings of the lowered choice."""
        choice, rules, tape, prices, fold = lowered
        peaks = np.empty((len(timings), len(prices.type_of_device)))
        tables = rules.tables
        held = held_bytes(tables, choice)
        resident = kept_bytes(tape, tables, choice, held)
        kept = self.kept_values(tables, choice)
        inside = self.inside(tables, choice, held, prices.type_of_device)
        for each, peak in zip(timings, peaks, strict=True):
            peak_memory(tape, each, resident, inside, peak, tables.value_start, kept)
        most = peaks.max(axis=0)
        return np.asarray(most if fold is None else fold.unfolded(most), np.float64)

    def inside(
        self, tables: GraphTables, choice: Choice, held: Held, types: IntArray | None = None
    ) -> Inside:
        """What is made inside tasks on devices of some types, by default the cluster's."""
        on_cpu = self._are_cpus[self.prices.types if types is None else types]
        copies = _NOTHING_COPIED
        if on_cpu.any():
            if choice.rule_set not in self._copies:
                self._copies[choice.rule_set] = copies_of_ops(self.graph, tables)
            copies = self._copies[choice.rule_set]
        return Inside(stepping_bytes(self.graph, held, on_cpu), copies, on_cpu)

    def kept_values(self, tables: GraphTables, choice: Choice) -> Kept:
        """Where a compiled step keeps the values of some tables."""
        return kept_values(
            self.graph,
            tables,
            self.cluster.execution,
            choice.num_micro,
            splits_backward=choice.turns.splits,
        )

    def alone(self, choice: Choice) -> tuple[Lowered, float, Timings]:
        """Simulate a step without the seconds that modes add.

        It is not counted as an evaluation, since it is part of the strategy's evaluation.

        Returns:
            (lowered choice, seconds, timings that the next simulation overwrites).
        """
        counted = self.num_evaluations
        own = tuple(replace(mode, more_s=0.0) for mode in choice.modes)
        lowered = self.lower(choice._replace(modes=own))
        seconds, _ = self.run(lowered, Order.FIFO, math.inf)
        self.num_evaluations = counted
        return lowered, seconds, self.last

    def tape_s(self, tape: Tape, choice: Choice) -> float:
        """Seconds by the referee of a tape that is not a training step.

        Args:
            tape: The tape.
            choice: Strategy on whose devices the tape runs.
        """
        rules, channels = self.rules.of(choice.rule_set), self.prices.of_channels(tape)
        prices = self.prices.prices(choice, rules, self.prices.types, channels)
        lowered = Lowered(choice._replace(num_steps=1, modes=()), rules, tape, prices)
        self.run(lowered, Order.FIFO, math.inf)
        return self.replayed(lowered)[0]

    def simulate(self, choice: Choice, order: Order) -> tuple[float, FloatArray]:
        """(seconds per step, peak bytes of each device) of an encoded strategy."""
        lowered = self.lower(choice)
        seconds, _ = self.run(lowered, order, math.inf)
        return seconds, self.peak(lowered, self.last)

    def program(self, choice: Choice) -> Program:
        """The program of an encoded strategy."""
        rules = self.rules.of(choice.rule_set)
        self._tape = lower_to_tape(rules.tables, choice, rules.scratch, self._tape)
        return program_from_tape(
            self._tape,
            rules.tables,
            choice,
            self.channels,
            op_rules=rules.op_rules,
            blocks=rules.blocks,
        )

    def timings(self, choice: Choice, order: Order) -> tuple[Program, FloatArray, FloatArray]:
        """(program, start, finish) of an encoded strategy, seconds from the step's begin."""
        self.simulate(choice, order)
        program = self.program(choice)
        tasks = program.num_tasks
        return program, self.last.start[:tasks].copy(), self.last.finish[:tasks].copy()

    def referee_timings(
        self, choice: Choice, order: Order
    ) -> tuple[Program, FloatArray, FloatArray]:
        """Like ``timings``, with the referee's times."""
        lowered = self.lower(choice)
        self.run(lowered, order, math.inf)
        _, replayed = self.replayed(lowered)
        assert replayed is not None
        return self.program(choice), replayed.start, replayed.finish

    def seconds_under_noise(self, choice: Choice, order: Order, noise: Noise) -> FloatArray:
        """Seconds per step by the referee when speeds are not as predicted.

        The order is that of the undisturbed run, as when a plan is executed. Folded twins share
        the factor of the device that stands for them. The seconds that modes add scale with the
        rest of the step.

        Returns:
            # [num_draws]
        """
        lowered = self.fold(choice) or self.lower(choice)
        whole_s, _ = self.run(lowered, order, math.inf)
        _, rules, tape, prices, fold = lowered
        nominal, num_devices = self.last, len(prices.type_of_device)
        sequence = sequence_of(rules.tables, lowered.choice, tape, nominal)
        factor = noise.device if fold is None else noise.device[:, fold.columns]
        result = np.empty(len(factor))
        for draw in range(len(factor)):
            self.poll()
            noisy = noisy_prices(prices, noise.resource[draw])
            seconds = noisy_seconds(tape, prices, noisy, nominal.seconds, factor[draw])
            disturbed = nominal._replace(seconds=seconds)
            end, _, _ = replay(tape, noisy, disturbed, num_devices, sequence)
            result[draw] = end / choice.num_steps
        return result * whole_s / (whole_s - sum(mode.more_s for mode in choice.modes))
