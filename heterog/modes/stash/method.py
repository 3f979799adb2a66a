"""``stash``: pipelines whose stages do not wait, and keep older weights for batches under way.

Only if a user asks for it (``stash=1``), because the resulting weights differ from those of one
device. It is a row beside the exact methods.

Stages are those of ``pipeline``: whole machines or single devices in many sequences. For each
sequence, dynamic programming finds the cut with the fastest slowest stage, which is a step's time
if messages are short. Each group counts with the memory of all batches that its stage has under
way. Then boundaries of the best cut move by one or two groups. The stages of exact pipelines from
other methods are tried, too.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from heterog.errors import HeterogError, StrategyError
from heterog.graph.batch_plan import micro_batches_refused
from heterog.lowering.program import FloatArray
from heterog.methods.model_parallel import stage_starts
from heterog.methods.pipeline import Stages, stage_sequences
from heterog.methods.planner import Planner, PlanResult, Problem
from heterog.methods.recomputing import kinds_worth_trying
from heterog.methods.tuned_uniform import tuned_decision
from heterog.modes.search import Tried, best_of, by_preference, count_in, nothing, words_in
from heterog.modes.stash.value import WeightStash, stages_of
from heterog.names import shown
from heterog.simulator.engine import Order
from heterog.simulator.evaluator import Evaluator
from heterog.strategy.division import micro_batch_table, split_evenly, split_in_proportion
from heterog.strategy.schedules import AS_IT_COMES
from heterog.strategy.strategy import REPLICATED, Decision, Keeps, Strategy

_MOST_TRIED = 40
"""Most sequences of stages that are simulated, in order of estimates."""
_MICRO_BATCHES = (2, 4, 8, 16, 32)
"""Numbers of micro-batches that are tried for the best sequences of stages."""
_NUM_CUT_FINER = 4
"""Number of sequences of stages that are tried with micro-batches."""
_MOST_MOVED = 12
"""Most moves of boundaries."""

_LEAST_S = 1e-9
"""Least seconds of a group, so that cuts of groups without work differ."""


def parse_stash(text: str) -> "StashedPipelines":
    """The method for a text such as ``stash=1``.

    >>> parse_stash("stash=1").stash.boundary_steps
    1
    >>> parse_stash("stash=1,micro_batches=8").num_micro
    8

    Raises:
        HeterogError: a word is unknown, or its value is no number.
    """
    try:
        said = words_in(text, WeightStash.word, "micro_batches")
        stash = WeightStash(boundary_steps=count_in(said.get(WeightStash.word, "")))
        counts = [count_in(said[each]) for each in said if each != WeightStash.word]
        if 0 in counts:
            raise ValueError(text)
    except ValueError:
        raise HeterogError(
            f"`asynchronous` has {shown(text)}; a stash needs the number of micro-batches by "
            "which each boundary between stages may make backward passes later: stash=1 is "
            "PipeDream's, stash=2 leaves messages more time. Their number in a batch may follow: "
            "stash=1,micro_batches=8."
        ) from None
    return StashedPipelines(stash, *counts)


class StashedPipelines(Planner):
    """Searches the best stages for one stash.

    Args:
        stash: The requested stash.
        num_micro: Number of micro-batches; if ``None``, the search chooses it.
    """

    name = WeightStash.word
    stage = "search"

    def __init__(self, stash: WeightStash, num_micro: int | None = None) -> None:
        self.stash = stash
        self.num_micro = num_micro

    def plan(self, problem: Problem) -> PlanResult:
        """Try balanced cuts of all sequences of stages, then cuts nearby."""
        evaluator = problem.evaluator
        if not problem.step_barrier:
            return nothing("a stash needs a step barrier")
        batch = evaluator.graph.batch_size
        if self.num_micro is not None and self.num_micro > batch:
            return nothing(f"{self.num_micro} micro-batches are more than {batch} samples")
        spending = problem.spend()
        tried: list[Tried] = []
        faults: list[str] = []

        def attempt(strategies: Iterable[Strategy]) -> None:
            known = {strategy for _, strategy in tried}
            for strategy in strategies:
                if strategy in known:
                    continue
                fault = _fault(evaluator, strategy)
                if fault:
                    faults.append(fault)
                else:
                    known.add(strategy)
                    tried.append((evaluator.referee(strategy, Order.FIFO), strategy))

        with spending.limits():
            costs = _Costs(evaluator, self.stash)
            attempt(self._strategies(problem, costs))
            if self.num_micro is None:
                attempt(list(self._cut_finer(evaluator, costs, tried)))
            if tried and not min(tried, key=by_preference)[0].is_ok:
                too_large = min(tried, key=by_preference)[1]
                for keeps in reversed(kinds_worth_trying(evaluator.graph)):
                    known = len(tried)
                    attempt([_recomputing(too_large, keeps)])
                    if len(tried) == known or not tried[-1][0].is_ok:
                        break
            if tried:
                tried += self._moved(evaluator, min(tried, key=by_preference))
        why_none = faults[0] if faults else "no two stages have layers and devices"
        return best_of(tried, problem, spending, why_none)

    def _strategies(self, problem: Problem, costs: "_Costs") -> Iterator[Strategy]:
        """Stages of exact pipelines, then balanced cuts of many sequences."""
        evaluator, count = problem.evaluator, self.num_micro or 1
        for seed in problem.seeds:
            strategy = self._of_exact(evaluator, seed.strategy, count)
            if strategy is not None:
                yield strategy
        sequences = [
            each
            for each in stage_sequences(evaluator.cluster)
            if 1 < len(each) <= evaluator.tables.num_groups
        ]
        cuts = [(costs.balanced(stages, count), stages) for stages in sequences]
        for (_, starts), stages in sorted(cuts, key=lambda pair: pair[0][0])[:_MOST_TRIED]:
            yield self._strategy(evaluator, stages, starts, count)

    def _cut_finer(
        self, evaluator: Evaluator, costs: "_Costs", tried: Sequence[Tried]
    ) -> Iterator[Strategy]:
        """The best sequences of stages with more micro-batches, with old and new cuts."""
        graph = evaluator.graph
        counts = [count for count in _MICRO_BATCHES if count <= graph.batch_size]
        if micro_batches_refused(graph, 2):
            return
        sequences: dict[Stages, Strategy] = {}
        for _, strategy in sorted(tried, key=by_preference):
            sequences.setdefault(stages_of(strategy), strategy)
        for stages, strategy in list(sequences.items())[:_NUM_CUT_FINER]:
            for count in counts:
                yield replace(strategy, micro_batches=_micro_batches(evaluator, strategy, count))
                _, starts = costs.balanced(stages, count)
                yield self._strategy(evaluator, stages, starts, count)

    def _of_exact(self, evaluator: Evaluator, exact: Strategy, count: int) -> Strategy | None:
        """An exact pipeline's stages with the stash; ``None`` if they cannot have it."""
        strategy = replace(
            exact,
            micro_batches=_micro_batches(evaluator, exact, count),
            schedule=AS_IT_COMES,
            blocks=(),
            modes=(self.stash,),
        )
        try:
            self.stash.check(strategy, evaluator.graph, evaluator.cluster)
        except StrategyError:
            return None
        return strategy

    def _strategy(
        self, evaluator: Evaluator, stages: Stages, starts: tuple[int, ...], count: int
    ) -> Strategy:
        """The strategy with a number of micro-batches, whose stages begin at the given groups."""
        graph, cluster = evaluator.graph, evaluator.cluster
        speeds = evaluator.speeds
        ends = (*starts[1:], evaluator.tables.num_groups)
        decisions: list[Decision] = []
        for devices, first, end in zip(stages, starts, ends, strict=True):
            decisions += [tuned_decision(evaluator, devices, speeds)] * (end - first)
        strategy = Strategy(
            graph=graph.fingerprint,
            cluster=cluster.fingerprint,
            decisions=tuple(decisions),
            homes=(REPLICATED,) * len(graph.updates),
            modes=(self.stash,),
        )
        return replace(strategy, micro_batches=_micro_batches(evaluator, strategy, count))

    def _moved(self, evaluator: Evaluator, best: Tried) -> Iterator[Tried]:
        """Move boundaries between stages while that improves the best strategy."""
        for _ in range(_MOST_MOVED):
            found = [
                (evaluator.referee(strategy, Order.FIFO), strategy)
                for strategy in _with_a_boundary_moved(best[1])
                if not _fault(evaluator, strategy)
            ]
            yield from found
            better = min(found, key=by_preference, default=best)
            if by_preference(better) >= by_preference(best):
                return
            best = better


class _Costs:
    """Seconds and bytes of groups on stages, to cut the chain of groups."""

    def __init__(self, evaluator: Evaluator, stash: WeightStash) -> None:
        self._evaluator = evaluator
        self._stash = stash
        self._speeds = evaluator.speeds
        self._kept = evaluator.group_state_bytes
        self._weights = self._kept / (2.0 + evaluator.tables.state_ratio)
        self._saved = evaluator.group_saved_bytes

    def balanced(self, stages: Stages, num_micro: int) -> tuple[float, tuple[int, ...]]:
        """The best cut of a sequence of stages.

        Args:
            stages: Devices of each stage.
            num_micro: Number of micro-batches.

        Returns:
            Seconds of the slowest stage, and the first group of each stage.
        """
        usable = [device.usable_memory_bytes for device in self._evaluator.cluster.devices]
        seconds = np.stack([self._seconds(devices, num_micro) for devices in stages], axis=1)
        memory = np.stack([self._bytes(n, stages, num_micro) for n in range(len(stages))], axis=1)
        room = np.array([float(min(usable[d] for d in devices)) for devices in stages])
        starts = stage_starts(seconds, memory, room)
        return float(np.add.reduceat(seconds, starts, axis=0).diagonal().max()), starts

    def _seconds(self, devices: tuple[int, ...], num_micro: int) -> FloatArray:
        """Seconds of each group on the slowest device of a stage."""
        evaluator = self._evaluator
        weights = tuple(self._speeds[device] for device in devices)
        shares = split_in_proportion(evaluator.graph.batch_size, weights)
        kinds = [evaluator.cluster.type_index[device] for device in devices]
        each = []
        for kind, share in zip(kinds, shares, strict=True):
            samples = -(-share // num_micro)  # of the largest micro-batch
            _, seconds = evaluator.prices.seconds_of_groups(kind, samples)
            each.append(seconds * (share / max(samples, 1)))
        found: FloatArray = np.max(each, axis=0)
        return np.maximum(found, _LEAST_S)

    def _bytes(self, stage: int, stages: Stages, num_micro: int) -> FloatArray:
        """Bytes that each group keeps on a device of a stage."""
        behind = self._stash.behind(stage, len(stages))
        versions = self._stash.staleness(stage, len(stages), num_micro)
        saved = self._saved * (behind + 1) / (num_micro * len(stages[stage]))
        return self._kept + versions * self._weights + saved


def _micro_batches(
    evaluator: Evaluator, strategy: Strategy, count: int
) -> tuple[tuple[int, ...], ...]:
    """The table of a number of even micro-batches, which every group divides in proportion."""
    sizes = split_evenly(evaluator.graph.batch_size, count)
    first = strategy.decisions[0].devices[0]
    return micro_batch_table(sizes, evaluator.cluster.num_devices, first)


def _with_a_boundary_moved(strategy: Strategy) -> Iterator[Strategy]:
    """Strategies with one boundary of stages moved by one or two groups either way."""
    decisions, count = strategy.decisions, len(strategy.decisions)
    for start in range(1, count):
        if decisions[start] == decisions[start - 1]:
            continue
        for step in (-2, -1, 1, 2):
            first, end = sorted((start, start + step))
            # The stage that shrinks keeps a group.
            if first < 1 or end > count - 1 or len(set(decisions[first:end])) > 1:
                continue
            taken = decisions[start] if step < 0 else decisions[start - 1]
            moved = (*decisions[:first], *(taken,) * (end - first), *decisions[end:])
            if set(moved) == set(decisions):
                yield replace(strategy, decisions=moved)


def _recomputing(strategy: Strategy, keeps: Keeps) -> Strategy:
    """The strategy with recomputation in all stages."""
    decisions = tuple(replace(each, recompute=True, keeps=keeps) for each in strategy.decisions)
    return replace(strategy, decisions=decisions)


def _fault(evaluator: Evaluator, strategy: Strategy) -> str:
    """Why stages cannot run different batches; empty if they can."""
    program = evaluator.program(evaluator.encode(strategy))
    return strategy.own_mode(WeightStash).fault(program, strategy, evaluator.tables)
