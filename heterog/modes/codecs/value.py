"""Codecs: lossy encodings of messages, chosen by kind of traffic and devices.

A codec changes the numbers of training, so a strategy has one only if a user asked for it by name.
A codec belongs to a transfer or a synchronisation: ``Codecs`` lists ``CodecRule`` values, and
``messages`` adds an encoding and a decoding task to each message that a rule applies to. The
length of a message depends on the number of elements only, so the receiver knows it beforehand.

- ``fp16``: every element in half precision. Finite values beyond its range are clipped to it.
- ``int8``: every element as one of 255 steps of the largest magnitude in its block of 256
  elements; the block's scale is sent as an fp32 number.
- ``top_k``: the k elements of largest magnitude, unchanged; zeros elsewhere. The lowest index wins
  ties. Positions are sent as indices or as a bitmap, whichever leaves room for more values.

With ``d`` elements of ``v`` bytes and indices of ``x`` bytes, k kept elements cost ``k (v + x)``
bytes, or ``k v + d / 8`` with a bitmap. ``reduction`` is a ratio of bytes, ``r = d v / message``,
which gives k: ``k / d = v / (r (v + x))`` with indices. Below ``r = (v + x) / v`` all elements are
sent unchanged, because a message of half of them would be as long.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

from heterog.errors import StrategyError
from heterog.modes.mode import EncodedMode, Mode
from heterog.modes.mode import Traffic as Traffic
from heterog.records import Int32, Many, Record, member_of

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from heterog.cluster.topology import Cluster
    from heterog.graph.op_graph import OpGraph
    from heterog.lowering.channels import ChannelTable
    from heterog.lowering.tables import GraphTables
    from heterog.strategy.strategy import Strategy

INT8_BLOCK = 256
"""Number of elements that share a scale; scales are about 1/64 of a message. A bucket mixes
gradients of layers, whose magnitudes differ by orders; a block lies within one layer."""
MOST_REDUCTION = 1e6
"""Limit of ``top_k``; nothing is learned from less than one of a million elements."""


class CodecKind(StrEnum):
    """The encoding of a message."""

    FP16 = "fp16"
    INT8 = "int8"
    TOP_K = "top_k"


WITH_FEEDBACK = (Traffic.GRADIENTS, Traffic.PARAMETER_CHANGES)
"""Traffic that adds up over steps, and over any number of devices, so that a codec's error is
added to the next message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """An encoding of messages, with its parameters.

    Attributes:
        kind: Kind of encoding; see the module.
        reduction: For ``top_k``, bytes of the plain message over bytes of the encoded message.
        index_bytes: For ``top_k``, bytes of each index, 4 or 8.
    """

    kind: CodecKind
    reduction: float = 1.0
    index_bytes: int = 4

    def __post_init__(self) -> None:
        if self.kind == CodecKind.TOP_K:
            if not 1.0 <= self.reduction <= MOST_REDUCTION:
                raise StrategyError(
                    f"top_k is to shorten messages {self.reduction:g} times; choose a reduction "
                    f"from 1 to {MOST_REDUCTION:g}."
                )
        elif self.reduction != 1.0:
            raise StrategyError(
                f"{self.kind} has no reduction to choose, got {self.reduction:g}; only top_k has."
            )
        if self.index_bytes not in (4, 8):
            raise StrategyError(f"index_bytes is {self.index_bytes}; it must be 4 or 8.")

    def __str__(self) -> str:
        """The text that ``parse_codec`` reads."""
        return f"{self.kind}={self.reduction:g}" if self.kind == CodecKind.TOP_K else self.kind

    def encode(self, tensor: "Tensor") -> "Tensor":
        """Encode a tensor as a message; see ``tensors``."""
        from heterog.modes.codecs.tensors import encode

        return encode(tensor, self)

    def decode(self, message: "Tensor", num_elements: int, dtype: "dtype") -> "Tensor":
        """Decode a message into a flat tensor."""
        from heterog.modes.codecs.tensors import decode

        return decode(message, num_elements, dtype, self)

    def add_decoded(self, total: "Tensor", message: "Tensor") -> None:
        """Add a decoded message to a flat tensor."""
        from heterog.modes.codecs.tensors import add_decoded

        add_decoded(total, message, self)

    def message_bytes(self, num_elements: int, value_bytes: int) -> int:
        """Bytes of the encoded message for a number of elements."""
        if self.is_plain(num_elements, value_bytes):
            return num_elements * value_bytes
        if self.kind == CodecKind.FP16:
            return 2 * num_elements
        if self.kind == CodecKind.INT8:
            return num_elements + 4 * -(-num_elements // INT8_BLOCK)
        kept, has_bitmap = self.kept(num_elements, value_bytes)
        where = -(-num_elements // 8) if has_bitmap else kept * self.index_bytes
        return kept * value_bytes + where

    def is_plain(self, num_elements: int, value_bytes: int) -> bool:
        """Whether encoding would not shorten a message, which is then sent unchanged."""
        if self.kind == CodecKind.FP16:
            return value_bytes <= 2
        if self.kind == CodecKind.INT8:
            return num_elements + 4 * -(-num_elements // INT8_BLOCK) >= num_elements * value_bytes
        return (
            self.reduction < (value_bytes + self.index_bytes) / value_bytes
            or num_elements * self.index_bytes >= (1 << 8 * self.index_bytes) // 2
        )

    def kept(self, num_elements: int, value_bytes: int) -> tuple[int, bool]:
        """(number of elements that ``top_k`` keeps, at least 1, whether a bitmap marks them)."""
        room = num_elements * value_bytes / self.reduction
        by_index = int(room / (value_bytes + self.index_bytes))
        by_bitmap = int((room - -(-num_elements // 8)) / value_bytes)
        kept = max(by_index, by_bitmap, min(num_elements, 1))
        return min(kept, num_elements), by_bitmap > by_index


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecRule:
    """A codec for one kind of messages between some devices.

    Attributes:
        traffic: Content of the messages.
        devices: Source and destination of transfers; or the members of an all-reduce or of an
            averaging, in any order.
        codec: Encoding of the messages.
    """

    traffic: Traffic
    devices: tuple[int, ...]
    codec: Codec

    def __post_init__(self) -> None:
        if len(self.devices) < 2 or len(set(self.devices)) != len(self.devices):
            raise StrategyError(
                f"a codec for {self.traffic.words} names devices {self.devices}; it needs at "
                "least two different ones."
            )
        if self.traffic not in WITH_FEEDBACK and len(self.devices) != 2:
            raise StrategyError(
                f"a codec for {self.traffic.words} names {len(self.devices)} devices; it needs "
                "the one that sends and the one that receives."
            )
        if self.traffic == Traffic.PARAMETERS and self.codec.kind == CodecKind.TOP_K:
            raise StrategyError(
                "top_k on parameters would set most of them to 0; choose fp16 or int8."
            )

    def __str__(self) -> str:
        """A description for users and error messages."""
        between = ", ".join(map(str, self.devices))
        return f"{self.codec} on {self.traffic.words} between devices {between}"


CodecRules = tuple[CodecRule, ...]


class CodecRecord(Record):
    """A codec rule in a file."""

    traffic: Annotated[Traffic, member_of(Traffic)]
    devices: Many[Int32]
    codec: Annotated[CodecKind, member_of(CodecKind)]
    reduction: float = 1.0
    index_bytes: Int32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Codecs(Mode):
    """Lossy encodings of messages, which change the numbers of training.

    Attributes:
        rules: Codec rules, at least one; the first that applies to a message counts.
    """

    key = "codecs"
    record = Many[CodecRecord]
    goes_with = ("averaging",)
    takes_clipping = True

    rules: CodecRules

    @property
    def words(self) -> str:
        """The codecs in a few words."""
        return f"{self.rules[0]}" + f" and {len(self.rules) - 1} more" * (len(self.rules) > 1)

    def to_json(self) -> object:
        """The rules as JSON values."""
        return [
            {
                "traffic": rule.traffic.name.lower(),
                "devices": list(rule.devices),
                "codec": rule.codec.kind.value,
                "reduction": rule.codec.reduction,
                "index_bytes": rule.codec.index_bytes,
            }
            for rule in self.rules
        ]

    @classmethod
    def from_record(cls, record: list[CodecRecord]) -> "Codecs | None":
        """The codecs from a list of records; ``None`` for an empty list."""
        rules = tuple(
            CodecRule(
                traffic=each.traffic,
                devices=tuple(each.devices),
                codec=Codec(
                    kind=each.codec, reduction=each.reduction, index_bytes=each.index_bytes
                ),
            )
            for each in record
        )
        return cls(rules=rules) if rules else None

    def check(self, strategy: "Strategy", graph: "OpGraph", cluster: "Cluster") -> None:
        """Refuse unknown devices, two rules for a message, and traffic that averaging excludes."""
        sends_changes = any(mode.sends_changes for mode in strategy.modes)
        seen: set[tuple[Traffic, tuple[int, ...]]] = set()
        for rule in self.rules:
            if not all(0 <= device < cluster.num_devices for device in rule.devices):
                raise StrategyError(
                    f"the strategy has a codec, {rule}, but the cluster has devices 0 to "
                    f"{cluster.num_devices - 1}."
                )
            if (rule.traffic, rule.devices) in seen:
                raise StrategyError(
                    f"the strategy has two codecs on {rule.traffic.words} between devices "
                    f"{', '.join(map(str, rule.devices))}; keep one of them."
                )
            seen.add((rule.traffic, rule.devices))
            if (rule.traffic == Traffic.PARAMETER_CHANGES) != sends_changes:
                others = [mode.words for mode in strategy.modes if mode.sends_changes]
                raise StrategyError(
                    f"the strategy has a codec, {rule}, and "
                    + (others[0] if others else "no averaging")
                    + "; codecs on parameter changes and averaging go with each other alone."
                )

    def encode(
        self, strategy: "Strategy", tables: "GraphTables", channels: "ChannelTable"
    ) -> EncodedMode:
        """The channels of the rules; no effect if all rules are for averaging."""
        from heterog.modes.codecs.messages import EncodedCodecs, coded_channels

        coded = coded_channels(self.rules, channels)
        return EncodedCodecs(coded=coded) if coded else EncodedMode()


def codec_rules(strategy: "Strategy") -> CodecRules:
    """The codec rules of a strategy; empty without codecs."""
    codecs = strategy.mode(Codecs)
    return () if codecs is None else codecs.rules


def with_rules(strategy: "Strategy", rules: CodecRules) -> "Strategy":
    """A strategy with other codec rules."""
    rest = tuple(mode for mode in strategy.modes if not isinstance(mode, Codecs))
    plain = replace(strategy, modes=rest)
    return plain.with_mode(Codecs(rules=rules)) if rules else plain


def parse_codec(text: str) -> Codec:
    """Parse a codec: ``fp16``, ``int8``, or ``top_k=R`` with a reduction of bytes.

    >>> parse_codec("top_k=20").reduction
    20.0

    Raises:
        StrategyError: the text is no codec.
    """
    name, given, value = text.partition("=")
    try:
        kind = CodecKind(name)
        reduction = float(value) if given else (10.0 if kind == CodecKind.TOP_K else 1.0)
    except ValueError:
        raise StrategyError(
            f"'{text[:60]}' is no codec; choose fp16, int8, top_k or top_k=R, where R is how many "
            "times shorter messages become."
        ) from None
    if given and kind != CodecKind.TOP_K:
        raise StrategyError(f"{kind} takes no number, got '{text[:60]}'; only top_k does.")
    return Codec(kind=kind, reduction=reduction)


ENCODE_BYTES: dict[CodecKind, float] = {
    CodecKind.FP16: 2.5,
    CodecKind.INT8: 9.0,
    CodecKind.TOP_K: 80.0,
}
"""Bytes of device memory that could be copied while one payload byte is encoded: CPU seconds of
encoding over those of a copy, for 0.1 to 16 MB of fp32 numbers, as measured by
``experiments/inexact.py`` at 828f0afe. Ratios of accelerators differ; for ``top_k`` they are
probably smaller."""
DECODE_BYTES: dict[CodecKind, float] = {
    CodecKind.FP16: 3.5,
    CodecKind.INT8: 3.5,
    CodecKind.TOP_K: 12.0,
}
"""The same for decoding one payload byte."""
_FEEDBACK_BYTES = 6.0
"""The same for error feedback: a sum and a difference, each of two reads and one write."""


def encode_bytes(rule: CodecRule) -> float:
    """Bytes that could be copied while a payload byte is encoded, including error feedback."""
    kind = rule.codec.kind
    if rule.traffic not in WITH_FEEDBACK:
        return ENCODE_BYTES[kind]
    return ENCODE_BYTES[kind] + DECODE_BYTES[kind] + _FEEDBACK_BYTES
