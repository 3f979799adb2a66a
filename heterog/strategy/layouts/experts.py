"""Rules of teams for expert parallelism and for context parallelism of a layout.

In expert parallelism the members of a team are replicas: each works on its own samples, but has
only some experts of the mixture layers (GShard, Lepikhin et al. 2021, section 3). Either tokens
are sent to the members that have their experts, or every member gathers the tokens of the whole
team, applies its own experts, and the team adds up the results: the all-to-all and the all-gather
dispatcher of Megatron-LM.

In context parallelism the members of a team split every sequence (``context_rules``).
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

from heterog.graph.axis_plan import axis_plan
from heterog.graph.grouping import CONSTANT_GROUP, group_ops
from heterog.graph.op_costs import GROUPED_PRODUCTS
from heterog.graph.op_graph import OpGraph, Phase
from heterog.graph.placement import OpRule, S, kinds
from heterog.strategy.layer_shardings import exchanged
from heterog.strategy.layouts.layout import Dispatch, LayoutError
from heterog.strategy.layouts.tensor import TeamRules
from heterog.strategy.sequence_split import MOST_UNITS, finest_split, lengths
from heterog.strategy.tensor_parallel import Region, follow_split, ops_of_groups

_PRODUCTS = ("bmm.default", "baddbmm.default", *GROUPED_PRODUCTS)
"""Products of many matrices, one for each expert."""
_PICKS = kinds("index.Tensor index_select embedding gather")
"""Ops that pick matrices by number."""


def expert_rules(
    graph: OpGraph, groups: Sequence[int], members: int, dispatch: Dispatch = Dispatch.ALL_TO_ALL
) -> TeamRules:
    """Rules of the ops of experts; all other ops follow the batch.

    Args:
        graph: One training step.
        groups: Groups whose teams have several members.
        members: Number of members of the largest team.
        dispatch: How tokens come to experts on other members; tokens that cannot be exchanged are
            gathered.

    Raises:
        LayoutError: the model has no experts, or fewer than a team has members.
    """
    found = _rules_of_experts(graph, tuple(groups), dispatch)
    if found.least_units < members:
        raise LayoutError(
            f"{members} devices share experts (ep, of which each has tp or cp of them), but there "
            f"are {found.least_units} experts."
        )
    return found


@lru_cache(maxsize=16)
def _rules_of_experts(graph: OpGraph, groups: tuple[int, ...], dispatch: Dispatch) -> TeamRules:
    """Rules for teams of any size; cached, because many layouts share the same experts."""
    region = ops_of_groups(graph, groups)
    weights = expert_weights(graph, region)
    if not weights:
        raise LayoutError(_nothing_to_share(graph))
    followed = Region(graph, region)
    rules: dict[int, OpRule] = {}
    gathered: list[str] = []
    split: set[int] = set()
    for weight in weights:
        if weight in split:
            continue
        num_experts = graph.tensors[weight].shape[0]
        found = dict(follow_split(followed, {weight: S(0)}, num_experts))
        split |= {int(graph.storage[read]) for op in found for read in graph.ops[op].inputs}
        if dispatch == Dispatch.ALL_TO_ALL:
            dispatched = exchanged(graph, found, [weight])
            if dispatched is None:
                gathered.append(graph.tensors[weight].name)
            found = found if dispatched is None else dispatched
        if found and found.keys().isdisjoint(rules):
            rules |= found
    if not rules:
        raise LayoutError(
            f"ep cannot share '{graph.tensors[weights[0]].name}' and other weights of experts: "
            f"{_why_not(graph, region)}; take ep=1, and zero=3 to slice the weights."
        )
    return TeamRules(
        op_rules=tuple(sorted(rules.items())),
        least_units=min(graph.tensors[weight].shape[0] for weight in weights),
        remarks=tuple(_about_gathered(gathered)),
    )


def _nothing_to_share(graph: OpGraph) -> str:
    """A sentence that says why a model has no experts to share."""
    for op in graph.ops:
        for tensor in op.inputs[:1]:
            weight = int(graph.storage[tensor])
            shape = graph.tensors[weight].shape
            if op.kind in _PICKS and weight in graph.trained and len(shape) == 3:
                return (
                    f"ep cannot share '{graph.tensors[weight].name}': each token picks the "
                    "matrices of its experts by number (experts_implementation='batched_mm'), so "
                    "that every device needs all of them; take ep=1, and zero=3 to slice them."
                )
    return (
        "ep has no experts to share: no op multiplies a batch of matrices by a weight of "
        "[experts, ..., ...]; take ep=1."
    )


def _why_not(graph: OpGraph, region: Sequence[int]) -> str:
    """Why no op can run for some experts alone."""
    if any(graph.ops[op].kind in GROUPED_PRODUCTS for op in region):
        return (
            "how many tokens each gets is known only while the model runs (grouped_mm), and a "
            "plan sends tensors of known sizes, such as those of experts with a capacity"
        )
    return "no op that reads them can be done for some experts alone"


@lru_cache(maxsize=16)
def groups_of_experts(graph: OpGraph) -> frozenset[int]:
    """Groups whose forward ops read weights of experts; empty if there are none."""
    group = group_ops(graph).group
    region = range(graph.num_ops)
    weights = set(expert_weights(graph, region))
    return frozenset(
        int(group[op])
        for op in region
        if graph.ops[op].phase == Phase.FORWARD
        and any(int(graph.storage[tensor]) in weights for tensor in graph.ops[op].inputs)
    ) - {CONSTANT_GROUP}


def _about_gathered(weights: Sequence[str]) -> Iterator[str]:
    """A sentence about experts whose tokens are gathered although they should be exchanged."""
    if weights:
        rest = f" and of {len(weights) - 1} more" if len(weights) > 1 else ""
        yield (
            f"The tokens of {weights[0]}{rest} are read by others than experts, too: members of a "
            "team gather them (dispatch=allgather) instead of exchanging them."
        )


def expert_weights(graph: OpGraph, region: Sequence[int]) -> tuple[int, ...]:
    """Parameters that hold one matrix per expert, each multiplied with its own tokens.

    Args:
        graph: One training step.
        region: Indices of the ops to look at.

    Returns:
        Tensor ids, in the order in which the forward pass reads them.
    """
    found: dict[int, None] = {}
    for op in region:
        if graph.ops[op].phase != Phase.FORWARD or graph.ops[op].kind not in _PRODUCTS:
            continue
        for tensor in graph.ops[op].inputs:
            weight = int(graph.storage[tensor])
            shape = graph.tensors[weight].shape
            # XLNet has a weight of one matrix per head, but reads it as one matrix.
            is_each_multiplied = graph.tensors[tensor].shape[:1] == shape[:1]
            if weight in graph.trained and len(shape) == 3 and is_each_multiplied:
                found.setdefault(weight)
    return tuple(found)


def context_rules(graph: OpGraph, members: int) -> TeamRules:
    """Rules of all ops for teams whose members have runs of positions.

    Args:
        graph: One training step.
        members: Members of a team. If they do not divide the sequences, runs are as equal as the
            units allow.

    Raises:
        LayoutError: there are no sequences, or they are too short.
    """
    split = finest_split(graph, max(MOST_UNITS, members), members)
    if split is None:
        known = lengths(graph)
        why = (
            "the batch has no sequences ([batch, positions] of whole numbers)"
            if not known
            else f"sequences of {', '.join(map(str, known))} positions have no such equal units"
        )
        raise LayoutError(f"cp={members} splits sequences into {members} runs or more, but {why}.")
    remarks = []
    if split.units % members:
        remarks.append(
            f"cp={members} does not divide the {split.units} units of the sequences: their runs "
            "are unequal."
        )
    if len(axis_plan(graph, split.op_rules).causal_ops):
        remarks.append(
            "Shares are equal, but later positions see more keys and take longer; the method "
            "'sequences' finds runs that take equal times."
        )
    return TeamRules(op_rules=split.op_rules, least_units=split.units, remarks=tuple(remarks))
