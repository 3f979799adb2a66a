"""The data that one averaging moves: parameters in buckets, each all-reduced over its replicas.

Where a codec of the strategy is about a bucket, the first replica of each island sends what the
island has changed, in a message that all replicas gather instead.
"""

from dataclasses import dataclass

from heterog.graph.grouping import group_ops
from heterog.graph.op_graph import OpGraph
from heterog.graph.placement import ITEM_BYTES
from heterog.modes.averaging.value import island_parts
from heterog.modes.codecs.value import Codec, CodecRule, codec_rules
from heterog.strategy.strategy import DEFAULT_BUCKET_BYTES, Decision, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragedBucket:
    """A bucket of parameters that are averaged together.

    Attributes:
        rows: Rows of ``graph.updates``.
        devices: Devices that have the parameters, ascending.
        weights: Weight of the copy of each of ``devices``; they add up to 1. Replicas of one
            island are equal and share its weight.
        num_bytes: Size of all its parameters as the optimizer has them: of masters, if it has
            any.
        rounded_bytes: Size of the model's own parameters, into which masters are rounded
            afterwards; 0 without masters.
        senders: First replica of each island.
        parts: Weight of what each of ``senders`` sends by a codec: that of its island.
        rule: Codec rule of its messages; ``None``: parameters are summed as they are.
        num_elements: Number of elements of all its parameters.
    """

    rows: tuple[int, ...]
    devices: tuple[int, ...]
    weights: tuple[float, ...]
    num_bytes: float
    rounded_bytes: float
    senders: tuple[int, ...]
    parts: tuple[float, ...]
    rule: CodecRule | None
    num_elements: int

    @property
    def codec(self) -> Codec | None:
        """Codec of its messages, if any."""
        return None if self.rule is None else self.rule.codec

    @property
    def message_bytes(self) -> float:
        """Size of the message of each of ``senders``; of the bucket without a codec."""
        if self.rule is None:
            return self.num_bytes
        value_bytes = round(self.num_bytes / self.num_elements)
        return float(self.rule.codec.message_bytes(self.num_elements, value_bytes))


def averaged_buckets(graph: OpGraph, strategy: Strategy) -> list[AveragedBucket]:
    """The buckets of an averaging, in the order in which all ranks handle them.

    Parameters of one dtype and one set of devices share buckets of at most DDP's bucket size, in
    bytes of the model's own values, not of masters.
    """
    group = group_ops(graph).group
    parts = island_parts(strategy)
    open_: dict[tuple[Decision, str], tuple[list[int], float]] = {}
    closed: list[tuple[Decision, list[int]]] = []
    for row, (op, parameter, _) in enumerate(graph.updates):
        decision = strategy.decisions[int(group[op])]
        key = decision, graph.tensors[parameter].dtype
        rows, size = open_.get(key, ([], 0.0))
        rows, size = [*rows, row], size + float(graph.tensor_bytes[parameter])
        if size >= DEFAULT_BUCKET_BYTES:
            closed.append((decision, rows))
            open_.pop(key, None)
        else:
            open_[key] = rows, size
    closed += [(decision, rows) for (decision, _), (rows, _) in open_.items()]
    return [_bucket(graph, strategy, parts, *each) for each in closed]


def _bucket(
    graph: OpGraph,
    strategy: Strategy,
    parts: tuple[float, ...],
    decision: Decision,
    rows: list[int],
) -> AveragedBucket:
    """A bucket of rows; a codec that would not shorten its messages is left out."""
    parameters = [graph.updates[row][1] for row in rows]
    num_elements = sum(graph.tensors[each].meta.num_elements for each in parameters)
    own_bytes = float(sum(graph.tensor_bytes[each] for each in parameters))
    stepped = graph.stepped_dtype(parameters[0])
    value_bytes = ITEM_BYTES[stepped]
    rule = next(
        (
            each
            for each in codec_rules(strategy)
            if tuple(sorted(each.devices)) == decision.devices
        ),
        None,
    )
    if rule is not None and (not num_elements or rule.codec.is_plain(num_elements, value_bytes)):
        rule = None
    return AveragedBucket(
        rows=tuple(rows),
        devices=decision.devices,
        weights=_device_weights(decision, parts),
        num_bytes=float(num_elements * value_bytes),
        rounded_bytes=own_bytes if stepped != graph.tensors[parameters[0]].dtype else 0.0,
        senders=tuple(min(team) for team in decision.teams),
        parts=parts,
        rule=rule,
        num_elements=num_elements,
    )


def _device_weights(decision: Decision, parts: tuple[float, ...]) -> tuple[float, ...]:
    weight = {
        device: part / len(team)
        for team, part in zip(decision.teams, parts, strict=True)
        for device in team
    }
    return tuple(weight[device] for device in decision.devices)
