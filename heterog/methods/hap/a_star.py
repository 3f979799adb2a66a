"""Search for the cheapest SPMD program: A* over the folded graph.

A node is a segment boundary with one *entry* per carried value. The entry of a value that is made
already holds the form it was made in and the forms it has been converted into. The entry of a
cotangent that is made later holds the forms promised to its readers. The cost of a program is

    sum over rows of the work of the chosen triple
    + sum over values of the cheapest delivery from the made form to all needed forms

and does not depend on the order of visits. The heuristic is the sum of the cheapest work of all
remaining rows. It is admissible and consistent: each row is run exactly once, and deliveries never
get cheaper when another form is needed.

Inside a segment, states are extended visit by visit. Two rules keep them few without losing the
optimum:

- Irrelevant properties are removed: entries that no later row can tell apart are merged.
- Dominance: a state is dropped if another one at the same boundary costs no more, even after it
  pays the largest extra price that its own entries may cause later.

Segments with the same signature (repeated layers) share their transitions.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from operator import getitem
from typing import TypeVar

from heterog.methods.hap.programs import IMPOSSIBLE, SpmdPrices
from heterog.methods.hap.segments import Action, Segments
from heterog.methods.hap.theory import Role

_Key = TypeVar("_Key")

Entry = int
Codes = tuple[Entry, ...]
Path = tuple["Path", int] | None
"""Choices inside a segment, the last one first."""
Route = tuple["Route", Path] | None
"""Paths of segments, the last one first."""
_Node = tuple[float, int, float, int, Codes, Route]  # estimate, counter, cost, segment, entries

_FORMS = 16  # bits of an entry that hold the set of forms; higher bits hold the made form plus 1
_MOST_COMPARED = 5  # forms whose subsets are all compared


@dataclass(frozen=True, slots=True)
class SpmdProgram:
    """A complete program.

    Attributes:
        triples: Number of the chosen triple for each row of the theory.
        cost_s: Its cost by the search's own prices.
    """

    triples: tuple[int, ...]
    cost_s: float


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search.

    Attributes:
        programs: Programs, best first; the first is optimal if ``is_exact``.
        is_exact: Whether no state was cut by the beam.
        is_given_up: Whether it needed more extensions than allowed.
    """

    programs: tuple[SpmdProgram, ...]
    is_exact: bool
    is_given_up: bool = False


def _entry(made: int, forms: int) -> Entry:
    """The entry for a made form and a set of forms; ``made`` is -1 for a promise."""
    return (made + 1) << _FORMS | forms


def _made(entry: Entry) -> int:
    return (entry >> _FORMS) - 1


def _forms(entry: Entry) -> int:
    return entry & ((1 << _FORMS) - 1)


class Search:
    """One search at one set of prices.

    Args:
        segments: The folded graph.
        prices: Prices of work and conversions.
        width: States kept after each visit; the result says whether any were cut.
        check: Called at every visit; an exception from it ends the search.
        most_extensions: Extensions of a state by a triple, and comparisons at boundaries, after
            which the search gives up without a program; it bounds searches without a time limit.
        most_at_cut: Most states that are followed from each boundary of segments.

    Attributes:
        extensions_left: Rest of ``most_extensions``.
        is_exact: Whether no state was cut so far.
    """

    def __init__(
        self,
        segments: Segments,
        prices: SpmdPrices,
        width: int = 64,
        *,
        check: Callable[[], None] = lambda: None,
        most_extensions: float = math.inf,
        most_at_cut: float = math.inf,
    ) -> None:
        self._most_at_cut = most_at_cut
        self._check = check
        self.extensions_left = most_extensions
        self.segments = segments
        self.prices = prices
        self.width = width
        self.is_exact = True
        self._delivery = [prices.delivery(kind) for kind in segments.classes]
        self._is_parameter = [kind.role == Role.PARAMETER for kind in segments.classes]
        self._work = [
            ([float(seconds) for seconds in self.prices.seconds[: len(action.triples), action.op]])
            for action in segments.actions
        ]
        self._moves: list[dict[Codes, list[tuple[Codes, float, int]]]] = [
            {} for _ in segments.actions
        ]
        self._canonical: dict[tuple[int, int, tuple[float, ...]], Entry] = {}
        self._canonical_of: dict[tuple[int, int, Entry], Entry] = {}
        # The last one is for kind -1.
        numbers = (*range(len(segments.kinds)), -1)
        self._excess = [_Answers(partial(self._excess_of, number)) for number in numbers]
        self._guess = [_Answers(partial(self._pending, number)) for number in numbers]
        self._solved: dict[tuple[int, Codes], list[tuple[Codes, float, Path]]] = {}

    def run(self, num_programs: int = 1) -> SearchResult:
        """A* from the empty boundary to the end.

        Args:
            num_programs: Number of complete programs to return; runners-up differ from the best at
                a segment boundary.
        """
        segments = self.segments.segments
        remaining = self.heuristic()
        kinds = self.segments.kinds_after
        start: Codes = ()
        heap: list[_Node] = [(remaining[0], 0, 0.0, 0, start, None)]
        popped: list[list[tuple[float, Codes]]] = [[] for _ in range(len(segments) + 1)]
        seen: dict[tuple[int, Codes], float] = {}
        counter = 0  # orders nodes of equal estimates, so that entries are not compared
        programs: list[SpmdProgram] = []
        while heap and len(programs) < num_programs and self.extensions_left > 0:
            _, _, cost, number, codes, path = heapq.heappop(heap)
            if number == len(segments):
                programs.append(self._program(path, cost))
                continue
            self._check()
            if len(popped[number]) >= self._most_at_cut:
                self.is_exact = False
                continue
            self.extensions_left -= len(popped[number])
            if self._is_dominated(cost, codes, popped[number], kinds[number - 1]):
                continue
            popped[number].append((cost, codes))
            segment = segments[number]
            inner = tuple(codes[place] for place in segment.inlets)
            for result, extra, choices in self.solve(number, inner):
                after = tuple(
                    result[place] if is_inner else codes[place]
                    for is_inner, place in segment.outlets
                )
                total = cost + extra
                key = (number + 1, after)
                if seen.get(key, IMPOSSIBLE) <= total and num_programs == 1:
                    continue
                seen[key] = total
                counter += 1
                estimate = total + remaining[number + 1]
                route: Route = (path, choices)
                heapq.heappush(heap, (estimate, counter, total, number + 1, after, route))
        is_over = self.extensions_left <= 0
        return SearchResult(tuple(programs), self.is_exact and not is_over, is_over)

    def heuristic(self) -> list[float]:
        """For each segment, the cheapest work of its rows and all later ones; 0 at the end."""
        remaining = [0.0]
        for segment in reversed(self.segments.segments):
            cheapest = sum(min(self._work[step.action]) for step in segment.steps)
            remaining.append(remaining[-1] + cheapest)
        return remaining[::-1]

    def _is_dominated(
        self, cost: float, codes: Codes, others: list[tuple[float, Codes]], kinds: Sequence[int]
    ) -> bool:
        """Whether some other state costs no more, even with the most that it may cost extra."""
        excess = self._excess
        for other_cost, other in others:
            left = cost - other_cost
            if left < 0.0:
                continue
            for kind, a, b in zip(kinds, other, codes, strict=True):
                if a != b:
                    left -= excess[kind][a, b]
                    if left < 0.0:
                        break
            else:
                return True
        return False

    def solve(self, number: int, codes: Codes) -> list[tuple[Codes, float, Path]]:
        """All undominated paths through a segment, from given entries of the values it touches."""
        segment = self.segments.segments[number]
        key = (segment.signature, codes)
        if key in self._solved:
            return self._solved[key]
        states: dict[Codes, tuple[float, Path]] = {codes: (0.0, None)}
        for step in segment.steps:
            self._check()
            if self.extensions_left <= 0:
                return []
            moves = self._moves[step.action]
            grown: dict[Codes, tuple[float, Path]] = {}
            sources, kept = step.sources, step.kept
            for state, (cost, path) in states.items():
                touched = tuple(state[place] if place >= 0 else -1 for place in sources)
                offers = moves.get(touched)
                if offers is None:
                    offers = moves[touched] = self._offers(step.action, touched)
                rest = tuple(state[place] for place in kept)
                self.extensions_left -= len(offers)
                for made, extra, choice in offers:
                    after = rest + made
                    total = cost + extra
                    known = grown.get(after)
                    if known is None or total < known[0]:
                        grown[after] = (total, (path, choice))
            states = self._thin(grown, step.kinds)
        found = [(state, cost, path) for state, (cost, path) in states.items()]
        self._solved[key] = found
        return found

    def _thin(
        self, states: dict[Codes, tuple[float, Path]], kinds: Sequence[int]
    ) -> dict[Codes, tuple[float, Path]]:
        """Drop dominated states, then the dearest beyond the width."""
        if len(states) == 1:
            return states
        if len(states) > self.width:
            guesses = [self._guess[kind] for kind in kinds]
            rank = {
                codes: known[0] + sum(map(getitem, guesses, codes))
                for codes, known in states.items()
            }
            ordered = sorted(states.items(), key=lambda item: rank[item[0]])
        else:
            ordered = sorted(states.items(), key=lambda item: item[1][0])
        # Most entries are the same in all states; only the others are compared.
        is_compared = [len(set(column)) > 1 for column in zip(*states, strict=True)]
        compared = list(compress(kinds, is_compared))
        kept: list[tuple[float, Codes]] = []
        result: dict[Codes, tuple[float, Path]] = {}
        for codes, known in ordered:
            differing = tuple(compress(codes, is_compared))
            if self._is_dominated(known[0], differing, kept, compared):
                continue
            if len(kept) == self.width:
                self.is_exact = False
                break
            kept.append((known[0], differing))
            result[codes] = known
        return result

    def _pending(self, kind_number: int, entry: Entry) -> float:
        """An entry's probable further cost: the beam ranks states by it; no cost includes it.

        A promised form is priced from the cheapest split form in which its maker could make it. A
        made value is priced by its cheapest conversion into forms that are still wanted.
        """
        if kind_number < 0:  # entered the segment and is untouched: the same in all states
            return 0.0
        kind = self.segments.kinds[kind_number]
        if self._is_parameter[kind.value_class]:
            return 0.0
        delivery = self._delivery[kind.value_class]
        made, forms = _made(entry), _forms(entry)
        if made >= 0:
            future = self._future(kind.value_class, kind.wanted, entry)
            return min(future[1:], default=0.0) if future else 0.0
        names = self.segments.classes[kind.value_class].forms
        makers = [number for number, form in enumerate(names) if form.kind == "S"]
        return min((delivery.price(maker, forms) for maker in makers), default=0.0)

    def _offers(self, number: int, touched: Codes) -> list[tuple[Codes, float, int]]:
        """(entries that stay, cost, triple) of every triple that is possible here."""
        action = self.segments.actions[number]
        best: dict[Codes, tuple[float, int]] = {}
        for choice, triple in enumerate(action.triples):
            needs = [0] * len(touched)
            made = [-1] * len(touched)
            for place, form in triple.needs:
                needs[place] |= 1 << form
            for place, form in triple.makes:
                made[place] = form
            self._apply(action, touched, needs, made, self._work[number][choice], choice, best)
        return [(codes, cost, choice) for codes, (cost, choice) in best.items()]

    def _apply(
        self,
        action: Action,
        touched: Codes,
        needs: list[int],
        made: list[int],
        cost: float,
        choice: int,
        best: dict[Codes, tuple[float, int]],
    ) -> None:
        options: list[list[Entry]] = []  # a new parameter may be stored in several forms
        for place, old in enumerate(touched):
            value_class = action.classes[place]
            delivery = self._delivery[value_class]
            entries: list[Entry]
            if self._is_parameter[value_class]:
                stored = [old] if old >= 0 else _storable(needs[place])
                entries = [
                    e
                    for e in stored
                    if (
                        needs[place] == 1 << _made(e)
                        if action.is_update
                        else delivery.price(_made(e), needs[place]) < IMPOSSIBLE
                    )
                ]
            else:
                before = _forms(old) if old >= 0 else 0
                maker = _made(old) if old >= 0 else -1
                forms = before | needs[place]
                if made[place] >= 0:
                    maker = made[place]
                    cost += delivery.price(maker, forms)
                elif maker >= 0:
                    cost += delivery.price(maker, forms) - delivery.price(maker, before)
                entries = [_entry(maker, forms)]
            options.append(entries)
        if cost >= IMPOSSIBLE:
            return
        results: list[Codes] = [()]
        for place, entries in enumerate(options):
            if not action.stays[place]:
                results = results if entries else []
                continue
            results = [
                (*codes, self._simplified(action.classes[place], action.wanted[place], entry))
                for codes in results
                for entry in entries
            ]
        for codes in results:
            if codes not in best or cost < best[codes][0]:
                best[codes] = (cost, choice)

    def _simplified(self, value_class: int, wanted: int, entry: Entry) -> Entry:
        """The representative of all entries that later rows cannot tell apart."""
        if self._is_parameter[value_class] or _made(entry) < 0:
            return entry
        key = (value_class, wanted, entry)
        if key not in self._canonical_of:
            future = self._future(value_class, wanted, entry)
            found = entry
            if future is not None:
                rounded = tuple(round(price, 12) for price in future)
                found = self._canonical.setdefault((value_class, wanted, rounded), entry)
            self._canonical_of[key] = found
        return self._canonical_of[key]

    def _future(self, value_class: int, wanted: int, entry: Entry) -> list[float] | None:
        """Extra price of every set of forms that may still be needed; ``None`` if too many."""
        if wanted.bit_count() > _MOST_COMPARED:
            return None
        delivery = self._delivery[value_class]
        made, forms = _made(entry), _forms(entry)
        paid = delivery.price(made, forms)
        return [delivery.price(made, forms | more) - paid for more in _subsets(wanted)]

    def _excess_of(self, kind_number: int, entries: tuple[Entry, Entry]) -> float:
        """Upper bound of the later cost of a value with the first entry beyond the second."""
        one, other = entries
        kind = self.segments.kinds[kind_number]
        if self._is_parameter[kind.value_class]:
            return IMPOSSIBLE
        if kind.awaited:
            return self._promise_excess(kind.value_class, kind.wanted, one, other)
        mine = self._future(kind.value_class, kind.wanted, one)
        theirs = self._future(kind.value_class, kind.wanted, other)
        if mine is None or theirs is None:
            return IMPOSSIBLE
        return max(0.0, *(a - b for a, b in zip(mine, theirs, strict=True)))

    def _promise_excess(self, value_class: int, wanted: int, one: Entry, other: Entry) -> float:
        mine, theirs = _forms(one), _forms(other)
        if mine & ~theirs == 0:
            return 0.0
        if wanted.bit_count() > _MOST_COMPARED:
            return IMPOSSIBLE
        delivery = self._delivery[value_class]
        makers = range(len(delivery.conversions))
        return max(
            0.0,
            *(
                delivery.price(maker, mine | more) - delivery.price(maker, theirs | more)
                for maker in makers
                for more in _subsets(wanted)
            ),
        )

    def _program(self, route: Route, cost: float) -> SpmdProgram:
        """Program of the choices along a route, by row."""
        paths: list[Path] = []
        while route is not None:
            route, path = route
            paths.append(path)
        order: list[int] = []
        for link in reversed(paths):
            part: list[int] = []
            while link is not None:
                link, choice = link
                part.append(choice)
            order.extend(reversed(part))
        triples = [0] * len(order)
        for visit, choice in zip(self.segments.folded.visits, order, strict=True):
            triples[visit.row] = choice
        return SpmdProgram(tuple(triples), cost)


class _Answers(dict[_Key, float]):
    """Answers of a function, each computed when it is first asked for."""

    def __init__(self, answer: Callable[[_Key], float]) -> None:
        self._answer = answer

    def __missing__(self, key: _Key) -> float:
        self[key] = value = self._answer(key)
        return value


def _storable(needs: int) -> list[Entry]:
    """Forms that a parameter may be stored in for a reader: whole, or the only form needed."""
    entries = [_entry(0, 0)]
    if needs and needs & (needs - 1) == 0 and needs != 1:
        entries.append(_entry(needs.bit_length() - 1, 0))
    return entries


def _subsets(forms: int) -> list[int]:
    found = [0]
    subset = forms
    while subset:
        found.append(subset)
        subset = (subset - 1) & forms
    return found
