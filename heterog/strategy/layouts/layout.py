"""A layout: the usual description of how a model is trained on a cluster.

``tp=2,pp=4,micro_batch=1,zero=1,recompute=full,schedule=1f1b``: the vocabulary of Megatron-LM,
DeepSpeed and FSDP. All replicas are equal, and all stages have the same number of devices. A
strategy can express more; layouts serve as its baselines.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

from heterog.errors import HeterogError, nearest
from heterog.names import shown
from heterog.strategy.schedules import SCHEDULES
from heterog.yaml_files import load_shipped

MOST = 1 << 20
"""Limit of any number in a layout: far above any cluster or batch."""
_LONGEST_TEXT = 10_000


class LayoutError(HeterogError):
    """A layout that cannot be read, or that does not fit a model, a batch or a cluster."""


class Recompute(StrEnum):
    """Activations that are recomputed for the backward pass instead of being kept."""

    NONE = "none"
    FULL = "full"
    """All activations of a repeated layer; its inputs are kept."""
    SELECTIVE = "selective"
    """Scores and softmax of attention, as in Megatron; a fused kernel keeps neither anyway."""
    OP = "op"
    """All of a repeated layer except every second matrix product and attention, as in
    torchtitan."""


class Dispatch(StrEnum):
    """How tokens come to the experts of other devices; Megatron's token dispatchers."""

    ALL_TO_ALL = "alltoall"
    """Each token is sent only to the devices of its experts, and its results are sent back."""
    ALL_GATHER = "allgather"
    """Each device gets the tokens of the whole team, and the team adds up the results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Uniform parallelism, in the terms of Megatron and FSDP.

    Ranks are numbered as in Megatron: the ``tp`` members of a team are neighbours, then
    come the replicas (``dp``), then the stages (``pp``). Rank r is device r of the cluster.

    Attributes:
        tp: devices that share every matrix product of a layer (tensor parallelism).
        cp: devices that share every sequence, each with a run of its positions (context
            parallelism); instead of ``tp``, not beside it.
        ep: neighbouring replicas that share the experts of mixture layers, each device with some
            of them (expert parallelism); it divides ``dp``. With ``tp`` or ``cp`` all devices of
            these replicas have whole experts (Megatron's ``expert-tensor-parallel-size=1``).
        dispatch: how tokens come to experts on other replicas.
        pp: devices in a row, each with the layers of its stage (pipeline parallelism).
        dp: replicas (data parallelism); 0 for as many as the cluster has devices for.
        micro_batch: samples of one replica that go through the model at a time; 0 for one sample
            with a pipeline, and the replica's whole share without.
        num_micro: micro-batches of a replica (gradient accumulation), instead of ``micro_batch``;
            if both are given they must agree. 0 for the number that follows from it.
        zero: what replicas keep in slices: nothing (0), the optimizer's state (1, Megatron's
            distributed optimizer), also gradients (2, FSDP's SHARD_GRAD_OP), also parameters (3,
            FSDP's FULL_SHARD).
        dp_replicate: Number of copies of the state that ``zero`` slices: the replicas are cut into
            this number of groups of neighbours, each of which keeps one copy in slices (hybrid
            sharding, HSDP); 0 for one copy on each host.
        recompute: Activations that are recomputed for the backward pass.
        recompute_every: With ``full``, recompute only every n-th layer (torchtitan's number for
            selective checkpoints): 2 for the second, the fourth, and so on.
        schedule: Name of a schedule in ``strategy.schedules``; empty for ``1f1b``, or for
            ``interleaved`` if devices have several chunks. With ``breadth_first`` ZeRO gathers and
            reduces once for all micro-batches; without a pipeline its chunks are single layers.
        chunks: Number of stages of each device (Megatron's virtual pipeline); 0 for the number
            that the schedule needs.
        layers: Number of layers of each stage, in the order of the model; empty for equal ones.
        split: Module at which each stage but the first one begins, instead of ``layers``.
        vocabulary_parallel: Whether the embedding and the head are split over the team as well.
        sequence_parallel: Whether members of a team split activations between their matrix
            products by positions, instead of keeping them whole.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    dispatch: Dispatch = Dispatch.ALL_TO_ALL
    pp: int = 1
    dp: int = 0
    micro_batch: int = 0
    num_micro: int = 0
    zero: int = 0
    dp_replicate: int = 1
    recompute: Recompute = Recompute.NONE
    recompute_every: int = 1
    schedule: str = ""
    chunks: int = 0
    layers: tuple[int, ...] = ()
    split: tuple[str, ...] = ()
    vocabulary_parallel: bool = True
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        least_of = {
            "tp": 1,
            "cp": 1,
            "ep": 1,
            "pp": 1,
            "dp": 0,
            "micro_batch": 0,
            "num_micro": 0,
            "dp_replicate": 0,
            "recompute_every": 1,
            "chunks": 0,
            "zero": 0,
        }
        for name, least in least_of.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise LayoutError(f"{name} is {value!r}; give a whole number.")
            if not least <= value <= MOST:
                raise LayoutError(f"{name} is {value}; it must be {least} to {MOST}.")
        if self.zero not in range(4):
            raise LayoutError(f"zero is {self.zero}; the stages of ZeRO are 0, 1, 2 and 3.")
        if self.tp > 1 and self.cp > 1:
            raise LayoutError(
                f"tp={self.tp} and cp={self.cp}: a team splits its layers or its sequences, not "
                f"both; give one of them, such as cp={self.tp * self.cp}."
            )
        if self.dp % self.ep:
            raise LayoutError(
                f"ep={self.ep} does not divide dp={self.dp}: it is replicas that share experts."
            )
        if self.recompute_every > 1 and self.recompute != Recompute.FULL:
            raise LayoutError(
                f"recompute_every={self.recompute_every} is about layers that recompute; give "
                "recompute=full with it."
            )
        self._check_copies()
        self._check_schedule()
        self._check_stages()

    def _check_copies(self) -> None:
        if self.dp_replicate == 1:
            return
        if not self.zero:
            raise LayoutError(
                f"dp_replicate is {self.dp_replicate or 'hosts'}, but zero=0 keeps everything "
                "whole on every replica; give zero=3 (FSDP), or leave out dp_replicate."
            )
        if self.dp_replicate and self.dp and self.dp % self.dp_replicate:
            raise LayoutError(
                f"dp {self.dp} does not divide into {self.dp_replicate} copies (dp_replicate)."
            )

    def _check_schedule(self) -> None:
        if self.schedule != "" and self.schedule not in tuple(SCHEDULES):
            raise LayoutError(_unknown("schedule", self.schedule, tuple(SCHEDULES)))
        wanted = {"1f1b": 1, "zero_bubble_v": 2, "dual_pipe_v": 2}.get(self.schedule)
        if wanted is not None and self.chunks not in (0, wanted):
            raise LayoutError(
                f"schedule {self.schedule} has {wanted} chunk{'s' * (wanted > 1)} on each device, "
                f"not {self.chunks}; for more stages on a device take schedule=interleaved."
            )
        if self.pp == 1 and self.num_chunks > 1:
            raise LayoutError(
                f"{self.num_chunks} chunks of a stage need a pipeline, but pp is 1; give pp=2 or "
                "more."
            )

    def _check_stages(self) -> None:
        if self.layers and self.split:
            raise LayoutError("layers and split both say where stages begin; give one of them.")
        if self.layers and (len(self.layers) != self.num_stages or min(self.layers) < 1):
            raise LayoutError(
                f"layers {'-'.join(map(str, self.layers))} names {len(self.layers)} stages; "
                f"{self._stages_in_words} need {self.num_stages} numbers of at least 1."
            )
        if self.split and len(self.split) != self.num_stages - 1:
            raise LayoutError(
                f"split names {len(self.split)} modules; {self._stages_in_words} need "
                f"{self.num_stages - 1}, one for each stage but the first."
            )

    @property
    def _stages_in_words(self) -> str:
        chunks = f" with {self.num_chunks} chunks each" if self.num_chunks > 1 else ""
        return f"pp={self.pp}{chunks}"

    @property
    def schedule_name(self) -> str:
        """Name of the schedule, chosen by default if the layout does not name one."""
        return self.schedule or ("interleaved" if self.chunks > 1 else "1f1b")

    @property
    def num_chunks(self) -> int:
        """Number of stages on each device."""
        usual = {"1f1b": 1, "gpipe": 1}.get(self.schedule_name, 2)
        return self.chunks or (usual if self.pp > 1 else 1)

    @property
    def num_stages(self) -> int:
        """Number of stages of the model."""
        return self.pp * self.num_chunks

    @property
    def members(self) -> int:
        """Devices of a replica on each rank of the pipeline: its team."""
        return self.tp * self.cp

    @property
    def num_devices(self) -> int:
        """Devices that have work; 0 if the number of replicas is not given."""
        return self.members * self.pp * self.dp

    def team(self, rank: int, number: int) -> tuple[int, ...]:
        """Devices of a replica, as Megatron numbers them: tp or cp inside dp inside pp."""
        first = (rank * self.dp + number) * self.members
        return tuple(range(first, first + self.members))

    def __str__(self) -> str:
        """The text that parses to this layout, without fields that have their default."""
        said = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value == field.default and field.name not in ("tp", "pp"):
                continue
            if field.name == "dp_replicate":
                value = value or "hosts"
            if isinstance(value, tuple):
                value = ("-" if field.name == "layers" else "+").join(map(str, value))
            said.append(f"{field.name}={str(value).lower() if isinstance(value, bool) else value}")
        return ",".join(said)


def parse_layout(text: str) -> Layout:
    """Read ``tp=2,pp=4,...``; keys may also be the names of Megatron's and FSDP's options.

    >>> str(parse_layout("tp=2, pp=4, micro-batch-size=1, use_distributed_optimizer=true"))
    'tp=2,pp=4,micro_batch=1,zero=1'
    >>> parse_layout("fsdp=full_shard").zero
    3
    >>> str(parse_layout("dp_replicate=2,dp_shard=4"))
    'tp=1,pp=1,dp=8,zero=3,dp_replicate=2'

    Raises:
        LayoutError: a key is unknown or repeated, or its value is invalid.
    """
    if len(text) > _LONGEST_TEXT:
        raise LayoutError(f"a layout of {len(text):,} characters; at most {_LONGEST_TEXT:,}.")
    said: dict[str, str] = {}
    for part in text.split(","):
        key, is_pair, value = (piece.strip() for piece in part.partition("="))
        if not is_pair or not key or not value:
            raise LayoutError(
                f"cannot read {shown(part.strip())} of a layout; write key=value with commas "
                "between, such as tp=2,pp=4,micro_batch=1."
            )
        name, value = _own_word(key, value)
        for own, text in (fsdp_words(value) if name == "fsdp" else {name: value}).items():
            if own in said:
                raise LayoutError(f"the layout says '{own}' twice; give it once.")
            said[own] = text
    _take_shards(said)
    return layout_of_words(said)


def layout_of_words(said: Mapping[str, Any]) -> Layout:
    """Make a layout from keys of this vocabulary; values may be texts.

    Raises:
        LayoutError: a text is not a valid value of its key.
    """
    found = {
        name: _READERS.get(name, _number)(name, value) if isinstance(value, str) else value
        for name, value in said.items()
    }
    return Layout(**found)  # type: ignore[arg-type]


def _take_shards(said: dict[str, str]) -> None:
    """Convert torchtitan's pair ``dp_replicate`` and ``dp_shard`` to ``dp`` and ``zero``."""
    copies = said.get("dp_replicate", "")
    if _plain(copies) in ("host", "hosts"):
        said["dp_replicate"] = "0"
    shards = said.pop("dp_shard", "")
    if not copies and not shards:
        return
    if not shards:
        said.setdefault("zero", "0" if copies in ("0", "1") else "3")
        return
    each, number = _number("dp_shard", shards), _number("dp_replicate", copies or "0")
    whole = _number("dp", said.get("dp", "0"))
    if not each or (whole and whole % each) or (whole and number and each * number != whole):
        raise LayoutError(
            f"dp_shard is {shown(shards)}; it must be a whole number of which dp "
            f"({whole or 'not given'}) is dp_replicate ({number or 'not given'}) times as much."
        )
    number = number or (whole // each if whole else 1)
    said["dp"] = str(each * number)
    said["dp_replicate"] = str(number if each > 1 else 1)
    said.setdefault("zero", "3" if each > 1 else "0")


FSDP_STAGES: Mapping[str, int] = MappingProxyType(
    {
        "full_shard": 3,
        "shard_grad_op": 2,
        "no_shard": 0,
        "hybrid_shard": 3,
        "hybrid_shard_zero2": 2,
    }
)
"""FSDP's sharding strategies as stages of ZeRO, in the order of their numbers from 1.

The hybrid strategies keep one copy on each host.
"""
_FSDP_WORDS = {
    **{str(number): name for number, name in enumerate(FSDP_STAGES, 1)},
    **{f"_{name}": name for name in FSDP_STAGES},
}
_YES, _NO = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
_RECOMPUTE_WORDS = {
    **dict.fromkeys((*_YES, "uniform", "block"), "full"),
    **dict.fromkeys(_NO, "none"),
}
_DISPATCH_WORDS = {
    "all_to_all": "alltoall",
    "all_gather": "allgather",
    "flex": "alltoall",  # Megatron's third dispatcher sends the same tokens by other kernels
}
_KEYS = tuple(field.name for field in fields(Layout))


@cache
def programs() -> dict[str, Any]:
    """What is known of other programs; the file says what it holds."""
    found: dict[str, Any] = load_shipped(
        resources.files("heterog.strategy.layouts") / "programs.yaml"
    )
    return found


def _in_own_words(kind: str, word: str) -> str:
    """The word of this vocabulary for one of another program, or that word itself."""
    own: dict[str, list[str]] = programs()[kind]
    return next((name for name, others in own.items() if word in others), word)


def _own_word(key: str, value: str) -> tuple[str, str]:
    """Convert a key and value to this vocabulary.

    Raises:
        LayoutError: there is no such key; names the nearest.
    """
    plain = _plain(key)
    if plain in ("use_distributed_optimizer", "distributed_optimizer"):
        return "zero", "1" if _yes_or_no(plain, value) else "0"
    if plain in ("fsdp", "fsdp_sharding_strategy", "sharding_strategy"):
        return "fsdp", value
    name = _in_own_words("keys", plain)
    if name not in (*_KEYS, "dp_shard"):
        raise LayoutError(_unknown("key of a layout", key, (*_KEYS, "dp_shard", "fsdp")))
    return name, value


def fsdp_words(value: str) -> dict[str, str]:
    """Convert a sharding strategy of FSDP to keys of a layout.

    >>> fsdp_words("HYBRID_SHARD")
    {'zero': '3', 'dp_replicate': '0'}

    Raises:
        LayoutError: there is no such strategy.
    """
    plain = _one_of("sharding strategy", value, tuple(FSDP_STAGES), _FSDP_WORDS)
    hybrid = {"dp_replicate": "0"} if plain.startswith("hybrid") else {}
    return {"zero": str(FSDP_STAGES[plain])} | hybrid


def _one_of(what: str, value: str, known: tuple[str, ...], words: Mapping[str, str]) -> str:
    """One of the known words, which a value may also say in other words."""
    plain = words.get(_plain(value), _plain(value))
    if plain not in known:
        raise LayoutError(_unknown(what, value, known))
    return plain


def _number(name: str, value: str) -> int:
    if not value.isascii() or not value.isdigit() or len(value) > 9:
        raise LayoutError(
            f"{name} is {shown(value)}; it must be a whole number, such as {name}=2."
        )
    return int(value)


def _yes_or_no(name: str, value: str) -> bool:
    plain = _plain(value)
    if plain not in (*_YES, *_NO):
        raise LayoutError(f"{name} is {shown(value)}; write true or false.")
    return plain in _YES


_READERS: Mapping[str, Callable[[str, str], object]] = {
    "recompute": lambda name, value: Recompute(
        _one_of(name, value, tuple(Recompute), _RECOMPUTE_WORDS)
    ),
    "dispatch": lambda name, value: Dispatch(
        _one_of(name, value, tuple(Dispatch), _DISPATCH_WORDS)
    ),
    "schedule": lambda _, value: _in_own_words("schedules", _plain(value)),
    "layers": lambda name, value: tuple(_number(name, each) for each in value.split("-")),
    "split": lambda _, value: tuple(each.strip() for each in value.split("+") if each.strip()),
    "vocabulary_parallel": _yes_or_no,
    "sequence_parallel": _yes_or_no,
}
"""Readers of the values that are no whole numbers, by key."""


def _plain(word: str) -> str:
    return word.strip().strip("-").lower().replace("-", "_").replace(" ", "_")


def _unknown(what: str, name: object, known: tuple[str, ...]) -> str:
    hint = nearest(_plain(str(name)), known)
    return f"unknown {what} {shown(name)}{hint} Known: {', '.join(known)}."
