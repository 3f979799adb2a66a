"""A plan as the rules read it: stages of layers, replicas of stages, micro-batches."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from heterog.errors import StrategyError

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
    """Stages and what they run; Sailor's own plans have neither lists nor ZeRO-1.

    Attributes:
        stages: in the order of the layers.
        micro_batch: samples of every micro-batch; unused where there are lists.
        batch: samples of an iteration.
        lists: micro-batches of each column of replicas, or ``None``: as many of ``micro_batch``
            as cover the batch.
        is_zero1: optimizer states lie in equal slices on the replicas of a stage.
    """

    stages: tuple[Stage, ...]
    micro_batch: int
    batch: int = BATCH
    lists: tuple[tuple[int, ...], ...] | None = None
    is_zero1: bool = False

    def __post_init__(self) -> None:
        """Check what holds for every plan.

        Raises:
            StrategyError: a stage is empty, layers do not follow each other, or lists do not add
                up.
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
        if self.lists is not None:
            self._check_lists(self.lists)

    def _check_lists(self, lists: tuple[tuple[int, ...], ...]) -> None:
        counts = {len(stage.replicas) for stage in self.stages}
        if counts != {len(lists)}:
            raise StrategyError(
                f"{len(lists)} lists of micro-batches for stages of {sorted(counts)} replicas; "
                "every column of replicas has one, and all stages have as many columns."
            )
        samples = sum(map(sum, lists))
        if samples != self.batch:
            raise StrategyError(
                f"the lists of micro-batches have {samples} samples, not {self.batch}; "
                "a plan runs its batch exactly."
            )
        if any(size < 1 for sizes in lists for size in sizes):
            raise StrategyError("a list has a micro-batch of no sample; leave it out.")

    @property
    def num_gpus(self) -> dict[str, int]:
        """GPUs that it uses, by card."""
        found: dict[str, int] = {}
        for stage in self.stages:
            for replica in stage.replicas:
                found[replica.card] = found.get(replica.card, 0) + replica.tensor
        return found

    @property
    def has_equal_replicas(self) -> bool:
        """Whether all stages have as many replicas."""
        return len({len(stage.replicas) for stage in self.stages}) == 1

    def sizes_of(self, column: int) -> tuple[int, ...]:
        """Sizes of micro-batches that a column of replicas runs."""
        if self.lists is None:
            return (self.micro_batch,)
        return tuple(sorted(set(self.lists[column])))


def read_plan(row: Mapping[str, Any], batch: int = BATCH) -> Plan:
    """A plan in Sailor's form: ``pipeline_list`` and ``mbs``, perhaps ``gbs``.

    Two keys more say what Sailor cannot: ``lists`` and ``is_zero1``.

    Args:
        row: the plan.
        batch: samples of an iteration where it does not say.

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
    lists = row.get("lists")
    return Plan(
        stages=stages,
        micro_batch=int(row["mbs"]),
        batch=int(row.get("gbs", batch)),
        lists=None if lists is None else tuple(tuple(map(int, sizes)) for sizes in lists),
        is_zero1=bool(row.get("is_zero1", False)),
    )


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
    found: dict[str, Any] = {
        "pipeline_list": [pipeline],
        "mbs": plan.micro_batch,
        "gbs": plan.batch,
        "is_zero1": plan.is_zero1,
    }
    if plan.lists is not None:
        found["lists"] = [list(sizes) for sizes in plan.lists]
    return found


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
