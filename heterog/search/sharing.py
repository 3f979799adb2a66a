"""The division of a budget when several methods run; see ``portfolio.run_methods``."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from heterog.methods.planner import Budget, Candidate, Planner, Problem, Progress, Stop
from heterog.search.allotment import Allotment
from heterog.search.judging import (
    JUDGED_PART,
    STARVED,
    Contender,
    Ran,
    SeatTurn,
    can_be_sent,
    deal,
    next_of,
    run_method,
    take_turn,
)
from heterog.search.request import GIVEN, Request
from heterog.search.rows import MethodRow
from heterog.workers import Seats

BASELINE_PART = 0.25
"""Part of a budget in seconds for all baselines of ``auto`` together."""
LEAST_SEARCHED = 0.25
"""Least part of a budget in seconds for all searches of ``auto`` together."""
FIRST_ROUND = 0.4
"""Part of the searches' seconds that is divided equally; rounds use the rest (``judging``)."""
ROUND = 0.3
"""Part of the seconds that are left for the next round."""
LEAST_ROUND = 0.03
"""Part of a budget in seconds below which no round is begun."""
LAST_PART = 0.05
"""Part of a budget in seconds kept for each method that comes last, to improve the winner."""
WHOLE_PART, _SLACK = 1 / 6, 2.0
"""For a method with whole answers (``Planner.whole_s``): the largest part of the remaining seconds
that it may get, and its seconds in multiples of its own estimate. Others get what it leaves."""
_TASKS_PER_S, _OWN_TASKS_PER_S = 50_000, 1_000_000
_LEAST_TASKS = 200_000
"""Most tasks of a program, per second of the whole budget and per second of a method's own part;
the last is allowed to all. To lower and simulate that many takes a few percent of the whole budget
and a quarter of the part."""


class BudgetSplit:
    """Divides a budget among searches that run one after another.

    Each gets an equal part. Later searches share what an earlier one leaves over. If one
    overspends, later ones get less only if the remaining time is too short for their parts.

    >>> split = BudgetSplit(Budget(evaluations=30), 3)
    >>> split.next_part()
    Budget(seconds=None, evaluations=10)
    >>> split.settle(4)
    >>> split.next_part()
    Budget(seconds=None, evaluations=13)
    >>> split.settle(20)
    >>> split.next_part()
    Budget(seconds=None, evaluations=13)
    >>> late = BudgetSplit(Budget(seconds=30.0), 3)
    >>> late.next_part(left_s=18.0)
    Budget(seconds=6.0, evaluations=None)
    """

    def __init__(self, budget: Budget, num_searches: int) -> None:
        self._whole = budget
        self._num = max(num_searches, 1)
        self._left = self._num
        self._spare = 0.0  # part of the whole that earlier searches left over
        self._given = 0.0

    def next_part(self, left_s: float = math.inf) -> Budget:
        """The budget of the next search.

        Args:
            left_s: Seconds left for this search and all later ones. If their parts together are
                longer, each is shortened, but to no less than half.
        """
        extra = self._spare / max(self._left, 1)
        self._spare -= extra
        self._given = 1.0 / self._num + extra
        if self._whole.seconds is not None:
            fair = left_s / (max(self._left, 1) * self._whole.seconds)
            self._given = min(self._given, max(fair, 0.5 / self._num))
        self._left -= 1
        return self._whole.part(self._given)

    def settle(self, spent: float) -> None:
        """Record what the search spent, in seconds or evaluations as the budget is."""
        whole = self._whole.seconds if self._whole.evaluations is None else self._whole.evaluations
        assert whole is not None
        self._spare += max(self._given - spent / whole, 0.0)


class Shares:
    """Runs methods, each on its share of a budget, and keeps their rows.

    Args:
        asked: Problem of all methods, with the budget of all.
        running: Methods in the order in which they run.
        allotment: What else the budget is for.
        progress: Function that gets every method's progress.
    """

    def __init__(
        self,
        asked: Problem,
        running: Sequence[Planner],
        allotment: Allotment,
        progress: Progress,
    ) -> None:
        self.rows: dict[str, MethodRow] = {}
        self._asked = asked
        self._running = running
        self._allotment = allotment
        self._progress = progress
        self._contenders = {planner.name: Contender(planner=planner) for planner in running}

    def give_each(self) -> None:
        """Let every method spend the whole budget."""
        for planner in self._running:
            if not self._is_stopped:
                self._run(planner, self._asked.budget)

    def divide(self) -> None:
        """Give baselines equal shares of one part and searches of another; see ``BudgetSplit``."""
        budget = self._asked.budget
        for is_baseline in (True, False):
            stage = [each for each in self._running if (each.stage == "baseline") == is_baseline]
            if is_baseline:  # methods that resume come last: they can use what others leave over
                stage.sort(key=lambda each: each.resumes)
            part = self._first_part(is_baseline)
            whole = _whole(budget, is_baseline, self._left_s)
            split = BudgetSplit(whole.part(part), len(stage))
            for planner in stage:
                if self._is_stopped:
                    return
                left_s = math.inf if is_baseline else part * self._left_s
                seconds = self._run(planner, split.next_part(left_s))
                evaluations = self.rows[planner.name].num_evaluations
                split.settle(evaluations if budget.seconds is None else seconds)

    def go_on(self, planners: Sequence[Planner]) -> None:
        """Let some methods resume with the remaining seconds; see ``judging``.

        Methods that come last run after the others and start from their strategies.
        """
        last = [planner for planner in planners if planner.comes_last]
        contenders = [self._contenders[each.name] for each in planners if each not in last]
        budget_s = self._asked.budget.seconds or 0.0
        least_s, kept_s = LEAST_ROUND * budget_s, LAST_PART * budget_s * len(last)
        while not self._is_stopped and (left_s := self._left_s - kept_s) >= least_s:
            contender = next_of(contenders)
            if contender is None:
                break
            self._run(contender.planner, Budget(seconds=max(ROUND * left_s, least_s)))
        for planner in last:
            if not self._is_stopped:
                self._run(planner, Budget(seconds=max(self._left_s, least_s)))

    def _first_part(self, is_baseline: bool) -> float:
        """Part of a stage's budget for its first round; methods that resume get the rest."""
        has_rounds = any(each.stage == "search" for each in self._running)
        is_first = has_rounds and not is_baseline and self._asked.budget.seconds is not None
        return FIRST_ROUND if is_first else 1.0

    @property
    def _candidates(self) -> list[Candidate]:
        return [row.candidate for row in self.rows.values() if row.candidate is not None]

    @property
    def _is_stopped(self) -> bool:
        """Whether a stop was requested, and there is something to hand over."""
        return self._asked.stop.is_requested and bool(self._candidates)

    @property
    def _left_s(self) -> float:
        return self._allotment.search_s(self._candidates)

    def _run(self, planner: Planner, part: Budget) -> float:
        """Let a method spend a part; return the seconds that it took."""
        contender, seeds = self._contenders[planner.name], tuple(self._candidates)
        given, part = part, self._part_of(planner, part)
        self._progress(planner.name, 0.0, math.inf)
        problem = replace(
            self._asked,
            budget=part,
            seeds=seeds,
            report=partial(self._progress, planner.name),
            stop=self._asked.stop if seeds else Stop(),
            memory=contender.memory,
        )
        spending = problem.spend()
        if planner.name != GIVEN:  # a person's own layout always gets it
            # More seconds are for more evaluations, not for longer ones.
            longest = (
                part if planner.answers_whole else min(given, part, key=lambda each: each.limit_s)
            )
            self._asked.evaluator.most_tasks = self._most_tasks(longest)
        try:
            row = run_method(planner, problem)
        finally:
            self._asked.evaluator.most_tasks = math.inf
        self._keep(contender, part, (row, spending.seconds))
        return spending.seconds

    def _part_of(self, planner: Planner, part: Budget) -> Budget:
        """The part, within the method's limits, or extended to fit a whole answer.

        For limits see ``Planner.most_part`` and ``Planner.least_part``. It is extended to at most
        ``WHOLE_PART`` of the remaining seconds.
        """
        if part.seconds is None:
            return part
        contender, budget_s = self._contenders[planner.name], self._asked.budget.seconds or 0.0
        whole_s = planner.whole_s(replace(self._asked, memory=contender.memory))
        if not whole_s:
            least_s = 0.0 if contender.rounds else planner.least_part * budget_s
            return Budget(seconds=min(max(part.seconds, least_s), planner.most_part * budget_s))
        needed_s = whole_s / (1.0 - JUDGED_PART)
        most_s = WHOLE_PART * self._left_s
        if part.seconds >= needed_s or most_s < needed_s:
            return part
        return Budget(seconds=min(_SLACK * needed_s, most_s))

    def _most_tasks(self, part: Budget) -> float:
        """Most tasks of a program that is simulated, so that no evaluation uses up a part."""
        most = min(_TASKS_PER_S * self._asked.budget.limit_s, _OWN_TASKS_PER_S * part.limit_s)
        return max(most, _LEAST_TASKS)

    def _keep(self, contender: Contender, part: Budget, ran: Ran) -> None:
        """Keep the row of a method that has run, and record the round in its contender."""
        row, seconds = ran
        known_s = _best_s(self.rows.values())
        best = self.rows[row.method] = _joined(self.rows.get(row.method), row)
        contender.tell(
            given_s=part.seconds or 0.0,
            seconds=seconds,
            evaluations=row.num_evaluations,
            step_time_s=_best_s([best]),
            best_s=_best_s(self.rows.values()),
            known_s=known_s,
            overflow_bytes=math.inf if best.candidate is None else best.overflow_bytes,
        )
        self._progress(row.method, 1.0, row.step_time_s or math.inf)


class SharesTogether(Shares):
    """``Shares`` for several methods at a time; see ``judging``.

    Methods of a user's file, a given layout and seeds run in this process, before the others of
    their stage.

    Args:
        asked: Problem of all methods, with the budget of all.
        running: Methods in the order in which they run.
        allotment: What else the budget is for.
        progress: Function that gets every method's progress.
        workers: Workers that keep their state between calls; each is a seat.
        request: Request for all of them.
    """

    def __init__(
        self,
        asked: Problem,
        running: Sequence[Planner],
        allotment: Allotment,
        progress: Progress,
        workers: Seats,
        request: Request,
    ) -> None:
        super().__init__(asked, running, allotment, progress)
        self._workers, self._request = workers, request
        dealt = deal([each for each in running if can_be_sent(each)], len(workers))
        self._seats = [
            {planner.name: Contender(planner=planner) for planner in seat} for seat in dealt
        ]

    def divide(self) -> None:
        """Divide the budget by stage; on n seats, a method on one seat may take n times as long.

        A budget in evaluations gives all seats of a method together the part of one method.
        """
        budget = self._asked.budget
        for is_baseline in (True, False):
            stage = [each for each in self._running if (each.stage == "baseline") == is_baseline]
            whole = _whole(budget, is_baseline, self._left_s).part(self._first_part(is_baseline))
            here = [planner for planner in stage if not can_be_sent(planner)]
            for planner in here:
                if not self._is_stopped:
                    self._run(planner, whole.part(1.0 / len(stage)))
            if self._is_stopped:
                return
            parts: list[list[tuple[Planner, Budget]]] = []
            for seat in self._seats:
                on_seat = [planner for planner in stage if planner.name in seat]
                share = (1.0 - len(here) / max(len(stage), 1)) / max(len(on_seat), 1)
                if budget.seconds is None:
                    share = 1.0 / len(stage)
                parts.append(
                    [
                        (
                            planner,
                            self._part_of(planner, whole.part(share / self._times(planner))),
                        )
                        for planner in on_seat
                    ]
                )
            self._take(parts)
        if self._asked.stop.is_requested and not self._candidates:
            super().divide()  # seats that were asked to stop begin nothing more

    def go_on(self, planners: Sequence[Planner]) -> None:
        """Let every seat resume its own methods; after each round all know the best plans."""
        last = [planner for planner in planners if planner.comes_last]
        rest = {planner.name for planner in planners if planner not in last}
        budget_s = self._asked.budget.seconds or 0.0
        least_s, kept_s = LEAST_ROUND * budget_s, LAST_PART * budget_s * len(last)
        stop = self._asked.stop
        while not stop.is_requested and (left_s := self._left_s - kept_s) >= least_s:
            part = Budget(seconds=max(ROUND * left_s, least_s))
            parts = [self._next(seat, rest, part) for seat in self._seats]
            if not any(parts):
                break
            self._take(parts)
        if last and not stop.is_requested:
            part = Budget(seconds=max(self._left_s, least_s))
            parts = [self._next(seat, rest, part) for seat in self._seats]
            each = part.part(1.0 / len(last))
            parts[0] = [(planner, each) for planner in last if can_be_sent(planner)]
            self._take(parts)

    def _times(self, planner: Planner) -> int:
        """Number of seats that divide a method's evaluations among them."""
        is_divided = planner.is_random and self._asked.budget.seconds is None
        return len(self._seats) if is_divided else 1

    def _next(
        self, seat: dict[str, Contender], names: set[str], part: Budget
    ) -> list[tuple[Planner, Budget]]:
        """The method that a seat resumes, with its budget."""
        contender = next_of([each for name, each in seat.items() if name in names])
        if contender is None:
            return []
        return [(contender.planner, self._part_of(contender.planner, part))]

    def _take(self, parts: Sequence[Sequence[tuple[Planner, Budget]]]) -> None:
        """Take a turn on all seats; rows are joined in the order of the seats."""
        names = sorted({planner.name for seat in parts for planner, _ in seat})
        if not names:
            return
        what = names[0] if len(names) == 1 else f"{len(names)} methods"
        self._progress(f"{what}, {len(parts)} at a time", 0.0, _best_s(self.rows.values()))
        seeds = tuple(self._candidates)
        turns = [
            SeatTurn(
                methods=tuple(seat),
                seeds=seeds,
                seed=self._asked.seed + number,
                most_tasks=min((self._most_tasks(part) for _, part in seat), default=math.inf),
            )
            for number, seat in enumerate(parts)
        ]
        for number, ran in enumerate(self._workers.run(take_turn, self._request, turns)):
            for (planner, part), each in zip(parts[number], ran or [], strict=False):
                contender = self._seats[number].get(planner.name, Contender(planner=planner))
                self._keep(contender, part, each)


def _best_s(rows: Iterable[MethodRow]) -> float:
    """Seconds of the best step so far; infinite if none fits."""
    return min((row.step_time_s for row in rows if row.step_time_s is not None), default=math.inf)


def _joined(before: MethodRow | None, row: MethodRow) -> MethodRow:
    """The better one of a method's rows, with the effort of all its rounds."""
    if before is None:
        return row
    rows = [each for each in (before, row) if each.candidate is not None] or [row]
    evaluations = before.num_evaluations + row.num_evaluations
    best = min(rows, key=lambda each: each.preference)
    is_starved = row.starved and evaluations < STARVED
    return replace(
        best,
        num_evaluations=evaluations,
        search_seconds=before.search_seconds + row.search_seconds,
        note=best.note if is_starved or not best.starved else "",
        starved=is_starved,
    )


def _whole(budget: Budget, is_baselines: bool, left_s: float) -> Budget:
    """Budget of all baselines or all searches together."""
    if budget.seconds is None:
        return budget
    if is_baselines:
        return budget.part(BASELINE_PART)
    return Budget(seconds=max(left_s, LEAST_SEARCHED * budget.seconds))
