"""Rules of the ops of teams that share experts: expert parallelism of a layout.

The members of a team are replicas: each works on its own samples, but for the experts of mixture
layers, of which each member has some (GShard, Lepikhin et al. 2021, section 3). A member gathers
the tokens of the whole team, applies its own experts, and the team adds up what they make: the
all-gather dispatcher of Megatron-LM. Its all-to-all would send a token to its own experts alone.
"""

from collections.abc import Sequence

from heterog.graph.op_graph import OpGraph, Phase
from heterog.graph.op_rule import OpRule
from heterog.graph.placement import S
from heterog.strategy.layouts.layout import LayoutError
from heterog.strategy.layouts.tensor import TeamRules
from heterog.strategy.tensor_parallel import follow_split, ops_of_groups

_PRODUCTS = ("bmm.default", "baddbmm.default", "_grouped_mm.default")
"""Products of many matrices, one for each expert."""


def expert_rules(graph: OpGraph, groups: Sequence[int], members: int) -> TeamRules:
    """Rules of the ops of experts; all others follow the batch.

    Args:
        graph: One training step.
        groups: Groups whose teams have several members.
        members: Number of members of the largest team.

    Raises:
        LayoutError: the model has no experts, or fewer than a team has members.
    """
    region = ops_of_groups(graph, groups)
    weights = expert_weights(graph, region)
    if not weights:
        raise LayoutError(
            f"ep={members} has no experts to share: no op multiplies a batch of matrices by a "
            "weight of [experts, ..., ...]; take ep=1."
        )
    rules: dict[int, OpRule] = {}
    split: set[int] = set()
    for weight in weights:
        if weight in split:
            continue
        num_experts = graph.tensors[weight].shape[0]
        found = dict(follow_split(graph, region, {weight: S(0)}, num_experts))
        if found and found.keys().isdisjoint(rules):
            rules |= found
        split |= {tensor for op in found for tensor in graph.ops[op].inputs}
    if not rules:
        raise LayoutError(
            f"ep={members} cannot share the {len(weights)} weights of experts: no op that reads "
            "them can be done for some experts alone; take ep=1."
        )
    fewest = min(rule.units for rule in rules.values())
    if fewest < members:
        raise LayoutError(f"ep={members} is more than the {fewest} experts there are.")
    return TeamRules(
        op_rules=tuple(sorted(rules.items())),
        least_units=fewest,
        remarks=(
            "Members of a team gather each other's tokens for their experts (Megatron's "
            "all-gather dispatcher); an all-to-all would send less.",
        ),
    )


def expert_weights(graph: OpGraph, region: Sequence[int]) -> tuple[int, ...]:
    """Parameters that hold one matrix per expert, each multiplied with its own tokens.

    Args:
        graph: One training step.
        region: Indices of the ops to look at.

    Returns:
        Tensor ids, in the order in which the forward pass reads them.
    """
    parameters = frozenset(parameter for _, parameter, _ in graph.updates)
    found: dict[int, None] = {}
    for op in region:
        if graph.ops[op].phase != Phase.FORWARD or graph.ops[op].kind not in _PRODUCTS:
            continue
        for tensor in graph.ops[op].inputs:
            weight = int(graph.storage[tensor])
            if weight in parameters and len(graph.tensors[weight].shape) == 3:
                found.setdefault(weight)
    return tuple(found)
