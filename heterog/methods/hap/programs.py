"""The cost of a program, and its strategy."""

from collections.abc import Sequence

from heterog.graph.batch_plan import batch_plan
from heterog.graph.op_rule import OpRules
from heterog.methods.hap.prices import IMPOSSIBLE, SpmdPrices, ValueClass
from heterog.methods.hap.theory import Role, Theory, batch_triple


def data_parallel(theory: Theory) -> tuple[int, ...]:
    """The program that splits everything along the batch: the start of every search."""
    plan = batch_plan(theory.graph)
    return tuple(batch_triple(theory, row, plan) for row in theory.rows)


def program_cost(theory: Theory, prices: SpmdPrices, triples: Sequence[int]) -> float:
    """Cost of a program by definition, whatever the order of the search; see ``a_star``."""
    gradients = {row.reads[1].value for row in theory.rows if row.is_update}
    total = 0.0
    made: dict[int, int] = {}
    needed: dict[int, int] = {}
    stored: dict[int, int] = {}
    for row, number in zip(theory.rows, triples, strict=True):
        triple = row.triples[number]
        total += float(prices.seconds[number, row.op])
        made.update(triple.makes)
        for which, form in triple.needs:
            needed[which] = needed.get(which, 0) | 1 << form
            if row.is_update and theory.values[which].role == Role.PARAMETER:
                stored[which] = form
    for number, forms in needed.items():
        value = theory.values[number]
        if value.role == Role.PARAMETER:
            # Stored split, all readers must want just that form; stored whole, they slice.
            form = stored.get(number, 0)
            if form != 0 and forms != 1 << form:
                return IMPOSSIBLE
            continue
        kind = ValueClass(value.num_bytes, tuple(value.forms), value.role, number in gradients)
        if number in made:
            total += prices.delivery(kind).price(made[number], forms)
    return total


def op_rules(theory: Theory, triples: Sequence[int], start: Sequence[int]) -> OpRules:
    """The explicit rules of a strategy, for every op that does not follow the batch plan.

    Args:
        theory: Theory of the graph.
        triples: The program.
        start: The batch plan as a program (``data_parallel``).
    """
    found = []
    for row, number, batch in zip(theory.rows, triples, start, strict=True):
        rule = row.triples[number].rule
        if rule is not None and number != batch:
            found.append((row.op, rule))
    return tuple(sorted(found, key=lambda pair: pair[0]))
