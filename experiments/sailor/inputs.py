"""Sailor's measurements: seconds of layers, sizes of layers, rates of links.

The files are those of its repository, gzipped: ``profiles_tmp.json.gz`` (seconds of forward,
backward and update by card, micro-batch and tensor parallelism), ``llm_info.json.gz`` (parameters,
outputs and activations by tensor parallelism) and ``multizone_bandwidths_het.json.gz``
(polynomials of point-to-point rates by zones, cards and GPUs taking part).

The module also has plans as the rules read them: stages, replicas of stages, micro-batches.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import log2
from pathlib import Path
from typing import Any

from heterog.errors import InputFileError, StrategyError
from heterog.files import read_json
from heterog.units import GIB

MODEL = "OPT-350"
ZONE = "us-central1-a"
FLOAT_BYTES = 4

CAPACITY_BYTES = {
    name: size * GIB
    for name, size in {
        "V100-16": 16,
        "A100-40": 40,
        "A100-80": 80,
        "GH-96": 96,
        "Titan-RTX": 24,
        "RTX-3090": 24,
        "RTX-2080": 11,
    }.items()
}
"""Memory of a GPU as the validity check of Sailor's simulator counts it."""

Polynomial = tuple[float, float, float]
"""Factors of the square, of the first power, and the constant."""
End = tuple[str, int]
"""A card and how many of its GPUs send or receive together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of one card at one micro-batch and tensor parallelism.

    Attributes:
        compute_s: forward and backward of all layers before each one.  # [num_layers + 1]
        update_s: of one optimizer step; the files have one number for all layers.
    """

    compute_s: tuple[float, ...]
    update_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Numbers of floats of the layers on one GPU of a team.

    Attributes:
        params: of all layers before each one.  # [num_layers + 1]
        activations: kept for one sample, of all layers before each one.  # [num_layers + 1]
        outputs: that each layer hands on for one sample.  # [num_layers]
    """

    params: tuple[int, ...]
    activations: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Everything that the rules look up, of one model in one zone.

    Attributes:
        times: by card, micro-batch and tensor parallelism.
        sizes: by tensor parallelism.
        links: polynomials of the rate, by sender and receiver.
    """

    times: Mapping[str, Mapping[int, Mapping[int, Times]]]
    sizes: Mapping[int, Sizes]
    links: Mapping[tuple[End, End], Polynomial]

    @property
    def num_layers(self) -> int:
        """Layers of the model, embedding and head included."""
        return len(self.sizes[1].outputs)

    def profiled(self, card: str, tensor: int) -> list[int]:
        """Micro-batches that were measured on a card at a tensor parallelism, ascending."""
        return sorted(size for size, found in self.times.get(card, {}).items() if tensor in found)

    def measured(self, replica: "Replica", micro_batch: int) -> Times:
        """Seconds of a team at one size of micro-batches.

        Sailor's simulator counts zero seconds for some sizes that it does not have; here they are
        refused.

        Raises:
            StrategyError: this size was not measured.
        """
        sizes = self.profiled(replica.card, replica.tensor)
        if micro_batch not in sizes:
            have = f"sizes {', '.join(map(str, sizes))}" if sizes else "no size at all"
            raise StrategyError(
                f"micro-batches of {micro_batch} were not measured on {replica.card} in teams of "
                f"{replica.tensor} ({have}); choose one that was."
            )
        return self.times[replica.card][micro_batch][replica.tensor]

    def link(self, sender: End, receiver: End) -> Polynomial:
        """The polynomial between two ends.

        Raises:
            StrategyError: this link was not measured.
        """
        found = self.links.get((sender, receiver))
        if found is None:
            raise StrategyError(
                f"there is no rate from {sender[0]} x {sender[1]} to {receiver[0]} x "
                f"{receiver[1]}; use cards and numbers of GPUs whose links were measured."
            )
        return found


def seconds_of(polynomial: Polynomial, num_bytes: float) -> float:
    """Time of a message: ``x / 1e9 / (p2 l^2 + p1 l + p0)`` with ``l = log2(x / 1e6)``.

    The polynomials were fitted to large messages and become negative below some size; Sailor's
    simulator then counts negative seconds.

    Raises:
        StrategyError: the rate at this size is not positive.
    """
    if num_bytes == 0:
        return 0.0
    size = log2(num_bytes / 1e6)
    gigabytes_per_s = polynomial[0] * size**2 + polynomial[1] * size + polynomial[2]
    if gigabytes_per_s <= 0:
        raise StrategyError(
            f"the fitted rate of a message of {num_bytes:.0f} B is {gigabytes_per_s:.3g} GB/s; "
            "send larger messages: the fit does not hold there."
        )
    return num_bytes / 1e9 / gigabytes_per_s


def read_inputs(folder: Path) -> Inputs:
    """The three files of a folder.

    Layers are ordered by their number. Sailor's simulator takes them as they stand in the file,
    which is the same for OPT-350.

    Raises:
        InputFileError: a file is missing, or holds neither model nor zone.
    """
    times = _section(folder, "profiles_tmp", MODEL)
    sizes = _section(folder, "llm_info", MODEL)
    links = _section(folder, "multizone_bandwidths_het", ZONE)
    return Inputs(
        times={
            card: {
                int(micro): {int(tensor): _times(layers) for tensor, layers in found.items()}
                for micro, found in of_card.items()
            }
            for card, of_card in times.items()
        },
        sizes={int(tensor): _sizes(layers) for tensor, layers in sizes.items()},
        links={
            ((card, int(count)), (other, int(others))): _polynomial(entry)
            for card, counts in links.items()
            for count, zones in counts.items()
            for other, found in zones.get(ZONE, {}).items()
            for others, entry in found.items()
        },
    )


def _section(folder: Path, name: str, key: str) -> dict[str, Any]:
    path = folder / f"{name}.json.gz"
    content = read_json(path, "Sailor's file")
    if not isinstance(content, dict) or key not in content:
        raise InputFileError(f"{path} has nothing about {key}; is it Sailor's file of that name?")
    section: dict[str, Any] = content[key]
    return section


def _in_order(layers: Mapping[str, Any]) -> list[Any]:
    return [layers[key] for key in sorted(layers, key=int)]


def _times(layers: Mapping[str, Any]) -> Times:
    rows = _in_order(layers)
    return Times(
        compute_s=tuple(accumulate((row[0] + row[1] for row in rows), initial=0.0)),
        update_s=rows[0][2],
    )


def _sizes(layers: Mapping[str, Any]) -> Sizes:
    rows = _in_order(layers)
    return Sizes(
        params=tuple(accumulate((row["params_floats"] for row in rows), initial=0)),
        activations=tuple(accumulate((row["act_mem_floats"] for row in rows), initial=0)),
        outputs=tuple(row["act_output_floats"] for row in rows),
    )


def _polynomial(entry: Any) -> Polynomial:
    square, first, constant = entry[0]
    return square, first, constant


BATCH = 1024
"""Samples of an iteration in Sailor's experiments with OPT-350."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Replica:
    """One replica of a stage: a team of like GPUs in one node.

    Attributes:
        card: type of its GPUs.
        tensor: degree of tensor parallelism, that is, how many GPUs.
    """

    card: str
    tensor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Consecutive layers and the replicas that hold them.

    Attributes:
        first_layer: index of the first layer.
        num_layers: how many.
        replicas: in the order in which they form a ring, and meet those of other stages.
    """

    first_layer: int
    num_layers: int
    replicas: tuple[Replica, ...]

    @property
    def end_layer(self) -> int:
        """Index behind the last layer."""
        return self.first_layer + self.num_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Stages and what they run.

    Attributes:
        stages: in the order of the layers.
        micro_batch: samples of every micro-batch.
        batch: samples of an iteration.
    """

    stages: tuple[Stage, ...]
    micro_batch: int
    batch: int = BATCH

    def __post_init__(self) -> None:
        """Check what holds for every plan.

        Raises:
            StrategyError: a stage is empty, layers do not follow each other, or stages have
                unlike numbers of replicas.
        """
        next_layer = 0
        for index, stage in enumerate(self.stages):
            if not stage.replicas or stage.num_layers < 1:
                raise StrategyError(f"stage {index} has no replica or no layer; leave it out.")
            if stage.first_layer != next_layer:
                raise StrategyError(
                    f"stage {index} begins with layer {stage.first_layer}, not {next_layer}; "
                    "stages hold all layers in order."
                )
            next_layer = stage.end_layer
        if not self.stages or self.micro_batch < 1:
            raise StrategyError("a plan needs a stage and micro-batches of a sample at least.")
        counts = sorted({len(stage.replicas) for stage in self.stages})
        if len(counts) > 1:
            raise StrategyError(
                f"stages have {', '.join(map(str, counts))} replicas; Sailor's simulator counts "
                "what the smaller ones do twice as free: use as many in every stage."
            )

    @property
    def num_micro(self) -> int:
        """Micro-batches of a replica: enough to cover the batch."""
        return -(-self.batch // (self.micro_batch * len(self.stages[0].replicas)))

    @property
    def num_gpus(self) -> dict[str, int]:
        """GPUs that it uses, by card."""
        found: dict[str, int] = {}
        for stage in self.stages:
            for replica in stage.replicas:
                found[replica.card] = found.get(replica.card, 0) + replica.tensor
        return found


def read_plan(row: Mapping[str, Any]) -> Plan:
    """A plan in Sailor's form: ``pipeline_list`` and ``mbs``, perhaps ``gbs``.

    Args:
        row: the plan; its iteration has ``BATCH`` samples where it does not say.

    Raises:
        StrategyError: several pipelines, a team over several nodes or larger than its node.
    """
    pipelines = row["pipeline_list"]
    if len(pipelines) != 1:
        raise StrategyError(
            f"the plan has {len(pipelines)} pipelines; only one is scored: say the others as "
            "further replicas of its stages."
        )
    stages = tuple(
        Stage(
            first_layer=layers[0],
            num_layers=len(layers),
            replicas=tuple(_replica(entries, tensor) for entries, tensor in replicas),
        )
        for layers, replicas in zip(
            pipelines[0]["layers_per_stage"], pipelines[0]["tmp_per_stage"], strict=True
        )
    )
    return Plan(stages=stages, micro_batch=int(row["mbs"]), batch=int(row.get("gbs", BATCH)))


def written(plan: Plan, zone: str) -> dict[str, Any]:
    """A plan in the form that ``read_plan`` reads; nodes have as many GPUs as their team."""
    pipeline = {
        "num_stages": len(plan.stages),
        "layers_per_stage": [
            list(range(stage.first_layer, stage.end_layer)) for stage in plan.stages
        ],
        "dp": [len(stage.replicas) for stage in plan.stages],
        "tmp_per_stage": [
            [[[[each.card, each.tensor, zone]], each.tensor] for each in stage.replicas]
            for stage in plan.stages
        ],
    }
    return {"pipeline_list": [pipeline], "mbs": plan.micro_batch, "gbs": plan.batch}


def _replica(entries: list[list[Any]], tensor: int) -> Replica:
    if len(entries) != 1:
        raise StrategyError(
            f"a team of {tensor} GPUs is written as {len(entries)} entries; Sailor's simulator "
            "counts no compute time for it: keep each team in one node and entry."
        )
    card, num_gpus = entries[0][0], int(entries[0][1])
    if num_gpus < tensor:
        raise StrategyError(
            f"a team of {tensor} GPUs on a node with {num_gpus} {card}; keep it in one node."
        )
    return Replica(card=card, tensor=int(tensor))
